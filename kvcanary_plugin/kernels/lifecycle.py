"""The prepare launch: the first of a forward, before anything is verified or written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcanary_plugin.kernels.arguments import check_prepare
from kvcanary_plugin.kernels.backend import kernels_for
from kvcanary_plugin.kernels.context import VerifyOrWriteContext
from kvcanary_plugin.kernels.events import SlotEvent, pack_events
from kvcanary_plugin.kernels.inputs import TableReads, WritePlan
from kvcanary_plugin.kernels.lifecycle_ref import launch_canary_prepare_kernel_torch_reference
from kvcanary_plugin.kernels.packing import packed


def launch_canary_prepare_kernel(
    *,
    context: VerifyOrWriteContext,
    reads: TableReads,
    write_plan_out: WritePlan,
    out_cache_loc: torch.Tensor,
    step: int,
    events: Sequence[SlotEvent] = (),
) -> None:
    """Apply lifecycle events, fill the write plan of this forward, mark the slots it will write.

    The plan receives offsets, chain seeds, and (where it has the tensors) request uids and identity
    keys. With a slot table, ``writer_step`` becomes ``step`` for every slot of
    ``out_cache_loc[:sum(extend_lens)]`` above 0 and inside the records: the verify launch of the
    same step leaves those out.

    Args:
        context: the slot table and the counters; ``kernel_run_counter`` grows by one.
        reads: request rows, lengths, uids, keys and the page table.
        write_plan_out: receives the plan.
        out_cache_loc: int32 or int64 [n]; slots of this forward's tokens, -1 to skip.
        step: number of this forward.
        events: what the allocator did since the last forward, in that order; applied to the slot
            table first. A slot handed out that was not free, or given back that was, is a row.

    ValueError for tensors of a wrong shape, dtype or device, and for more requests than the plan
    holds.
    """
    words = packed(context)
    kernels = kernels_for(words.device_type)
    if kernels is None:
        launch_canary_prepare_kernel_torch_reference(
            context=context,
            reads=reads,
            write_plan_out=write_plan_out,
            out_cache_loc=out_cache_loc,
            step=step,
            events=events,
        )
        return
    try:
        kernels.canary_prepare(
            words.launch,
            write_plan_out.write_offsets,
            write_plan_out.write_seed_slot_indices,
            write_plan_out.write_num_valid_reqs,
            write_plan_out.write_request_uids,
            write_plan_out.write_identity_keys,
            reads.page_table,
            reads.page_size,
            reads.padding_row,
            reads.request_rows,
            reads.request_uids,
            reads.prefix_lens,
            reads.extend_lens,
            reads.full_to_swa_index_mapping,
            reads.identity_keys,
            out_cache_loc,
            pack_events(events, device=words.device) if events else None,
            step,
        )
    except Exception:
        check_prepare(
            context=context,
            reads=reads,
            write_plan_out=write_plan_out,
            out_cache_loc=out_cache_loc,
        )
        raise
