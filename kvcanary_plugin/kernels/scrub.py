"""The launches that read real K/V bytes: seal after the forward, scrub at leisure."""

from __future__ import annotations

import torch

from kvcanary_plugin.kernels.arguments import check_scrub, check_scrub_range, check_seal
from kvcanary_plugin.kernels.backend import kernels_for
from kvcanary_plugin.kernels.context import VerifyOrWriteContext
from kvcanary_plugin.kernels.inputs import WritePlan
from kvcanary_plugin.kernels.packing import packed
from kvcanary_plugin.kernels.scrub_ref import (
    launch_canary_scrub_kernel_torch_reference,
    launch_canary_scrub_range_kernel_torch_reference,
    launch_canary_seal_kernel_torch_reference,
)


def launch_canary_seal_kernel(
    *,
    context: VerifyOrWriteContext,
    plan: WritePlan,
    out_cache_loc: torch.Tensor,
    step: int,
) -> None:
    """Fold the real K/V of the slots that this forward wrote into their records.

    Covers the first ``plan.write_offsets[num_valid]`` entries of ``out_cache_loc`` (read on the
    device) with a slot above 0 and inside the records. A slot in state WRITTEN becomes SEALED.
    ``slot_run_counter`` grows by the slots sealed. In mode NONE, or without sources, only
    ``kernel_run_counter`` moves.

    Args:
        context: records, sources, mode, slot table, counters.
        plan: the plan of the write launch.
        out_cache_loc: int32 or int64 [n]; the slots of the write launch.
        step: number of this forward.

    ValueError for tensors of a wrong shape, dtype or device.
    """
    words = packed(context)
    kernels = kernels_for(words.device_type)
    if kernels is None:
        launch_canary_seal_kernel_torch_reference(
            context=context, plan=plan, out_cache_loc=out_cache_loc, step=step
        )
        return
    try:
        kernels.canary_seal(
            words.launch, plan.write_offsets, plan.write_num_valid_reqs, out_cache_loc, step
        )
    except Exception:
        check_seal(context=context, plan=plan, out_cache_loc=out_cache_loc)
        raise


def launch_canary_scrub_kernel(
    *,
    context: VerifyOrWriteContext,
    slots: torch.Tensor,
    num_valid: torch.Tensor,
    step: int,
) -> None:
    """Fold the real K/V of the listed slots again and compare with their records.

    Slots outside the records, slot 0, and (with a slot table) slots that are neither SEALED nor
    EXTERNAL are passed over. ``slot_run_counter`` grows by the slots compared. In mode NONE, or
    without sources, only ``kernel_run_counter`` moves.

    Args:
        context: records, sources, mode, slot table, sink, counters.
        slots: int64 [n]; slots to look at.
        num_valid: int32 [1]; how many of them.
        step: number of the forward after which this runs.

    ValueError for tensors of a wrong shape, dtype or device.
    """
    words = packed(context)
    kernels = kernels_for(words.device_type)
    if kernels is None:
        launch_canary_scrub_kernel_torch_reference(
            context=context, slots=slots, num_valid=num_valid, step=step
        )
        return
    try:
        kernels.canary_scrub(words.launch, slots, num_valid, step)
    except Exception:
        check_scrub(context=context, slots=slots, num_valid=num_valid)
        raise


def launch_canary_scrub_range_kernel(
    *, context: VerifyOrWriteContext, first_slot: int, num_slots: int, step: int
) -> None:
    """:func:`launch_canary_scrub_kernel` over the slot numbers of a range instead of a list.

    Covers ``[first_slot, first_slot + num_slots)`` as far as the records go. A slot that is passed
    over costs one read of its state.

    Args:
        context: records, sources, mode, slot table, sink, counters.
        first_slot: >= 0.
        num_slots: >= 0.
        step: number of the forward after which this runs.

    ValueError for a negative number.
    """
    words = packed(context)
    kernels = kernels_for(words.device_type)
    if kernels is None:
        launch_canary_scrub_range_kernel_torch_reference(
            context=context, first_slot=first_slot, num_slots=num_slots, step=step
        )
        return
    try:
        kernels.canary_scrub_range(words.launch, context.canary_buf, first_slot, num_slots, step)
    except Exception:
        check_scrub_range(first_slot=first_slot, num_slots=num_slots)
        raise
