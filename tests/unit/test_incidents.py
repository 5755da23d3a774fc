"""Rows are grouped to root causes: each exactly once, whatever their order, within bounds."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcanary_plugin import incidents
from kvcanary_plugin.checks import CHECKS
from kvcanary_plugin.incidents import Incident, IncidentTracker, cause_of
from kvcanary_plugin.kernels.consts import (
    VIOLATION_FIELDS,
    FailReason,
    LaunchTag,
    ViolationField,
    pack_kernel_kind,
)
from kvcanary_plugin.ring import Rows
from kvcanary_plugin.violations import RequestNames, Violation


def row(
    reasons: FailReason = FailReason.VERIFY_TOKEN,
    *,
    tag: LaunchTag = LaunchTag.VERIFY,
    group: int = 0,
    slot: int = 9,
    position: int = 3,
    expected: int | None = None,
    step: int = 10,
    uid: int = 1,
    writer: tuple[int, int] = (1, 1),
    sequence: int = 1,
) -> list[int]:
    fields = [-1] * VIOLATION_FIELDS
    fields[ViolationField.KERNEL_KIND] = pack_kernel_kind(tag, group)
    fields[ViolationField.SLOT] = slot
    fields[ViolationField.POSITION] = position
    fields[ViolationField.EXPECTED_POSITION] = position if expected is None else expected
    fields[ViolationField.FAIL_REASON_BITS] = int(reasons)
    fields[ViolationField.STEP] = step
    fields[ViolationField.REQUEST_UID] = uid
    fields[ViolationField.WRITER_UID], fields[ViolationField.WRITER_STEP] = writer
    fields[ViolationField.SEQUENCE] = sequence
    return fields


def as_rows(rows: Iterable[list[int]]) -> Rows:
    return np.array(list(rows), dtype=np.int64).reshape(-1, VIOLATION_FIELDS)


class Tracked:
    """A tracker with a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tracker = IncidentTracker(clock=lambda: self.now)

    def add(self, *rows: list[int]) -> list[Incident]:
        return self.tracker.add(as_rows(rows))


# --- one root -------------------------------------------------------------------------------------


def test_the_same_bad_slot_read_step_after_step_is_one_incident():
    tracked = Tracked()
    assert len(tracked.add(row())) == 1
    for step in range(11, 40):
        assert tracked.add(row(step=step)) == []
    (incident,) = tracked.tracker.open_incidents
    assert (incident.rows, incident.first_step, incident.last_step) == (30, 10, 39)


def test_the_chain_breaks_behind_a_bad_slot_go_back_to_it():
    tracked = Tracked()
    successor = row(FailReason.VERIFY_CHAIN_HASH, slot=10, position=4)
    assert len(tracked.add(successor, row())) == 1
    (incident,) = tracked.tracker.open_incidents
    assert incident.root[ViolationField.POSITION] == 3, "the first position is the root"


def test_requests_that_share_a_bad_slot_are_one_incident():
    tracked = Tracked()
    assert len(tracked.add(*(row(uid=uid) for uid in range(1, 20)))) == 1
    (incident,) = tracked.tracker.open_incidents
    assert len(incident.requests) == 19


def test_what_a_request_reads_behind_its_shared_bad_slot_goes_back_to_it():
    tracked = Tracked()
    tracked.add(row(uid=1), row(uid=2))
    later = row(FailReason.VERIFY_CHAIN_HASH, uid=2, slot=77, position=90, writer=(2, 9))
    assert tracked.add(later) == []


def test_a_wrong_input_and_the_later_reads_of_it_are_one_incident():
    tracked = Tracked()
    wrong = [
        row(
            FailReason.WRITE_POSITION,
            tag=LaunchTag.WRITE,
            slot=20 + index,
            position=index + 1,
            expected=index,
            uid=5,
            writer=(-1, -1),
        )
        for index in range(4)
    ]
    assert len(tracked.add(*wrong)) == 1
    own = row(FailReason.VERIFY_POSITION, slot=21, position=2, expected=1, uid=5, writer=(5, 10))
    shared = row(FailReason.VERIFY_POSITION, slot=22, position=3, expected=2, uid=6, writer=(5, 10))
    further = row(FailReason.VERIFY_CHAIN_HASH, slot=30, position=8, uid=7, writer=(5, 12))
    assert tracked.add(own, shared, further) == []


def test_one_fault_seen_in_two_groups_is_one_incident():
    tracked = Tracked()
    assert len(tracked.add(row(group=0), row(group=1, slot=400))) == 1


