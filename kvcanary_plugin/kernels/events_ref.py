"""Lifecycle events as tensor operations, one slot after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcanary_plugin.kernels.consts import EventKind, FailReason, SlotState, ViolationField
from kvcanary_plugin.kernels.context import SlotTable, VerifyOrWriteContext
from kvcanary_plugin.kernels.events import SlotEvent, check_events
from kvcanary_plugin.kernels.reference import (
    STATE_MASK,
    num_slots,
    read_records,
    record_fields,
    record_violations,
    violation_rows,
)

_GENERATION = 1 << 8
_UNCLAIMED = -1


def apply_events(context: VerifyOrWriteContext, events: Sequence[SlotEvent], *, step: int) -> None:
    """Apply ``events`` in order to the slot table; rows for double allocations and frees."""
    check_events(events, device=context.canary_buf.device)
    table = context.slot_table
    if table is None:
        return
    for event in events:
        if event.kind == EventKind.RESET:
            table.state[:] = (table.state & ~STATE_MASK) | SlotState.FREE
            table.owner_uid[:] = _UNCLAIMED
            continue
        assert event.slots is not None
        if event.kind == EventKind.MOVE:
            assert event.destinations is not None
            _move(context, table, event.slots, event.destinations)
            continue
        for entry in event.slots.tolist():
            if entry <= 0 or entry >= num_slots(context) // event.page_size:
                continue
            slots = range(entry * event.page_size, (entry + 1) * event.page_size)
            if event.kind == EventKind.ALLOC:
                _alloc(context, table, slots, step)
            else:
                _free(context, table, slots, step)


def _alloc(context: VerifyOrWriteContext, table: SlotTable, slots: range, step: int) -> None:
    for slot in slots:
        word = int(table.state[slot])
        if word & STATE_MASK != SlotState.FREE:
            _report(context, slot, FailReason.DOUBLE_ALLOC, step)
        # The generation lives in the upper 24 bits and wraps with them.
        table.state[slot] = _as_int32(
            ((word & ~STATE_MASK) + _GENERATION) & 0xFFFFFFFF | SlotState.ALLOCATED
        )
        table.owner_uid[slot] = _UNCLAIMED


def _free(context: VerifyOrWriteContext, table: SlotTable, slots: range, step: int) -> None:
    # A page may be partly filled: it was free already only if all of it was.
    states = [int(table.state[slot]) & STATE_MASK for slot in slots]
    if all(state == SlotState.FREE for state in states):
        _report(context, slots[0], FailReason.DOUBLE_FREE, step)
    for slot in slots:
        table.state[slot] = (int(table.state[slot]) & ~STATE_MASK) | SlotState.FREE
        table.owner_uid[slot] = _UNCLAIMED


def _move(
    context: VerifyOrWriteContext,
    table: SlotTable,
    sources: torch.Tensor,
    destinations: torch.Tensor,
) -> None:
    limit = num_slots(context)
    real = (sources > 0) & (sources < limit) & (destinations > 0) & (destinations < limit)
    source, destination = sources[real].to(torch.int64), destinations[real].to(torch.int64)
    for tensor in (
        record_fields(context),
        table.state,
        table.owner_uid,
        table.writer_uid,
        table.writer_step,
    ):
        tensor[destination] = tensor[source].clone()


def _report(context: VerifyOrWriteContext, slot: int, reason: FailReason, step: int) -> None:
    slots = torch.tensor([slot], device=context.canary_buf.device)
    record = read_records(context, slots)
    columns = {
        ViolationField.SLOT: slots,
        ViolationField.POSITION: record.position,
        ViolationField.STORED_TOKEN: record.token,
        ViolationField.STORED_CHAIN_HASH: record.prev_hash,
        ViolationField.FAIL_REASON_BITS: torch.full_like(slots, int(reason)),
    }
    record_violations(context, violation_rows(context, step=step, columns=columns))


def _as_int32(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
