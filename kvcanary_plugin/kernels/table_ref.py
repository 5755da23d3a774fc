"""Reading a page table: where a position's slot stands, and what the lookup table makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcanary_plugin.kernels.consts import CHAIN_HEAD, OUT_OF_TABLE, PADDING_SLOT, UNKNOWN


def window_start(prefix_len: int, swa_window_size: int) -> int:
    """First position of a prefix that the window still sees; 0 without a window."""
    return max(0, prefix_len - swa_window_size) if swa_window_size > 0 else 0


@dataclass(frozen=True, slots=True)
class PageTable:
    """A page table [rows, width] with its optional lookup table; positions are int64 vectors."""

    pages: torch.Tensor
    page_size: int
    full_to_swa: torch.Tensor | None
    swa_window_size: int

    @property
    def rows(self) -> int:
        return self.pages.shape[0]

    @property
    def positions(self) -> int:
        """Positions that fit into a row."""
        return self.pages.shape[1] * self.page_size

    def raw_slots(self, row: int, position: torch.Tensor) -> torch.Tensor:
        """Slots as the table holds them; OUT_OF_TABLE outside.

        A page <= 0 stands for itself: all the slots of a null page are the padding slot.
        """
        inside = (position >= 0) & (position < self.positions)
        if not 0 <= row < self.rows or not bool(inside.any()):
            return torch.full_like(position, OUT_OF_TABLE)
        column = torch.where(inside, position, torch.zeros_like(position))
        page = self.pages[row, column // self.page_size].to(torch.int64)
        slot = torch.where(page > 0, page * self.page_size + column % self.page_size, page)
        return torch.where(inside, slot, torch.full_like(slot, OUT_OF_TABLE))

    def mapped(self, slot: torch.Tensor, *, unmapped: int) -> torch.Tensor:
        """``slot`` through the lookup table: ``unmapped`` for -1, beyond its end, and values <= 0.

        Without a lookup table, and outside the page table, slots stay as they are.
        """
        if self.full_to_swa is None:
            return slot
        value = self._looked_up(slot)
        value = torch.where(value > 0, value, torch.full_like(value, unmapped))
        return torch.where(slot == OUT_OF_TABLE, slot, value)

    def live_slots(self, row: int, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots to verify and whether they may be read.

        What may not is left as it is, so that the report shows the wrong value: a slot <= 0 in the
        table, one that the lookup table cannot know, a mapping <= 0. Outside the page table: -1.
        """
        raw = self.raw_slots(row, position)
        slot, readable = raw, (raw > PADDING_SLOT) & (raw != OUT_OF_TABLE)
        if self.full_to_swa is not None:
            readable &= raw < self.full_to_swa.numel()
            slot = torch.where(readable, self._looked_up(raw), raw)
            readable &= slot > PADDING_SLOT
        return torch.where(raw == OUT_OF_TABLE, torch.full_like(raw, UNKNOWN), slot), readable

    def predecessors(self, row: int, position: torch.Tensor, start: int) -> torch.Tensor:
        """Slots of position - 1: CHAIN_HEAD for position 0, 0 where not reachable.

        With a window and no lookup table, what lies below ``start`` may be anything: not reachable.
        """
        slot = self.mapped(self.raw_slots(row, position - 1), unmapped=PADDING_SLOT)
        slot = slot.clamp(min=PADDING_SLOT)
        if self.swa_window_size > 0 and self.full_to_swa is None:
            slot = torch.where(position - 1 < start, torch.full_like(slot, PADDING_SLOT), slot)
        return torch.where(position == 0, torch.full_like(slot, CHAIN_HEAD), slot)

    def _looked_up(self, slot: torch.Tensor) -> torch.Tensor:
        """Values of the lookup table; 0 for slots that it does not have."""
        assert self.full_to_swa is not None
        inside = (slot >= 0) & (slot < self.full_to_swa.numel())
        if not bool(inside.any()):
            return torch.zeros_like(slot)
        value = self.full_to_swa[torch.where(inside, slot, torch.zeros_like(slot))]
        return torch.where(inside, value.to(torch.int64), torch.zeros_like(slot))


def expected_tokens_at(
    tokens: torch.Tensor | None,
    valid_lens: torch.Tensor | None,
    *,
    index: int,
    row: int,
    position: torch.Tensor,
) -> torch.Tensor:
    """Token history of request ``index`` at ``position`` (its offset included); -1 unknown."""
    unknown = torch.full_like(position, UNKNOWN)
    if tokens is None or valid_lens is None or not 0 <= row < tokens.shape[0]:
        return unknown
    known = min(int(valid_lens[index].item()), tokens.shape[1])
    inside = (position >= 0) & (position < known)
    if not bool(inside.any()):
        return unknown
    column = torch.where(inside, position, torch.zeros_like(position))
    return torch.where(inside, tokens[row, column].to(torch.int64), unknown)
