"""What memory is guarded: one short adapter per pool class of SGLang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcanary_plugin.cache import KVCacheGroup, row_source
from kvcanary_plugin.hooks.sglang.allocators import followable
from kvcanary_plugin.hooks.sglang.features import unsupported_feature
from kvcanary_plugin.kernels import RealKvSource

# Row 0 of req_to_token pads CUDA-graph batches.
PADDING_ROW = 0


@dataclass(frozen=True, slots=True)
class UnsupportedGroup:
    """A part of the KV cache that is not guarded, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class GuardedPools:
    """The groups of one model runner, guarded and not."""

    groups: tuple[KVCacheGroup, ...]
    unsupported: tuple[UnsupportedGroup, ...]


def guarded_pools(model_runner: Any) -> GuardedPools:
    """Groups of ``model_runner``'s KV pool; a class that no adapter knows is unsupported."""
    pool = model_runner.token_to_kv_pool
    refused = unsupported_feature(model_runner.server_args)
    if refused is not None:
        return GuardedPools((), (UnsupportedGroup("full", refused),))
    adapter = _ADAPTERS.get(type(pool).__name__)
    if adapter is None:
        known = ", ".join(sorted(_ADAPTERS))
        reason = f"pool class {type(pool).__name__} has no adapter (there are: {known})"
        return GuardedPools((), (UnsupportedGroup("full", reason),))
    return adapter(model_runner, pool)


def _token_layout_problem(pool: Any) -> str | None:
    layout = getattr(pool, "kv_cache_layout", "nhd")
    return None if layout == "nhd" else f"layout {layout!r} of {type(pool).__name__} has no adapter"


def _slot_sources(buffers: list[torch.Tensor]) -> tuple[RealKvSource, ...]:
    """Sources of per-layer buffers [slots, ...] in which a row is a slot."""
    return tuple(row_source(buffer) for buffer in buffers)


def _group(model_runner: Any, pool: Any, name: str, buffers: list[torch.Tensor]) -> KVCacheGroup:
    return KVCacheGroup(
        name=name,
        num_slots=pool.size + pool.page_size,
        page_table=model_runner.req_to_token_pool.req_to_token,
        page_size=1,
        padding_row=PADDING_ROW,
        tracks_allocation=name in followable(model_runner.token_to_kv_pool_allocator),
        table_stable_through_forward=_table_is_stable(model_runner),
        sources=_slot_sources(buffers),
    )


def _table_is_stable(model_runner: Any) -> bool:
    """Whether nobody rewrites req_to_token between the launch and the end of a forward.

    With overlap scheduling on a GPU the scheduler may, as soon as the forward has read the table.
    """
    on_cpu = model_runner.req_to_token_pool.req_to_token.device.type == "cpu"
    return on_cpu or bool(getattr(model_runner.server_args, "disable_overlap_schedule", False))


def _mha(model_runner: Any, pool: Any) -> GuardedPools:
    problem = _token_layout_problem(pool)
    if problem is not None:
        return GuardedPools((), (UnsupportedGroup("full", problem),))
    group = _group(model_runner, pool, "full", [*pool.k_buffer, *pool.v_buffer])
    return GuardedPools((group,), ())


def _mla(model_runner: Any, pool: Any) -> GuardedPools:
    group = _group(model_runner, pool, "mla", list(pool.kv_buffer))
    return GuardedPools((group,), ())


def _swa(model_runner: Any, pool: Any) -> GuardedPools:
    parts = (pool.full_kv_pool, pool.swa_kv_pool)
    for part in parts:
        problem = _token_layout_problem(part)
        if _ADAPTERS.get(type(part).__name__) is not _mha:
            problem = f"sub-pool class {type(part).__name__} has no adapter inside SWAKVPool"
        if problem is not None:
            return GuardedPools(
                (), (UnsupportedGroup("full", problem), UnsupportedGroup("swa", problem))
            )
    full, swa = (
        _group(model_runner, part, name, [*part.k_buffer, *part.v_buffer])
        for part, name in zip(parts, ("full", "swa"), strict=True)
    )
    windowed = replace(
        swa,
        full_to_swa=pool.full_to_swa_index_mapping,
        swa_window_size=int(model_runner.sliding_window_size),
    )
    return GuardedPools((full, windowed), ())


_ADAPTERS: dict[str, Callable[[Any, Any], GuardedPools]] = {
    "MHATokenToKVPool": _mha,
    "MLATokenToKVPool": _mla,
    "SWAKVPool": _swa,
}
