"""What queued events of SGLang's own allocators keep alive."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvcanary_plugin.hooks.sglang.allocators import follow
from kvcanary_plugin.kernels import EventKind
from kvcanary_plugin.lifecycle import SlotEvents


@pytest.mark.parametrize("size", [1_000, 500_000])
def test_events_do_not_keep_the_free_lists_of_a_large_pool(sglang_session: None, size: int):
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    pool = SimpleNamespace()
    allocator = TokenToKVPoolAllocator(size, torch.float16, "cpu", pool, need_sort=False)
    events = SlotEvents()
    follow(allocator, events)
    handed_out = []
    for _ in range(40):
        slots = allocator.alloc(16)
        handed_out.append(slots.clone())
        allocator.free(slots[:4])  # makes a new free list
    queued = events.take()
    allocs = [event.slots for event in queued if event.kind is EventKind.ALLOC]
    assert all(torch.equal(event, slots) for event, slots in zip(allocs, handed_out, strict=True))
    storages = {
        event.slots.untyped_storage().data_ptr(): event.slots.untyped_storage().nbytes()
        for event in queued
    }
    assert sum(storages.values()) < 1 << 20
