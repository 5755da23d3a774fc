"""The verify launch that reads the page table itself, behaviour by behaviour."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kvcanary_plugin.kernels import (
    FailReason,
    SlotState,
    SlotTable,
    TableReads,
    VerifyOrWriteContext,
    VerifyPlan,
    ViolationField,
    chain_hash,
    launch_canary_plan_kernels,
    launch_canary_table_verify_kernel,
    launch_canary_verify_kernel,
)
from tests.kernels import scenes

pytestmark = pytest.mark.usefixtures("implementation")

TOKENS = [11, 7, 7, 128000]
SLOTS = [4, 9, 2, 30]


def written(**context_fields: Any) -> VerifyOrWriteContext:
    context = scenes.make_context(**context_fields)
    scenes.write_sequence(context, tokens=TOKENS, slots=SLOTS, step=1)
    context.slot_run_counter.zero_()
    return context


def verify(context: VerifyOrWriteContext, reads: TableReads, *, step: int = 2) -> list[int]:
    """Verify and return the bits of every row in the ring."""
    launch_canary_table_verify_kernel(context=context, reads=reads, step=step)
    return scenes.rows(context)[:, ViolationField.FAIL_REASON_BITS].tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_healthy_prefix_is_silent_and_counted(dtype: torch.dtype) -> None:
    context = written()
    reads = scenes.make_reads([SLOTS], [4], page_table=torch.tensor([SLOTS], dtype=dtype))
    assert verify(context, reads) == []
    assert context.slot_run_counter.item() == 4


def test_stale_entries_behind_the_prefix_are_not_read() -> None:
    assert verify(written(), scenes.make_reads([[*SLOTS, 31, -1, 99]], [4])) == []


def test_exchanged_entries_break_position_and_chain() -> None:
    bits = verify(written(), scenes.make_reads([[4, 2, 9, 30]], [4]))
    both = FailReason.VERIFY_POSITION | FailReason.VERIFY_CHAIN_HASH
    # The last entry's own record is right; its predecessor is the wrong one.
    assert bits == [both, both, FailReason.VERIFY_CHAIN_HASH]


@pytest.mark.parametrize("value", [0, -1, -7])
def test_slot_at_or_below_zero_in_the_live_range_is_reported(value: int) -> None:
    context = written()
    assert verify(context, scenes.make_reads([[4, value, 2, 30]], [4])) == [FailReason.OUT_OF_POOL]
    (row,) = scenes.rows(context)
    assert row[ViolationField.SLOT] == value
    assert row[ViolationField.EXPECTED_POSITION] == 1
    assert row[ViolationField.REQUEST_UID] == 100
    assert row[ViolationField.BATCH_ROW] == 0


def test_table_of_zeros_is_not_silence() -> None:
    context = written()
    assert verify(context, scenes.make_reads([[0] * 4], [4])) == [FailReason.OUT_OF_POOL] * 4


@pytest.mark.parametrize(("prefix_len", "position"), [(5, 4), (2_000_000_000, 4)])
def test_prefix_beyond_the_tables_width_is_reported_once(prefix_len: int, position: int) -> None:
    context = written()
    assert verify(context, scenes.make_reads([SLOTS], [prefix_len])) == [FailReason.OUT_OF_POOL]
    (row,) = scenes.rows(context)
    assert row[ViolationField.SLOT] == -1
    assert row[ViolationField.EXPECTED_POSITION] == position
    assert context.slot_run_counter.item() == 5


def test_window_beyond_the_tables_width_is_reported_once() -> None:
    context = written()
    reads = scenes.make_reads([SLOTS], [100], swa_window_size=3)
    assert verify(context, reads) == [FailReason.OUT_OF_POOL]
    assert scenes.rows(context)[0, ViolationField.EXPECTED_POSITION].item() == 97


@pytest.mark.parametrize("row", [1, -2, 2**31 - 1])
def test_request_row_outside_the_table_is_reported_once(row: int) -> None:
    context = written()
    reads = scenes.make_reads([SLOTS], [4], request_rows=torch.tensor([row]))
    assert verify(context, reads) == [FailReason.OUT_OF_POOL]
    assert scenes.rows(context)[0, ViolationField.EXPECTED_POSITION].item() == 0
    assert context.slot_run_counter.item() == 1


def test_padding_rows_and_empty_prefixes_are_left_out() -> None:
    context = written()
    reads = scenes.make_reads(
        [[0] * 4], [4, 0, -1], padding_row=0, request_rows=torch.tensor([0, 99, 99])
    )
    assert verify(context, reads) == []
    assert context.slot_run_counter.item() == 0


def test_sizing_hint_does_not_cut_the_prefix() -> None:
    context = written()
    assert verify(context, scenes.make_reads([SLOTS], [4], max_prefix_len=0)) == []
    assert context.slot_run_counter.item() == 4


def test_rows_may_be_a_view_into_a_wider_table() -> None:
    wide = torch.full((3, 50), -1, dtype=torch.int32)
    wide[2, 10:14] = torch.tensor(SLOTS)
    reads = scenes.make_reads([[0]], [4], page_table=wide[:, 10:14], request_rows=torch.tensor([2]))
    assert verify(written(), reads) == []


# ---- pages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_size", "pages"), [(1, list(range(50, 90))), (7, [3, 1, 5, 2, 4, 6]), (16, [3, 1, 5])]
)
def test_positions_are_found_in_pages_of_any_size(page_size: int, pages: list[int]) -> None:
    count = 40
    slots = [pages[p // page_size] * page_size + p % page_size for p in range(count)]
    context = scenes.make_context(num_slots=120)
    scenes.write_sequence(context, tokens=list(range(count)), slots=slots)
    reads = scenes.make_reads([pages], [count], page_size=page_size)
    assert verify(context, reads) == []
    # A page that belongs to nobody is seen at each of its positions; the one behind it is right,
    # and its predecessor counts as unreachable.
    broken = torch.tensor([[pages[0], 0, *pages[2:]]])
    assert len(verify(context, dataclasses.replace(reads, page_table=broken))) == page_size


def test_every_slot_of_a_null_page_counts_as_padding() -> None:
    context = scenes.make_context()
    scenes.write_sequence(context, tokens=list(range(8)), slots=list(range(4, 12)))
    reads = scenes.make_reads([[1, 0]], [8], page_size=4)
    assert verify(context, reads) == [FailReason.OUT_OF_POOL] * 4
    assert scenes.rows(context)[:, ViolationField.SLOT].tolist() == [0] * 4


# ---- windows and lookup tables -------------------------------------------------------------------


def test_window_without_lookup_table_starts_with_an_unreachable_predecessor() -> None:
    context = written()
    # The entries left of the window are stale.
    reads = scenes.make_reads([[31, 31, 2, 30]], [4], swa_window_size=2)
    assert verify(context, reads) == []
    assert context.slot_run_counter.item() == 2


def test_window_larger_than_the_prefix_starts_at_the_head() -> None:
    context = written()
    context.canary_buf.view(torch.int64)[4, 2] = 5
    reads = scenes.make_reads([SLOTS], [4], swa_window_size=100)
    # The head itself, and the record that follows from it.
    assert verify(context, reads) == [FailReason.VERIFY_CHAIN_HASH] * 2


def lookup(**mapping: int) -> torch.Tensor:
    table = torch.zeros(64, dtype=torch.int64)
    for full, slot in mapping.items():
        table[int(full[1:])] = slot
    return table


def test_slots_and_predecessors_are_translated() -> None:
    context = written()
    reads = scenes.make_reads(
        [[50, 51, 52, 53]],
        [4],
        swa_window_size=2,
        full_to_swa_index_mapping=lookup(_51=9, _52=2, _53=30),
    )
    assert verify(context, reads) == []
    # Here the predecessor left of the window is still mapped, so the chain is checked through it.
    context.canary_buf.view(torch.int64)[9, 0] = 8
    assert verify(context, reads) == [FailReason.VERIFY_CHAIN_HASH]


def test_evicted_predecessor_is_silent() -> None:
    reads = scenes.make_reads(
        [[50, 51, 52, 53]],
        [4],
        swa_window_size=2,
        full_to_swa_index_mapping=lookup(_52=2, _53=30),
    )
    assert verify(written(), reads) == []


@pytest.mark.parametrize(
    ("full_slot", "mapped", "reported"), [(52, 0, 0), (52, -1, -1), (64, 2, 64), (-1, 2, -1)]
)
def test_unmapped_slot_inside_the_window_is_reported(
    full_slot: int, mapped: int, reported: int
) -> None:
    context = written()
    mapping = lookup(_53=30)
    mapping[52] = mapped
    reads = scenes.make_reads(
        [[50, 51, full_slot, 53]],
        [4],
        swa_window_size=2,
        full_to_swa_index_mapping=mapping,
    )
    assert verify(context, reads) == [FailReason.OUT_OF_POOL]
    assert scenes.rows(context)[0, ViolationField.SLOT].item() == reported


# ---- tokens, identity, states --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tokens_are_compared_with_the_history_of_the_row(dtype: torch.dtype) -> None:
    history = torch.tensor([[0] * 5, [*TOKENS, 9]], dtype=dtype)
    fields = {
        "request_rows": torch.tensor([1]),
        "page_table": torch.tensor([[0] * 4, SLOTS]),
        "expected_tokens": history,
        "expected_valid_lens": torch.tensor([5], dtype=torch.int32),
    }
    assert verify(written(), scenes.make_reads([[0]], [4], **fields)) == []
    history[1, 2] = 8
    assert verify(written(), scenes.make_reads([[0]], [4], **fields)) == [FailReason.VERIFY_TOKEN]
    fields["expected_valid_lens"] = torch.tensor([2])
    assert verify(written(), scenes.make_reads([[0]], [4], **fields)) == []


def test_draft_slots_hold_the_token_behind_their_position() -> None:
    fields = {
        "expected_tokens": torch.tensor([[5, *TOKENS]]),
        "expected_valid_lens": torch.tensor([5]),
    }
    shifted = scenes.make_reads([SLOTS], [4], token_offset=1, **fields)
    assert verify(written(), shifted) == []
    assert FailReason.VERIFY_TOKEN in verify(written(), scenes.make_reads([SLOTS], [4], **fields))


def test_prefix_hash_is_compared_behind_the_last_prefix_token() -> None:
    right = chain_hash(torch.tensor(TOKENS), identity_key=0)
    for value, valid, seen in (
        (right, 1, []),
        (right ^ 1, 0, []),
        (right ^ 1, 5, [FailReason.PREFIX_IDENTITY]),
    ):
        context = written()
        reads = scenes.make_reads(
            [SLOTS],
            [4],
            prefix_hashes=torch.tensor([value]),
            prefix_hash_valid=torch.tensor([valid], dtype=torch.int32),
        )
        assert verify(context, reads) == seen


def test_prefix_of_another_identity_is_seen_although_its_tokens_are_equal() -> None:
    context = scenes.make_context()
    scenes.write_sequence(context, tokens=TOKENS, slots=SLOTS, key=1)
    reads = scenes.make_reads(
        [SLOTS],
        [4],
        identity_keys=torch.tensor([2]),
        prefix_hashes=torch.tensor([chain_hash(torch.tensor(TOKENS), identity_key=2)]),
        prefix_hash_valid=torch.ones(1, dtype=torch.int32),
    )
    assert verify(context, reads) == [FailReason.VERIFY_CHAIN_HASH, FailReason.PREFIX_IDENTITY]


def test_prefix_shared_inside_one_step_is_left_out() -> None:
    table = SlotTable.allocate(num_slots=32, device=scenes.CPU, tracks_allocation=True)
    table.state.fill_(int(SlotState.ALLOCATED))
    table.writer_step[SLOTS] = 2
    context = scenes.make_context(slot_table=table)
    assert verify(context, scenes.make_reads([SLOTS], [4]), step=2) == []
    assert context.slot_run_counter.item() == 0
    assert (
        verify(context, scenes.make_reads([SLOTS], [4]), step=3) == [FailReason.UNWRITTEN_READ] * 4
    )


# ---- the same as plan and verify -----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_table_launch_sees_what_plan_and_verify_see(seed: int) -> None:
    """On tables without holes the fused launch leaves the rows that the two launches leave."""
    dice = scenes.Dice(seed)
    context = scenes.random_context(dice)
    num_slots = context.canary_buf.shape[0]
    reads = scenes.random_reads(dice, num_slots)
    last_page = max(1, (num_slots - 1) // reads.page_size)
    reads = dataclasses.replace(
        reads,
        page_table=reads.page_table.clamp(1, last_page),
        request_rows=torch.zeros_like(reads.request_rows),
        padding_row=-1,
        prefix_lens=reads.prefix_lens.clamp(max=reads.page_table.shape[1] * reads.page_size),
        full_to_swa_index_mapping=None,
        identity_keys=None,
        prefix_hashes=None,
        prefix_hash_valid=None,
    )
    fused = scenes.copied(context)
    launch_canary_table_verify_kernel(context=fused, reads=reads, step=3)

    plan = VerifyPlan.allocate(verify_capacity=1000, device=scenes.CPU)
    launch_canary_plan_kernels(
        verify_plan_out=plan,
        write_plan_out=scenes.make_write_plan(lengths=[], capacity=10),
        req_pool_indices=reads.request_rows,
        prefix_lens=reads.prefix_lens,
        extend_seq_lens=reads.extend_lens,
        req_to_token=reads.page_table,
        swa_window_size=reads.swa_window_size,
        full_to_swa_index_mapping=None,
        verify_capacity=1000,
        req_to_verify_expected_tokens=reads.expected_tokens,
        req_to_verify_expected_tokens_valid_lens=reads.expected_valid_lens,
        kv_token_id_vs_position_offset=reads.token_offset,
        page_size=reads.page_size,
        padding_row=-1,
    )
    planned = scenes.copied(context)
    launch_canary_verify_kernel(
        context=planned, plan=plan, check_verify_expected_token=True, step=3
    )
    # A plan without uids and rows cannot fill those two columns.
    for ring in (fused.violation_ring, planned.violation_ring):
        ring[:, [ViolationField.REQUEST_UID, ViolationField.BATCH_ROW]] = 0
    scenes.assert_same(fused, planned)
