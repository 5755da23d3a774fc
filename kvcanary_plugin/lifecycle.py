"""What the allocator did since the last forward, in the order in which it did it.

The scheduler side queues events on the host; the next forward applies them on the device before it
verifies anything. A slot then goes through these states::

    FREE -> ALLOCATED -> WRITTEN -> SEALED -> FREE        computed by a forward of this engine
    FREE -> ALLOCATED -> EXTERNAL -> FREE                 filled by somebody else and adopted

and belongs to [alloc, free) one owner: the request whose write claims it first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from kvcanary_plugin.kernels import EventKind, SlotEvent

# Batches of applied events that are kept: their tensors are read by launches that may still wait on
# the device. An engine runs at most two forwards ahead; imports in between take batches as well.
_KEPT_BATCHES = 64


class SlotEvents:
    """The queue of one group. Filled by the engine's scheduling thread; taken by it, or, while the
    engine is idle, by the thread that scrubs.

    Tensors are kept as they are, not copied: give one that nobody changes any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queued: list[SlotEvent] = []
        self._in_flight: deque[Sequence[SlotEvent]] = deque(maxlen=_KEPT_BATCHES)
        # Those that what is queued, and what was taken last, was queued under.
        self._streams: set[torch.cuda.Stream] = set()
        self._streams_of_taken: set[torch.cuda.Stream] = set()
        self._is_on = True

    def alloc(self, slots: torch.Tensor) -> None:
        """``slots`` (int32 | int64 [n]) were handed out."""
        self._queue(SlotEvent(kind=EventKind.ALLOC, slots=slots))

    def free(self, slots: torch.Tensor) -> None:
        """``slots`` (int32 | int64 [n]) were given back."""
        self._queue(SlotEvent(kind=EventKind.FREE, slots=slots))

    def free_pages(self, pages: torch.Tensor, *, page_size: int) -> None:
        """Whole ``pages`` (int32 | int64 [n]) were given back, filled or not."""
        self._queue(SlotEvent(kind=EventKind.FREE, slots=pages, page_size=page_size))

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """The engine copied the K/V of ``sources`` to ``destinations`` (same dtype, [n])."""
        self._queue(SlotEvent(kind=EventKind.MOVE, slots=sources, destinations=destinations))

    def reset(self) -> None:
        """Every slot was given back at once; what is queued before it has no effect any more."""
        with self._lock:
            self._queued = [SlotEvent(kind=EventKind.RESET)] if self._is_on else []

    def stop(self) -> None:
        """Nobody will take events any more: keep none, and forget what is queued."""
        with self._lock:
            self._is_on = False
            self._queued = []

    def own_queued(self) -> None:
        """Copy the tensors of what is queued: somebody is about to change the engine's own."""
        with self._lock:
            self._queued = [
                event if event.slots is None else replace(event, slots=event.slots.clone())
                for event in self._queued
            ]

    def take(self) -> Sequence[SlotEvent]:
        """The events since the last call, for the coming forward."""
        with self._lock:
            events, self._queued = self._queued, []
            self._streams_of_taken, self._streams = self._streams, set()
            if events:
                self._in_flight.append(events)
        return events

    def wait_for_tensors(self) -> None:
        """The current stream waits for what made the tensors of the events that were taken last.

        For whoever does not follow the engine's streams: an engine's forwards wait for its
        scheduling by themselves.
        """
        with self._lock:
            streams = tuple(self._streams_of_taken)
        for stream in streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _queue(self, event: SlotEvent) -> None:
        with self._lock:
            if self._is_on:
                self._queued.append(event)
                if event.slots is not None and event.slots.is_cuda:
                    self._streams.add(torch.cuda.current_stream(event.slots.device))
