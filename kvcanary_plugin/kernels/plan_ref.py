"""The plan launch and the SWA translation as tensor operations."""

from __future__ import annotations

import torch

from kvcanary_plugin.kernels.arguments import check_plan, check_translate
from kvcanary_plugin.kernels.consts import UNKNOWN
from kvcanary_plugin.kernels.inputs import VerifyPlan, WritePlan
from kvcanary_plugin.kernels.table_ref import PageTable, expected_tokens_at, window_start


def launch_canary_plan_kernels_torch_reference(
    *,
    verify_plan_out: VerifyPlan,
    write_plan_out: WritePlan,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    swa_window_size: int,
    full_to_swa_index_mapping: torch.Tensor | None,
    verify_capacity: int,
    req_to_verify_expected_tokens: torch.Tensor | None = None,
    req_to_verify_expected_tokens_valid_lens: torch.Tensor | None = None,
    kv_token_id_vs_position_offset: int = 0,
    page_size: int = 1,
    padding_row: int = 0,
) -> None:
    """Reference of ``launch_canary_plan_kernels``: same arguments, bytes and errors."""
    check_plan(
        verify_plan_out=verify_plan_out,
        write_plan_out=write_plan_out,
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        extend_seq_lens=extend_seq_lens,
        req_to_token=req_to_token,
        swa_window_size=swa_window_size,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        verify_capacity=verify_capacity,
        req_to_verify_expected_tokens=req_to_verify_expected_tokens,
        req_to_verify_expected_tokens_valid_lens=req_to_verify_expected_tokens_valid_lens,
        page_size=page_size,
    )
    table = PageTable(req_to_token, page_size, full_to_swa_index_mapping, swa_window_size)
    rows = req_pool_indices.tolist()
    prefixes = prefix_lens.tolist()
    fill_write_plan(write_plan_out, table, rows, prefixes, extend_seq_lens, padding_row)

    ranges = [
        (index, row, window_start(prefix, swa_window_size), prefix)
        for index, (row, prefix) in enumerate(zip(rows, prefixes, strict=True))
        if row != padding_row and prefix > 0
    ]
    total = sum(end - start for _, _, start, end in ranges)
    fits = total <= verify_capacity
    verify_plan_out.enable.fill_(int(fits))
    verify_plan_out.verify_num_valid.fill_(total if fits else 0)
    if not fits:
        return
    filled = 0
    for index, row, start, end in ranges:
        position = torch.arange(start, end, dtype=torch.int64, device=req_to_token.device)
        entries = slice(filled, filled + end - start)
        filled += end - start
        verify_plan_out.verify_slot_indices[entries] = table.mapped(
            table.raw_slots(row, position), unmapped=0
        )
        verify_plan_out.verify_expected_positions[entries] = position
        verify_plan_out.verify_prev_slot_indices[entries] = table.predecessors(row, position, start)
        verify_plan_out.verify_expected_tokens[entries] = expected_tokens_at(
            req_to_verify_expected_tokens,
            req_to_verify_expected_tokens_valid_lens,
            index=index,
            row=row,
            position=position + kv_token_id_vs_position_offset,
        )


def fill_write_plan(
    plan: WritePlan,
    table: PageTable,
    rows: list[int],
    prefix_lens: list[int],
    extend_lens: torch.Tensor,
    padding_row: int,
) -> None:
    """Offsets, seeds and number of requests; what lies behind them stays untouched."""
    count = len(rows)
    plan.write_num_valid_reqs.fill_(count)
    plan.write_offsets[0] = 0
    plan.write_offsets[1 : count + 1] = extend_lens.to(torch.int64).clamp(min=0).cumsum(0)
    for index, (row, prefix_len) in enumerate(zip(rows, prefix_lens, strict=True)):
        if row == padding_row or prefix_len <= 0:
            plan.write_seed_slot_indices[index] = UNKNOWN
            continue
        last = torch.tensor([prefix_len - 1], dtype=torch.int64, device=table.pages.device)
        seed = table.mapped(table.raw_slots(row, last), unmapped=UNKNOWN)
        plan.write_seed_slot_indices[index] = seed[0]


def translate_out_cache_loc_torch_reference(
    *,
    out_cache_loc: torch.Tensor,
    full_to_swa_index_mapping: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Reference of ``translate_out_cache_loc``: same arguments, bytes and errors."""
    check_translate(
        out_cache_loc=out_cache_loc,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        output=output,
    )
    inside = (out_cache_loc >= 0) & (out_cache_loc < full_to_swa_index_mapping.numel())
    value = torch.full_like(output, UNKNOWN)
    value[inside] = full_to_swa_index_mapping[out_cache_loc[inside].long()].to(output.dtype)
    output.copy_(torch.where(value > 0, value, torch.full_like(value, UNKNOWN)))
