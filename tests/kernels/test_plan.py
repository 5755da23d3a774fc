"""The plan launch, the prepare launch and the translation of slots, behaviour by behaviour."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kvcanary_plugin.kernels import (
    SlotTable,
    VerifyPlan,
    WritePlan,
    launch_canary_plan_kernels,
    launch_canary_prepare_kernel,
    translate_out_cache_loc,
)
from kvcanary_plugin.kernels.consts import OUT_OF_TABLE
from tests.kernels import scenes

pytestmark = pytest.mark.usefixtures("implementation")

TABLE = [[0] * 6, [11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]]
UNTOUCHED = 77


def plan(
    rows: list[int],
    prefixes: list[int],
    extends: list[int] | None = None,
    *,
    verify_capacity: int = 20,
    write_capacity: int = 4,
    **fields: Any,
) -> tuple[VerifyPlan, WritePlan]:
    verify_plan = VerifyPlan.allocate(verify_capacity=verify_capacity, device=scenes.CPU)
    for tensor in scenes.tensors(verify_plan).values():
        tensor.fill_(UNTOUCHED)
    write_plan = scenes.make_write_plan(lengths=[], capacity=write_capacity)
    write_plan.write_offsets.fill_(UNTOUCHED)
    arguments: dict[str, Any] = {
        "req_to_token": torch.tensor(TABLE, dtype=torch.int32),
        "swa_window_size": 0,
        "full_to_swa_index_mapping": None,
    }
    launch_canary_plan_kernels(
        verify_plan_out=verify_plan,
        write_plan_out=write_plan,
        req_pool_indices=torch.tensor(rows, dtype=torch.int64),
        prefix_lens=torch.tensor(prefixes, dtype=torch.int64),
        extend_seq_lens=torch.tensor(extends or [1] * len(rows), dtype=torch.int64),
        verify_capacity=verify_capacity,
        **(arguments | fields),
    )
    return verify_plan, write_plan


def entries(verify_plan: VerifyPlan) -> list[tuple[int, ...]]:
    """(slot, expected token, expected position, predecessor) of the valid entries."""
    count = int(verify_plan.verify_num_valid)
    columns = (
        verify_plan.verify_slot_indices,
        verify_plan.verify_expected_tokens,
        verify_plan.verify_expected_positions,
        verify_plan.verify_prev_slot_indices,
    )
    return list(zip(*(column[:count].tolist() for column in columns), strict=True))


def test_every_prefix_position_becomes_an_entry() -> None:
    verify_plan, _ = plan([2, 1], [2, 1])
    assert entries(verify_plan) == [(21, -1, 0, -1), (22, -1, 1, 21), (11, -1, 0, -1)]
    assert verify_plan.enable.item() == 1
    assert set(verify_plan.verify_slot_indices[3:].tolist()) == {UNTOUCHED}


def test_write_plan_holds_offsets_and_seeds() -> None:
    _, write_plan = plan([2, 1, 2], [2, 0, 6], [3, 0, 2])
    assert write_plan.write_offsets.tolist() == [0, 3, 3, 5, UNTOUCHED]
    assert write_plan.write_seed_slot_indices.tolist() == [22, -1, 26, UNTOUCHED]
    assert write_plan.write_num_valid_reqs.item() == 3


def test_padding_rows_read_nothing_and_continue_nothing() -> None:
    verify_plan, write_plan = plan([0, 1], [5, 1], [2, 1])
    assert entries(verify_plan) == [(11, -1, 0, -1)]
    assert write_plan.write_seed_slot_indices[:2].tolist() == [-1, 11]
    # Their tokens are written all the same (into the padding slot, normally).
    assert write_plan.write_offsets[:3].tolist() == [0, 2, 3]


def test_padding_row_is_configurable() -> None:
    verify_plan, _ = plan([1, 2], [1, 1], padding_row=2)
    assert entries(verify_plan) == [(11, -1, 0, -1)]


def test_window_limits_the_entries() -> None:
    verify_plan, _ = plan([1], [5], swa_window_size=2)
    assert entries(verify_plan) == [(14, -1, 3, 0), (15, -1, 4, 14)]


def lookup(mapping: dict[int, int]) -> torch.Tensor:
    table = torch.zeros(30, dtype=torch.int64)
    for full, slot in mapping.items():
        table[full] = slot
    return table


def test_slots_predecessors_and_seeds_are_translated() -> None:
    mapping = lookup({13: 3, 14: 4, 15: 5})
    verify_plan, write_plan = plan([1], [5], swa_window_size=2, full_to_swa_index_mapping=mapping)
    assert entries(verify_plan) == [(4, -1, 3, 3), (5, -1, 4, 4)]
    assert write_plan.write_seed_slot_indices[0].item() == 5


@pytest.mark.parametrize("value", [0, -1])
def test_unmapped_slots_become_zero_and_unmapped_seeds_minus_one(value: int) -> None:
    mapping = lookup({14: value, 15: value})
    verify_plan, write_plan = plan([1], [5], swa_window_size=2, full_to_swa_index_mapping=mapping)
    assert entries(verify_plan) == [(0, -1, 3, 0), (0, -1, 4, 0)]
    assert write_plan.write_seed_slot_indices[0].item() == -1


def test_minus_one_in_the_table_is_no_index_into_the_lookup_table() -> None:
    table = torch.tensor([[0, 0], [-1, 12]], dtype=torch.int32)
    mapping = lookup({12: 3, 29: 9})  # 29 is what index -1 would read
    verify_plan, _ = plan([1], [2], req_to_token=table, full_to_swa_index_mapping=mapping)
    assert entries(verify_plan) == [(0, -1, 0, -1), (3, -1, 1, 0)]


def test_block_table_is_read_by_pages() -> None:
    table = torch.tensor([[0, 0], [5, 2]], dtype=torch.int32)
    verify_plan, write_plan = plan([1], [6], req_to_token=table, page_size=4)
    slots = [slot for slot, *_ in entries(verify_plan)]
    assert slots == [20, 21, 22, 23, 8, 9]
    assert write_plan.write_seed_slot_indices[0].item() == 9


def test_expected_tokens_come_from_the_history_as_far_as_it_is_known() -> None:
    history = torch.tensor([[0] * 6, [1, 2, 3, 4, 5, 6], [7] * 6], dtype=torch.int32)
    verify_plan, _ = plan(
        [1],
        [4],
        req_to_verify_expected_tokens=history,
        req_to_verify_expected_tokens_valid_lens=torch.tensor([4]),
        kv_token_id_vs_position_offset=1,
    )
    assert [token for _, token, _, _ in entries(verify_plan)] == [2, 3, 4, -1]


def test_overflow_disables_the_plan_and_a_full_one_does_not() -> None:
    full, _ = plan([1, 2], [3, 2], verify_capacity=5)
    assert (full.enable.item(), full.verify_num_valid.item()) == (1, 5)
    over, write_plan = plan([1, 2], [3, 3], verify_capacity=5)
    assert (over.enable.item(), over.verify_num_valid.item()) == (0, 0)
    assert write_plan.write_num_valid_reqs.item() == 2


def test_huge_prefix_overflows_instead_of_wrapping() -> None:
    verify_plan, _ = plan([1, 2], [2**62, 2**62])
    assert (verify_plan.enable.item(), verify_plan.verify_num_valid.item()) == (0, 0)


def test_what_lies_outside_the_table_stays_visible() -> None:
    verify_plan, write_plan = plan([1, 9], [8, 1])
    slots = [slot for slot, *_ in entries(verify_plan)]
    assert slots == [*TABLE[1], OUT_OF_TABLE, OUT_OF_TABLE, OUT_OF_TABLE]
    assert write_plan.write_seed_slot_indices[:2].tolist() == [OUT_OF_TABLE] * 2


def test_empty_batch_makes_empty_plans() -> None:
    verify_plan, write_plan = plan([], [])
    assert (verify_plan.enable.item(), verify_plan.verify_num_valid.item()) == (1, 0)
    assert write_plan.write_num_valid_reqs.item() == 0
    assert write_plan.write_offsets[0].item() == 0


# ---- prepare -------------------------------------------------------------------------------------


def test_prepare_fills_the_plan_and_marks_the_slots_of_this_forward() -> None:
    table = SlotTable.allocate(num_slots=40, device=scenes.CPU, tracks_allocation=True)
    context = scenes.make_context(num_slots=40, slot_table=table)
    reads = scenes.make_reads(
        TABLE,
        [2, 0],
        request_rows=torch.tensor([2, 1]),
        request_uids=torch.tensor([8, 9]),
        extend_lens=torch.tensor([3, 1], dtype=torch.int32),
        identity_keys=torch.tensor([-5, 6]),
    )
    write_plan = scenes.make_write_plan(lengths=[], capacity=3)
    launch_canary_prepare_kernel(
        context=context,
        reads=reads,
        write_plan_out=write_plan,
        # -1 is skipped, 0 is padding, 40 is outside, the last two lie behind the batch.
        out_cache_loc=torch.tensor([5, -1, 40, 6, 30, 31]),
        step=4,
    )
    assert write_plan.write_offsets[:3].tolist() == [0, 3, 4]
    assert write_plan.write_seed_slot_indices[:2].tolist() == [22, -1]
    assert write_plan.write_request_uids is not None
    assert write_plan.write_request_uids.tolist() == [8, 9, UNTOUCHED]
    assert write_plan.write_identity_keys is not None
    assert write_plan.write_identity_keys.tolist() == [-5, 6, UNTOUCHED]
    assert (table.writer_step == 4).nonzero().flatten().tolist() == [5, 6]
    assert context.kernel_run_counter.item() == 1
    assert context.slot_run_counter.item() == 0


def test_prepare_without_keys_writes_zeros_over_those_of_the_last_forward() -> None:
    write_plan = scenes.make_write_plan(lengths=[1], keys=[5])
    launch_canary_prepare_kernel(
        context=scenes.make_context(),
        reads=scenes.make_reads(TABLE, [2]),
        write_plan_out=write_plan,
        out_cache_loc=torch.tensor([5]),
        step=4,
    )
    assert write_plan.write_identity_keys is not None
    assert write_plan.write_identity_keys.tolist() == [0]


def test_prepare_and_plan_agree_on_the_write_plan() -> None:
    _, by_plan = plan([2, 1], [6, 3], [2, 4])
    by_prepare = scenes.make_write_plan(lengths=[], capacity=4)
    by_prepare.write_offsets.fill_(UNTOUCHED)
    launch_canary_prepare_kernel(
        context=scenes.make_context(),
        reads=scenes.make_reads(
            TABLE,
            [6, 3],
            request_rows=torch.tensor([2, 1]),
            extend_lens=torch.tensor([2, 4]),
        ),
        write_plan_out=by_prepare,
        out_cache_loc=torch.zeros(6, dtype=torch.int64),
        step=1,
    )
    without = {"write_request_uids": None, "write_identity_keys": None}
    scenes.assert_same(
        dataclasses.replace(by_plan, **without), dataclasses.replace(by_prepare, **without)
    )


# ---- translate -----------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lookup_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("output_dtype", [torch.int32, torch.int64])
def test_translation_skips_what_is_not_mapped(
    slot_dtype: torch.dtype, lookup_dtype: torch.dtype, output_dtype: torch.dtype
) -> None:
    output = torch.full((7,), UNTOUCHED, dtype=output_dtype)
    translate_out_cache_loc(
        out_cache_loc=torch.tensor([3, -1, 0, 1, 2, 4, -7], dtype=slot_dtype),
        full_to_swa_index_mapping=torch.tensor([0, 0, -1, 9], dtype=lookup_dtype),
        output=output,
    )
    assert output.tolist() == [9, -1, -1, -1, -1, -1, -1]
