"""Taking a snapshot of page-table rows, and comparing the table with it, as tensor operations."""

from __future__ import annotations

import torch

from kvcanary_plugin.kernels.arguments import check_compare_tables, check_snapshot
from kvcanary_plugin.kernels.consts import PADDING_SLOT, UNKNOWN, FailReason, ViolationField
from kvcanary_plugin.kernels.context import VerifyOrWriteContext
from kvcanary_plugin.kernels.inputs import TableReads, TableSnapshot
from kvcanary_plugin.kernels.packing import packed
from kvcanary_plugin.kernels.reference import record_violations, violation_rows
from kvcanary_plugin.kernels.table_ref import PageTable, window_start


def launch_canary_snapshot_kernel_torch_reference(
    *, reads: TableReads, first_request: int, snapshot_out: TableSnapshot
) -> None:
    """Reference of ``launch_canary_snapshot_kernel``: same arguments, bytes and errors."""
    check_snapshot(reads=reads, first_request=first_request, snapshot_out=snapshot_out)
    snapshot_out.table_rows.copy_(reads.request_rows)
    snapshot_out.prefix_lens.copy_(reads.prefix_lens)
    snapshot_out.rows.fill_(UNKNOWN)
    table = _page_table(reads)
    kept_rows, width = snapshot_out.entries.shape
    rows, lens = reads.request_rows.tolist(), reads.prefix_lens.tolist()
    for request, (row, prefix_len) in enumerate(zip(rows, lens, strict=True)):
        kept_row = request - first_request
        first, end = _entries_of_prefix(reads, prefix_len)
        if (
            0 <= kept_row < kept_rows
            and row != reads.padding_row
            and 0 <= row < table.rows
            and 0 < prefix_len <= table.positions
            and end <= width
        ):
            snapshot_out.rows[request] = kept_row
            snapshot_out.entries[kept_row, first:end] = _entries_now(table, row, first, end)


def launch_canary_compare_tables_kernel_torch_reference(
    *, context: VerifyOrWriteContext, reads: TableReads, snapshot: TableSnapshot, step: int
) -> None:
    """Reference of ``launch_canary_compare_tables_kernel``: same arguments, rows and errors."""
    packed(context)
    check_compare_tables(context=context, reads=reads, snapshot=snapshot)
    context.kernel_run_counter.add_(1)
    table, size = _page_table(reads), positions_per_entry(reads)
    for request, kept_row in enumerate(snapshot.rows.tolist()):
        if kept_row < 0:
            continue
        prefix_len = int(snapshot.prefix_lens[request].item())
        first, end = _entries_of_prefix(reads, prefix_len)
        before = snapshot.entries[kept_row, first:end]
        now = _entries_now(table, int(snapshot.table_rows[request].item()), first, end)
        differs = torch.nonzero(now.to(before.dtype) != before)
        if differs.numel() == 0:
            continue
        index = int(differs[0].item())
        position = max((first + index) * size, window_start(prefix_len, reads.swa_window_size))
        columns = {
            ViolationField.SLOT: _slot_by_entry(int(now[index].item()), position, size),
            ViolationField.POSITION: position,
            ViolationField.EXPECTED_POSITION: position,
            ViolationField.EXPECTED_AUX: _slot_by_entry(int(before[index].item()), position, size),
            ViolationField.FAIL_REASON_BITS: int(FailReason.TABLE_CHANGED),
            ViolationField.REQUEST_UID: int(reads.request_uids[request].item()),
            ViolationField.BATCH_ROW: request,
        }
        device = reads.page_table.device
        rows = violation_rows(
            context,
            step=step,
            columns={
                field: torch.tensor([value], device=device) for field, value in columns.items()
            },
        )
        record_violations(context, rows)


def positions_per_entry(reads: TableReads) -> int:
    """Positions that an entry of a snapshot covers: a page, or one slot behind a lookup table."""
    return 1 if reads.full_to_swa_index_mapping is not None else reads.page_size


def _page_table(reads: TableReads) -> PageTable:
    return PageTable(
        reads.page_table, reads.page_size, reads.full_to_swa_index_mapping, reads.swa_window_size
    )


def _entries_of_prefix(reads: TableReads, prefix_len: int) -> tuple[int, int]:
    """The half-open range of entries that a prefix reads."""
    size = positions_per_entry(reads)
    return window_start(prefix_len, reads.swa_window_size) // size, -(-prefix_len // size)


def _entries_now(table: PageTable, row: int, first: int, end: int) -> torch.Tensor:
    """What the table says now: int64 [end - first]."""
    if table.full_to_swa is None:
        return table.pages[row, first:end].to(torch.int64)
    positions = torch.arange(first, end, dtype=torch.int64, device=table.pages.device)
    slot, readable = table.live_slots(row, positions)
    # A slot that the lookup table cannot know must not pass for one of the pool.
    return torch.where(readable | (slot <= PADDING_SLOT), slot, torch.full_like(slot, UNKNOWN))


def _slot_by_entry(entry: int, position: int, size: int) -> int:
    return entry if size == 1 or entry <= 0 else entry * size + position % size
