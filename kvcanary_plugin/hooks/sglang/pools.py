"""What memory is guarded: the pool classes of SGLang, and the groups that each of them holds.

How a class lays out its slots stands in ``layouts``; here is how pools are put together. Classes
are known by their exact name, so that a subclass never passes for its parent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcanary_plugin.cache import KVCacheGroup
from kvcanary_plugin.canary import UnguardedGroup
from kvcanary_plugin.hooks.sglang.allocators import followable
from kvcanary_plugin.hooks.sglang.features import unsupported_feature
from kvcanary_plugin.hooks.sglang.layouts import LAYOUTS, LeftOut, SlotBytes
from kvcanary_plugin.kernels import RealKvSource
from kvcanary_plugin.strips import UnsupportedLayout

# Row 0 of req_to_token pads CUDA-graph batches.
PADDING_ROW = 0


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GuardedPools:
    """The groups of one model runner, guarded and not."""

    groups: tuple[KVCacheGroup, ...]
    unsupported: tuple[UnguardedGroup, ...]


def guarded_pools(model_runner: Any) -> GuardedPools:
    """Groups of ``model_runner``'s KV pool; a class that is not known is unsupported."""
    reason = unsupported_feature(model_runner.server_args) or _slots_mean_something_else(
        model_runner
    )
    if reason is not None:
        return _nothing(("full",), reason)
    pool = model_runner.token_to_kv_pool
    name = type(pool).__name__
    composite = COMPOSITES.get(name)
    try:
        if composite is not None:
            return composite.groups(model_runner, pool)
        if _stands_alone(name):
            return _plain(model_runner, pool)
    except (AttributeError, IndexError, TypeError, ValueError) as problem:
        # A version of the engine whose pool is built in another way: no reason not to serve.
        logger.exception("kvcanary: pool class %s is not as its adapter knows it", name)
        reason = f"pool class {name} is not as its adapter knows it: {problem}"
        return _nothing(("full",), reason)
    return _nothing(("full",), UNSUPPORTED_POOLS.get(name) or _no_adapter(name))


def _slots_mean_something_else(model_runner: Any) -> str | None:
    """Settings under which the entries of req_to_token are no slots of this rank's pool."""
    if int(getattr(model_runner.server_args, "dcp_size", None) or 1) > 1:
        return "decode context parallelism spreads the slots of a request over ranks"
    if getattr(getattr(model_runner, "model_config", None), "is_encoder_decoder", False):
        return "rows of encoder-decoder models begin with the slots of the encoder's tokens"
    return None


def _stands_alone(class_name: str) -> bool:
    return class_name in LAYOUTS and LAYOUTS[class_name].group is not None


def _no_adapter(class_name: str) -> str:
    known = ", ".join(sorted([*filter(_stands_alone, LAYOUTS), *COMPOSITES]))
    return f"pool class {class_name} has no adapter (there are: {known})"


def _nothing(names: tuple[str, ...], reason: str) -> GuardedPools:
    return GuardedPools((), tuple(UnguardedGroup(name, reason) for name in names))


# ---- pools of one numbering ----------------------------------------------------------------------


def _plain(model_runner: Any, pool: Any) -> GuardedPools:
    group = LAYOUTS[type(pool).__name__].group
    assert group is not None
    try:
        return _group_of(model_runner, group, pool)
    except UnsupportedLayout as problem:
        return _nothing((group,), str(problem))


