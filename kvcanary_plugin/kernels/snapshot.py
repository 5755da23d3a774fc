"""The launches around a re-verify: keep the page-table rows that a forward reads, compare later."""

from __future__ import annotations

from kvcanary_plugin.kernels.arguments import check_compare_tables, check_snapshot
from kvcanary_plugin.kernels.backend import kernels_for
from kvcanary_plugin.kernels.context import VerifyOrWriteContext
from kvcanary_plugin.kernels.inputs import TableReads, TableSnapshot
from kvcanary_plugin.kernels.packing import packed
from kvcanary_plugin.kernels.snapshot_ref import (
    launch_canary_compare_tables_kernel_torch_reference,
    launch_canary_snapshot_kernel_torch_reference,
)


def launch_canary_snapshot_kernel(
    *, reads: TableReads, first_request: int, snapshot_out: TableSnapshot
) -> None:
    """Keep what the page table says now about the prefixes of a batch.

    Requests ``[first_request, first_request + snapshot rows)`` are kept, except padding and those
    whose prefix does not fit (into the table, or into a row of the snapshot): their
    ``snapshot_out.rows`` becomes -1. Runs on the current stream, never synchronises.

    Args:
        reads: page table, lookup table, window, request rows and prefix lengths of the batch.
        first_request: first request of the batch that gets a row of the snapshot, >= 0.
        snapshot_out: receives the snapshot; its vectors are as long as ``reads.request_rows``.

    ValueError for tensors of a wrong shape, dtype or device.
    """
    kernels = kernels_for(reads.page_table.device)
    if kernels is None:
        launch_canary_snapshot_kernel_torch_reference(
            reads=reads, first_request=first_request, snapshot_out=snapshot_out
        )
        return
    try:
        kernels.canary_snapshot_table(
            reads.page_table,
            reads.page_size,
            reads.padding_row,
            reads.request_rows,
            reads.prefix_lens,
            reads.full_to_swa_index_mapping,
            reads.swa_window_size,
            first_request,
            snapshot_out.entries,
            snapshot_out.rows,
            snapshot_out.table_rows,
            snapshot_out.prefix_lens,
        )
    except Exception:
        check_snapshot(reads=reads, first_request=first_request, snapshot_out=snapshot_out)
        raise


def launch_canary_compare_tables_kernel(
    *, context: VerifyOrWriteContext, reads: TableReads, snapshot: TableSnapshot, step: int
) -> None:
    """Compare the page table with a snapshot of it: a request whose row changed gives one row.

    The violation row (``table_changed``) stands for the first position of the prefix, within the
    window, at which they differ: ``slot`` is the one that the table names now, ``expected_aux`` the
    one of the snapshot. ``kernel_run_counter`` grows by one, ``slot_run_counter`` does not.

    Args:
        context: sink, slot table (for provenance), counters; the launch's tag.
        reads: page table, lookup table, window and request uids; its rows and lengths are not read,
            those of the snapshot are.
        snapshot: what :func:`launch_canary_snapshot_kernel` kept.
        step: number of this forward.

    ValueError for tensors of a wrong shape, dtype or device.
    """
    words = packed(context)
    kernels = kernels_for(words.device_type)
    if kernels is None:
        launch_canary_compare_tables_kernel_torch_reference(
            context=context, reads=reads, snapshot=snapshot, step=step
        )
        return
    try:
        kernels.canary_compare_tables(
            words.launch,
            reads.page_table,
            reads.page_size,
            reads.full_to_swa_index_mapping,
            reads.swa_window_size,
            reads.request_uids,
            snapshot.entries,
            snapshot.rows,
            snapshot.table_rows,
            snapshot.prefix_lens,
            step,
        )
    except Exception:
        check_compare_tables(context=context, reads=reads, snapshot=snapshot)
        raise
