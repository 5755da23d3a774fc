"""The write launch, behaviour by behaviour."""

from __future__ import annotations

import dataclasses
from itertools import permutations

import pytest
import torch

from kvcanary_plugin.kernels import (
    FailReason,
    RealKvHashMode,
    RealKvSource,
    SlotState,
    SlotTable,
    VerifyOrWriteContext,
    ViolationField,
    WritePlan,
    launch_canary_write_kernel,
)
from kvcanary_plugin.kernels.hashes import to_signed
from tests.kernels import oracle, scenes

pytestmark = pytest.mark.usefixtures("implementation")

HEAD = oracle.signed(oracle.splitmix64(oracle.ANCHOR))


def write(
    context: VerifyOrWriteContext,
    plan: WritePlan,
    tokens: list[int],
    positions: list[int],
    slots: list[int],
    *,
    expected: tuple[list[int], list[int]] | None = None,
    step: int = 3,
) -> None:
    wanted = None if expected is None else [torch.tensor(column) for column in expected]
    launch_canary_write_kernel(
        context=context,
        plan=plan,
        input_ids=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        out_cache_loc=torch.tensor(slots, dtype=torch.int64),
        enable_write_input_assert=wanted is not None,
        expected_input_tokens=wanted[0] if wanted else None,
        expected_input_positions=wanted[1] if wanted else None,
        step=step,
    )


def records(context: VerifyOrWriteContext, slots: list[int]) -> list[list[int]]:
    return context.canary_buf.view(torch.int64)[slots, :4].tolist()


def bits(context: VerifyOrWriteContext) -> list[int]:
    return scenes.rows(context)[:, ViolationField.FAIL_REASON_BITS].tolist()


def test_each_request_starts_its_own_chain() -> None:
    context = scenes.make_context()
    write(context, scenes.make_write_plan(lengths=[2, 1]), [5, 6, 5], [0, 1, 0], [3, 4, 9])
    (first, second, other) = records(context, [3, 4, 9])
    assert first == [5, 0, HEAD, 0]
    assert second == [6, 1, to_signed(oracle.mix3(HEAD, 5, 0)), 0]
    assert other == [5, 0, HEAD, 0]
    assert context.slot_run_counter.item() == 3
    assert context.kernel_run_counter.item() == 1
    assert bits(context) == []


def test_identity_key_moves_the_anchor() -> None:
    context = scenes.make_context()
    write(context, scenes.make_write_plan(lengths=[1], keys=[-9]), [5], [0], [3])
    key = -9 & oracle.MASK
    assert records(context, [3])[0][2] == oracle.signed(oracle.splitmix64(oracle.ANCHOR ^ key))


def test_chain_continues_from_the_seed() -> None:
    context = scenes.make_context()
    scenes.write_sequence(context, tokens=[1, 2, 3, 4], slots=[5, 6, 7, 8])
    whole = records(context, [7, 8])
    scenes.write_sequence(context, tokens=[3, 4], slots=[17, 18], start=2, seed=6)
    assert records(context, [17, 18]) == whole


def test_slot_zero_is_a_seed_like_any_other() -> None:
    context = scenes.make_context()
    scenes.write_sequence(context, tokens=[1], slots=[0])
    scenes.write_sequence(context, tokens=[2], slots=[4], start=1, seed=0)
    assert records(context, [4])[0][2] == to_signed(oracle.mix3(HEAD, 1, 0))


def test_skipped_entry_neither_stores_nor_advances_the_chain() -> None:
    context = scenes.make_context()
    plan = scenes.make_write_plan(lengths=[3])
    write(context, plan, [1, 9, 2], [0, 1, 1], [3, -1, 4])
    assert records(context, [4]) == [[2, 1, to_signed(oracle.mix3(HEAD, 1, 0)), 0]]
    assert context.slot_run_counter.item() == 2
    # Nothing else was touched, the last record (index -1) included.
    touched = context.canary_buf.any(dim=1).nonzero().flatten().tolist()
    assert touched == [3, 4]


def test_empty_plan_only_counts_the_launch() -> None:
    context = scenes.make_context()
    write(context, scenes.make_write_plan(lengths=[]), [], [], [])
    assert context.kernel_run_counter.item() == 1
    assert context.slot_run_counter.item() == 0


def test_padding_behind_the_plan_is_not_read() -> None:
    context = scenes.make_context()
    write(context, scenes.make_write_plan(lengths=[1], capacity=4), [1, 8, 8], [0, 8, 8], [3, 4, 5])
    assert context.canary_buf.any(dim=1).nonzero().flatten().tolist() == [3]


