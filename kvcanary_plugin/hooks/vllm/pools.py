"""What memory is guarded: vLLM's KV cache groups.

Slot ``s`` of a group is block ``s // block_size``, token ``s % block_size``. All groups hand out
blocks of one allocation, each block to one group at a time, so that their records are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcanary_plugin.cache import KVCacheGroup
from kvcanary_plugin.canary import UnguardedGroup
from kvcanary_plugin.hooks.vllm.layouts import layer_sources
from kvcanary_plugin.kernels import RealKvSource
from kvcanary_plugin.strips import UnsupportedLayout

# Row 0 of a block table is a request like any other; a batch has no padding rows.
_NO_PADDING_ROW = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """The page table of one KV cache group as a model runner keeps it.

    Fields:
        table: int32 [rows, blocks], persistent.
        page_size: slots per entry; smaller than the group's block size where kernels want that.
    """

    table: torch.Tensor
    page_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedCaches:
    """The groups of one model runner, guarded and not.

    Fields:
        groups: what is guarded.
        group_ids: vLLM's number of each guarded group.
        block_sizes: slots of each guarded group's blocks, as the scheduler counts them.
        unguarded: what is not, and why.
    """

    groups: tuple[KVCacheGroup, ...]
    group_ids: tuple[int, ...]
    block_sizes: tuple[int, ...]
    unguarded: tuple[UnguardedGroup, ...]


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    window: Callable[[Any], int]


def _no_window(_spec: Any) -> int:
    return 0


def _earlier_tokens_seen(spec: Any) -> int:
    return int(spec.sliding_window) - 1  # the window counts the token itself


# By the name of vLLM's spec class. What is not in here has rules of its own for which blocks a
# request keeps, or no slots at all.
_KINDS = {
    "FullAttentionSpec": _Kind("full", _no_window),
    "MLAAttentionSpec": _Kind("mla", _no_window),
    "SlidingWindowSpec": _Kind("swa", _earlier_tokens_seen),
    "SlidingWindowMLASpec": _Kind("swa_mla", _earlier_tokens_seen),
}
_REASONS = {
    "MambaSpec": "a recurrent state has no slots",
    "CrossAttentionSpec": "slots of encoder tokens hold no token of the request",
    "EncoderOnlyAttentionSpec": "nothing is cached",
}


def guarded_caches(
    *,
    groups: Sequence[Any],
    num_blocks: int,
    tables: Sequence[BlockTable],
    layers: Mapping[str, Any],
    is_target_layer: Callable[[Any], bool],
    packing_of: Callable[[Any], str | None] = lambda _layer: None,
) -> GuardedCaches:
    """Translate vLLM's groups.

    Args:
        groups: ``kv_cache_config.kv_cache_groups``.
        num_blocks: blocks of the allocation.
        tables: block table of each group (encoder-only groups at the end have none).
        layers: attention layer by name (``static_forward_context``).
        is_target_layer: whether a layer belongs to the model whose forwards are hooked, and not to
            a draft model, which writes its K/V at another time.
        packing_of: what a layer's K/V is packed for; None where it lies by its strides.
    """
    guarded: list[KVCacheGroup] = []
    group_ids: list[int] = []
    block_sizes: list[int] = []
    unguarded: list[UnguardedGroup] = []
    names = _Names()
    for group_id, group in enumerate(groups):
        specs = _layer_specs(group)
        kinds = {type(spec).__name__ for spec in specs.values()}
        name = names.unique(_name_of(kinds))
        window = _common_window(specs.values())
        if window is None:
            unguarded.append(UnguardedGroup(name, _reason(kinds)))
            continue
        target = [layer for layer in group.layer_names if is_target_layer(layers[layer])]
        if len(target) < len(group.layer_names):
            unguarded.append(
                UnguardedGroup(
                    names.unique("draft"), f"layers of a draft model in group {name} are left out"
                )
            )
        if not target:
            continue
        sources: tuple[RealKvSource, ...] = ()
        try:
            sources = _distinct(
                source
                for layer in target
                for source in layer_sources(layers[layer], packing=packing_of(layers[layer]))
            )
            _check_coverage(sources, slots=num_blocks * group.kv_cache_spec.block_size)
        except UnsupportedLayout as problem:
            sources = ()
            unguarded.append(
                UnguardedGroup(
                    names.unique(f"{name}_bytes"),
                    f"{problem}; its tokens and positions are guarded, its bytes are not",
                )
            )
        block_size = int(group.kv_cache_spec.block_size)
        guarded.append(
            KVCacheGroup(
                name=name,
                num_slots=num_blocks * block_size,
                page_table=tables[group_id].table,
                page_size=tables[group_id].page_size,
                padding_row=_NO_PADDING_ROW,
                sources=sources,
                swa_window_size=window,
                # Rows are filled by copies and kernels on the stream of the forwards.
                table_stable_through_forward=True,
                # Groups with blocks of different sizes number the same memory differently.
                pool=f"blocks of {block_size}",
            )
        )
        group_ids.append(group_id)
        block_sizes.append(block_size)
    return GuardedCaches(
        groups=tuple(_sharing_one_memory(guarded, are_all=len(guarded) == len(groups))),
        group_ids=tuple(group_ids),
        block_sizes=tuple(block_sizes),
        unguarded=tuple(unguarded),
    )


def _sharing_one_memory(groups: Sequence[KVCacheGroup], *, are_all: bool) -> Iterator[KVCacheGroup]:
    """``groups`` as they stand to each other, in the blocks that they take turns in.

    Layers of one shape overlay each other, so that groups of one pool get the same strips: a group
    with fewer layers than others folds bytes that nobody touches while the block is its own. Where
    somebody outside the pool uses blocks as well (another block size, another kind of cache), the
    bytes of a block that was freed do not stay what they were.
    """
    pools = {group.pool for group in groups}
    for group in groups:
        sharing = [other for other in groups if other.pool == group.pool]
        overlay = {
            source.tensor.data_ptr(): source for other in sharing for source in other.sources
        }
        shapes = {frozenset(_shape(source) for source in other.sources) for other in sharing}
        yield replace(
            group,
            sources=(
                tuple(overlay[address] for address in sorted(overlay))
                if len(shapes) == 1
                else group.sources
            ),
            freed_slots_keep_bytes=are_all and len(pools) == 1,
        )


def _shape(source: RealKvSource) -> tuple[int, ...]:
    """What two strips at one address have in common when they are the same strip."""
    stride = source.tensor.stride(0) * source.tensor.element_size()
    return (stride, source.page_size, source.num_bytes_per_token, source.read_bytes)


class _Names:
    """Group names, numbered from the second of a kind on: swa, swa_2, swa_3."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}

    def unique(self, name: str) -> str:
        self._count[name] = self._count.get(name, 0) + 1
        return name if self._count[name] == 1 else f"{name}_{self._count[name]}"


