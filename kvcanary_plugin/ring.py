"""Reading the violation ring in host memory while kernels write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvcanary_plugin.kernels.consts import VIOLATION_FIELDS, ViolationField

if TYPE_CHECKING:
    import torch

Rows = npt.NDArray[np.int64]

# violation_write_index is an int32 that wraps: the n-th violation carries n modulo 2^32.
_WRAP: Final = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RingBatch:
    """What one read of the ring found.

    Fields:
        rows: int64 [n, 16], a copy, oldest first.
        dropped: rows that were overwritten before this read could take them.
    """

    rows: Rows
    dropped: int


class RingReader:
    """Takes every row of a violation ring once, and counts the ones it came too late for.

    Needs nothing but the rows: each row's ``sequence`` (n + 1, written last) says which violation
    it holds, and the n-th violation goes to row n % capacity, so how many each row held in between
    is known. No device call, no copy from a device. For one thread at a time.

    Args:
        ring: int64 [capacity, 16], contiguous, in host memory (pinned on CUDA).

    Raises:
        ValueError: the ring is not such a tensor.
    """

    def __init__(self, ring: torch.Tensor) -> None:
        if ring.device.type != "cpu":
            raise ValueError(
                f"kvcanary: ring got a tensor on {ring.device}; allowed: host memory; allocate it"
                " pinned on the host"
            )
        rows: npt.NDArray[np.int64] = ring.numpy()
        if rows.ndim != 2 or rows.shape[1] != VIOLATION_FIELDS or rows.shape[0] < 1:
            raise ValueError(
                f"kvcanary: ring got shape {tuple(rows.shape)};"
                f" allowed [capacity >= 1, {VIOLATION_FIELDS}]; allocate it so"
            )
        if rows.dtype != np.int64 or not rows.flags.c_contiguous:
            raise ValueError(
                f"kvcanary: ring got {rows.dtype}, contiguous {rows.flags.c_contiguous};"
                " allowed contiguous int64; allocate it so"
            )
        self._ring = rows
        self._sequences = rows[:, ViolationField.SEQUENCE]
        capacity = rows.shape[0]
        # Per row: the latest violation accounted for (n, not wrapped), and how many it held so far.
        self._latest = np.arange(capacity, dtype=np.int64) - capacity
        self._held = np.zeros(capacity, dtype=np.int64)

    @property
    def capacity(self) -> int:
        """Rows in the ring."""
        return int(self._ring.shape[0])

    def read(self) -> RingBatch:
        """All rows that became visible since the last call."""
        sequences = self._sequences.copy()
        new = np.flatnonzero((sequences != 0) & ((sequences - 1 - self._latest) % _WRAP != 0))
        if new.size == 0:
            return RingBatch(rows=np.empty((0, VIOLATION_FIELDS), np.int64), dropped=0)
        rows = self._ring[new]
        # A writer sets a row's sequence to 0 first and to n + 1 last: one that did not change while
        # the row was copied vouches for all of it. The others wait for the next read.
        copied = rows[:, ViolationField.SEQUENCE]
        whole = (copied == sequences[new]) & (copied == self._sequences[new])
        new, rows = new[whole], rows[whole]

        latest = self._latest[new]
        violation = latest + (rows[:, ViolationField.SEQUENCE] - 1 - latest) % _WRAP
        held = self._times_held(new, violation)
        dropped = int(np.sum(held - self._held[new] - 1))
        self._latest[new] = violation
        self._held[new] = held
        return RingBatch(rows=rows[np.argsort(violation, kind="stable")], dropped=dropped)

    def _times_held(
        self, row: npt.NDArray[np.intp], violation: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """How many violations 0 .. ``violation`` went to ``row``, for each pair.

        Counted by wraps of the index, as a capacity that does not divide 2^32 shifts the rows at
        each wrap.
        """
        wraps, low = np.divmod(violation, _WRAP)
        each_wrap = (_WRAP - 1 - row) // self.capacity + 1
        return wraps * each_wrap + np.where(low >= row, (low - row) // self.capacity + 1, 0)
