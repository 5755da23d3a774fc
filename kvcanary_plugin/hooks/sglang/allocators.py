"""Follow SGLang's slot allocators: what they hand out and take back becomes slot events.

The allocator objects of one engine are wrapped, not their classes: two engines in a process do not
see each other's slots, and an allocator class that is not known here is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvcanary_plugin.hooks.sglang.versions import puts_frees_off
from kvcanary_plugin.lifecycle import SlotEvents

_TOKEN_ALLOCATOR = "TokenToKVPoolAllocator"
_PAGED_ALLOCATOR = "PagedTokenToKVPoolAllocator"
_SWA_ALLOCATOR = "SWATokenToKVPoolAllocator"
_PURE_SWA_ALLOCATOR = "PureSWATokenToKVPoolAllocator"

# A queued event keeps what it is a view of: up to this many bytes, the free list of a busy server.
_LARGE_BYTES = 256 * 1024


def followable(allocator: Any) -> Mapping[str, Any]:
    """Group name to the allocator of its slots, for the allocators that can be followed."""
    name = type(allocator).__name__
    if name in (_TOKEN_ALLOCATOR, _PAGED_ALLOCATOR):
        return {"full": allocator, "mla": allocator}
    if name == _PURE_SWA_ALLOCATOR:
        inner = allocator.swa_attn_allocator
        return {"swa": inner} if type(inner).__name__ == _TOKEN_ALLOCATOR else {}
    if name == _SWA_ALLOCATOR:
        parts = {"full": allocator.full_attn_allocator, "swa": allocator.swa_attn_allocator}
        known = {_TOKEN_ALLOCATOR, _PAGED_ALLOCATOR}
        return parts if all(type(part).__name__ in known for part in parts.values()) else {}
    return {}


def follow(allocator: Any, events: SlotEvents) -> None:
    """Queue what ``allocator`` (one that :func:`followable` names) does from now on."""
    _wrap(allocator, "alloc", _after_alloc(events))
    _wrap(allocator, "clear", lambda _result, *_: events.reset())
    if type(allocator).__name__ == _TOKEN_ALLOCATOR:
        _wrap(allocator, "free", _after_free(allocator, events))
        return
    for method in ("alloc_extend", "alloc_decode"):
        _wrap(allocator, method, _after_alloc(events))
    if hasattr(allocator, "_release_page_ids"):
        # The one place through which pages go back, whichever way they were freed.
        _wrap(allocator, "_release_page_ids", _after_release(allocator, events))
    else:
        _wrap(allocator, "free", _after_paged_free(allocator, events))


def _wrap(allocator: Any, method: str, after: Callable[..., None]) -> None:
    original = getattr(allocator, method)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        after(result, *args)
        return result

    setattr(allocator, method, wrapped)


def _after_alloc(events: SlotEvents) -> Callable[..., None]:
    def after(slots: torch.Tensor | None, *_: Any) -> None:
        if slots is not None and slots.numel() > 0:
            is_piece = slots.nbytes < slots.untyped_storage().nbytes()
            if is_piece and slots.untyped_storage().nbytes() > _LARGE_BYTES:
                # Every free makes a new free list; views of them would keep dozens alive.
                slots = slots.clone()
            events.alloc(slots)

    return after


def _after_free(allocator: Any, events: SlotEvents) -> Callable[..., None]:
    def after(_result: Any, slots: torch.Tensor) -> None:
        # Inside a free group the call is put off; the group's end frees all of it at once.
        if not puts_frees_off(allocator) and slots.numel() > 0:
            # A copy: callers pass views of page-table rows that are rewritten later.
            events.free(slots.clone())

    return after


def _after_paged_free(allocator: Any, events: SlotEvents) -> Callable[..., None]:
    """Before 0.5.21: the only way back, with any of a page's slots for the whole page."""

    def after(_result: Any, slots: torch.Tensor) -> None:
        if not puts_frees_off(allocator) and slots.numel() > 0:
            page_size = int(allocator.page_size)
            events.free_pages(torch.unique(slots // page_size), page_size=page_size)

    return after


def _after_release(allocator: Any, events: SlotEvents) -> Callable[..., None]:
    def after(_result: Any, *page_ids: torch.Tensor) -> None:
        for pages in page_ids:
            if pages.numel() > 0:
                events.free_pages(pages.clone(), page_size=int(allocator.page_size))

    return after
