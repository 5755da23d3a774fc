"""What a file must hold to be replayed."""

from __future__ import annotations

from typing import Final

from kvcanary_plugin.forward import ForwardKind
from kvcanary_plugin.incident_file import Evidence, IncidentFileError, Place

# A file that asks for more is not one that the canary wrote.
MAX_POSITIONS: Final = 1 << 24
MAX_TABLE_ENTRIES: Final = 1 << 26


def check_intact(evidence: Evidence, root: Place) -> None:
    """IncidentFileError for evidence that names what it does not have."""
    names = {group.name for group in evidence.groups}
    named = {root.group}
    named.update(row.group for request in evidence.requests for row in request.rows)
    named.update(slots.group for slots in evidence.slots)
    for forward in evidence.window:
        named.update(event.group for event in forward.events)
        for part in forward.parts:
            if set(part.slots) != names or set(part.seeds) != names:
                raise broken(f"step {forward.step} does not name the slots of every group")
            if part.prompt is not None and part.prompt.first > MAX_POSITIONS:
                raise broken(f"step {forward.step} has a prompt longer than a replay holds")
        if forward.kind not in set(ForwardKind):
            raise broken(f"step {forward.step} has kind {forward.kind!r}")
    if len(names) < len(evidence.groups):
        raise broken("two of its groups have one name")
    if not names or named - names:
        raise broken(f"groups {sorted(named - names)} are not among its groups")
    steps = [forward.step for forward in evidence.window]
    if steps != sorted(set(steps)):
        raise broken("the steps of its window do not increase")
    for request in evidence.requests:
        if request.first + max((len(row.slots) for row in request.rows), default=0) > MAX_POSITIONS:
            raise broken(f"request {request.uid} has more positions than a replay holds")


def broken(what: str) -> IncidentFileError:
    return IncidentFileError(f"kvcanary: evidence contradicts itself: {what}; give an intact file")
