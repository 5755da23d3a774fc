"""An incident and its replay in words."""

from __future__ import annotations

from kvcanary_plugin.incident_file import Evidence, Incident, Place
from kvcanary_plugin.replay.attempts import Replay


def story(incident: Incident, result: Replay) -> list[str]:
    """What happened and what the replay says of it, paragraph by paragraph."""
    root = incident.root
    lines = [f"Incident {incident.id} ({incident.engine}): {incident.cause}."]
    if incident.evidence is not None and incident.evidence.window:
        window = incident.evidence.window
        lines.append(
            f"Replayed {result.forwards} forwards, steps {window[0].step} to {window[-1].step}."
            f" What they did to slot {root.slot}:"
        )
        lines += [f"- {event}" for event in slot_history(incident.evidence, root)] or ["- nothing"]
    place = (
        f"{' + '.join(root.checks)} at slot {root.slot} of group {root.group},"
        f" position {root.read_position}, step {root.step}"
    )
    if result.violation is not None:
        lines.append(f"REPRODUCED: {place}.")
    else:
        lines.append(f"NOT REPRODUCED: {place}.")
        lines += [
            f"- the replay reports {' + '.join(v.checks)} at slot {v.slot}, position"
            f" {v.position if v.expected_position is None else v.expected_position}"
            for v in result.seen[:5]
        ]
    lines.append(f"{result.explanation[0].upper()}{result.explanation[1:]}.")
    return lines


def slot_history(evidence: Evidence, root: Place) -> list[str]:
    """What the window did to the root's slot, in words."""
    names = {request.uid: request.id for request in evidence.requests}
    history = []
    for forward in evidence.window:
        for event in forward.events:
            if event.group == root.group and (event.slots is None or root.slot in event.slots):
                history.append(f"before step {forward.step}: {event.kind}")
        for part in forward.parts:
            name = names.get(part.uid) or f"#{part.uid}"
            slots = part.slots[root.group]
            if root.slot in slots:
                position = part.prefix_len + part.first + slots.index(root.slot)
                history.append(
                    f"step {forward.step} ({forward.kind}): request {name} wrote position"
                    f" {position} to it"
                )
    if root.phase == "verify":
        reader = root.request_id or f"#{root.request_uid}"
        history.append(
            f"step {root.step}: request {reader} read it as position {root.read_position}"
        )
    return history
