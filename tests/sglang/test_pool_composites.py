"""Pools that SGLang puts together of others: which groups they become, and what is left out."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary_plugin.cache import KVCacheGroup
from kvcanary_plugin.hooks.sglang.layouts import LAYOUTS
from kvcanary_plugin.hooks.sglang.pools import (
    COMPOSITES,
    UNSUPPORTED_POOLS,
    GuardedPools,
    guarded_pools,
)
from tests.sglang import pool_cases
from tests.sglang.pool_cases import (
    DIM,
    HEADS,
    PAGE,
    RANK,
    ROPE,
    SIZE,
    at,
    dsa,
    dsv4_model,
    layer,
    mha,
    mla,
    one_rank,
)
from tests.sglang.test_pool_bytes import Memory, strip_of

memory_pool = pool_cases.memory_pool
qsa_pool = pytest.importorskip("sglang.srt.mem_cache.qsa_kv_pool")
mem_cache = pytest.importorskip("sglang.srt.mem_cache")

WINDOW = 7


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


def pools_of(
    pool: Any,
    *,
    allocator: Any = None,
    model: Any = None,
    window: int | None = WINDOW,
    **args: Any,
) -> GuardedPools:
    return guarded_pools(
        SimpleNamespace(
            token_to_kv_pool=pool,
            token_to_kv_pool_allocator=allocator,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros((5, 32), dtype=torch.int32)),
            server_args=SimpleNamespace(**args),
            model_config=model,
            sliding_window_size=window,
        )
    )


def names(pools: GuardedPools) -> tuple[list[str], list[str]]:
    return [group.name for group in pools.groups], [part.name for part in pools.unsupported]


def owned(group: KVCacheGroup, slot: int) -> set[int]:
    return set().union(*(strip_of(source, slot) for source in group.sources))


# ---- full and windowed layers --------------------------------------------------------------------


def swa(page_size: int = 1, **kwargs: Any) -> Any:
    pool = pool_cases.swa_pool.SWAKVPool(
        **{
            "size": SIZE,
            "size_swa": PAGE,
            "page_size": page_size,
            "dtype": torch.bfloat16,
            "head_num": HEADS,
            "head_dim": DIM,
            "swa_attention_layer_ids": [0, 2],
            "full_attention_layer_ids": [1],
            "device": "cpu",
        }
        | kwargs
    )
    pool.register_mapping(torch.zeros(SIZE + page_size + 1, dtype=torch.int64))
    return pool


def test_a_store_of_a_hybrid_changes_one_group_at_the_slot_of_its_own_numbering():
    pool = swa()
    full, window = pools_of(pool).groups
    where = memory_pool.KVWriteLoc(at(70), swa_loc=at(5))
    for layer_id, group, slot in ((1, full, 70), (0, window, 5), (2, window, 5)):
        memory = [Memory(part) for part in (pool.full_kv_pool, pool.swa_kv_pool)]
        k, v = torch.randn(2, 1, HEADS, DIM, dtype=torch.bfloat16)
        pool.set_kv_buffer(layer(layer_id), where, k, v)
        changed = set().union(*(part.changed() for part in memory))
        assert changed
        assert changed <= owned(group, slot)


def test_sub_pools_of_a_hybrid_may_be_latent_or_carry_an_index():
    common = {"page_size": PAGE, "device": "cpu", "enable_memory_saver": False}
    pool = swa(
        page_size=PAGE,
        full_kv_pool_class=memory_pool.DSATokenToKVPool,
        swa_kv_pool_class=memory_pool.MLATokenToKVPool,
        full_kv_pool_kwargs={
            **common,
            "kv_lora_rank": RANK,
            "qk_rope_head_dim": ROPE,
            "index_head_dim": 128,
            "kv_cache_dim": RANK + ROPE,
        },
        swa_kv_pool_kwargs={**common, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
    )
    full, window = pools_of(pool).groups
    assert [s.num_bytes_per_token for s in full.sources] == [(RANK + ROPE) * 2, 128, 4]
    assert [s.num_bytes_per_token for s in window.sources] == [48, 48]
    assert window.full_to_swa is pool.full_to_swa_index_mapping


def test_scales_left_out_of_a_sub_pool_are_named_by_its_group():
    pool = swa(
        page_size=128,
        size=256,
        size_swa=128,
        head_dim=128,
        dtype=torch.float8_e4m3fn,
        token_to_kv_pool_class=memory_pool.MHATokenToKVPoolMXFP8,
    )
    assert names(pools_of(pool)) == (["full", "swa"], ["full_scales", "swa_scales"])


def test_a_model_of_windows_only_is_read_through_the_table_itself():
    pool = swa(size=0, full_attention_layer_ids=[], swa_attention_layer_ids=[0, 1, 2])
    allocator = pool_cases.swa_allocator.PureSWATokenToKVPoolAllocator(
        PAGE, 1, torch.bfloat16, "cpu", pool, False
    )
    pools = pools_of(pool, allocator=allocator)
    (group,) = pools.groups
    assert pools.unsupported == ()
    assert (group.name, group.num_slots, group.swa_window_size) == ("swa", PAGE + 1, WINDOW)
    assert group.full_to_swa is None
    assert len(group.sources) == 6


def test_a_pipeline_stage_without_full_layers_still_looks_its_windows_up():
    pool = swa(full_attention_layer_ids=[], swa_attention_layer_ids=[0, 1])
    full, window = pools_of(pool).groups
    assert full.sources == ()
    assert (len(window.sources), window.full_to_swa) == (4, pool.full_to_swa_index_mapping)


def test_a_window_of_unknown_size_is_unsupported():
    pools = pools_of(swa(), window=None)
    assert names(pools) == ([], ["full", "swa"])
    assert "window" in pools.unsupported[0].reason


def test_a_window_that_is_not_addressed_by_the_lookup_table_is_unsupported():
    pool = swa()
    pool.swa_uses_full_indices = True
    assert names(pools_of(pool)) == ([], ["full", "swa"])


# ---- layers that carry a state, an index ---------------------------------------------------------


def hybrid_linear(**kwargs: Any) -> Any:
    return memory_pool.HybridLinearKVPool(
        **{
            "size": SIZE,
            "dtype": torch.bfloat16,
            "page_size": 1,
            "head_num": HEADS,
            "head_dim": DIM,
            "full_attention_layer_ids": [3, 7],
            "device": "cpu",
            "mamba_pool": object(),
        }
        | kwargs
    )


def test_the_full_layers_of_a_linear_hybrid_are_guarded_and_its_state_is_named():
    pool = hybrid_linear()
    pools = pools_of(pool)
    assert names(pools) == (["full"], ["mamba"])
    assert "state" in pools.unsupported[0].reason
    memory = Memory(pool.full_kv_pool)
    k, v = torch.randn(2, 1, HEADS, DIM, dtype=torch.bfloat16)
    pool.set_kv_buffer(layer(7), at(9), k, v)
    changed = memory.changed()
    assert changed
    assert changed <= owned(pools.groups[0], 9)


def test_the_full_layers_of_a_linear_hybrid_may_be_latent():
    pool = hybrid_linear(use_mla=True, kv_lora_rank=RANK, qk_rope_head_dim=ROPE)
    assert names(pools_of(pool)) == (["mla"], ["mamba"])


def test_a_compressed_index_beside_a_linear_hybrid_is_named():
    pool = qsa_pool.QSATokenToKVPool(
        size=SIZE,
        dtype=torch.bfloat16,
        page_size=16,
        head_num=HEADS,
        head_dim=DIM,
        full_attention_layer_ids=[1],
        device="cpu",
        mamba_pool=object(),
        qsa_index_kv_heads=1,
        qsa_index_head_dim=64,
        qsa_compress_ratio=4,
        qsa_token_topk=16,
        num_request_slots=4,
    )
    assert names(pools_of(pool)) == (["full"], ["mamba", "full_index"])


def test_a_pooled_index_of_dsa_is_named_and_the_latent_guarded():
    pool = dsa(size=4 * PAGE, page_size=2 * PAGE, index_kpool=2)
    pools = pools_of(pool)
    assert names(pools) == (["mla"], ["mla_index"])
    assert [s.num_bytes_per_token for s in pools.groups[0].sources] == [(RANK + ROPE) * 2] * 3


def test_the_sparse_index_of_minimax_is_part_of_the_slot():
    pool = memory_pool.MiniMaxSparseKVPool(
        size=SIZE,
        page_size=1,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=DIM,
        idx_head_dim=32,
        dense_layer_ids=[0],
        sparse_layer_ids=[1, 2],
        device="cpu",
        disable_value_sparse_layer_ids=[2],
        start_layer=0,
        end_layer=3,
    )
    pools = pools_of(pool)
    assert names(pools) == (["full"], [])
    memory = [Memory(p) for p in (pool.main_pool, pool.index_kv_pool, pool.index_k_pool)]
    k, v = torch.randn(2, 1, HEADS, DIM, dtype=torch.bfloat16)
    index_k, index_v = torch.randn(2, 1, 1, 32, dtype=torch.bfloat16)
    pool.set_kv_buffer(layer(0), at(9), k, v)
    pool.set_fused_kv_index_buffer(layer(1), at(9), k, v, index_k, index_v)
    pool.set_fused_kv_index_buffer(layer(2), at(9), k, v, index_k, None)
    changed = set().union(*(part.changed() for part in memory))
    assert changed <= owned(pools.groups[0], 9)
    assert all(strip_of(source, 9) & changed for source in pools.groups[0].sources)


# ---- DeepSeek-V4 ---------------------------------------------------------------------------------


def test_the_window_of_deepseek_v4_is_guarded_and_its_compressed_rows_are_named():
    pool = dsv4_model()
    allocator = pool_cases.swa_allocator.SWATokenToKVPoolAllocator(
        1024, 512, 256, torch.float8_e4m3fn, "cpu", pool, False
    )
    pools = pools_of(pool, allocator=allocator)
    full, window = pools.groups
    assert names(pools) == (["full", "swa"], ["full_bytes", "compress_state"])
    assert (full.num_slots, full.sources, full.full_to_swa) == (1024 + 256, (), None)
    assert full.unsupported_checks == {"real_kv"}
    assert (window.num_slots, window.swa_window_size) == (512 + 256, WINDOW)
    assert window.full_to_swa is pool.full_to_swa_index_mapping
    assert [s.num_bytes_per_token for s in window.sources] == [576, 8] * 3
    assert full.tracks_allocation
    assert window.tracks_allocation


def test_a_window_of_deepseek_v4_in_smaller_physical_pages_has_as_many_slots():
    with pytest.MonkeyPatch.context() as patch:
        sm120 = SimpleNamespace(is_sm120=True)
        patch.setattr(pool_cases.dsv4, "get_platform", lambda: sm120)
        with pool_cases.environ.envs.SGLANG_OPT_SM120_DIRECT_SWA_KV.override(True):
            pool = dsv4_model()
    pool.register_mapping(torch.zeros(1024 + 256 + 1, dtype=torch.int64))
    window = pools_of(pool).groups[1]
    assert {source.page_size for source in window.sources} == {64}
    assert window.num_slots == 512 + 256


def test_a_window_of_deepseek_v4_without_slots_is_unsupported():
    pool = dsv4_model()
    pool.register_mapping(torch.zeros(1024 + 256 + 1, dtype=torch.int64))
    pool.swa_req_ring_size = 128
    assert names(pools_of(pool)) == ([], ["full", "swa"])


# ---- what passes for what ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: mha(dtype=torch.bfloat16),
        lambda: mla(dtype=torch.bfloat16),
        dsa,
        swa,
        hybrid_linear,
    ],
)
def test_a_subclass_does_not_pass_for_its_parent(make: Callable[[], Any]):
    pool = make()
    assert pools_of(pool).groups
    pool.__class__ = type("SomebodyElsesPool", (type(pool),), {})
    pools = pools_of(pool)
    assert pools.groups == ()
    assert "SomebodyElsesPool" in pools.unsupported[0].reason


def test_a_subclass_inside_a_hybrid_does_not_pass_for_its_parent():
    for pool, part, unsupported in (
        (swa(), "swa_kv_pool", ["full", "swa"]),
        (hybrid_linear(), "full_kv_pool", ["full", "mamba"]),
    ):
        inner = getattr(pool, part)
        inner.__class__ = type("SomebodyElsesPool", (type(inner),), {})
        pools = pools_of(pool)
        assert names(pools) == ([], unsupported)
        assert "SomebodyElsesPool" in pools.unsupported[0].reason


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_POOLS))
def test_a_known_class_that_cannot_be_guarded_says_why(name: str):
    pools = pools_of(type(name, (), {})())
    assert names(pools) == ([], ["full"])
    assert pools.unsupported[0].reason == UNSUPPORTED_POOLS[name]


def test_every_pool_class_of_the_engine_is_known():
    """A class that a new version brings has to be looked at before it is guarded or refused."""
    bases = {"KVCache", "BaseSWAKVPool"}
    inside_others = {
        "HiSparseC4DevicePool",  # of DeepSeek-V4 with hierarchical sparse attention
        "DeepSeekV4IndexerPool",
        "MiniMaxM3Nvfp4IndexKPool",
        "MiniMaxM3Nvfp4MainKVPool",
        "UnifiedDraftKVPool",  # of a draft model
        "UnifiedDraftSWAKVPool",
    }
    found = set()
    for module in pkgutil.iter_modules(mem_cache.__path__):
        if "pool" in module.name or "split" in module.name:
            loaded = importlib.import_module(f"sglang.srt.mem_cache.{module.name}")
            found |= {
                name
                for name, cls in inspect.getmembers(loaded, inspect.isclass)
                if issubclass(cls, memory_pool.KVCache)
            }
    assert len(found) > 20
    assert found - bases - inside_others - set(LAYOUTS) - set(COMPOSITES) == set(UNSUPPORTED_POOLS)


# ---- slots that mean something else --------------------------------------------------------------


def test_slots_that_are_spread_over_ranks_are_unsupported():
    pools = pools_of(mha(dtype=torch.bfloat16), dcp_size=2)
    assert names(pools) == ([], ["full"])
    assert "context parallelism" in pools.unsupported[0].reason


def test_rows_that_begin_with_encoder_slots_are_unsupported():
    pools = pools_of(mha(dtype=torch.bfloat16), model=SimpleNamespace(is_encoder_decoder=True))
    assert names(pools) == ([], ["full"])
    assert "encoder" in pools.unsupported[0].reason


# ---- sizes ---------------------------------------------------------------------------------------


def test_slots_are_counted_in_whole_pages():
    pool = dsa(size=SIZE + 36)  # the index has no page for a page that is never handed out
    (group,) = pools_of(pool).groups
    assert group.num_slots == SIZE + PAGE


def test_a_buffer_that_is_shorter_than_its_pool_is_unsupported():
    pool = mha(dtype=torch.bfloat16)
    pool.v_buffer[1] = pool.v_buffer[1][:10]
    pools = pools_of(pool)
    assert names(pools) == ([], ["full"])
    assert "10 slots" in pools.unsupported[0].reason


def test_a_pool_that_got_less_than_it_reserved_is_guarded_up_to_its_size():
    pool = mha(dtype=torch.bfloat16)
    pool.size = SIZE // 2
    (group,) = pools_of(pool).groups
    assert group.num_slots == SIZE // 2 + 1
    assert all(source.tensor.shape[0] == SIZE + 1 for source in group.sources)
