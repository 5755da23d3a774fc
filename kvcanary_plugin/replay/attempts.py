"""Runs until the violation comes, each time with more that was found to differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvcanary_plugin.incident_file import Incident, IncidentFileError
from kvcanary_plugin.replay.by_hand import ByHand
from kvcanary_plugin.replay.case import Case
from kvcanary_plugin.replay.explanation import from_recorded
from kvcanary_plugin.replay.intact import broken, check_intact
from kvcanary_plugin.replay.run import Run
from kvcanary_plugin.violations import Violation

_REPLAYED_PHASES: Final = ("lifecycle", "verify", "write", "reverify", "scrub")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a replay came to.

    Fields:
        violation: the replayed violation at the incident's place, None if it did not come.
        outside: what had to be changed by hand for it to come; empty if nothing.
        explanation: one sentence.
        forwards: how many were run.
        seen: what the replay reported for that request in that step, for the case that it is not
            the same.
    """

    violation: Violation | None
    outside: tuple[str, ...]
    explanation: str
    forwards: int
    seen: tuple[Violation, ...]

    @property
    def reproduced(self) -> bool:
        """Whether the same violation came out."""
        return self.violation is not None


def replay(incident: Incident) -> Replay:
    """Runs ``incident`` on the CPU.

    Raises:
        IncidentFileError: it has no evidence to run, or one that contradicts itself.
    """
    evidence, root = incident.evidence, incident.root
    if evidence is None:
        raise IncidentFileError(
            f"kvcanary: incident {incident.id} holds no evidence"
            f" ({incident.no_evidence_because}); there is nothing to replay"
        )
    check_intact(evidence, root)
    if root.phase not in _REPLAYED_PHASES:
        return _silent(f"rows of phase {root.phase} cannot be replayed", 0)
    if not any(forward.step == root.step for forward in evidence.window):
        return _silent(f"the recorded window does not hold step {root.step}", 0)
    try:
        return _run_again(Case(evidence, root))
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise broken(f"{type(error).__name__}: {error}") from error


def _run_again(case: Case) -> Replay:
    forwards = len(case.evidence.window)
    for by_hand in ByHand:
        run = Run(case, by_hand)
        found = run.run()
        if found is not None:
            explanation = (
                "not explained by recorded events: " + "; ".join(run.changes)
                if run.changes
                else from_recorded(case.evidence, case.root)
            )
            return Replay(
                violation=found,
                outside=run.changes,
                explanation=explanation,
                forwards=forwards,
                seen=(),
            )
    return _silent(
        "neither the recorded events nor the state that was found lead to it",
        forwards,
        tuple(run.seen),
    )


def _silent(explanation: str, forwards: int, seen: tuple[Violation, ...] = ()) -> Replay:
    return Replay(violation=None, outside=(), explanation=explanation, forwards=forwards, seen=seen)
