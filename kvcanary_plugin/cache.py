"""What memory is guarded: one :class:`KVCacheGroup` per set of slots that share a numbering."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcanary_plugin.kernels.context import RealKvSource


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVCacheGroup:
    """A pool of KV slots, the page table through which requests read it, and its bytes.

    Fields:
        name: metric label ``group``: ``full``, ``swa``, ``mla``, ``draft`` ...
        num_slots: slots of the pool, the padding slot 0 included.
        page_table: int32 | int64 [rows, width]; entry ``[row, position // page_size]`` is a page
            (a slot when page_size is 1).
        page_size: slots per entry of the page table.
        padding_row: request row that pads batches (-1 if the engine has none).
        sources: every strip of real K/V of a slot (all layers, K and V); may be empty.
        full_to_swa: [full slots], lookup table from the full pool's slots to this group's, 0 where
            not mapped; None if the page table holds this group's own slots.
        swa_window_size: earlier tokens that a token sees; 0 for full attention.
        token_offset: the slot of position p holds the K/V of the token at p + token_offset (draft
            models: 1).
        tracks_allocation: whether alloc / free events reach this group.
        table_stable_through_forward: whether the rows that a forward reads (and the lookup table)
            stay as they are until the end of that forward on its stream. Where an engine rewrites
            them earlier by right, changes cannot be told from faults: `table_changed` is off.
        freed_slots_keep_bytes: whether the bytes of a slot stay as they are from its last use until
            a guarded forward writes it again, or the group hears of it (events, ``forget_slots``).
            False where others, who are not guarded, use the memory of free slots as well: the scrub
            then needs ``tracks_allocation``.
        pool: groups of one pool share records and slot states: their page tables hand out slots of
            one allocation, each slot to one group at a time, under one numbering. None: the group
            has a pool of its own.
    """

    name: str
    num_slots: int
    page_table: torch.Tensor
    page_size: int
    padding_row: int
    sources: tuple[RealKvSource, ...]
    full_to_swa: torch.Tensor | None = None
    swa_window_size: int = 0
    token_offset: int = 0
    tracks_allocation: bool = False
    table_stable_through_forward: bool = False
    freed_slots_keep_bytes: bool = True
    pool: str | None = None

    def __post_init__(self) -> None:
        if self.num_slots <= 0:
            raise ValueError(
                f"kvcanary: group {self.name!r}: num_slots must be positive, got {self.num_slots}"
            )
        if self.page_size <= 0:
            raise ValueError(
                f"kvcanary: group {self.name!r}: page_size must be positive, got {self.page_size}"
            )
        if self.swa_window_size < 0:
            raise ValueError(
                f"kvcanary: group {self.name!r}: swa_window_size must be 0 (full attention) or "
                f"positive, got {self.swa_window_size}"
            )

    @property
    def unsupported_checks(self) -> frozenset[str]:
        """Labels of the checks that cannot work for this group, whatever the settings say."""
        missing = set()
        if not self.sources:
            missing.add("real_kv")
        if not self.tracks_allocation:
            missing |= {"freed_read", "write_owned", "double_free", "double_alloc"}
        if not self.table_stable_through_forward:
            missing.add("table_changed")
        return frozenset(missing)

    @property
    def device(self) -> torch.device:
        """Where the page table, and with it everything else of the group, lies."""
        return self.page_table.device


def row_source(tensor: torch.Tensor, *, page_size: int = 1) -> RealKvSource:
    """A source of which each row of ``tensor`` [rows, ...] holds ``page_size`` whole slots.

    The bytes of a slot follow from the row's size; all of them are folded.
    """
    row_bytes = tensor[0].numel() * tensor.element_size()
    if row_bytes % page_size:
        raise ValueError(
            f"kvcanary: rows of {row_bytes} bytes do not split into {page_size} equal slots"
        )
    num_bytes = row_bytes // page_size
    return RealKvSource(
        tensor=tensor, page_size=page_size, num_bytes_per_token=num_bytes, read_bytes=num_bytes
    )
