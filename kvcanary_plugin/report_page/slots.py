"""The slots around an incident: what was recorded for each position, and what was found there."""

from __future__ import annotations

from typing import Final

from kvcanary_plugin.incident_file import Evidence, FoundSlot, Place
from kvcanary_plugin.kernels.consts import PADDING_SLOT
from kvcanary_plugin.report_page.html import Html, element

# Positions shown before and behind the root.
_AROUND: Final = 6


def slots_around(evidence: Evidence, root: Place) -> Html:
    """A table of the reader's slots around the root's position."""
    reader = next((request for request in evidence.requests if request.role == "reader"), None)
    records = _records(evidence, root.group)
    if reader is None:
        return _only_the_root(records, root, evidence)
    row = next((row for row in reader.rows if row.group == root.group), None)
    found_slots = row.slots if row is not None else []
    end = reader.first + len(found_slots)
    start = max(reader.first, root.read_position - _AROUND)
    rows = []
    for position in range(start, min(end, root.read_position + _AROUND + 1)):
        slot = found_slots[position - reader.first]
        before = found_slots[position - reader.first - 1] if position > reader.first else None
        recorded = _recorded_write(evidence, reader.uid, position, root)
        rows.append(
            element(
                "tr",
                element("td", position),
                *_recorded_cells(recorded, slot),
                *_cells(slot, records.get(slot), evidence),
                element("td", *_verdict(position, slot, before, records, root)),
                class_="root" if position == root.read_position else None,
            )
        )
    head = ("position", "recorded", "slot found", "holds", "written by", "state", "")
    return element(
        "div",
        element("table", element("tr", *(element("th", name) for name in head)), *rows),
        element(
            "p",
            "Recorded: what the forwards of the window wrote for that position. Found: what the"
            " page table and the records said when the report was written, a moment after the"
            " violation.",
            class_="soft",
        ),
        class_="scroll",
    )


def _only_the_root(records: dict[int, FoundSlot], root: Place, evidence: Evidence) -> Html:
    head = ("slot", "holds", "written by", "state")
    return element(
        "table",
        element("tr", *(element("th", name) for name in head)),
        element(
            "tr",
            element("td", root.slot),
            *_cells(root.slot, records.get(root.slot), evidence),
            class_="root",
        ),
    )


def _recorded_cells(recorded: tuple[int, int] | None, found: int) -> list[Html]:
    """What was recorded for a position, and the slot found there, marked where it is another."""
    if recorded is None:
        return [
            element("td", element("span", "not in the window", class_="soft")),
            element("td", found),
        ]
    slot, step = recorded
    not_stored = "" if slot > PADDING_SLOT else " (not stored)"
    return [
        element("td", f"slot {slot}{not_stored}, step {step}"),
        element("td", found, class_=None if slot == found else "bad"),
    ]


def _cells(slot: int, record: FoundSlot | None, evidence: Evidence) -> list[Html]:
    if record is None:
        return [element("td", "no slot of the pool", colspan=3)]
    names = {request.uid: request.id for request in evidence.requests}
    writer = "nobody"
    if record.writer_uid >= 0:
        name = names.get(record.writer_uid) or f"#{record.writer_uid}"
        writer = f"{name}, step {record.writer_step}"
    never = record.state == "allocated"
    return [
        element("td", "nothing" if never else f"position {record.position}"),
        element("td", writer, class_="id"),
        element("td", record.state),
    ]


def _verdict(
    position: int, slot: int, before: int | None, records: dict[int, FoundSlot], root: Place
) -> list[Html]:
    """What is wrong with a slot, as far as the records tell; the violation itself at the root."""
    wrong = []
    if position == root.read_position:
        wrong = [f"{label}" for label in root.checks]
        if slot != root.slot:
            wrong.append(f"slot {root.slot} was read at step {root.step}")
    else:
        record, previous = records.get(slot), records.get(before) if before is not None else None
        if record is None:
            wrong.append("names no slot")
        elif record.state in ("free", "allocated"):
            wrong.append(record.state)
        else:
            if record.position != position:
                wrong.append("position")
            if previous is not None and previous.next_hash != record.prev_hash:
                wrong.append("does not continue the slot before")
    if not wrong:
        return [element("span", "ok", class_="good")]
    return [element("span", ", ".join(wrong), class_="bad")]


def _records(evidence: Evidence, group: str) -> dict[int, FoundSlot]:
    return {
        record.slot: record
        for slots in evidence.slots
        if slots.group == group
        for record in slots.rows()
    }


def _recorded_write(
    evidence: Evidence, uid: int, position: int, root: Place
) -> tuple[int, int] | None:
    """(slot, step) of the last write of a position by a request, in the window."""
    for forward in reversed(evidence.window):
        for part in forward.parts:
            entry = position - part.prefix_len - part.first
            slots = part.slots[root.group]
            if part.uid == uid and 0 <= entry < len(slots):
                return slots[entry], forward.step
    return None
