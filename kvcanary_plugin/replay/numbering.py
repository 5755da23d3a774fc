"""What the numbers of the file are called in a replay.

Slots are numbered anew, densely, so that a replay is as small as its incident. Hashes of the file
are those of an engine with other tokens, or keyed ones: each is bound to the hash that stands in
its place here (:class:`Chains`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from kvcanary_plugin.incident_file import Evidence, Group
from kvcanary_plugin.kernels.consts import PADDING_SLOT, UNKNOWN

PADDING_ROW: Final = 0


class SlotNumbering:
    """Slots of one pool, numbered 1, 2, ... in a replay; what is no slot stays none.

    Args:
        slots: all that the incident names, slots or not.
        num_slots: of the engine's pool.
        extra: further slots, for positions of which the file does not tell.
    """

    def __init__(self, slots: Iterable[int], num_slots: int, extra: int) -> None:
        self._num_slots = num_slots
        self._known = sorted({slot for slot in slots if PADDING_SLOT < slot < num_slots})
        self._dense = {slot: index for index, slot in enumerate(self._known, start=1)}
        self.first_extra = len(self._known) + 1
        self.size = self.first_extra + extra

    def dense(self, slot: int) -> int:
        if slot <= PADDING_SLOT:
            return slot
        if slot >= self._num_slots:
            return self.size + (slot - self._num_slots)
        return self._dense[slot]

    def original(self, dense: int) -> int:
        if dense <= PADDING_SLOT:
            return dense
        if dense >= self.size:
            return self._num_slots + (dense - self.size)
        if dense >= self.first_extra:
            return UNKNOWN  # a made-up slot: nothing of the engine's stands there
        return self._known[dense - 1]


class Rows:
    """Rows of the page table, numbered 1, 2, ... in a replay; what is no row stays none.

    Args:
        evidence: names each row by the request in it, and the row of the engine's.
        group: whose page table it is.
    """

    def __init__(self, evidence: Evidence, group: Group) -> None:
        self._group = group
        self._here: dict[tuple[int, int], int] = {}
        for forward in evidence.window:
            for part in forward.parts:
                self._here.setdefault((part.uid, part.request_row), len(self._here) + 1)
        for request in evidence.requests:
            self._here.setdefault((request.uid, request.request_row), len(self._here) + 1)

    @property
    def count(self) -> int:
        """Rows of a page table here, the padding row included."""
        return len(self._here) + 1

    def here(self, uid: int, request_row: int) -> int:
        if request_row == self._group.padding_row:
            return PADDING_ROW
        if not 0 <= request_row < self._group.table_rows:
            return self.count  # outside here as well
        return self._here[uid, request_row]

    def of(self, uid: int) -> list[int]:
        """All rows in which a request stood: some engines move requests between them."""
        return sorted({self.here(*key) for key in self._here if key[0] == uid})


class Chains:
    """Which hash here stands for which hash of the file.

    A record's predecessor is found by its hash, so that continuing the chain of a record there
    means continuing the chain of its counterpart here; a hash whose origin is not known stands for
    itself, and continues nothing.
    """

    def __init__(self) -> None:
        self._here: dict[int, int] = {}

    def bind(self, in_file: int, here: int) -> None:
        """``here`` stands for ``in_file``, unless something else does already."""
        self._here.setdefault(in_file, here)

    def rebind(self, in_file: int, here: int) -> None:
        """``here`` stands for ``in_file``: a write that was replayed knows better than a guess."""
        self._here[in_file] = here

    def knows(self, in_file: int) -> bool:
        return in_file in self._here

    def here(self, in_file: int) -> int:
        return self._here.get(in_file, in_file)


class Tokens:
    """Token ids of a replay: small numbers in the order of their appearance; -1 stays."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def here(self, token: int) -> int:
        return token if token < 0 else self._numbers.setdefault(token, len(self._numbers) + 1)


def int64(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
