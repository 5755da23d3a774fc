"""K/V that goes away all at once: memory given back while the server sleeps, weights updated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcanary_plugin.hooks.sglang.attach import Session

_KV_CACHE = "kv_cache"


def around_release_memory(
    session: Session | None, original: Callable[[], Any], tags: list[str] | None
) -> Any:
    """Run ``original``, which gives back the memory of ``tags`` (none means all of it)."""
    monitor = session.monitor if session is not None else None
    if monitor is None or (tags and _KV_CACHE not in tags):
        return original()
    with monitor.engine_works():
        # First: an address without memory behind it must not be read.
        monitor.forget_everything()
        return original()


def around_flush_after_update(session: Session | None, original: Callable[[], Any]) -> Any:
    """Run ``original``, which flushes the cache after a weight update if the caller wants it to.

    What was computed behind a flush has another identity, so that K/V of the old weights that
    outlives it is found. Without a flush the engine goes on with it by the operator's own wish.
    """
    if session is None:
        return original()
    flushes = session.flushes
    result = original()
    if session.flushes != flushes:
        session.new_weights()
    return result