def test_a_read_of_a_bad_slot_and_its_scrub_are_one_incident():
    tracked = Tracked()
    scrub = row(FailReason.VERIFY_REAL_KV_HASH, tag=LaunchTag.SCRUB, uid=-1, step=12)
    assert len(tracked.add(row(FailReason.VERIFY_REAL_KV_HASH))) == 1
    assert tracked.add(scrub) == []


# --- two roots ------------------------------------------------------------------------------------


def test_two_slots_of_two_requests_are_two_incidents():
    tracked = Tracked()
    assert len(tracked.add(row(), row(slot=50, uid=2, writer=(2, 4)))) == 2


def test_a_slot_before_the_one_that_is_open_is_another_root():
    tracked = Tracked()
    tracked.add(row(position=9))
    assert len(tracked.add(row(slot=5, position=2, step=11))) == 1


def test_a_slot_that_was_written_anew_is_another_root():
    tracked = Tracked()
    tracked.add(row())
    assert len(tracked.add(row(uid=8, writer=(8, 30), step=31))) == 1


def test_a_write_over_what_a_hit_request_left_is_another_root():
    tracked = Tracked()
    tracked.add(row(uid=1))
    reused = row(FailReason.WRITE_TOKEN, tag=LaunchTag.WRITE, slot=70, position=50, uid=9)
    assert len(tracked.add(reused)) == 1


def test_zeros_in_the_rows_of_two_requests_are_two_incidents():
    tracked = Tracked()
    zeros = [row(FailReason.OUT_OF_POOL, slot=0, uid=uid, writer=(-1, -1)) for uid in (1, 2)]
    assert len(tracked.add(*zeros)) == 2


# --- the end --------------------------------------------------------------------------------------


def test_an_incident_ends_when_it_is_quiet_and_a_later_row_opens_another():
    tracked = Tracked()
    (first,) = tracked.add(row())
    tracked.now = incidents.QUIET_SECONDS - 1
    assert tracked.tracker.close_quiet() == []
    tracked.add(row(step=11))
    tracked.now += incidents.QUIET_SECONDS - 1
    assert tracked.tracker.close_quiet() == []
    tracked.now += 1
    assert tracked.tracker.close_quiet() == [first]
    (second,) = tracked.add(row(step=12))
    assert second.id != first.id


def test_closing_one_incident_leaves_the_others():
    tracked = Tracked()
    tracked.add(row())
    tracked.now = 30.0
    tracked.add(row(slot=50, uid=2, writer=(2, 4)))
    tracked.now = incidents.QUIET_SECONDS
    assert len(tracked.tracker.close_quiet()) == 1
    assert tracked.add(row(slot=50, uid=2, writer=(2, 4), step=12)) == []


# --- bounds ---------------------------------------------------------------------------------------


def test_so_many_incidents_are_open_at_most_and_every_row_still_counts():
    tracked = Tracked()
    many = [row(slot=n, uid=n, writer=(-1, -1)) for n in range(1, 4 * incidents.MAX_OPEN)]
    assert len(tracked.add(*many)) == incidents.MAX_OPEN
    assert sum(i.rows for i in tracked.tracker.open_incidents) == len(many)


def test_an_incident_that_spreads_stays_within_its_bounds():
    tracked = Tracked()
    count = incidents.MAX_PLACES + incidents.MAX_REQUESTS + 100
    tracked.add(*(row(slot=n, position=n) for n in range(1, count)))
    tracked.add(*(row(uid=n, slot=1, position=1) for n in range(2, count)))
    (incident,) = tracked.tracker.open_incidents
    assert len(incident.places) <= incidents.MAX_PLACES
    assert len(incident.requests) <= incidents.MAX_REQUESTS
    assert len(incident.followed) <= incidents.MAX_FOLLOWED
    assert incident.rows == 2 * count - 3
    assert len(tracked.tracker._by_place) <= incidents.MAX_PLACES
    assert len(tracked.tracker._by_request) <= incidents.MAX_REQUESTS


# --- properties -----------------------------------------------------------------------------------

some_row = st.builds(
    row,
    st.sampled_from([check.reasons for check in CHECKS]),
    tag=st.sampled_from([LaunchTag.VERIFY, LaunchTag.WRITE, LaunchTag.SCRUB, LaunchTag.LIFECYCLE]),
    group=st.integers(0, 1),
    slot=st.integers(-1, 6),
    position=st.integers(-1, 6),
    step=st.integers(0, 5),
    uid=st.integers(-1, 4),
    writer=st.tuples(st.integers(-1, 4), st.integers(-1, 5)),
)


