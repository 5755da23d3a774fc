"""What the allocator did since the last forward, in the order in which it did it.

The scheduler side queues events on the host; the next forward applies them on the device before it
verifies anything. A slot then goes through these states::

    FREE -> ALLOCATED -> WRITTEN -> SEALED -> FREE        computed by a forward of this engine
    FREE -> ALLOCATED -> EXTERNAL -> FREE                 filled by somebody else and adopted

and belongs to [alloc, free) one owner: the request whose write claims it first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from kvcanary_plugin.kernels import EventKind, SlotEvent

# Forwards for which applied events are kept: their tensors are read by launches that may still
# wait on the device, and an engine runs at most two forwards ahead.
_KEPT_FORWARDS = 4


class SlotEvents:
    """The queue of one group. Filled and taken by the engine's scheduling thread.

    Tensors are kept as they are, not copied: give one that nobody changes any more.
    """

    def __init__(self) -> None:
        self._queued: list[SlotEvent] = []
        self._in_flight: deque[Sequence[SlotEvent]] = deque(maxlen=_KEPT_FORWARDS)

    def alloc(self, slots: torch.Tensor) -> None:
        """``slots`` (int32 | int64 [n]) were handed out."""
        self._queued.append(SlotEvent(kind=EventKind.ALLOC, slots=slots))

    def free(self, slots: torch.Tensor) -> None:
        """``slots`` (int32 | int64 [n]) were given back."""
        self._queued.append(SlotEvent(kind=EventKind.FREE, slots=slots))

    def free_pages(self, pages: torch.Tensor, *, page_size: int) -> None:
        """Whole ``pages`` (int32 | int64 [n]) were given back, filled or not."""
        self._queued.append(SlotEvent(kind=EventKind.FREE, slots=pages, page_size=page_size))

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """The engine copied the K/V of ``sources`` to ``destinations`` (same dtype, [n])."""
        self._queued.append(
            SlotEvent(kind=EventKind.MOVE, slots=sources, destinations=destinations)
        )

    def reset(self) -> None:
        """Every slot was given back at once; what is queued before it has no effect any more."""
        self._queued = [SlotEvent(kind=EventKind.RESET)]

    def take(self) -> Sequence[SlotEvent]:
        """The events since the last call, for the coming forward."""
        events, self._queued = self._queued, []
        self._in_flight.append(events)
        return events