def test_bytes_behind_the_record_stay() -> None:
    context = scenes.make_context(stride=64)
    context.canary_buf.fill_(0xAB)
    scenes.write_sequence(context, tokens=[1], slots=[3])
    assert context.canary_buf[3, 32:].unique().tolist() == [0xAB]


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.int32, torch.int32, torch.int64),  # vLLM: int32 input_ids, int64 slots
        (torch.int64, torch.int64, torch.int32),
        (torch.int32, torch.int64, torch.int32),
    ],
)
def test_inputs_may_mix_int32_and_int64(dtypes: tuple[torch.dtype, ...]) -> None:
    context = scenes.make_context()
    columns = [
        torch.tensor(values, dtype=dtype)
        for values, dtype in zip(([5, 6], [0, 1], [3, 4]), dtypes, strict=True)
    ]
    launch_canary_write_kernel(
        context=context,
        plan=scenes.make_write_plan(lengths=[2]),
        input_ids=columns[0],
        positions=columns[1],
        out_cache_loc=columns[2],
        enable_write_input_assert=True,
        expected_input_tokens=columns[0].int(),
        expected_input_positions=columns[1].long(),
    )
    assert records(context, [3])[0][:2] == [5, 0]
    assert bits(context) == []


# ---- the input assert ----------------------------------------------------------------------------


def test_input_assert_puts_both_bits_into_one_row_and_follows_the_actual_values() -> None:
    context = scenes.make_context()
    plan = scenes.make_write_plan(lengths=[3], uids=[42])
    write(context, plan, [5, 6, 7], [0, 1, 2], [3, 4, 5], expected=([5, 9, 7], [0, 8, 2]))
    (row,) = scenes.rows(context).tolist()
    chain = to_signed(oracle.mix3(HEAD, 5, 0))
    both = FailReason.WRITE_TOKEN | FailReason.WRITE_POSITION
    assert row == [1, 4, 1, 6, 9, chain, 8, both, 3, 42, -1, -1, 0, -1, 8, 1]
    assert records(context, [4, 5])[0] == [6, 1, chain, 0]
    assert records(context, [5])[0][2] == to_signed(oracle.mix3(chain, 6, 1))


@pytest.mark.parametrize(
    ("expected", "bit"),
    [(([9], [0]), FailReason.WRITE_TOKEN), (([5], [9]), FailReason.WRITE_POSITION)],
)
def test_input_assert_names_what_differs(
    expected: tuple[list[int], list[int]], bit: FailReason
) -> None:
    context = scenes.make_context()
    write(context, scenes.make_write_plan(lengths=[1]), [5], [0], [3], expected=expected)
    assert bits(context) == [bit]


# ---- the position assert -------------------------------------------------------------------------


def seeded(position_assert: int) -> VerifyOrWriteContext:
    context = scenes.make_context(position_assert=position_assert)
    scenes.write_sequence(context, tokens=[1, 2], slots=[5, 6])
    return context


def test_position_assert_reports_the_gap_once() -> None:
    context = seeded(position_assert=1)
    plan = scenes.make_write_plan(lengths=[3], seeds=[6], uids=[42])
    write(context, plan, [7, 8, 9], [2, 5, 6], [10, 11, 12])
    (row,) = scenes.rows(context)
    assert row[ViolationField.SLOT] == 11
    assert row[ViolationField.FAIL_REASON_BITS] == FailReason.WRITE_POSITION
    assert row[ViolationField.EXPECTED_TOKEN] == row[ViolationField.STORED_TOKEN] == 8
    assert row[ViolationField.POSITION] == 5
    assert row[ViolationField.EXPECTED_POSITION] == row[ViolationField.EXPECTED_AUX] == 3


def test_position_assert_looks_past_skipped_entries() -> None:
    context = seeded(position_assert=1)
    plan = scenes.make_write_plan(lengths=[2], seeds=[6])
    write(context, plan, [7, 8], [9, 2], [-1, 10])
    assert bits(context) == []


@pytest.mark.parametrize("switch", [0, 2])
def test_position_assert_is_on_at_one_only(switch: int) -> None:
    context = seeded(position_assert=switch)
    write(context, scenes.make_write_plan(lengths=[1], seeds=[6]), [7], [9], [10])
    assert bits(context) == []


def test_position_assert_needs_a_seed() -> None:
    context = seeded(position_assert=1)
    write(context, scenes.make_write_plan(lengths=[2]), [7, 8], [9, 3], [10, 11])
    assert bits(context) == []


def test_input_assert_and_position_assert_are_two_rows() -> None:
    context = seeded(position_assert=1)
    plan = scenes.make_write_plan(lengths=[1], seeds=[6])
    write(context, plan, [7], [9], [10], expected=([7], [2]))
    assert bits(context) == [FailReason.WRITE_POSITION, FailReason.WRITE_POSITION]


