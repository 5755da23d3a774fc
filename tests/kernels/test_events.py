"""Lifecycle events, behaviour by behaviour; equality of the implementations is tested elsewhere."""

from __future__ import annotations

import pytest
import torch

from kvcanary_plugin.kernels import (
    EventKind,
    FailReason,
    SlotEvent,
    SlotState,
    SlotTable,
    TableReads,
    ViolationField,
    WritePlan,
    launch_canary_prepare_kernel,
)
from tests.kernels import scenes

NUM_SLOTS = 24


class Pool:
    """A slot table to which events are applied; ``rows`` are what the ring gained."""

    def __init__(self) -> None:
        table = SlotTable.allocate(
            num_slots=NUM_SLOTS, device=torch.device("cpu"), tracks_allocation=True
        )
        self.context = scenes.make_context(num_slots=NUM_SLOTS, slot_table=table)
        self.table = table

    def apply(self, *events: SlotEvent) -> list[tuple[int, FailReason]]:
        before = int(self.context.violation_write_index)
        nothing = torch.empty(0, dtype=torch.int64)
        launch_canary_prepare_kernel(
            context=self.context,
            reads=TableReads(
                page_table=torch.zeros((1, 1), dtype=torch.int32),
                page_size=1,
                padding_row=-1,
                request_rows=nothing,
                request_uids=nothing,
                prefix_lens=nothing,
                extend_lens=nothing,
                max_prefix_len=0,
            ),
            write_plan_out=WritePlan.allocate(write_req_capacity=1, device=torch.device("cpu")),
            out_cache_loc=nothing,
            step=7,
            events=events,
        )
        after = int(self.context.violation_write_index)
        rows = self.context.violation_ring[before:after].tolist()
        return [
            (row[ViolationField.SLOT], FailReason(row[ViolationField.FAIL_REASON_BITS]))
            for row in rows
        ]

    def states(self, *slots: int) -> list[SlotState]:
        return [SlotState(int(self.table.state[slot]) & 0xFF) for slot in slots]


def alloc(*slots: int) -> SlotEvent:
    return SlotEvent(kind=EventKind.ALLOC, slots=torch.tensor(slots))


def free(*slots: int, page_size: int = 1) -> SlotEvent:
    return SlotEvent(kind=EventKind.FREE, slots=torch.tensor(slots), page_size=page_size)


def test_alloc_and_free_follow_each_other_silently_and_advance_the_generation():
    pool = Pool()
    for generation in (1, 2, 3):
        assert pool.apply(alloc(3, 4)) == []
        assert pool.states(3, 4) == [SlotState.ALLOCATED] * 2
        assert int(pool.table.state[3]) >> 8 == generation
        assert pool.apply(free(3, 4)) == []
        assert pool.states(3, 4) == [SlotState.FREE] * 2


def test_a_slot_freed_twice_is_a_double_free_at_that_moment():
    pool = Pool()
    pool.apply(alloc(3, 4), free(3))
    assert pool.apply(free(3, 4)) == [(3, FailReason.DOUBLE_FREE)]


def test_a_slot_that_stands_twice_in_one_free_is_a_double_free():
    pool = Pool()
    pool.apply(alloc(3))
    assert pool.apply(free(3, 3)) == [(3, FailReason.DOUBLE_FREE)]


def test_a_slot_handed_out_while_in_use_is_a_double_alloc():
    pool = Pool()
    pool.apply(alloc(3))
    assert pool.apply(alloc(3, 5)) == [(3, FailReason.DOUBLE_ALLOC)]


def test_order_within_one_launch_counts():
    pool = Pool()
    assert pool.apply(alloc(3), free(3), alloc(3)) == []
    assert pool.apply(alloc(3), free(3)) == [(3, FailReason.DOUBLE_ALLOC)]


def test_a_partly_filled_page_is_freed_whole_and_silently():
    pool = Pool()
    pool.apply(alloc(8, 9))
    assert pool.apply(free(2, page_size=4)) == []
    assert pool.states(8, 9, 10, 11) == [SlotState.FREE] * 4
    assert pool.apply(free(2, page_size=4)) == [(8, FailReason.DOUBLE_FREE)]


def test_a_free_ends_the_ownership():
    pool = Pool()
    pool.apply(alloc(3))
    pool.table.owner_uid[3] = 77
    pool.apply(free(3))
    assert int(pool.table.owner_uid[3]) == -1


def test_a_move_takes_record_state_and_provenance_along():
    pool = Pool()
    pool.apply(alloc(3, 9))
    pool.context.canary_buf.view(torch.int64)[3] = torch.tensor([5, 6, 7, 8])
    pool.table.state[3] = SlotState.SEALED
    pool.table.writer_uid[3], pool.table.writer_step[3], pool.table.owner_uid[3] = 11, 12, 13
    pool.apply(
        SlotEvent(kind=EventKind.MOVE, slots=torch.tensor([3]), destinations=torch.tensor([9]))
    )
    assert pool.context.canary_buf.view(torch.int64)[9].tolist() == [5, 6, 7, 8]
    assert pool.states(9) == [SlotState.SEALED]
    moved = (pool.table.writer_uid[9], pool.table.writer_step[9], pool.table.owner_uid[9])
    assert [int(value) for value in moved] == [11, 12, 13]


def test_a_reset_frees_everything_and_keeps_generations():
    pool = Pool()
    pool.apply(alloc(3), SlotEvent(kind=EventKind.RESET))
    assert pool.states(*range(NUM_SLOTS)) == [SlotState.FREE] * NUM_SLOTS
    assert int(pool.table.state[3]) >> 8 == 1
    assert pool.apply(alloc(3)) == []


def test_padding_and_slots_outside_the_pool_are_left_alone():
    pool = Pool()
    assert pool.apply(alloc(0, -1, NUM_SLOTS, 2**40), free(0, -1, NUM_SLOTS)) == []
    assert pool.states(0) == [SlotState.FREE]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (SlotEvent(kind=EventKind.ALLOC), "slots"),
        (SlotEvent(kind=EventKind.ALLOC, slots=torch.tensor([1.0])), "int32 or int64"),
        (SlotEvent(kind=EventKind.FREE, slots=torch.arange(8)[::2]), "contiguous"),
        (SlotEvent(kind=EventKind.FREE, slots=torch.arange(2), page_size=0), "page_size"),
        (SlotEvent(kind=EventKind.FREE, slots=torch.arange(2, device="meta")), "device"),
        (SlotEvent(kind=EventKind.MOVE, slots=torch.arange(2)), "destinations"),
        (
            SlotEvent(kind=EventKind.MOVE, slots=torch.arange(2), destinations=torch.arange(3)),
            "2 entries",
        ),
    ],
)
def test_an_event_that_a_kernel_cannot_read_is_a_value_error(event: SlotEvent, message: str):
    with pytest.raises(ValueError, match=message):
        Pool().apply(event)