@given(st.lists(st.lists(some_row, max_size=8), max_size=6))
def test_every_row_counts_in_exactly_one_incident(polls: list[list[list[int]]]):
    tracked = Tracked()
    opened = [incident for poll in polls for incident in tracked.add(*poll)]
    assert list(tracked.tracker.open_incidents) == opened
    assert sum(incident.rows for incident in opened) == sum(map(len, polls))
    assert len({incident.id for incident in opened}) == len(opened)


@given(st.lists(st.lists(some_row, min_size=1, max_size=8), min_size=1, max_size=6))
def test_rows_that_come_again_open_nothing(polls: list[list[list[int]]]):
    tracked = Tracked()
    for poll in polls:
        tracked.add(*poll)
    for poll in polls:
        again = [r for r in poll if not r[ViolationField.FAIL_REASON_BITS] & FailReason.OUT_OF_POOL]
        assert tracked.add(*again) == []


@given(st.lists(some_row, min_size=1, max_size=10), st.randoms(use_true_random=False))
def test_the_order_within_a_poll_does_not_matter(rows: list[list[int]], random: object):
    for number, fields in enumerate(rows, start=1):
        fields[ViolationField.SEQUENCE] = number
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    roots = [
        [incident.root.tolist() for incident in Tracked().add(*order)] for order in (rows, shuffled)
    ]
    assert roots[0] == roots[1]


@given(
    st.integers(0, 30),
    st.sets(st.integers(1, 5), min_size=1),
    st.integers(1, 12),
    st.integers(1, 6),
)
def test_a_bad_slot_and_all_its_consequences_are_one_incident(
    bad: int, readers: set[int], behind: int, steps: int
):
    """Requests share a prefix with one bad slot; every later position of each is broken too."""
    tracked = Tracked()
    opened = []
    for step in range(10, 10 + steps):
        rows = []
        for uid in sorted(readers):
            rows.append(row(slot=100 + bad, position=bad, uid=uid, step=step, writer=(9, 2)))
            rows += [
                row(
                    FailReason.VERIFY_CHAIN_HASH,
                    slot=1000 * uid + bad + offset,
                    position=bad + offset,
                    uid=uid,
                    step=step,
                    writer=(uid, 3),
                )
                for offset in range(1, behind)
            ]
        opened += tracked.add(*rows)
    (incident,) = opened
    assert incident.root[ViolationField.SLOT] == 100 + bad


# --- in words -------------------------------------------------------------------------------------


def violation(reasons: FailReason, **fields: object) -> Violation:
    names = RequestNames()
    names.remember(1, "A")
    names.remember(2, "B")
    return Violation.from_row(
        np.array(row(reasons, **fields), dtype=np.int64),  # type: ignore[arg-type]
        ["full", "swa"],
        names,
    )


def test_the_cause_names_both_requests_both_steps_and_the_position():
    foreign = violation(
        FailReason.VERIFY_TOKEN, slot=8123, position=77, step=1043, writer=(2, 1042)
    )
    assert cause_of(foreign, reader_wrote_it_at=1030) == (
        "slot 8123: written by request B at step 1042 while request A still owned it, which had"
        " written it at step 1030; request A read it at step 1043, position 77"
    )
    assert cause_of(foreign) == (
        "slot 8123: written by request B at step 1042 and not what request A has there; request A"
        " read it at step 1043, position 77"
    )


def test_a_chain_that_begins_wrong_has_no_slot_before_it():
    first = cause_of(violation(FailReason.VERIFY_CHAIN_HASH, position=0))
    assert "begins a sequence of another identity" in first
    assert "before it" not in first
    assert "does not continue the slot before it" in cause_of(
        violation(FailReason.VERIFY_CHAIN_HASH)
    )


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.label)
@pytest.mark.parametrize("tag", list(LaunchTag))
@pytest.mark.parametrize("known", [True, False])
def test_every_check_has_a_cause_in_words(check, tag: LaunchTag, known: bool):
    fields = {} if known else {"uid": -1, "writer": (-1, -1)}
    text = cause_of(violation(check.reasons, tag=tag, group=1, **fields))
    assert text.startswith("slot 9 of group swa")
    assert "None" not in text
    assert "#-1" not in text
