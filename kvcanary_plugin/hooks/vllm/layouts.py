"""Which bytes a slot owns in an attention layer of vLLM, by the strides of its cache.

vLLM gives every layer the same logical view and any order in memory; its CPU backend packs K and V
for its kernels besides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvcanary_plugin.kernels import RealKvSource
from kvcanary_plugin.strips import UnsupportedLayout, head_strips, strip


def layer_sources(layer: Any, *, packing: str | None = None) -> Iterator[RealKvSource]:
    """Every strip of K/V that a slot owns in one attention layer.

    Args:
        layer: one that has its ``kv_cache``.
        packing: instruction set that the CPU backend has packed it for; None: by its strides.

    Raises:
        UnsupportedLayout: when some do not lie in equal steps from slot to slot.
    """
    cache = layer.kv_cache
    if isinstance(cache, (list, tuple)) and len(cache) == 1:  # one per virtual engine, once
        (cache,) = cache
    if not isinstance(cache, torch.Tensor):
        raise UnsupportedLayout(f"K/V of type {type(cache).__name__} has no adapter")
    if packing is not None:
        yield from _packed_sources(cache, packing)
        return
    for part in _halves(cache):
        yield from head_strips(part)


def _halves(cache: torch.Tensor) -> Iterator[torch.Tensor]:
    """The cache as [blocks, heads, tokens, bytes of a token] views."""
    if cache.ndim == 3:  # latent: [blocks, tokens, size]
        yield cache.unsqueeze(1)
    elif cache.ndim == 4:  # [blocks, heads, tokens, K and V]
        yield cache
    elif cache.ndim == 5 and cache.shape[0] == 2:  # [K and V, blocks, tokens, heads, size]
        yield cache[0].transpose(1, 2)
        yield cache[1].transpose(1, 2)
    elif cache.ndim == 5 and cache.shape[1] == 2:  # [blocks, K and V, tokens, heads, size]
        yield cache[:, 0].transpose(1, 2)
        yield cache[:, 1].transpose(1, 2)
    else:
        raise UnsupportedLayout(f"K/V of shape {list(cache.shape)} has no adapter")


def _packed_sources(cache: torch.Tensor, packing: str) -> Iterator[RealKvSource]:
    """Strips of the CPU backend's layout, which packs K for its matrix kernels.

    A head of a block is one run of 2 * tokens * size elements: K transposed, [size, tokens], then
    V, [tokens, size]. The K of a token thus lies in ``size`` places of one element, each a strip of
    its own. AMX tiles interleave tokens in pairs, K and V alike, which is no equal step at all.
    """
    if packing not in ("vec", "vec16"):
        raise UnsupportedLayout(f"K/V packed for {packing!r} on a CPU has no adapter")
    if cache.ndim != 4:  # before 0.26
        raise UnsupportedLayout(f"packed K/V of shape {list(cache.shape)} has no adapter")
    _, heads, tokens, both = cache.shape
    _, head_stride, token_stride, inner_stride = cache.stride()
    size = both // 2
    if inner_stride != 1 or token_stride != both:
        raise UnsupportedLayout(f"packed K/V with strides {list(cache.stride())} has no adapter")
    for head in range(heads):
        start = head * head_stride
        for element in range(size):
            offset = start + element * tokens
            yield strip(cache, offset=offset, page_size=tokens, elements=1)
        yield strip(cache, offset=start + size * tokens, page_size=tokens, elements=size)
