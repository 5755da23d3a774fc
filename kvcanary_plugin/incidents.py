"""Violation rows grouped to what they go back to: one incident for each root cause.

One bad slot makes many rows: every request that shares it reads it in every step, the chain breaks
behind it, and what is written from there on is wrong as well. A row belongs to an open incident if

1. its *place* is one of the incident's: the same slot of the same group, holding the same write
   (writer and step) - so a slot that is written anew is a new place;
2. or its request is one that the incident hit, and the row is at or behind the position at which it
   was hit first;
3. or what is wrong is the record that such a request left, at or behind that position.

Otherwise it is the root of a new incident. Rows of one poll are taken in the order of steps, then
of the launches within a forward, then of positions, so that the root comes first. An incident ends
after ``QUIET_SECONDS`` without a row. Memory is bounded by the constants below, whatever happens.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvcanary_plugin.checks import check_named, labels_of
from kvcanary_plugin.forward import DUMMY_UID
from kvcanary_plugin.kernels.consts import UNKNOWN, FailReason, LaunchTag, ViolationField
from kvcanary_plugin.ring import Rows
from kvcanary_plugin.violations import Violation

# An incident without a further row for so long is over; a later row of it opens a new one.
QUIET_SECONDS: Final = 60.0
# Incidents open at a time. When so many are open, what would open another joins the newest.
MAX_OPEN: Final = 256
# Places and requests that one incident knows; what comes beyond them is matched no longer.
MAX_PLACES: Final = 4096
MAX_REQUESTS: Final = 4096
# Rows beside the root that an incident's report shows.
MAX_FOLLOWED: Final = 32

# Order of the launches of one forward, as far as they report.
_PHASE_ORDER: Final = np.array(
    [
        {
            LaunchTag.LIFECYCLE: 0,
            LaunchTag.ADOPT: 1,
            LaunchTag.VERIFY: 2,
            LaunchTag.WRITE: 3,
            LaunchTag.SEAL: 4,
            LaunchTag.REVERIFY: 5,
            LaunchTag.SCRUB: 6,
        }[tag]
        for tag in LaunchTag
    ]
)
# The slot of such a row is a wrong value out of a table and not a place in the pool.
_NO_PLACE: Final = int(FailReason.OUT_OF_POOL)
# Rows about the slot itself, whoever wrote it last.
_ABOUT_THE_SLOT: Final = int(
    FailReason.DOUBLE_FREE | FailReason.DOUBLE_ALLOC | FailReason.FREED_READ
)

# Rows about what the last writer put into the slot.
_CONTENT: Final = int(
    FailReason.VERIFY_CHAIN_HASH
    | FailReason.VERIFY_POSITION
    | FailReason.VERIFY_TOKEN
    | FailReason.PREFIX_IDENTITY
)

# (group index, slot, writer uid, writer step)
Place = tuple[int, int, int, int]


@dataclass(slots=True, eq=False)
class Incident:
    """An open incident.

    Fields:
        id: unique over processes.
        root: row int64 [16] that everything else follows from.
        rows: rows so far.
        rows_by_check: the same by check.
        followed: the first rows beside the root, int64 [16] each.
        first_step, last_step: steps that saw them.
        requests: uid -> lowest position at which the request was hit.
        places: bad places.
        last_row_at: clock when the last row came.
        reported_rows: rows that the log has been told of.
        reported_at: clock of that.
    """

    id: str
    root: Rows
    first_step: int
    last_step: int
    last_row_at: float
    reported_at: float
    rows: int = 0
    rows_by_check: Counter[str] = field(default_factory=Counter)
    followed: list[Rows] = field(default_factory=list)
    requests: dict[int, int] = field(default_factory=dict)
    places: set[Place] = field(default_factory=set)
    reported_rows: int = 0


class IncidentTracker:
    """Groups rows into incidents. For one thread at a time.

    Args:
        clock: seconds, monotonic.
        quiet_seconds: an incident ends after so long without a row.
    """

    def __init__(self, *, clock: Callable[[], float], quiet_seconds: float = QUIET_SECONDS) -> None:
        self._clock = clock
        self._quiet_seconds = quiet_seconds
        self._open: list[Incident] = []
        self._by_place: dict[Place, Incident] = {}
        self._by_request: dict[int, Incident] = {}

    @property
    def open_incidents(self) -> tuple[Incident, ...]:
        """Oldest first."""
        return tuple(self._open)

    def add(self, rows: Rows) -> list[Incident]:
        """Take rows int64 [n, 16] of one poll; returns the incidents that they open."""
        now = self._clock()
        opened: list[Incident] = []
        for row, values in _in_order(rows):
            place = _place_of(values)
            incident = self._incident_of(values, place)
            if incident is None:
                incident = self._open_for(row, now, opened)
            self._join(incident, row, values, place, now)
        return opened

    def close_quiet(self, *, everything: bool = False) -> list[Incident]:
        """Ends and returns the incidents that are quiet, or all of them."""
        latest = self._clock() - self._quiet_seconds
        ended = [i for i in self._open if everything or i.last_row_at <= latest]
        if ended:
            gone = set(ended)
            self._open = [incident for incident in self._open if incident not in gone]
            self._by_place = {k: i for k, i in self._by_place.items() if i not in gone}
            self._by_request = {k: i for k, i in self._by_request.items() if i not in gone}
        return ended

    def _incident_of(self, values: list[int], place: Place | None) -> Incident | None:
        if place is not None:
            found = self._by_place.get(place) or self._by_place.get(_any_write(place))
            if found is not None:
                return found
        position = max(_positions_of(values))
        uids = [values[ViolationField.REQUEST_UID]]
        if _is_about_content(values):
            uids.append(values[ViolationField.WRITER_UID])
        for uid in uids:
            found = self._by_request.get(uid)
            if found is not None and (position == UNKNOWN or position >= found.requests[uid]):
                return found
        return None

    def _open_for(self, row: Rows, now: float, opened: list[Incident]) -> Incident:
        if len(self._open) >= MAX_OPEN:
            return self._open[-1]
        step = int(row[ViolationField.STEP])
        incident = Incident(
            id=uuid.uuid4().hex[:12],
            root=row,
            first_step=step,
            last_step=step,
            last_row_at=now,
            reported_at=now,
        )
        self._open.append(incident)
        opened.append(incident)
        return incident

    def _join(
        self, incident: Incident, row: Rows, values: list[int], place: Place | None, now: float
    ) -> None:
        if incident.rows and len(incident.followed) < MAX_FOLLOWED:
            incident.followed.append(row)
        incident.rows += 1
        incident.rows_by_check.update(labels_of(values[ViolationField.FAIL_REASON_BITS]))
        incident.first_step = min(incident.first_step, values[ViolationField.STEP])
        incident.last_step = max(incident.last_step, values[ViolationField.STEP])
        incident.last_row_at = now
        if place is not None and len(incident.places) < MAX_PLACES:
            for known in (place, _any_write(place)) if _is_about_the_slot(values) else (place,):
                incident.places.add(known)
                self._by_place.setdefault(known, incident)
        uid, positions = values[ViolationField.REQUEST_UID], _positions_of(values)
        if uid == UNKNOWN:
            return
        if uid in incident.requests:
            incident.requests[uid] = min(incident.requests[uid], max(positions))
        elif len(incident.requests) < MAX_REQUESTS:
            position = min(positions)
            incident.requests[uid] = position
            held_by = self._by_request.get(uid)
            # The incident that reaches further towards the beginning covers the other's range.
            if held_by is None or position < held_by.requests[uid]:
                self._by_request[uid] = incident


def _in_order(rows: Rows) -> Iterator[tuple[Rows, list[int]]]:
    """Rows with their values, so that a root comes before what follows from it."""
    expected = rows[:, ViolationField.EXPECTED_POSITION]
    position = np.where(expected == UNKNOWN, rows[:, ViolationField.POSITION], expected)
    phase = _PHASE_ORDER[rows[:, ViolationField.KERNEL_KIND] & 0xFF]
    order = np.lexsort(
        (rows[:, ViolationField.SEQUENCE], position, phase, rows[:, ViolationField.STEP])
    )
    rows = rows[order]
    return zip(rows, rows.tolist(), strict=True)


def _positions_of(values: list[int]) -> tuple[int, int]:
    """Where in its request a row stands: (at least, at most).

    A read is where it was made. A write has an input position and an expected one, of which either
    may be the wrong one: the expected one may follow from a predecessor that nobody wrote.
    """
    position, expected = values[ViolationField.POSITION], values[ViolationField.EXPECTED_POSITION]
    if expected == UNKNOWN:
        return position, position
    if values[ViolationField.KERNEL_KIND] & 0xFF != LaunchTag.WRITE:
        return expected, expected
    return min(position, expected), max(position, expected)


def _is_about_the_slot(values: list[int]) -> bool:
    return bool(values[ViolationField.FAIL_REASON_BITS] & _ABOUT_THE_SLOT)


def _is_about_content(values: list[int]) -> bool:
    return not values[ViolationField.FAIL_REASON_BITS] & ~_CONTENT


def _place_of(values: list[int]) -> Place | None:
    if values[ViolationField.FAIL_REASON_BITS] & _NO_PLACE:
        return None
    kind = values[ViolationField.KERNEL_KIND]
    writer = (values[ViolationField.WRITER_UID], values[ViolationField.WRITER_STEP])
    if kind & 0xFF == LaunchTag.WRITE:
        # Such a row names the write before; what a later read finds is the one it complains of.
        writer = (values[ViolationField.REQUEST_UID], values[ViolationField.STEP])
    return (kind >> 8, values[ViolationField.SLOT], *writer)


def _any_write(place: Place) -> Place:
    return (*place[:2], UNKNOWN - 1, UNKNOWN - 1)


# ---- in words ------------------------------------------------------------------------------------


def cause_of(violation: Violation, *, reader_wrote_it_at: int | None = None) -> str:
    """What happened, in one plain sentence; the root row of an incident decides it.

    ``reader_wrote_it_at``: step at which the reader itself wrote the slot, before its last write,
    where that is known.
    """
    v = violation
    labels = set(v.checks)
    slot = f"slot {v.slot}" + ("" if v.group == "full" else f" of group {v.group}")
    reader = _name(v.request_id, v.request_uid)
    at = v.position if v.expected_position is None else v.expected_position
    read = f"{reader} read it at step {v.step}, position {at}"
    if v.phase == "scrub":
        read = f"the scrub after step {v.step} found it"
    written = _written(v)

    if "out_of_pool" in labels and v.phase != "write":
        return (
            f"{slot} is none of the pool: the page table of {reader} names it for position {at},"
            f" read at step {v.step}"
        )
    if "out_of_pool" in labels:
        return f"{slot} is none of the pool: {reader} was to write to it at step {v.step}"
    if "table_changed" in labels:
        before = "" if v.slot_before is None else f" from slot {v.slot_before}"
        return (
            f"{slot}: the page-table entry of {reader} for position {at} changed to it{before}"
            f" while the forward of step {v.step} was running"
        )
    if "write_input" in labels:
        return f"{slot}: {reader} wrote {_wrong_input(v, at)} at step {v.step}"
    if "write_owned" in labels:
        owner = _name(v.writer_id, v.writer_uid)
        return (
            f"{slot}: written by {reader} at step {v.step}, position {at}, while another request"
            f" ({owner} wrote it last) still owned it"
        )
    if "double_free" in labels:
        return f"{slot}: freed at step {v.step} although it was free already; {written}"
    if "double_alloc" in labels:
        return f"{slot}: handed out at step {v.step} while it was still in use; {written}"
    if "unwritten" in labels:
        return f"{slot}: nobody wrote it since it was handed out; {read}"
    if "freed_read" in labels:
        return f"{slot}: freed, {written}; {read} all the same"
    if _has_another_writer(v) and labels & {"token", "position", "chain"}:
        if reader_wrote_it_at is not None:
            return (
                f"{slot}: {written} while {reader} still owned it, which had written it at step"
                f" {reader_wrote_it_at}; {read}"
            )
        return f"{slot}: {written} and not what {reader} has there; {read}"
    if "prefix_identity" in labels:
        return f"{slot}: end of a cached prefix that is not the one of {reader}; {written}; {read}"
    if "real_kv" in labels:
        return (
            f"{slot}: its bytes changed after they were sealed, its record did not; {written};"
            f" {read}"
        )
    if "position" in labels:
        return f"{slot}: holds position {v.position}; {written}; {read}"
    if "token" in labels:
        return f"{slot}: holds another token than {reader} has there; {written}; {read}"
    if at == 0:
        identity = "another identity (adapter, salt, weights)"
        return f"{slot}: begins a sequence of {identity}; {written}; {read}"
    return f"{slot}: does not continue the slot before it; {written}; {read}"


def advice_for(checks: list[str] | tuple[str, ...]) -> list[tuple[str, str]]:
    """(label, what to do) of each check of a row."""
    return [(label, check_named(label).do) for label in checks]


def _has_another_writer(v: Violation) -> bool:
    return v.writer_uid is not None and v.request_uid is not None and v.writer_uid != v.request_uid


def _wrong_input(v: Violation, expected_position: int) -> str:
    if v.position != expected_position:
        return f"position {v.position} to it where the scheduler has position {expected_position}"
    return f"another token to it than the scheduler has for position {expected_position}"


def _written(v: Violation) -> str:
    if v.writer_uid is None:
        return "its last writer is not known"
    step = "" if v.writer_step is None else f" at step {v.writer_step}"
    return f"written by {_name(v.writer_id, v.writer_uid)}{step}"


def _name(request_id: str | None, uid: int | None) -> str:
    if request_id is not None:
        return f"request {request_id}"
    if uid == DUMMY_UID:
        return "a dummy batch"
    return "a request that is not known" if uid is None else f"request #{uid}"
