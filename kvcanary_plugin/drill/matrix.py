"""The detection matrix: fault x check, as a drill or the simulated engine found it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvcanary_plugin.checks import CHECKS
from kvcanary_plugin.drill.drill import DrillResult

_LABELS: Final = tuple(check.label for check in CHECKS)


def uncovered_checks(results: Sequence[DrillResult]) -> tuple[str, ...]:
    """Checks that no fault of ``results`` was reported by."""
    seen = {check for r in results if r.report is not None for check in r.report["checks"]}
    return tuple(label for label in _LABELS if label not in seen)


def as_markdown(results: Sequence[DrillResult]) -> str:
    """Fault x check for the docs: violations counted, the planted place's own checks in bold."""
    labels = [label for label in _LABELS if any(r.counted.get(label) for r in results)]
    rows = [
        "| fault | group | detected | steps | twin | " + " | ".join(labels) + " |",
        "| --- | --- | --- | ---: | ---: |" + " ---: |" * len(labels),
    ]
    for result in results:
        at_the_place = set(result.report["checks"]) if result.report is not None else set()
        cells = []
        for label in labels:
            count = result.counted.get(label, 0)
            text = str(count) if count else ""
            cells.append(f"**{text}**" if label in at_the_place and text else text)
        rows.append(
            f"| {result.case.title} | {result.case.group} | {'yes' if result.detected else 'NO'}"
            f" | {_steps(result)} | {_twin(result)} | " + " | ".join(cells) + " |"
        )
    return "\n".join(rows)


def as_text(results: Sequence[DrillResult]) -> str:
    """The same for a terminal: one line a fault, checks with their counts behind it.

    With several tensor-parallel ranks also which of them counted.
    """
    header = ("fault", "group", "detected", "steps", "twin", "violations counted, by check")
    lines = [
        (
            result.case.title,
            result.case.group,
            "yes" if result.detected else "NO",
            _steps(result),
            _twin(result),
            _counted(result),
        )
        for result in results
    ]
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, [*widths, 0], strict=True))
        for line in (header, *lines)
    )


def _steps(result: DrillResult) -> str:
    return "-" if result.steps_until_seen is None else str(result.steps_until_seen)


def _twin(result: DrillResult) -> str:
    return "-" if result.false_alarms is None else str(result.false_alarms)


def _counted(result: DrillResult) -> str:
    text = ", ".join(f"{check} {count}" for check, count in result.counted.items()) or "none"
    if result.tp_ranks in ((), (0,)):
        return text
    return f"{text} (tp_rank {', '.join(map(str, result.tp_ranks))})"
