"""Did the forward store any K/V at all? A skipped write hook leaves every slot as it was.

The seal folds the bytes of the slots just written; the fold of what they held before stands in
their old records. A forward all of whose slots have a new token or position and the old bytes has
stored nothing: its slots count as not written, and their next reader reports `unwritten`. That
costs no fold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcanary_plugin.guard import GroupGuard
from kvcanary_plugin.kernels import RealKvHashMode, SlotState
from kvcanary_plugin.kernels.consts import (
    FIELD_POSITION,
    FIELD_REAL_KV_HASH,
    FIELD_TOKEN,
    PADDING_SLOT,
    RECORD_FIELDS,
)
from kvcanary_plugin.kernels.hashes import splitmix64_tensor, word_keys
from kvcanary_plugin.kernels.packing import read_bytes
from kvcanary_plugin.kernels.reference import STATE_MASK

_NEVER_SEALED = 0


class StoreWatch:
    """Keeps the old records of the slots that a forward writes, and compares when it has run.

    Not thread-safe: called around each forward in turn. Waits for nothing.
    """

    def __init__(self, guards: Sequence[GroupGuard]) -> None:
        self._zeros_folded = {guard.index: _fold_of_zeros(guard) for guard in guards}
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, guard: GroupGuard, out_cache_loc: torch.Tensor) -> None:
        """Before the records of ``out_cache_loc`` (int32 | int64 [n]) are written."""
        self._kept.pop(guard.index, None)
        if guard.sealed_bytes_per_slot and out_cache_loc.numel():
            slots = out_cache_loc.to(torch.int64)
            real = (slots > PADDING_SLOT) & (slots < guard.group.num_slots)
            slots = torch.where(real, slots, torch.full_like(slots, PADDING_SLOT))
            self._kept[guard.index] = slots, _fields(guard)[slots]

    def look(self, guard: GroupGuard) -> None:
        """After the seal of a forward that :meth:`keep` was called for."""
        kept = self._kept.pop(guard.index, None)
        if kept is None:
            return
        slots, before = kept
        now = _fields(guard)[slots]
        fold, fold_before = now[:, FIELD_REAL_KV_HASH], before[:, FIELD_REAL_KV_HASH]
        never_sealed = fold_before == _NEVER_SEALED
        same_bytes = (fold == fold_before) | (
            never_sealed & (fold == self._zeros_folded[guard.index])
        )
        # The same token computed again into its own slot has the same bytes by right.
        is_new = (slots > PADDING_SLOT) & (
            (now[:, FIELD_TOKEN] != before[:, FIELD_TOKEN])
            | (now[:, FIELD_POSITION] != before[:, FIELD_POSITION])
        )
        stored_nothing = is_new.any() & (same_bytes | ~is_new).all()
        words = guard.slots.state[slots]
        unwritten = (words & ~STATE_MASK) | int(SlotState.ALLOCATED)
        in_use = (words & STATE_MASK) == int(SlotState.SEALED)
        guard.slots.state[slots] = torch.where(stored_nothing & is_new & in_use, unwritten, words)


def _fields(guard: GroupGuard) -> torch.Tensor:
    return guard.records.view(torch.int64)[:, :RECORD_FIELDS]


def _fold_of_zeros(guard: GroupGuard) -> int:
    """The fold of a slot of a fresh pool."""
    if guard.seal_mode is RealKvHashMode.NONE:
        return _NEVER_SEALED
    total = torch.zeros((), dtype=torch.int64)
    for index, source in enumerate(guard.group.sources):
        words = -(-read_bytes(source, guard.seal_mode) // 8)
        total += splitmix64_tensor(word_keys(index, words, torch.device("cpu"))).sum()
    return int(splitmix64_tensor(total))