def _layer_specs(group: Any) -> dict[str, Any]:
    """Spec of each layer; a group may hold layers of one type and different sizes."""
    spec = group.kv_cache_spec
    per_layer = getattr(spec, "kv_cache_specs", None)
    return dict(per_layer) if per_layer else dict.fromkeys(group.layer_names, spec)


def _name_of(kinds: set[str]) -> str:
    if len(kinds) == 1:
        (kind,) = kinds
        known = _KINDS.get(kind)
        return known.name if known is not None else kind.removesuffix("Spec").lower()
    return "mixed"


def _common_window(specs: Iterator[Any] | Any) -> int | None:
    """Earlier tokens that a token sees in every layer (0: all); None if this group has no such."""
    windows = set()
    for spec in specs:
        kind = _KINDS.get(type(spec).__name__)
        if kind is None:
            return None
        windows.add(kind.window(spec))
    # Layers that see more than others keep their blocks for all: a group of both keeps everything.
    return 0 if 0 in windows else min(windows)


def _reason(kinds: set[str]) -> str:
    known = ", ".join(sorted(_KINDS))
    return "; ".join(
        _REASONS.get(kind, f"{kind} has no adapter (there are: {known})")
        for kind in sorted(kinds - set(_KINDS))
    )


def _distinct(sources: Iterator[RealKvSource]) -> tuple[RealKvSource, ...]:
    """Layers that share their K/V count once."""
    return tuple({source.tensor.data_ptr(): source for source in sources}.values())


def _check_coverage(sources: Sequence[RealKvSource], *, slots: int) -> None:
    for source in sources:
        covered = source.tensor.shape[0] * source.page_size
        if covered < slots:
            raise UnsupportedLayout(f"a layer holds {covered} slots and the group has {slots}")
