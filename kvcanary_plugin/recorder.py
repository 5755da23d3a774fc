"""The flight recorder: what the last forwards read and wrote, kept until an incident asks for it.

The arrays of a step are persistent buffers on some engines, so a reference would show a later
forward: each forward's arrays are copied into one buffer on their own device, one launch a forward.
Nothing is fetched to the host before :meth:`FlightRecorder.window` asks for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kvcanary_plugin.forward import ForwardKind, ForwardStep, HostTokens, Int64Array
from kvcanary_plugin.kernels.consts import UNKNOWN, EventKind
from kvcanary_plugin.step_copy import StepCopy, copy_of

# What all kept forwards may take together, on the device and on the host; the oldest go first.
MAX_BYTES: Final = 64 * 1024 * 1024
# Lifecycle events that may wait for the forward they belong to.
_MAX_PENDING_EVENTS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotEvent:
    """Something that happened to slots between two forwards.

    Fields:
        kind: what.
        group: index of the group in whose numbering the slots are.
        slots: int64 [n]; for a move, where to. None for a reset of the whole pool.
        sources: int64 [n], for a move, where from.
        uid: the request it was for, -1 unknown.
    """

    kind: EventKind
    group: int
    slots: Int64Array | None
    sources: Int64Array | None = None
    uid: int = UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedForward:
    """One forward as it was launched, on the host: ``bs`` requests, ``n`` tokens without padding.

    Fields:
        step, kind: of the ``ForwardStep``.
        request_rows, request_uids, prefix_lens, extend_lens: int64 [bs].
        starts: int64 [bs + 1]; request r has the tokens starts[r] .. starts[r + 1].
        input_ids, positions: int64 [n].
        slots: int64 [n] per group: the slots written, in the group's numbering.
        identity_keys: int64 [bs], or None.
        host_tokens: the scheduler's own tokens, of requests that computed prompt tokens.
        events: what happened to slots before this forward and after the one before it.
    """

    step: int
    kind: ForwardKind
    request_rows: Int64Array
    request_uids: Int64Array
    prefix_lens: Int64Array
    extend_lens: Int64Array
    starts: Int64Array
    input_ids: Int64Array
    positions: Int64Array
    slots: tuple[Int64Array, ...]
    identity_keys: Int64Array | None
    host_tokens: tuple[HostTokens, ...]
    events: tuple[SlotEvent, ...]


@dataclass(frozen=True, slots=True)
class _PendingEvent:
    """A :class:`SlotEvent` whose arrays may still be on the device, in pages of slots."""

    kind: EventKind
    group: int
    slots: torch.Tensor | Int64Array | None
    sources: torch.Tensor | Int64Array | None
    page_size: int
    uid: int

    def fetch(self) -> SlotEvent:
        return SlotEvent(
            kind=self.kind,
            group=self.group,
            slots=_slots_on_host(self.slots, self.page_size),
            sources=_slots_on_host(self.sources, self.page_size),
            uid=self.uid,
        )


@dataclass(frozen=True, slots=True)
class _Frame:
    """One forward as it is kept."""

    step: int
    kind: ForwardKind
    copy: StepCopy
    tokens: int  # without padding
    host_tokens: tuple[HostTokens, ...]
    events: tuple[_PendingEvent, ...]
    num_bytes: int

    def fetch(self) -> RecordedForward:
        integers = self.copy.integers.cpu().numpy()
        arrays = [array.copy() for array in np.split(integers, np.cumsum(self.copy.sizes[:-1]))]
        keys = arrays.pop() if self.copy.has_keys else None
        rows, uids, prefix_lens, extend_lens, *by_token = arrays
        input_ids, positions, *slots = (array[: self.tokens] for array in by_token)
        return RecordedForward(
            step=self.step,
            kind=self.kind,
            request_rows=rows,
            request_uids=uids,
            prefix_lens=np.maximum(prefix_lens, 0),
            extend_lens=np.maximum(extend_lens, 0),
            starts=np.concatenate(([0], np.maximum(extend_lens, 0).cumsum())),
            input_ids=input_ids,
            positions=positions,
            slots=tuple(slots),
            identity_keys=keys,
            host_tokens=self.host_tokens,
            events=tuple(event.fetch() for event in self.events),
        )


class FlightRecorder:
    """Keeps the last forwards. One thread records; any thread may ask for the window.

    Args:
        forwards: how many are kept; 0 keeps nothing and costs nothing.
        max_bytes: bound of what is kept, whatever the number of forwards.
    """

    def __init__(self, forwards: int, *, max_bytes: int = MAX_BYTES) -> None:
        self._forwards = forwards
        self._max_bytes = max_bytes
        self._frames: deque[_Frame] = deque()
        self._num_bytes = 0
        self._pending: deque[_PendingEvent] = deque(maxlen=_MAX_PENDING_EVENTS)
        # Guards frames and bytes together; held for the time of an append or of a copy of the list.
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self._forwards > 0

    @property
    def num_bytes(self) -> int:
        """Bytes kept now, on the device and on the host."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._frames)

    def stop(self) -> None:
        """Keep nothing from now on, and forget what is kept."""
        with self._lock:
            self._forwards = 0
            self._frames.clear()
            self._num_bytes = 0

    def record(self, step: ForwardStep) -> StepCopy | None:
        """Keep ``step`` before anything of it is launched: one launch, no synchronisation.

        Returns the copy that it keeps; None when it keeps nothing.
        """
        if not self.is_on:
            return None
        copy = copy_of(step)
        extend = step.host_extend_lens
        host_bytes = 8 * sum(request.num_tokens for request in step.host_tokens)
        events, self._pending = tuple(self._pending), deque(maxlen=_MAX_PENDING_EVENTS)
        frame = _Frame(
            step.step,
            step.kind,
            copy,
            int(extend.sum()) if extend is not None else step.input_ids.shape[0],
            step.host_tokens,
            events,
            8 * copy.integers.shape[0] + host_bytes + sum(_bytes_of(event) for event in events),
        )
        with self._lock:
            self._frames.append(frame)
            self._num_bytes += frame.num_bytes
            while len(self._frames) > self._forwards or (
                self._num_bytes > self._max_bytes and len(self._frames) > 1
            ):
                self._num_bytes -= self._frames.popleft().num_bytes
        return copy

    def record_event(
        self,
        kind: EventKind,
        *,
        group: int,
        slots: torch.Tensor | Int64Array | None,
        sources: torch.Tensor | Int64Array | None = None,
        page_size: int = 1,
        uid: int = UNKNOWN,
    ) -> None:
        """Keep what happened to slots; it belongs to the forward that is recorded next.

        Call it on the thread that records, in the order in which things happen. Costs no launch:
        the arrays, on whatever device, are kept as they are, so nobody may write to them later.

        Args:
            kind: what happened.
            group: index of the group in whose numbering the slots are.
            slots: int32 | int64 [n]; for a move, where to; None for all slots of the pool.
            sources: int32 | int64 [n], for a move, where from.
            page_size: slots of each entry; 1 means that entries are slots.
            uid: the request it is for, -1 unknown.
        """
        if self.is_on:
            self._pending.append(_PendingEvent(kind, group, slots, sources, page_size, uid))

    def window(self, *, until_step: int) -> list[RecordedForward]:
        """The kept forwards up to and including ``until_step``, oldest first, on the host.

        Waits for copies on the current stream only: call it under a stream beside the engine's. A
        violation of ``until_step`` that is visible on the host vouches for all of these being
        complete on the device, as each forward is recorded before it is checked.
        """
        with self._lock:
            frames = tuple(self._frames)
        return [frame.fetch() for frame in frames if frame.step <= until_step]


def _slots_on_host(entries: torch.Tensor | Int64Array | None, page_size: int) -> Int64Array | None:
    if entries is None:
        return None
    host = entries.cpu().numpy() if isinstance(entries, torch.Tensor) else entries
    pages = host.astype(np.int64)
    return (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)


def _bytes_of(event: _PendingEvent) -> int:
    arrays: Iterable[torch.Tensor | Int64Array | None] = (event.slots, event.sources)
    return sum(array.nbytes for array in arrays if array is not None)
