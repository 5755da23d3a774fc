"""The second look after a forward: rows of the page table and records are still what verify saw.

Before a sampled forward the table's rows are copied into a bounded snapshot, in the same window in
which the verify reads them. After it the table is compared with the snapshot (where it has to stay
as it is so long), and the records are verified again through the snapshot, so that a table which
the engine fills for the next forward by then is not looked at.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import torch

from kvcanary_plugin.forward import ForwardStep
from kvcanary_plugin.guard import GroupGuard
from kvcanary_plugin.kernels import (
    LaunchTag,
    TableReads,
    TableSnapshot,
    launch_canary_compare_tables_kernel,
    launch_canary_snapshot_kernel,
    launch_canary_table_verify_kernel,
)

# Entries of a snapshot (4 bytes each), unless a single row of the table needs more.
_MOST_ENTRIES = 1 << 20


class Reverifier:
    """Takes the snapshots and looks again. Not thread-safe: called around each forward in turn.

    Args:
        guards: the groups.
        max_requests: requests that a forward may hold.
        dice: decides which forwards are sampled.
    """

    def __init__(
        self,
        *,
        guards: Sequence[GroupGuard],
        max_requests: int,
        dice: random.Random | None = None,
    ) -> None:
        self._snapshots = {guard.index: _Snapshots(guard, max_requests) for guard in guards}
        self._dice = dice if dice is not None else random.Random()
        self._is_sampled = False
        self.requests_left_out: Counter[str] = Counter()

    def sample(self, share: float) -> None:
        """Decides about the coming forward: it is looked at again with probability ``share``."""
        self._is_sampled = self._dice.random() < share

    @property
    def is_sampled(self) -> bool:
        """Whether the coming forward is."""
        return self._is_sampled

    def keep(self, guard: GroupGuard, reads: TableReads) -> None:
        """Before the forward, beside its verify: keep what ``reads`` says of this group."""
        snapshots = self._snapshots[guard.index]
        snapshots.current = None
        if not self._is_sampled or reads.max_prefix_len == 0 or reads.request_rows.numel() == 0:
            return
        left_out = snapshots.take(reads, self._dice)
        if left_out:
            self.requests_left_out[guard.group.name] += left_out

    def look_again(self, guard: GroupGuard, step: ForwardStep, *, compare_tables: bool) -> None:
        """After the forward: compare and verify what :meth:`keep` kept, if it did."""
        snapshots = self._snapshots[guard.index]
        if snapshots.current is None:
            return
        reads, snapshot = snapshots.current
        snapshots.current = None
        context = guard.context(LaunchTag.REVERIFY)
        if compare_tables:
            launch_canary_compare_tables_kernel(
                context=context, reads=reads, snapshot=snapshot, step=step.step
            )
        launch_canary_table_verify_kernel(
            context=context, reads=_through(snapshot, reads), step=step.step
        )


class _Snapshots:
    """The snapshot of one group; its buffer comes with the first sampled forward."""

    def __init__(self, guard: GroupGuard, max_requests: int) -> None:
        group = guard.group
        columns = group.page_table.shape[1]
        self._positions_per_entry = 1 if group.full_to_swa is not None else group.page_size
        self._width = columns * (group.page_size // self._positions_per_entry)
        # Requests share prefixes: a batch may have more entries than the pool has slots.
        self._num_entries = max(min(_MOST_ENTRIES, max_requests * self._width), self._width)
        self._max_requests = max_requests
        self._device = group.device
        self._entries: torch.Tensor | None = None
        self._vectors: torch.Tensor | None = None
        self.current: tuple[TableReads, TableSnapshot] | None = None

    def take(self, reads: TableReads, dice: random.Random) -> int:
        """Launches the snapshot; returns how many requests do not fit into it."""
        if self._entries is None or self._vectors is None:
            self._entries = torch.empty(self._num_entries, dtype=torch.int32, device=self._device)
            self._vectors = torch.empty(
                (3, self._max_requests), dtype=torch.int64, device=self._device
            )
        requests = reads.request_rows.numel()
        width = min(-(-reads.max_prefix_len // self._positions_per_entry), self._width)
        kept = min(self._num_entries // width, requests)
        first = dice.randint(0, requests - kept)
        rows, table_rows, prefix_lens = (vector[:requests] for vector in self._vectors)
        snapshot = TableSnapshot(
            entries=self._entries[: kept * width].view(kept, width),
            rows=rows,
            table_rows=table_rows,
            prefix_lens=prefix_lens,
        )
        launch_canary_snapshot_kernel(reads=reads, first_request=first, snapshot_out=snapshot)
        self.current = reads, snapshot
        return requests - kept


def _through(snapshot: TableSnapshot, reads: TableReads) -> TableReads:
    """What the batch read, by the snapshot: its slots are the records' own.

    Tokens and prefix hashes are compared once, at admission; behind that the chain covers them.
    """
    return TableReads(
        page_table=snapshot.entries,
        page_size=1 if reads.full_to_swa_index_mapping is not None else reads.page_size,
        padding_row=-1,  # a request that is not kept has this row
        request_rows=snapshot.rows,
        request_uids=reads.request_uids,
        prefix_lens=snapshot.prefix_lens,
        extend_lens=reads.extend_lens,
        max_prefix_len=reads.max_prefix_len,
        swa_window_size=reads.swa_window_size,
        identity_keys=reads.identity_keys,
        token_offset=reads.token_offset,
    )
