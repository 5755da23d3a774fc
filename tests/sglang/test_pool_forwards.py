"""Forwards over every kind of pool under a real session: silent, until a byte of a slot changes.

Allocation, page table and lookup table are the engine's own; what stands for the model writes each
token through the pool's own store, in every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary_plugin.hooks.sglang.attach import Session
from kvcanary_plugin.kernels import LaunchTag
from kvcanary_plugin.ring import RingReader
from kvcanary_plugin.violations import RequestNames
from tests.monitor.world import checking_everything
from tests.sglang import pool_cases
from tests.sglang.engine import ROWS, WINDOW, Engine, Request
from tests.sglang.pool_cases import DIM, HEADS, PAGE, SIZE, at, layer, one_rank
from tests.sglang.test_pool_bytes import flip
from tests.sglang.test_pool_composites import hybrid_linear, swa

paged = pytest.importorskip("sglang.srt.mem_cache.allocator.paged")
token = pytest.importorskip("sglang.srt.mem_cache.allocator.token")
memory_pool = pool_cases.memory_pool

LENGTH, DECODES = 21, 14


@dataclass(frozen=True, slots=True)
class Kind:
    """A pool with its allocator, and how the model stores the token of one slot."""

    name: str
    pool: Callable[[], Any]
    allocator: Callable[[Any], Any]
    store: Callable[[Any, int], None]


class PoolEngine(Engine):
    """An engine rank with any pool."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.pool = kind.pool()
        self.allocator = kind.allocator(self.pool)
        self.req_to_token_pool = memory_pool.ReqToTokenPool(
            size=ROWS - 1, max_context_len=96, device="cpu", enable_memory_saver=False
        )
        self.runner = SimpleNamespace(
            token_to_kv_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.req_to_token_pool,
            server_args=SimpleNamespace(),
            sliding_window_size=WINDOW,
            max_total_num_tokens=SIZE,
            tp_rank=0,
        )
        self.session = Session(checking_everything(), self.runner)
        self._names = RequestNames()
        self._reader = RingReader(self.monitor.sink.ring)
        self._spare: dict[int, list[int]] = {}
        self._slid: dict[int, int] = {}

    def give_slots(self, request: Request, count: int) -> None:
        spare = self._spare.setdefault(request.row, [])
        while len(spare) < count:
            spare += self._pages()
        start = len(request.slots)
        request.slots += spare[:count]
        del spare[:count]
        self.table[request.row, start : start + count] = torch.tensor(
            request.slots[start:], dtype=torch.int32
        )

    def _pages(self) -> list[int]:
        page_size = self.allocator.page_size
        if page_size == 1 or not hasattr(self.allocator, "swa_attn_allocator"):
            return self.allocator.alloc(page_size).tolist()
        full = self.allocator.full_attn_allocator.alloc(page_size)
        window = self.allocator.swa_attn_allocator.alloc(page_size)
        self.allocator.set_full_to_swa_mapping(full, window)
        return full.tolist()

    def fill(self, slots: torch.Tensor) -> None:
        for slot in slots.tolist():
            self.kind.store(self.pool, slot)

    def slide(self, request: Request) -> None:
        """Give back what has left the window of ``request``, as the scheduler does."""
        if not hasattr(self.pool, "swa_kv_pool") or self.allocator.page_size > 1:
            return
        end = max(len(request.tokens) - 1 - WINDOW, 0)
        dead = request.slots[self._slid.get(request.row, 0) : end]
        self._slid[request.row] = end
        if dead:
            self.allocator.free_swa(torch.tensor(dead))


