"""Keeps the engine's forwards and the canary's own work apart, on an idle engine and beside one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvcanary_plugin.kernels import beside_the_engine, join_writes


class EngineGate:
    """One side at a time: the engine, from the start of a forward to its end, or an idle turn.

    The engine waits at most for the idle turn that has already begun; an idle turn never waits, it
    does not take place while the engine is inside or while the device still works on what the
    engine launched. An idle turn ends only when the device has done it, so that nothing on a
    device overlaps either. Whatever changes records or slot states goes through here.

    What is launched beside a forward runs while it does: long writes, or all that the canary does
    about it. Whoever comes next, the end of the forward or somebody else, waits for that on their
    stream.

    Args:
        device: device of the records.
        clock: seconds, monotonic.
    """

    def __init__(
        self, device: torch.device, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device = device
        self._clock = clock
        self._lock = threading.RLock()  # of the engine's thread, `engine_works` in itself
        self._engine_waits = self._engine_is_inside = False
        self._tables_are_there = True
        self._left_at: float | None = None
        cuda: Any = torch.cuda if device.type == "cuda" else None
        self._launched = cuda.Event() if cuda is not None else None
        self._idle_stream = cuda.Stream(device) if cuda is not None else None
        # Its blocks go first when the forward's fill the device: they are few.
        self._side = cuda.Stream(device, priority=-1) if cuda is not None else None
        self._before_forward = cuda.Event() if cuda is not None else None
        self._side_is_done = cuda.Event() if cuda is not None else None
        self._is_marked = self._has_side = self._has_branch = False
        self.is_beside_forward = False
        self._marker = torch.zeros(1, dtype=torch.int64, device=device)

    def engine_enters(self) -> None:
        """A forward begins. One that was never left (it failed) is begun again."""
        with self._before_idle_turns():
            self._engine_is_inside = self._tables_are_there = True
            self._is_marked = False
            self.join_branch()

    def branch_begins(self) -> None:
        """Writes follow that are launched beside the forward (``launch_canary_write_kernel``)."""
        self._has_branch = True

    def mark_before_forward(self) -> None:
        """What is launched beside the coming forward follows what the stream holds now."""
        if self._before_forward is not None:
            self._before_forward.record()
        self._is_marked = True

    @contextmanager
    def forward_is_launched(self) -> Iterator[None]:
        """What is launched inside runs beside a forward that was marked, and behind any other.

        Beside it, it follows what was there before the forward. Memory that torch hands out there
        comes back to the same side stream, whose work begins each time behind everything that the
        forward's stream held by then.
        """
        self.is_beside_forward, self._is_marked = self._is_marked, False
        try:
            if not self.is_beside_forward or self._side is None or self._side_is_done is None:
                yield
                return
            self._side.wait_event(self._before_forward)
            with torch.cuda.stream(self._side):
                try:
                    yield
                finally:
                    self._side_is_done.record()
                    self._has_side = True
        finally:
            self.is_beside_forward = False

    def engine_leaves(self) -> None:
        """A forward, all of it, has been launched on the current stream."""
        self.join_branch()
        if self._launched is not None:
            self._launched.record()
        with self._lock:
            self._left_at = self._clock()
            self._engine_is_inside = False

    @contextmanager
    def engine_works(self) -> Iterator[None]:
        """The engine changes records or states outside of a forward, on the current stream.

        It may be another one than the forwards': then it waits for what they launched.
        """
        with self._before_idle_turns():
            if self._launched is not None:
                self._launched.wait()
            self._wait_for_branch()  # the forward itself may be on another stream: it waits as well
            yield
            if self._launched is not None:
                self._launched.record()

    def tables_go(self) -> None:
        """The engine may give away what its page tables lie in, until its next forward."""
        with self._lock:
            self._tables_are_there = False

    @contextmanager
    def tables(self) -> Iterator[bool]:
        """Yields whether page tables may be read. Inside, nobody gives them away."""
        with self._lock:
            yield self._tables_are_there

    def join_branch(self) -> None:
        """The forward's stream goes on once all that runs beside the forward is done."""
        self._wait_for_branch()
        self._has_side = self._has_branch = False

    def engine_left_before(self, seconds: float) -> bool:
        """Whether at least one forward has been and none for that long."""
        left_at = self._left_at
        return left_at is not None and self._clock() - left_at >= seconds

    @contextmanager
    def idle_turn(self) -> Iterator[bool]:
        """Yields whether the turn may take place; if so, nothing of the engine runs during it."""
        if self._engine_waits or not self._lock.acquire(blocking=False):
            yield False
            return
        try:
            if self._engine_is_inside:
                yield False
            elif self._launched is None or self._idle_stream is None:
                yield True
            else:
                with beside_the_engine(self._idle_stream):
                    # Torch has few streams and hands them out again: a graph may be captured here.
                    if torch.cuda.is_current_stream_capturing() or not self._launched.query():
                        yield False
                        return
                    try:
                        yield True
                    finally:
                        self._idle_stream.synchronize()
        finally:
            self._lock.release()

    @contextmanager
    def _before_idle_turns(self) -> Iterator[None]:
        """Holds the lock. A lock is not fair: idle turns could take it again and again."""
        self._engine_waits = True
        with self._lock:
            self._engine_waits = False
            yield

    def _wait_for_branch(self) -> None:
        if self._has_branch:
            join_writes(self._marker)
        if self._has_side and self._side_is_done is not None:
            self._side_is_done.wait()
