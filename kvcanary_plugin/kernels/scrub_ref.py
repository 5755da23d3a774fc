"""Seal and scrub as tensor operations."""

from __future__ import annotations

import torch

from kvcanary_plugin.kernels.arguments import check_scrub, check_scrub_range, check_seal
from kvcanary_plugin.kernels.consts import (
    FIELD_REAL_KV_HASH,
    FailReason,
    SlotState,
    ViolationField,
)
from kvcanary_plugin.kernels.context import VerifyOrWriteContext
from kvcanary_plugin.kernels.inputs import WritePlan
from kvcanary_plugin.kernels.packing import folds_real_kv, packed
from kvcanary_plugin.kernels.reference import (
    STATE_MASK,
    fold_slots,
    has_sealed_bytes,
    is_real_slot,
    read_records,
    record_fields,
    record_violations,
    states,
    violation_rows,
)


def launch_canary_seal_kernel_torch_reference(
    *,
    context: VerifyOrWriteContext,
    plan: WritePlan,
    out_cache_loc: torch.Tensor,
    step: int,
) -> None:
    """Reference of ``launch_canary_seal_kernel``: same arguments, bytes and errors."""
    packed(context)
    check_seal(context=context, plan=plan, out_cache_loc=out_cache_loc)
    context.kernel_run_counter.add_(1)
    if not folds_real_kv(context):
        return
    capacity = plan.write_seed_slot_indices.numel()
    requests = max(0, min(int(plan.write_num_valid_reqs.item()), capacity))
    entries = max(0, int(plan.write_offsets[requests].item()))
    slots = out_cache_loc[:entries].to(torch.int64)
    slots = slots[is_real_slot(context, slots)]
    record_fields(context)[slots, FIELD_REAL_KV_HASH] = fold_slots(context, slots)
    context.slot_run_counter.add_(slots.numel())
    if context.slot_table is not None:
        written = slots[states(context, slots) == SlotState.WRITTEN]
        words = context.slot_table.state[written]
        context.slot_table.state[written] = (words & ~STATE_MASK) | SlotState.SEALED


def launch_canary_scrub_kernel_torch_reference(
    *,
    context: VerifyOrWriteContext,
    slots: torch.Tensor,
    num_valid: torch.Tensor,
    step: int,
) -> None:
    """Reference of ``launch_canary_scrub_kernel``: same arguments, bytes, rows and errors."""
    packed(context)
    check_scrub(context=context, slots=slots, num_valid=num_valid)
    context.kernel_run_counter.add_(1)
    _scrub(context, slots[: max(0, int(num_valid.item()))], step)


def launch_canary_scrub_range_kernel_torch_reference(
    *, context: VerifyOrWriteContext, first_slot: int, num_slots: int, step: int
) -> None:
    """Reference of ``launch_canary_scrub_range_kernel``: same arguments, bytes, rows and errors."""
    packed(context)
    check_scrub_range(first_slot=first_slot, num_slots=num_slots)
    context.kernel_run_counter.add_(1)
    pool_size = context.canary_buf.shape[0]
    begin = min(first_slot, pool_size)
    end = min(begin + num_slots, pool_size)
    slots = torch.arange(begin, end, dtype=torch.int64, device=context.canary_buf.device)
    _scrub(context, slots, step)


def _scrub(context: VerifyOrWriteContext, slots: torch.Tensor, step: int) -> None:
    """Fold those of ``slots`` that hold sealed bytes again, and record the ones that differ."""
    if not folds_real_kv(context):
        return
    listed = slots[is_real_slot(context, slots)]
    listed = listed[has_sealed_bytes(context, listed)]
    context.slot_run_counter.add_(listed.numel())
    stored = read_records(context, listed)
    differs = fold_slots(context, listed) != stored.real_kv_hash
    rows = violation_rows(
        context,
        step=step,
        columns={
            ViolationField.SLOT: listed,
            ViolationField.POSITION: stored.position,
            ViolationField.STORED_TOKEN: stored.token,
            ViolationField.STORED_CHAIN_HASH: stored.prev_hash,
            ViolationField.FAIL_REASON_BITS: torch.full_like(
                listed, int(FailReason.VERIFY_REAL_KV_HASH)
            ),
        },
    )
    record_violations(context, rows[differs])