def both_pools(store: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    def run(pool: Any, slot: int) -> None:
        store(pool.full_kv_pool, slot)
        window = int(pool.full_to_swa_index_mapping[slot])
        if window > 0:
            store(pool.swa_kv_pool, window)

    return run


def one_layer_each(pool: Any, slot: int) -> None:
    for part in (pool.k_buffer, pool.v_buffer) if hasattr(pool, "k_buffer") else (pool.kv_buffer,):
        for buffer in part:
            buffer[slot] = torch.randn(buffer[slot].shape)


def store_window(pool: Any, slot: int) -> None:
    one_layer_each(pool.swa_kv_pool, slot)


def store_hybrid(pool: Any, slot: int) -> None:
    for layer_id in (3, 7):
        k, v = torch.randn(2, 1, HEADS, DIM, dtype=torch.bfloat16)
        pool.set_kv_buffer(layer(layer_id), at(slot), k, v)


def store_dsv4_window(pool: Any, slot: int) -> None:
    window = int(pool.full_to_swa_index_mapping[slot])
    if window > 0:
        pool_cases.store_dsv4(pool.swa_kv_pool, window)


def store_index_too(pool: Any, slot: int) -> None:
    """Latent and index of one token; by addresses, because the stores are kernels."""
    page, offset = divmod(slot, PAGE)
    one_layer_each(pool, slot)
    for index in pool.index_k_with_scale_buffer:
        index[page, offset * 128 : offset * 128 + 128].random_(1, 255)
        start = PAGE * 128 + offset * 4
        index[page, start : start + 4].random_(1, 255)


def by_token(pool: Any) -> Any:
    return token.TokenToKVPoolAllocator(SIZE, torch.float32, "cpu", pool, need_sort=False)


def by_page(pool: Any) -> Any:
    return paged.PagedTokenToKVPoolAllocator(
        pool.size, pool.page_size, torch.float32, "cpu", pool, need_sort=False
    )


def by_window(size: int, window: int, page_size: int) -> Callable[[Any], Any]:
    return lambda pool: pool_cases.swa_allocator.SWATokenToKVPoolAllocator(
        size, window, page_size, torch.float32, "cpu", pool, need_sort=False
    )


def all_windows(pool: Any) -> Any:
    return pool_cases.swa_allocator.PureSWATokenToKVPoolAllocator(
        SIZE, 1, torch.float32, "cpu", pool, False
    )


KINDS = [
    Kind("MHA HND", pool_cases.hnd, by_page, pool_cases.store_kv),
    Kind(
        "MHA FP4",
        lambda: pool_cases.mha(memory_pool.MHATokenToKVPoolFP4, dtype=torch.float4_e2m1fn_x2),
        by_token,
        pool_cases.store_kv,
    ),
    Kind(
        "MLA FP8",
        lambda: pool_cases.mla(dtype=torch.float8_e4m3fn),
        by_token,
        pool_cases.store_latent,
    ),
    Kind("DSA", lambda: pool_cases.dsa(size=5 * PAGE), by_page, store_index_too),
    Kind("full and windowed", swa, by_window(SIZE, PAGE, 1), both_pools(one_layer_each)),
    Kind(
        "full and windowed, a stage without full layers",
        lambda: swa(full_attention_layer_ids=[], swa_attention_layer_ids=[0, 1]),
        by_window(SIZE, PAGE, 1),
        both_pools(one_layer_each),
    ),
    Kind(
        "windows only",
        lambda: swa(
            size=0, size_swa=SIZE, full_attention_layer_ids=[], swa_attention_layer_ids=[0, 1]
        ),
        all_windows,
        store_window,
    ),
    Kind("hybrid linear", hybrid_linear, by_token, store_hybrid),
    Kind(
        "DeepSeek-V4",
        lambda: pool_cases.dsv4_model(swa_size=1024),
        by_window(1024, 1024, 256),
        store_dsv4_window,
    ),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def engine(request: pytest.FixtureRequest, sglang_session: None) -> Iterator[PoolEngine]:
    with one_rank():
        engine = PoolEngine(request.param)
        yield engine
        engine.close()


def tokens(seed: int, count: int = LENGTH) -> list[int]:
    return [(seed * 1000 + index * 7) % 32000 + 1 for index in range(count)]


def serve(engine: PoolEngine) -> tuple[Request, Request]:
    """Prefill, a request that shares its beginning, and decodes past a page's and window's end."""
    first = Request("first", 1, tokens(1))
    assert engine.prefill(first) == []
    second = Request("second", 2, [*tokens(1)[:16], *tokens(2, 5)])
    engine.share(second, first.slots[:16])
    assert engine.prefill(second, prefix=16) == []
    for step in range(DECODES):
        assert engine.decode(first, second, tokens=[100 + step, 200 + step]) == []
        engine.slide(first)
    return first, second


def test_healthy_forwards_are_silent_and_looked_at(engine: PoolEngine):
    serve(engine)
    for guard in engine.monitor.guards:
        assert guard.slots_run(LaunchTag.VERIFY) > 8 * DECODES
        assert guard.group.tracks_allocation


def test_a_byte_that_changes_in_any_source_is_reported_in_its_group(engine: PoolEngine):
    _, second = serve(engine)
    for guard in engine.monitor.guards:
        lookup = guard.group.full_to_swa
        for source in guard.group.sources:
            last = second.slots[len(second.tokens) - 1]
            slot = last if lookup is None else int(lookup[last])
            flip(source, slot, 0)
            reported = engine.decode(second, tokens=[9])
            assert {(v.group, v.slot, v.checks) for v in reported} == {
                (guard.group.name, slot, ("real_kv",))
            }
            flip(source, slot, 0)
    assert engine.decode(second, tokens=[9]) == []