# ---- out of the pool -----------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [32, 33, 2**31, 2**62])
def test_slot_beyond_the_pool_is_reported_and_not_stored(slot: int) -> None:
    context = scenes.make_context(num_slots=32)
    write(context, scenes.make_write_plan(lengths=[2]), [5, 6], [0, 1], [slot, 4])
    (row,) = scenes.rows(context)
    assert row[ViolationField.SLOT] == slot
    assert row[ViolationField.FAIL_REASON_BITS] == FailReason.OUT_OF_POOL
    assert context.slot_run_counter.item() == 1
    # The chain advanced over the entry all the same.
    assert records(context, [4])[0][2] == to_signed(oracle.mix3(HEAD, 5, 0))


def test_seed_beyond_the_pool_is_reported_and_the_chain_starts_anew() -> None:
    context = scenes.make_context(num_slots=32, position_assert=1)
    plan = scenes.make_write_plan(lengths=[1], seeds=[32], uids=[42])
    write(context, plan, [5], [7], [4])
    (row,) = scenes.rows(context).tolist()
    reason = FailReason.OUT_OF_POOL
    assert row == [1, 32, -1, -1, -1, -1, -1, reason, 3, 42, -1, -1, 0, -1, -1, 1]
    assert records(context, [4])[0][2] == HEAD


def test_offsets_beyond_the_inputs_are_cut_off() -> None:
    context = scenes.make_context()
    plan = scenes.make_write_plan(lengths=[1000])
    write(context, plan, [5, 6], [0, 1], [3, 4])
    assert context.slot_run_counter.item() == 2


# ---- the slot table ------------------------------------------------------------------------------


def tracked(state: SlotState, *, owner: int = -1, tracks_allocation: bool = True) -> SlotTable:
    table = SlotTable.allocate(num_slots=32, device=scenes.CPU, tracks_allocation=tracks_allocation)
    table.state.fill_(int(state) | 5 << 8)
    table.owner_uid.fill_(owner)
    return table


def test_first_write_claims_the_slot_and_marks_it_written() -> None:
    table = tracked(SlotState.ALLOCATED)
    context = scenes.make_context(slot_table=table)
    write(context, scenes.make_write_plan(lengths=[1], uids=[42]), [5], [0], [3])
    assert table.state[3].item() == SlotState.WRITTEN | 5 << 8  # the generation stays
    assert table.owner_uid[3].item() == table.writer_uid[3].item() == 42
    assert table.writer_step[3].item() == 3
    assert bits(context) == []


def test_write_into_another_requests_slot_is_reported_with_both_sides() -> None:
    table = tracked(SlotState.SEALED, owner=7)
    table.writer_uid.fill_(7)
    table.writer_step.fill_(1)
    context = scenes.make_context(slot_table=table)
    write(context, scenes.make_write_plan(lengths=[1], uids=[42]), [5], [0], [3])
    (row,) = scenes.rows(context)
    assert row[ViolationField.FAIL_REASON_BITS] == FailReason.WRITE_OWNED
    assert row[ViolationField.REQUEST_UID] == 42
    assert row[ViolationField.WRITER_UID] == 7
    assert row[ViolationField.WRITER_STEP] == 1
    assert row[ViolationField.SLOT_STATE] == SlotState.SEALED
    assert table.owner_uid[3].item() == 7  # the owner stays
    assert table.writer_uid[3].item() == 42
    assert records(context, [3])[0][0] == 5  # the record is what was written


@pytest.mark.parametrize("uid", [7, -1])
def test_owner_and_unknown_writers_do_not_alarm(uid: int) -> None:
    context = scenes.make_context(slot_table=tracked(SlotState.SEALED, owner=7))
    write(context, scenes.make_write_plan(lengths=[1], uids=[uid]), [5], [0], [3])
    assert bits(context) == []


def test_owners_are_not_compared_without_allocator_events() -> None:
    table = tracked(SlotState.SEALED, owner=7, tracks_allocation=False)
    context = scenes.make_context(slot_table=table)
    write(context, scenes.make_write_plan(lengths=[1], uids=[42]), [5], [0], [3])
    assert bits(context) == []


def test_write_into_a_free_slot_leaves_it_free() -> None:
    table = tracked(SlotState.FREE)
    context = scenes.make_context(slot_table=table)
    write(context, scenes.make_write_plan(lengths=[1], uids=[42]), [5], [0], [3])
    assert table.state[3].item() & 0xFF == SlotState.FREE


def test_padding_slot_is_stored_but_never_claimed() -> None:
    table = tracked(SlotState.SEALED, owner=7)
    before = scenes.copied(table)
    context = scenes.make_context(slot_table=table)
    write(context, scenes.make_write_plan(lengths=[2], uids=[42]), [5, 6], [0, 1], [0, 0])
    scenes.assert_same(table, before)
    assert records(context, [0])[0][0] == 6
    assert context.slot_run_counter.item() == 2
    assert bits(context) == []


