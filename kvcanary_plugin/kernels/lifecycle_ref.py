"""The prepare launch as tensor operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcanary_plugin.kernels.arguments import check_prepare
from kvcanary_plugin.kernels.context import VerifyOrWriteContext
from kvcanary_plugin.kernels.events import SlotEvent
from kvcanary_plugin.kernels.events_ref import apply_events
from kvcanary_plugin.kernels.inputs import TableReads, WritePlan
from kvcanary_plugin.kernels.packing import packed
from kvcanary_plugin.kernels.plan_ref import fill_write_plan
from kvcanary_plugin.kernels.reference import is_real_slot
from kvcanary_plugin.kernels.table_ref import PageTable


def launch_canary_prepare_kernel_torch_reference(
    *,
    context: VerifyOrWriteContext,
    reads: TableReads,
    write_plan_out: WritePlan,
    out_cache_loc: torch.Tensor,
    step: int,
    events: Sequence[SlotEvent] = (),
) -> None:
    """Reference of ``launch_canary_prepare_kernel``: same arguments, bytes and errors."""
    packed(context)
    check_prepare(
        context=context, reads=reads, write_plan_out=write_plan_out, out_cache_loc=out_cache_loc
    )
    context.kernel_run_counter.add_(1)
    apply_events(context, events, step=step)
    table = PageTable(
        reads.page_table, reads.page_size, reads.full_to_swa_index_mapping, reads.swa_window_size
    )
    fill_write_plan(
        write_plan_out,
        table,
        reads.request_rows.tolist(),
        reads.prefix_lens.tolist(),
        reads.extend_lens,
        reads.padding_row,
    )
    count = reads.request_rows.numel()
    if write_plan_out.write_request_uids is not None:
        write_plan_out.write_request_uids[:count] = reads.request_uids
    if write_plan_out.write_identity_keys is not None:
        keys = 0 if reads.identity_keys is None else reads.identity_keys
        write_plan_out.write_identity_keys[:count] = keys
    if context.slot_table is not None:
        tokens = int(reads.extend_lens.to(torch.int64).clamp(min=0).sum())
        slots = out_cache_loc[:tokens].to(torch.int64)
        context.slot_table.writer_step[slots[is_real_slot(context, slots)]] = step
