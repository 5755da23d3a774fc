"""Groups from SGLang's real pool and allocator classes, allocated on the CPU.

The model runner around them is a stand-in with the four attributes that the hook reads.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary_plugin.hooks.sglang.allocators import follow, followable
from kvcanary_plugin.hooks.sglang.pools import _table_is_stable, guarded_pools
from kvcanary_plugin.kernels import EventKind
from kvcanary_plugin.lifecycle import SlotEvents

memory_pool = pytest.importorskip("sglang.srt.mem_cache.memory_pool")
token_allocator = pytest.importorskip("sglang.srt.mem_cache.allocator.token")
paged_allocator = pytest.importorskip("sglang.srt.mem_cache.allocator.paged")
swa_pool = pytest.importorskip("sglang.srt.mem_cache.swa_memory_pool")

SIZE, LAYERS, HEADS, DIM = 64, 3, 2, 8


def mha(page_size: int = 1) -> Any:
    return memory_pool.MHATokenToKVPool(
        size=SIZE,
        page_size=page_size,
        dtype=torch.float32,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def runner(pool: Any, allocator: Any = None, **server_args: Any) -> Any:
    return SimpleNamespace(
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=allocator,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros((5, 32), dtype=torch.int32)),
        server_args=SimpleNamespace(**server_args),
        sliding_window_size=7,
    )


def test_every_layers_k_and_v_of_an_mha_pool_are_sources():
    pool = mha()
    pools = guarded_pools(runner(pool))
    (group,) = pools.groups
    assert pools.unsupported == ()
    assert (group.name, group.num_slots, group.page_size) == ("full", SIZE + 1, 1)
    assert len(group.sources) == 2 * LAYERS
    assert {source.num_bytes_per_token for source in group.sources} == {HEADS * DIM * 4}
    addresses = [source.tensor.data_ptr() for source in group.sources]
    assert addresses == [buffer.data_ptr() for buffer in [*pool.k_buffer, *pool.v_buffer]]


def test_the_latent_of_an_mla_pool_is_one_source_a_layer():
    pool = memory_pool.MLATokenToKVPool(
        size=SIZE,
        page_size=1,
        dtype=torch.float32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    (group,) = guarded_pools(runner(pool)).groups
    assert group.name == "mla"
    assert len(group.sources) == LAYERS
    assert {source.num_bytes_per_token for source in group.sources} == {48 * 4}


def test_a_sliding_window_pool_is_two_groups_with_one_lookup_table():
    pool = swa_pool.SWAKVPool(
        size=SIZE,
        size_swa=32,
        page_size=1,
        dtype=torch.float32,
        head_num=HEADS,
        head_dim=DIM,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1],
        device="cpu",
    )
    pool.full_to_swa_index_mapping = torch.zeros(SIZE + 2, dtype=torch.int64)
    full, swa = guarded_pools(runner(pool)).groups
    assert (full.name, full.num_slots, full.full_to_swa, len(full.sources)) == ("full", 65, None, 2)
    assert (swa.name, swa.num_slots, swa.swa_window_size, len(swa.sources)) == ("swa", 33, 7, 4)
    assert swa.full_to_swa is pool.full_to_swa_index_mapping


class SomebodyElsesPool(memory_pool.MHATokenToKVPool):
    """A pool class that no adapter knows."""


def test_an_unknown_pool_class_is_unsupported_by_name():
    pool = mha()
    pool.__class__ = SomebodyElsesPool
    pools = guarded_pools(runner(pool))
    assert pools.groups == ()
    assert "SomebodyElsesPool" in pools.unsupported[0].reason


def test_another_layout_of_a_known_class_is_unsupported():
    pool = mha()
    pool.kv_cache_layout = "vectorized_5d"
    pools = guarded_pools(runner(pool))
    assert pools.groups == ()
    assert "vectorized_5d" in pools.unsupported[0].reason


def kinds(events: SlotEvents) -> list[tuple[EventKind, list[int]]]:
    return [(e.kind, [] if e.slots is None else e.slots.tolist()) for e in events.take()]


def test_a_token_allocator_is_followed_through_groups_of_frees_and_clear():
    allocator = token_allocator.TokenToKVPoolAllocator(
        SIZE, torch.float32, "cpu", mha(), need_sort=False
    )
    events = SlotEvents()
    follow(followable(allocator)["full"], events)

    slots = allocator.alloc(3)
    allocator.free(slots[:1])
    allocator.free_group_begin()
    allocator.free(slots[1:2])
    assert kinds(events) == [(EventKind.ALLOC, [1, 2, 3]), (EventKind.FREE, [1])]
    allocator.free(slots[2:])
    allocator.free_group_end()
    assert kinds(events) == [(EventKind.FREE, [2, 3])]
    assert allocator.alloc(SIZE + 1) is None
    allocator.clear()
    assert kinds(events) == [(EventKind.RESET, [])]


def test_a_freed_row_that_is_rewritten_later_does_not_change_the_event():
    allocator = token_allocator.TokenToKVPoolAllocator(
        SIZE, torch.float32, "cpu", mha(), need_sort=False
    )
    events = SlotEvents()
    follow(allocator, events)
    row = allocator.alloc(2).to(torch.int32)
    events.take()
    allocator.free(row)
    row.fill_(0)
    assert kinds(events) == [(EventKind.FREE, [1, 2])]


def test_a_paged_allocator_gives_back_whole_pages():
    allocator = paged_allocator.PagedTokenToKVPoolAllocator(
        SIZE, 4, torch.float32, "cpu", mha(page_size=4), need_sort=False
    )
    events = SlotEvents()
    follow(followable(allocator)["full"], events)
    slots = allocator.alloc(8)
    allocator.free(slots[:5])
    alloc, free = events.take()
    assert (alloc.kind, alloc.slots.tolist()) == (EventKind.ALLOC, slots.tolist())
    assert (free.kind, free.page_size, sorted(free.slots.tolist())) == (EventKind.FREE, 4, [1, 2])


def test_an_allocator_that_is_not_known_is_not_followed():
    assert followable(SimpleNamespace()) == {}
    assert guarded_pools(runner(mha(), SimpleNamespace())).groups[0].tracks_allocation is False


@pytest.mark.parametrize(
    ("device", "settings", "is_stable"),
    [
        ("cpu", {}, True),
        ("cuda", {}, False),
        ("cuda", {"disable_overlap_schedule": True}, True),
        ("cuda", {"disable_overlap_schedule": True, "pp_size": 2}, False),
    ],
)
def test_a_table_is_compared_only_where_schedule_and_forwards_share_a_stream(
    device: str, settings: dict[str, Any], is_stable: bool
):
    """A pipeline switches overlap scheduling off, and has its forwards on a stream of their own."""
    table = SimpleNamespace(device=SimpleNamespace(type=device))
    stand_in = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        server_args=SimpleNamespace(**settings),
    )
    assert _table_is_stable(stand_in) is is_stable
