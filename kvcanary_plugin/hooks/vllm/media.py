"""Images, audio, video: what stands behind the placeholder tokens of a prompt.

Every image has the same placeholder tokens, and vLLM keeps their blocks apart by a hash of the
content. Records do the same: where an item stands, the token that is recorded is the placeholder
with the item's hash in it. What stands before the item is as shared as before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvcanary_plugin.forward import Int64Array

# A bit that no token id has, and 30 bits of hash: together an int32 that is not negative.
_IS_MEDIA = 1 << 30
_HASH_MASK = _IS_MEDIA - 1


@dataclass(frozen=True, slots=True)
class Media:
    """The items of one prompt.

    Fields:
        ranges: (first position, position behind the last, mark) of each item.
    """

    ranges: tuple[tuple[int, int, int], ...] = ()

    def marks(self, start: int, end: int) -> Int64Array:
        """int64 [end - start]: what to combine (exclusive or) the tokens there with; 0: nothing."""
        marks = np.zeros(end - start, dtype=np.int64)
        for first, behind, mark in self.ranges:
            marks[max(first - start, 0) : max(behind - start, 0)] ^= mark
        return marks

    def marked(self, tokens: Int64Array) -> Int64Array:
        """``tokens``, a prompt from its first token on, with the marks of the items."""
        return tokens ^ self.marks(0, tokens.shape[0]) if self.ranges else tokens


NO_MEDIA = Media()


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPart:
    """What a forward computes of one prompt.

    Fields:
        media: the items of the prompt.
        row: its row in the batch.
        start, end: the positions that are computed.
    """

    media: Media
    row: int
    start: int
    end: int


def media_of(features: Iterable[Any] | None, *, prompt_len: int) -> Media:
    """The items of a prompt, from vLLM's ``mm_features``."""
    ranges = []
    for feature in features or ():
        first = int(feature.mm_position.offset)
        behind = min(first + int(feature.mm_position.length), prompt_len)
        if behind > first:
            ranges.append((first, behind, _mark(feature.identifier)))
    return Media(tuple(ranges)) if ranges else NO_MEDIA


def marked_inputs(
    input_ids: torch.Tensor, parts: Iterable[MediaPart], *, starts: torch.Tensor
) -> torch.Tensor:
    """``input_ids`` with the marks of the items; itself where there are none. No synchronisation.

    Args:
        input_ids: int32 | int64 [n] on the device.
        parts: the prompts that the forward computes tokens of.
        starts: int32 | int64 [bs + 1] on the device, where each row begins in ``input_ids``.
    """
    rows, entries, marks = [], [], []
    for part in parts:
        marks_here = part.media.marks(part.start, part.end)
        within = np.flatnonzero(marks_here)
        rows.append(np.full_like(within, part.row))
        entries.append(within)
        marks.append(marks_here[within])
    count = sum(part.shape[0] for part in entries)
    if not count:
        return input_ids
    device = input_ids.device
    host = torch.empty((3, count), dtype=torch.int64, pin_memory=device.type == "cuda")
    for line, parts_of_line in zip(host.numpy(), (rows, entries, marks), strict=True):
        np.concatenate(parts_of_line, out=line)
    row, within_row, mark = host.to(device, non_blocking=True)
    marked = input_ids.clone()
    marked[starts[row] + within_row] ^= mark.to(input_ids.dtype)
    return marked


def _mark(identifier: str) -> int:
    digest = hashlib.blake2b(identifier.encode(), digest_size=4).digest()
    return _IS_MEDIA | (int.from_bytes(digest, "little") & _HASH_MASK)
