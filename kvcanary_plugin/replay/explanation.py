"""Why it came to the violation, when nothing had to be changed by hand."""

from __future__ import annotations

from kvcanary_plugin.incident_file import Evidence, Place
from kvcanary_plugin.kernels.consts import PADDING_SLOT, UNKNOWN


def from_recorded(evidence: Evidence, root: Place) -> str:
    """Which recorded event leads to the violation, in words."""
    if root.phase == "lifecycle":
        return "explained by the recorded events of the allocator: " + "; ".join(
            f"before step {forward.step} {event.kind}"
            for forward in evidence.window
            for event in forward.events
            if event.group == root.group and (event.slots is None or root.slot in event.slots)
        )
    if "write_owned" in root.checks:
        return (
            f"explained by the recorded events: slot {root.slot} was in use when step {root.step}"
            " wrote to it"
        )
    if root.phase == "write":
        return (
            f"explained by the recorded events: what went into the forward of step {root.step}"
            " is not what the scheduler has"
        )
    return _from_recorded_writes(evidence, root)


def _from_recorded_writes(evidence: Evidence, root: Place) -> str:
    """The last thing that the window did to what was read."""
    names = {request.uid: request.id for request in evidence.requests}

    def name(uid: int) -> str:
        known = names.get(uid)
        return f"request {known}" if known is not None else f"request #{uid}"

    reader = root.request_uid if root.request_uid is not None else UNKNOWN
    for forward in reversed(evidence.window):
        for part in forward.parts:
            entry = root.read_position - part.prefix_len - part.first
            sent = part.slots[root.group]
            if part.uid == reader and 0 <= entry < len(sent) and sent[entry] <= PADDING_SLOT:
                return (
                    f"explained by the recorded events: in step {forward.step} position"
                    f" {root.read_position} of {name(reader)} was written to slot {sent[entry]},"
                    f" not to slot {root.slot} from which it is read"
                )
            if forward.step < root.step and root.slot in sent:
                position = part.positions[sent.index(root.slot)]
                written_at = part.prefix_len + part.first + sent.index(root.slot)
                if part.uid == reader and written_at != root.read_position:
                    return (
                        f"the page table of {name(reader)} named slot {root.slot} for position"
                        f" {root.read_position} when the recorded window began (step"
                        f" {evidence.window[0].step}), although it holds position {written_at} of"
                        f" it (step {forward.step}): the cause is older, or from outside"
                    )
                return (
                    f"explained by the recorded events: in step {forward.step} {name(part.uid)}"
                    f" wrote position {position} to slot {root.slot}"
                )
        # Backwards: what happened to slots comes before the forward.
        for event in reversed(forward.events):
            given_up = event.kind in ("reset", "free", "alloc") and event.group == root.group
            if given_up and (event.slots is None or root.slot in event.slots):
                return (
                    f"explained by the recorded events: before step {forward.step} slot"
                    f" {root.slot} was given up ({event.kind})"
                )
    return (
        f"slot {root.slot} stood so when the recorded window began (step"
        f" {evidence.window[0].step}): the cause is older, or from outside"
    )
