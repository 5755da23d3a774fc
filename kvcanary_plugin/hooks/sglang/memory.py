"""K/V that goes away all at once: memory given back while the server sleeps, weights updated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcanary_plugin.monitor import CanaryMonitor

_KV_CACHE = "kv_cache"


class Flushes:
    """How often the cache has been flushed: each time, ``allocator`` is cleared."""

    def __init__(self, allocator: Any) -> None:
        self.count = 0
        clear = allocator.clear

        def counted() -> None:
            self.count += 1
            clear()

        allocator.clear = counted


def around_release_memory(
    monitor: CanaryMonitor | None, original: Callable[[], Any], tags: list[str] | None
) -> Any:
    """Run ``original``, which gives back the memory of ``tags`` (none means all of it)."""
    if monitor is None or (tags and _KV_CACHE not in tags):
        return original()
    with monitor.engine_works():
        # First: an address without memory behind it must not be read.
        monitor.forget_everything()
        return original()


def around_flush_after_update(
    flushes: Flushes, new_weights: Callable[[], None], original: Callable[[], Any]
) -> Any:
    """Run ``original``, which flushes the cache after a weight update if the caller wants it to.

    What was computed behind a flush has another identity, so that K/V of the old weights that
    outlives it is found. Without a flush the engine goes on with it by the operator's own wish.
    """
    before = flushes.count
    result = original()
    if flushes.count != before:
        new_weights()
    return result
