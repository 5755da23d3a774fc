"""The verify launch over a plan, behaviour by behaviour."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvcanary_plugin.kernels import (
    FailReason,
    RealKvHashMode,
    RealKvSource,
    SlotState,
    SlotTable,
    VerifyOrWriteContext,
    VerifyPlan,
    ViolationField,
    launch_canary_seal_kernel,
    launch_canary_verify_kernel,
)
from tests.kernels import oracle, scenes

pytestmark = pytest.mark.usefixtures("implementation")

TOKENS = [11, 7, 7, 128000]
SLOTS = [4, 9, 2, 30]
# (slot, token, position, predecessor) of the sequence as a healthy engine reads it.
HEALTHY = [(4, 11, 0, -1), (9, 7, 1, 4), (2, 7, 2, 9), (30, 128000, 3, 2)]


def written(**context_fields: object) -> VerifyOrWriteContext:
    context = scenes.make_context(**context_fields)  # type: ignore[arg-type]
    scenes.write_sequence(context, tokens=TOKENS, slots=SLOTS, step=1)
    context.slot_run_counter.zero_()
    return context


def verify(
    context: VerifyOrWriteContext,
    entries: list[tuple[int, int, int, int]] | VerifyPlan,
    *,
    tokens: bool = True,
    step: int = 2,
) -> list[int]:
    """Verify and return the bits of every row in the ring."""
    plan = entries if isinstance(entries, VerifyPlan) else scenes.make_verify_plan(entries)
    launch_canary_verify_kernel(
        context=context, plan=plan, check_verify_expected_token=tokens, step=step
    )
    return scenes.rows(context)[:, ViolationField.FAIL_REASON_BITS].tolist()


def set_field(context: VerifyOrWriteContext, slot: int, field: int, value: int) -> None:
    context.canary_buf.view(torch.int64)[slot, field] = value


def test_healthy_sequence_is_silent_and_counted() -> None:
    context = written()
    records = context.canary_buf.clone()
    assert verify(context, HEALTHY) == []
    assert context.slot_run_counter.item() == 4
    assert context.kernel_run_counter.item() == 2
    assert torch.equal(context.canary_buf, records)


@pytest.mark.parametrize(
    ("field", "value", "reasons"),
    [
        # The successor's chain breaks with token and position, the record's own with prev_hash.
        (0, 8, [FailReason.VERIFY_TOKEN, FailReason.VERIFY_CHAIN_HASH]),
        (1, 8, [FailReason.VERIFY_POSITION, FailReason.VERIFY_CHAIN_HASH]),
        (2, 8, [FailReason.VERIFY_CHAIN_HASH, FailReason.VERIFY_CHAIN_HASH]),
    ],
)
def test_changed_field_is_seen_at_the_slot_and_behind_it(
    field: int, value: int, reasons: list[FailReason]
) -> None:
    context = written()
    set_field(context, 9, field, value)
    assert verify(context, HEALTHY) == reasons


def test_one_bad_entry_makes_one_row_with_everything_in_it() -> None:
    context = written(kernel_kind=513)
    plan = scenes.make_verify_plan([(9, 5, 8, 2)], uids=[42])
    plan = dataclasses.replace(plan, verify_batch_rows=torch.tensor([6]))
    verify(context, plan)
    (row,) = scenes.rows(context).tolist()
    records = context.canary_buf.view(torch.int64)
    bits = FailReason.VERIFY_CHAIN_HASH | FailReason.VERIFY_POSITION | FailReason.VERIFY_TOKEN
    expected_chain = oracle.signed(oracle.mix3(int(records[2, 2]), 7, 2))
    stored_chain = int(records[9, 2])
    assert row == [
        *(513, 9, 1, 7, 5, stored_chain, expected_chain, bits, 2, 42, -1, -1, 6, -1, 8, 1)
    ]


def test_unknown_expected_token_is_not_compared() -> None:
    context = written()
    assert verify(context, [(9, -1, 1, 4)]) == []


def test_tokens_are_compared_on_request_only() -> None:
    context = written()
    assert verify(context, [(9, 5, 1, 4)], tokens=False) == []
    assert verify(context, [(9, 5, 9, 4)], tokens=False) == [FailReason.VERIFY_POSITION]
    assert scenes.rows(context)[0, ViolationField.EXPECTED_TOKEN].item() == -1


def test_padding_slot_is_skipped_but_counted() -> None:
    context = written()
    assert verify(context, [(0, 5, 9, 4), (9, 7, 1, 4)]) == []
    assert context.slot_run_counter.item() == 2


def test_predecessor_in_the_padding_slot_skips_the_chain_check_alone() -> None:
    context = written()
    set_field(context, 2, 2, 12345)
    assert verify(context, [(2, 7, 2, 0)]) == []
    assert verify(context, [(2, 7, 9, 0)]) == [FailReason.VERIFY_POSITION]
    row = scenes.rows(context)[0]
    assert row[ViolationField.EXPECTED_AUX] == row[ViolationField.STORED_CHAIN_HASH] == 12345


def test_identity_key_is_part_of_the_heads_expectation() -> None:
    context = scenes.make_context()
    scenes.write_sequence(context, tokens=[5], slots=[3], key=77)
    assert verify(context, scenes.make_verify_plan([(3, 5, 0, -1)], keys=[77])) == []
    assert verify(context, scenes.make_verify_plan([(3, 5, 0, -1)], keys=[78])) == [
        FailReason.VERIFY_CHAIN_HASH
    ]


@pytest.mark.parametrize("slot", [32, 33, 2**62, -1, -(2**62)])
def test_slot_outside_the_pool_is_reported_and_not_read(slot: int) -> None:
    context = written()
    assert verify(context, [(slot, 5, 9, 4)]) == [FailReason.OUT_OF_POOL]
    (row,) = scenes.rows(context).tolist()
    reason = FailReason.OUT_OF_POOL
    assert row == [1, slot, -1, -1, 5, -1, -1, reason, 2, -1, -1, -1, -1, -1, 9, 1]
    assert context.slot_run_counter.item() == 1


@pytest.mark.parametrize("prev_slot", [32, 2**62, -2])
def test_predecessor_outside_the_pool_replaces_the_chain_check(prev_slot: int) -> None:
    context = written()
    assert verify(context, [(9, 5, 1, prev_slot)]) == [
        FailReason.OUT_OF_POOL | FailReason.VERIFY_TOKEN
    ]


def test_disabled_plan_only_counts_the_launch() -> None:
    context = written()
    plan = scenes.make_verify_plan([(9, 5, 9, 4)])
    plan.enable.zero_()
    assert verify(context, plan) == []
    assert context.slot_run_counter.item() == 0
    assert context.kernel_run_counter.item() == 2


@pytest.mark.parametrize(("count", "looked_at"), [(-1, 0), (1, 1), (1000, 2)])
def test_entries_beyond_num_valid_or_the_capacity_are_ignored(count: int, looked_at: int) -> None:
    context = written()
    plan = scenes.make_verify_plan([(9, 7, 1, 4), (4, 11, 0, -1)])
    plan.verify_num_valid.fill_(count)
    assert verify(context, plan) == []
    assert context.slot_run_counter.item() == looked_at


# ---- slot states ---------------------------------------------------------------------------------


def with_table(state: SlotState) -> tuple[VerifyOrWriteContext, SlotTable]:
    """The sequence in slots whose state is ``state`` now, generation 3."""
    table = SlotTable.allocate(num_slots=32, device=scenes.CPU, tracks_allocation=True)
    table.state.fill_(int(SlotState.ALLOCATED))
    context = written(slot_table=table)
    table.state.fill_(int(state) | 3 << 8)
    return context, table


@pytest.mark.parametrize("state", [SlotState.WRITTEN, SlotState.SEALED, SlotState.EXTERNAL])
def test_live_states_are_silent(state: SlotState) -> None:
    context, _ = with_table(state)
    assert verify(context, HEALTHY) == []


def test_unwritten_slot_is_reported_alone() -> None:
    context, _ = with_table(SlotState.ALLOCATED)
    assert verify(context, [(9, 5, 9, 2)]) == [FailReason.UNWRITTEN_READ]


def test_freed_slot_is_reported_with_whatever_else_differs() -> None:
    context, _ = with_table(SlotState.FREE)
    assert verify(context, [(9, 7, 1, 4), (2, 7, 9, 9)]) == [
        FailReason.FREED_READ,
        FailReason.FREED_READ | FailReason.VERIFY_POSITION,
    ]


def test_row_names_the_writer_and_the_state() -> None:
    context, _ = with_table(SlotState.SEALED)
    verify(context, [(9, 5, 1, 4)])
    (row,) = scenes.rows(context)
    assert row[ViolationField.WRITER_UID] == 100
    assert row[ViolationField.WRITER_STEP] == 1
    assert row[ViolationField.SLOT_STATE] == SlotState.SEALED


def test_slot_written_in_this_forward_is_left_out_and_not_counted() -> None:
    context, table = with_table(SlotState.ALLOCATED)
    table.writer_step[9] = 2
    assert verify(context, [(9, 5, 9, 4)], step=2) == []
    assert context.slot_run_counter.item() == 0


def test_chain_behind_a_slot_written_in_this_forward_is_left_out() -> None:
    context, table = with_table(SlotState.WRITTEN)
    table.writer_step[4] = 2
    set_field(context, 4, 0, 999)
    assert verify(context, [(9, 7, 1, 4)], step=2) == []
    assert verify(context, [(9, 7, 1, 4)], step=3) == [FailReason.VERIFY_CHAIN_HASH]


def test_unknown_step_leaves_nothing_out() -> None:
    context, table = with_table(SlotState.WRITTEN)
    table.writer_step.fill_(-1)
    assert verify(context, [(9, 5, 1, 4)], step=-1) == [FailReason.VERIFY_TOKEN]
    assert context.slot_run_counter.item() == 1


# ---- real KV -------------------------------------------------------------------------------------


def sealed(table: SlotTable | None = None) -> tuple[VerifyOrWriteContext, torch.Tensor]:
    kv = torch.arange(32 * 24).reshape(32, 24).to(torch.uint8)
    source = RealKvSource(tensor=kv, page_size=1, num_bytes_per_token=24, read_bytes=24)
    context = written(sources=(source,), mode=RealKvHashMode.ALL, slot_table=table)
    plan = scenes.make_write_plan(lengths=[4])
    launch_canary_seal_kernel(context=context, plan=plan, out_cache_loc=torch.tensor(SLOTS), step=1)
    return context, kv


def test_changed_byte_is_seen_by_a_launch_that_folds() -> None:
    context, kv = sealed()
    assert verify(context, HEALTHY) == []
    kv[9, 23] ^= 1
    assert verify(context, HEALTHY) == [FailReason.VERIFY_REAL_KV_HASH]


def test_records_only_launch_does_not_look_at_sealed_bytes() -> None:
    context, kv = sealed()
    kv.zero_()
    assert verify(scenes.with_mode(context, RealKvHashMode.NONE), HEALTHY) == []


@pytest.mark.parametrize(
    ("state", "seen"),
    [
        (SlotState.WRITTEN, []),  # not sealed yet: field 3 means nothing
        (SlotState.SEALED, [FailReason.VERIFY_REAL_KV_HASH]),
        (SlotState.EXTERNAL, [FailReason.VERIFY_REAL_KV_HASH]),
        (SlotState.FREE, [FailReason.FREED_READ]),
    ],
)
def test_bytes_are_compared_in_sealed_and_external_slots(
    state: SlotState, seen: list[FailReason]
) -> None:
    table = SlotTable.allocate(num_slots=32, device=scenes.CPU, tracks_allocation=True)
    table.state.fill_(int(SlotState.ALLOCATED))
    context, kv = sealed(table)
    table.state.fill_(int(state))
    kv[9, 0] ^= 1
    assert verify(context, [(9, 7, 1, 4)]) == seen
