"""The plan launch (fills both plans from the page table) and the SWA translation of slots."""

from __future__ import annotations

import torch

from kvcanary_plugin.kernels.arguments import (
    check_plan,
    check_translate,
    check_verify_capacity,
)
from kvcanary_plugin.kernels.backend import kernels_for
from kvcanary_plugin.kernels.inputs import VerifyPlan, WritePlan
from kvcanary_plugin.kernels.plan_ref import (
    launch_canary_plan_kernels_torch_reference,
    translate_out_cache_loc_torch_reference,
)


def launch_canary_plan_kernels(
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
    """List the slots that a batch reads (verify plan) and the chains it continues (write plan).

    Verify plan: for every request whose row is not ``padding_row``, the positions
    ``[start, prefix)``, start being ``max(0, prefix - swa_window_size)`` with a window and 0
    without. More entries than ``verify_capacity``: ``enable`` and ``verify_num_valid`` become 0,
    otherwise ``enable`` becomes 1. Slots that the lookup table does not map become 0, those outside
    the table the largest int64, so that the verify launch reports them.
    Write plan: exclusive prefix sums of the extend lengths, and per request the slot of its last
    prefix token (-1 without a prefix or where not mapped). Uids and keys are left alone.

    Args:
        verify_plan_out: receives the verify entries; its uid, row and key tensors are left alone.
        write_plan_out: receives offsets, seeds and the number of requests.
        req_pool_indices: int32 or int64 [bs]; rows of ``req_to_token``.
        prefix_lens: int32 or int64 [bs]; tokens whose K/V existed before this forward.
        extend_seq_lens: int32 or int64 [bs]; tokens of this forward.
        req_to_token: int32 or int64 [rows, width]; slots, or pages when ``page_size`` > 1.
        swa_window_size: earlier tokens that a token sees; 0 for full attention.
        full_to_swa_index_mapping: int32 or int64 [full slots]; 0 or below where not mapped.
        verify_capacity: entries that the verify plan holds.
        req_to_verify_expected_tokens: int32 or int64 [rows, width]; token history by request row.
        req_to_verify_expected_tokens_valid_lens: int32 or int64 [bs]; tokens known of each request.
        kv_token_id_vs_position_offset: the slot of position p holds the token at p + offset.
        page_size: slots per entry of the table.
        padding_row: request row that pads batches; -1 if there is none.

    ValueError for tensors of a wrong shape, dtype or device, for more requests than the write plan
    holds, and for a ``verify_capacity`` that is not the verify plan's.
    """
    check_verify_capacity(verify_capacity, verify_plan_out)
    kernels = kernels_for(req_to_token.device)
    if kernels is None:
        launch_canary_plan_kernels_torch_reference(
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
            kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
            page_size=page_size,
            padding_row=padding_row,
        )
        return
    try:
        kernels.canary_plan(
            verify_plan_out.verify_slot_indices,
            verify_plan_out.verify_expected_tokens,
            verify_plan_out.verify_expected_positions,
            verify_plan_out.verify_prev_slot_indices,
            verify_plan_out.verify_num_valid,
            verify_plan_out.enable,
            write_plan_out.write_offsets,
            write_plan_out.write_seed_slot_indices,
            write_plan_out.write_num_valid_reqs,
            req_pool_indices,
            prefix_lens,
            extend_seq_lens,
            req_to_token,
            page_size,
            padding_row,
            swa_window_size,
            full_to_swa_index_mapping,
            req_to_verify_expected_tokens,
            req_to_verify_expected_tokens_valid_lens,
            kv_token_id_vs_position_offset,
        )
    except Exception:
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
        raise


def translate_out_cache_loc(
    *,
    out_cache_loc: torch.Tensor,
    full_to_swa_index_mapping: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Slots of an SWA group: one gather through the lookup table into ``output``.

    -1 (skip) comes out for -1, for a slot outside the lookup table, and where it holds <= 0.

    Args:
        out_cache_loc: int32 or int64 [n]; slots of the full pool.
        full_to_swa_index_mapping: int32 or int64 [full slots].
        output: int32 or int64 [n]; on the device of both.

    ValueError for tensors of a wrong shape, dtype or device.
    """
    kernels = kernels_for(output.device)
    if kernels is None:
        translate_out_cache_loc_torch_reference(
            out_cache_loc=out_cache_loc,
            full_to_swa_index_mapping=full_to_swa_index_mapping,
            output=output,
        )
        return
    try:
        kernels.canary_translate(out_cache_loc, full_to_swa_index_mapping, output)
    except Exception:
        check_translate(
            out_cache_loc=out_cache_loc,
            full_to_swa_index_mapping=full_to_swa_index_mapping,
            output=output,
        )
        raise