# ---- prefix hits within one batch ----------------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_prefix_hit_within_the_batch_continues_the_other_requests_chain(
    order: tuple[int, ...],
) -> None:
    """A writes 1..4, B continues behind A's third token, C behind B's first; any batch order."""
    parts = [
        ([1, 2, 3, 4], [0, 1, 2, 3], [11, 12, 13, 14], -1),
        ([5, 6], [3, 4], [21, 22], 13),
        ([7], [4], [25], 21),
    ]
    step = 3
    table = tracked(SlotState.ALLOCATED)
    context = scenes.make_context(slot_table=table, position_assert=1)
    # What the slots held before must not matter.
    context.canary_buf.random_(0, 255)
    for _, _, slots, _ in parts:
        table.writer_step[slots] = step  # as the prepare launch marks them
    chosen = [parts[number] for number in order]
    plan = scenes.make_write_plan(
        lengths=[len(tokens) for tokens, _, _, _ in chosen], seeds=[part[3] for part in chosen]
    )
    columns = [[value for part in chosen for value in part[column]] for column in range(3)]
    write(context, plan, *columns, step=step)

    alone = scenes.make_context()
    scenes.write_sequence(alone, tokens=[1, 2, 3, 5, 7], slots=[11, 12, 13, 21, 25])
    scenes.write_sequence(alone, tokens=[4], slots=[14], start=3, seed=13)
    scenes.write_sequence(alone, tokens=[6], slots=[22], start=4, seed=21)
    written = [slot for part in parts for slot in part[2]]
    assert records(context, written) == records(alone, written)
    assert bits(context) == []


def test_seed_marked_by_this_step_but_written_elsewhere_is_read_from_its_record() -> None:
    table = tracked(SlotState.WRITTEN)
    context = scenes.make_context(slot_table=table)
    scenes.write_sequence(context, tokens=[1], slots=[5], step=3)
    write(context, scenes.make_write_plan(lengths=[1], seeds=[5]), [2], [1], [6], step=3)
    assert records(context, [6])[0][2] == to_signed(oracle.mix3(HEAD, 1, 0))


def test_seeds_in_a_circle_continue_from_the_stored_records() -> None:
    table = tracked(SlotState.WRITTEN)
    context = scenes.make_context(slot_table=table)
    scenes.write_sequence(context, tokens=[1, 2], slots=[5, 6], step=3)
    plan = scenes.make_write_plan(lengths=[1, 1], seeds=[6, 5])
    write(context, plan, [7, 8], [9, 9], [5, 6], step=3)
    second = to_signed(oracle.mix3(HEAD, 1, 0))
    assert records(context, [5])[0][2] == to_signed(oracle.mix3(second, 2, 1))
    assert records(context, [6])[0][2] == second


def test_later_request_wins_a_slot_that_two_write() -> None:
    context = scenes.make_context()
    write(context, scenes.make_write_plan(lengths=[1, 1]), [5, 6], [0, 0], [3, 3])
    assert records(context, [3])[0][0] == 6


# ---- real KV and the ring ------------------------------------------------------------------------


def test_mode_none_stores_zero_even_with_sources() -> None:
    source = RealKvSource(
        tensor=torch.ones(32, 8), page_size=1, num_bytes_per_token=32, read_bytes=32
    )
    context = scenes.make_context(sources=(source,), mode=RealKvHashMode.NONE)
    context.canary_buf.fill_(1)
    scenes.write_sequence(context, tokens=[5], slots=[3])
    assert records(context, [3])[0][3] == 0
    with_bytes = scenes.with_mode(context, RealKvHashMode.ALL)
    scenes.write_sequence(with_bytes, tokens=[5], slots=[3])
    assert records(context, [3])[0][3] != 0


def test_ring_keeps_the_newest_rows_and_counts_all() -> None:
    context = scenes.make_context(num_slots=8, ring_capacity=3)
    slots = list(range(100, 107))
    write(context, scenes.make_write_plan(lengths=[7]), [1] * 7, list(range(7)), slots)
    assert context.violation_write_index.item() == 7
    newest = scenes.rows(context)
    assert newest[:, ViolationField.SLOT].tolist() == [104, 105, 106]
    assert newest[:, ViolationField.SEQUENCE].tolist() == [5, 6, 7]


def test_uids_are_unknown_when_the_plan_has_none() -> None:
    context = scenes.make_context(num_slots=4)
    plan = dataclasses.replace(
        scenes.make_write_plan(lengths=[1]), write_request_uids=None, write_identity_keys=None
    )
    write(context, plan, [5], [0], [9])
    assert scenes.rows(context)[0, ViolationField.REQUEST_UID].item() == -1