def _group_of(
    model_runner: Any, name: str, *pools: Any, page_size: int | None = None
) -> GuardedPools:
    """The group ``name`` over pools of one numbering, and what of their bytes is left out.

    ``page_size`` is that of the allocator, where the pools' own differs. Raises UnsupportedLayout.
    """
    page_size = int(page_size or pools[0].page_size)
    held = _slot_bytes(*pools)
    # Whole pages are handed out, from page 1 on. A pool that shrinks later never uses the rest.
    num_slots = (int(pools[0].size) // page_size + 1) * page_size
    group = _table_group(model_runner, name, num_slots=num_slots, sources=held.sources)
    return GuardedPools((group,), _named(name, held.left_out))


def _slot_bytes(*pools: Any) -> SlotBytes:
    """The bytes of pools that share one numbering. Raises UnsupportedLayout."""
    held = []
    for pool in pools:
        layout = LAYOUTS.get(type(pool).__name__)
        if layout is None:
            raise UnsupportedLayout(f"sub-pool class {type(pool).__name__} has no adapter")
        held.append(layout.slot_bytes(pool))
    return SlotBytes(
        tuple(source for part in held for source in part.sources),
        tuple(left_out for part in held for left_out in part.left_out),
    )


def _named(group: str, left_out: tuple[LeftOut, ...]) -> tuple[UnguardedGroup, ...]:
    return tuple(UnguardedGroup(f"{group}_{part.part}", part.reason) for part in left_out)


def _table_group(
    model_runner: Any, name: str, *, num_slots: int, sources: tuple[RealKvSource, ...]
) -> KVCacheGroup:
    for source in sources:
        covered = source.tensor.shape[0] * source.page_size
        if covered < num_slots:
            raise UnsupportedLayout(f"a buffer holds {covered} slots and the pool {num_slots}")
    return KVCacheGroup(
        name=name,
        num_slots=num_slots,
        page_table=model_runner.req_to_token_pool.req_to_token,
        page_size=1,
        padding_row=PADDING_ROW,
        tracks_allocation=name in followable(model_runner.token_to_kv_pool_allocator),
        table_stable_through_forward=_table_is_stable(model_runner),
        sources=sources,
    )


def _table_is_stable(model_runner: Any) -> bool:
    """Whether nobody rewrites req_to_token between the launch and the end of a forward.

    With overlap scheduling on a GPU the scheduler may, as soon as the forward has read the table.
    A pipeline has its schedule and its forwards on two streams as well.
    """
    if model_runner.req_to_token_pool.req_to_token.device.type == "cpu":
        return True
    settings = model_runner.server_args
    has_one_stream = bool(getattr(settings, "disable_overlap_schedule", False))
    return has_one_stream and int(getattr(settings, "pp_size", 1) or 1) == 1


# ---- pools put together --------------------------------------------------------------------------


def _windowed(model_runner: Any, group: KVCacheGroup, lookup: torch.Tensor | None) -> KVCacheGroup:
    window = getattr(model_runner, "sliding_window_size", None)
    if window is None:
        raise UnsupportedLayout("the model does not say how many tokens its window holds")
    return replace(group, full_to_swa=lookup, swa_window_size=int(window))


def _swa(model_runner: Any, pool: Any) -> GuardedPools:
    """Layers with full attention and layers with a window, each with a numbering of its own."""
    if getattr(pool, "swa_uses_full_indices", False):
        return _nothing(("full", "swa"), "the window's pool is addressed without its lookup table")
    only_windows = int(pool.full_kv_pool.size) == 0  # then req_to_token holds the window's slots
    lookup = None if only_windows else pool.full_to_swa_index_mapping
    try:
        swa = _group_of(model_runner, "swa", pool.swa_kv_pool)
        windowed = _windowed(model_runner, swa.groups[0], lookup)
        if only_windows:
            return GuardedPools((windowed,), swa.unsupported)
        full = _group_of(model_runner, "full", pool.full_kv_pool)
    except UnsupportedLayout as problem:
        return _nothing(("full", "swa"), str(problem))
    return GuardedPools((*full.groups, windowed), (*full.unsupported, *swa.unsupported))


def _hybrid_linear(model_runner: Any, pool: Any) -> GuardedPools:
    """Layers with full attention beside layers that carry a state per request."""
    state = UnguardedGroup("mamba", "a recurrent state has no slots: every token rewrites it")
    part = pool.full_kv_pool
    if not _stands_alone(type(part).__name__):
        problem = f"sub-pool class {type(part).__name__} has no adapter"
        return GuardedPools((), (UnguardedGroup("full", problem), state))
    full = _plain(model_runner, part)
    return GuardedPools(full.groups, (*full.unsupported, state))


def _qsa(model_runner: Any, pool: Any) -> GuardedPools:
    """As a hybrid, with a compressed index."""
    hybrid = _hybrid_linear(model_runner, pool)
    index = UnguardedGroup("full_index", "a compressed index key belongs to several tokens")
    return GuardedPools(hybrid.groups, (*hybrid.unsupported, index))


def _minimax_sparse(model_runner: Any, pool: Any) -> GuardedPools:
    """K and V and the keys (and values) of the sparse index, all under one numbering."""
    parts = (pool.main_pool, pool.index_kv_pool, pool.index_k_pool)
    try:
        return _group_of(model_runner, "full", *(part for part in parts if part is not None))
    except UnsupportedLayout as problem:
        return _nothing(("full",), str(problem))


_DSV4_PARTS = (
    UnguardedGroup(
        "full_bytes",
        "a compressed row (c4, c128 and their index) belongs to several tokens and is written with"
        " the last of them; tokens and positions of the slots are guarded, its bytes are not",
    ),
    UnguardedGroup("compress_state", "compressor states belong to a request, not to slots"),
)


def _deepseek_v4(model_runner: Any, pool: Any) -> GuardedPools:
    """The window's rows with their bytes; the slots that compressed rows are numbered by."""
    lookup = pool.full_to_swa_index_mapping
    paged = getattr(pool, "swa_kv_pool", None)
    in_a_ring = getattr(pool, "swa_req_ring_size", None) is not None
    if paged is None or in_a_ring or lookup is None:
        reason = "the window lies in a ring or a row of each request, not in slots"
        return _nothing(("full", "swa"), reason)
    try:
        swa = _group_of(model_runner, "swa", paged, page_size=pool.swa_page_size)
        windowed = _windowed(model_runner, swa.groups[0], lookup)
    except UnsupportedLayout as problem:
        return _nothing(("full", "swa"), str(problem))
    # The lookup table has one entry a slot, and one more for "no slot".
    full = _table_group(model_runner, "full", num_slots=lookup.shape[0] - 1, sources=())
    return GuardedPools((full, windowed), _DSV4_PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Composite:
    """A pool class that is put together of others.

    Fields:
        groups: its groups.
        covers: for the table in the docs, what is guarded.
        left_out: the same, what is not.
    """

    groups: Callable[[Any, Any], GuardedPools]
    covers: str
    left_out: str = ""


COMPOSITES: Mapping[str, Composite] = {
    "SWAKVPool": Composite(
        groups=_swa, covers="full and windowed layers, each of any class that stands alone"
    ),
    "HybridLinearKVPool": Composite(
        groups=_hybrid_linear,
        covers="layers with full attention, of any class that stands alone",
        left_out="recurrent states",
    ),
    "QSATokenToKVPool": Composite(
        groups=_qsa,
        covers="layers with full attention, of any class that stands alone",
        left_out="recurrent states and compressed index keys",
    ),
    "MiniMaxSparseKVPool": Composite(
        groups=_minimax_sparse, covers="K and V, and the sparse index' keys and values"
    ),
    "DeepSeekV4TokenToKVPool": Composite(
        groups=_deepseek_v4,
        covers="the window's values and scales; tokens and positions of every slot",
        left_out="compressed rows (c4, c128, index) and compressor states",
    ),
}

_MOVES = (
    "slots are virtual: compaction moves their bytes between forwards, and sub-pools share them"
)
_STRIPES = "a slot's bytes are spread over ranks"
_HISPARSE = "slots are a cache of host memory"

# Classes that are known, and cannot be guarded.
UNSUPPORTED_POOLS: Mapping[str, str] = {
    "NoOpMHATokenToKVPool": "nothing is cached",
    "UnifiedMHATokenToKVPool": _MOVES,
    "UnifiedMLATokenToKVPool": _MOVES,
    "UnifiedHybridLinearKVPool": _MOVES,
    "UnifiedSWAKVPool": _MOVES,
    "PageInterleaveMHATokenToKVPool": _STRIPES,
    "PageInterleaveMLATokenToKVPool": _STRIPES,
    "PageInterleaveDSATokenToKVPool": _STRIPES,
    "LayerSplitDSATokenToKVPool": "layers are spread over ranks, which copy them into scratch",
    "HiSparseDSATokenToKVPool": _HISPARSE,
    "HiSparseMHAMainPool": _HISPARSE,
    "MiniMaxM3Nvfp4KVPool": "block scales interleave the slots of a page",
}
