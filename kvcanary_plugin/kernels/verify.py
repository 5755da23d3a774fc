"""The verify launches: over a materialised plan, and straight from the page table."""

from __future__ import annotations

from kvcanary_plugin.kernels.arguments import check_table_verify, check_verify
from kvcanary_plugin.kernels.backend import kernels_for
from kvcanary_plugin.kernels.context import VerifyOrWriteContext
from kvcanary_plugin.kernels.inputs import TableReads, VerifyPlan
from kvcanary_plugin.kernels.packing import packed
from kvcanary_plugin.kernels.verify_ref import (
    launch_canary_table_verify_kernel_torch_reference,
    launch_canary_verify_kernel_torch_reference,
)

__all__ = [
    "TableReads",
    "VerifyPlan",
    "launch_canary_table_verify_kernel",
    "launch_canary_verify_kernel",
]


def launch_canary_verify_kernel(
    *,
    context: VerifyOrWriteContext,
    plan: VerifyPlan,
    check_verify_expected_token: bool,
    step: int = -1,
) -> None:
    """Compare the records of the plan's slots with what the plan expects; one row per bad entry.

    Per entry: chain hash (unless the predecessor is slot 0), token (where one is expected),
    position, and the real-KV hash in the context's mode. Slot 0 is skipped but counted; a slot
    outside the records is reported as such and never read. With a slot table also the slot's state,
    and entries written in this ``step`` are left out. Read-only on the records, runs on the current
    stream, never synchronises, and a violation never raises.

    Args:
        context: records, sink, counters, sources; the launch's tag.
        plan: the entries; ``plan.enable[0] == 0`` skips the launch.
        check_verify_expected_token: whether to compare tokens at all.
        step: number of this forward; -1 unknown (nothing counts as written in this forward).

    ValueError when a tensor has a wrong shape, dtype or device, or is not contiguous.
    """
    words = packed(context)
    kernels = kernels_for(words.device_type)
    if kernels is None:
        launch_canary_verify_kernel_torch_reference(
            context=context,
            plan=plan,
            check_verify_expected_token=check_verify_expected_token,
            step=step,
        )
        return
    try:
        kernels.canary_verify_plan(
            words.launch,
            plan.verify_slot_indices,
            plan.verify_expected_tokens,
            plan.verify_expected_positions,
            plan.verify_prev_slot_indices,
            plan.verify_num_valid,
            plan.enable,
            plan.verify_request_uids,
            plan.verify_batch_rows,
            plan.verify_identity_keys,
            check_verify_expected_token,
            step,
        )
    except Exception:
        check_verify(context=context, plan=plan)
        raise


def launch_canary_table_verify_kernel(
    *, context: VerifyOrWriteContext, reads: TableReads, step: int
) -> None:
    """Verify every slot that the batch reads, straight from the page table.

    Covers the entries that the plan launch would list, with the checks of
    :func:`launch_canary_verify_kernel`, and reports in addition what a plan cannot say: a slot <= 0
    or an unmapped one in the live range, a position beyond the table's width (once per request), a
    request row outside the table (once). Where ``reads.prefix_hashes`` says so, the chain hash
    behind the last prefix token is compared with the host's. ``slot_run_counter`` grows by the
    entries looked at; entries written in this ``step`` are left out and not counted.

    Args:
        context: records, sink, counters, sources; the launch's tag.
        reads: the page table and what the batch reads of it.
        step: number of this forward.

    ValueError when a tensor has a wrong shape, dtype or device, or is not contiguous.
    """
    words = packed(context)
    kernels = kernels_for(words.device_type)
    if kernels is None:
        launch_canary_table_verify_kernel_torch_reference(context=context, reads=reads, step=step)
        return
    try:
        kernels.canary_verify_table(
            words.launch,
            reads.page_table,
            reads.page_size,
            reads.padding_row,
            reads.request_rows,
            reads.request_uids,
            reads.prefix_lens,
            reads.max_prefix_len,
            reads.full_to_swa_index_mapping,
            reads.swa_window_size,
            reads.identity_keys,
            reads.expected_tokens,
            reads.expected_valid_lens,
            reads.token_offset,
            reads.prefix_hashes,
            reads.prefix_hash_valid,
            step,
        )
    except Exception:
        check_table_verify(context=context, reads=reads)
        raise
