"""Which bytes a slot owns: one function per pool class of SGLang that holds one row a token.

A source may only hold bytes that the engine writes together with the slot's own token, and never
again until the slot is given to another token. What does not fit is named, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvcanary_plugin.cache import row_source
from kvcanary_plugin.kernels import RealKvSource
from kvcanary_plugin.strips import UnsupportedLayout, head_strips, strip


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A part of a pool whose bytes are no source, and why."""

    part: str
    reason: str


@dataclass(frozen=True, slots=True)
class SlotBytes:
    """The bytes of a pool: those that its slots own, and the parts left out."""

    sources: tuple[RealKvSource, ...]
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one pool class lays out its slots.

    Fields:
        group: name of the group when the pool stands alone; None if it never does.
        covers: for the table in the docs, what is folded.
        left_out: the same, what is not.
        slot_bytes: the bytes of a pool object; raises UnsupportedLayout if it lies otherwise.
    """

    group: str | None
    covers: str
    slot_bytes: Callable[[Any], SlotBytes]
    left_out: str = ""


# ---- MHA -----------------------------------------------------------------------------------------


def _mha(pool: Any) -> SlotBytes:
    """K and V of every layer: a row a slot (NHD), or per head a run of the page's slots (HND)."""
    layout = getattr(pool, "kv_cache_layout", "nhd")
    buffers = [*pool.k_buffer, *pool.v_buffer]
    if getattr(pool, "is_quantized_kv_cache", False):
        return _with_block_scales(pool, _rows(buffers))
    if layout == "nhd":
        return SlotBytes(_rows(buffers))
    if layout == "hnd":  # [pages, heads, tokens, size]
        return SlotBytes(tuple(source for buffer in buffers for source in head_strips(buffer)))
    raise UnsupportedLayout(f"layout {layout!r} of {type(pool).__name__} has no adapter")


def _with_block_scales(pool: Any, data: tuple[RealKvSource, ...]) -> SlotBytes:
    """Packed K and V with a row of block scales a slot, or in the layout that TRT-LLM reads."""
    sources = [*data, *_rows(_buffers(pool, "k_scale_buffer", "v_scale_buffer"))]
    native_k = _buffers(pool, "native_k_scale_buffer")  # [pages, heads, tokens, scales]
    if not native_k:
        return SlotBytes(tuple(sources))
    sources += (source for buffer in native_k for source in head_strips(buffer))
    reason = "block scales of V interleave four slots; K, V and the scales of K are guarded"
    return SlotBytes(tuple(sources), (LeftOut("scales", reason),))


def _mha_page_major(pool: Any) -> SlotBytes:
    """K and V as views [pages, tokens, heads, size] into pages that hold all layers."""
    views = (view.transpose(1, 2) for view in (*pool.k_buffer, *pool.v_buffer))
    return SlotBytes(tuple(source for view in views for source in head_strips(view)))


def _mha_fp4(pool: Any) -> SlotBytes:
    """Two values a byte, and a row of block scales a slot."""
    return SlotBytes(
        _rows(_buffers(pool, "k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer"))
    )


def _mha_mxfp8(pool: Any) -> SlotBytes:
    """FP8 rows; the engine stores block scales interleaved over the 128 slots of a page only."""
    reason = "block scales interleave the slots of a page; K and V are guarded"
    return SlotBytes(_rows(_buffers(pool, "k_buffer", "v_buffer")), (LeftOut("scales", reason),))


def _k_only(pool: Any) -> SlotBytes:
    return SlotBytes(_rows(pool.k_buffer))


# ---- MLA -----------------------------------------------------------------------------------------


def _mla(pool: Any) -> SlotBytes:
    """The latent of every layer; packed FP8 carries its scales in the row."""
    return SlotBytes(_rows(pool.kv_buffer))


def _mla_fp4(pool: Any) -> SlotBytes:
    return SlotBytes(_rows(_buffers(pool, "kv_buffer", "kv_scale_buffer")))


_INDEX_SCALE_BYTES = 4


def _dsa(pool: Any) -> SlotBytes:
    """The latent, and the indexer's keys: a page holds the keys of its slots, then their scales."""
    latent = _rows(pool.kv_buffer)
    if getattr(pool, "index_kpool", 1) != 1:
        reason = "one index key pools several tokens; the latent is guarded"
        return SlotBytes(latent, (LeftOut("index", reason),))
    if torch.version.hip is not None:
        reason = "ROCm shuffles index keys in tiles of 16 slots; the latent is guarded"
        return SlotBytes(latent, (LeftOut("index", reason),))
    tokens = int(getattr(pool, "index_page_size", pool.page_size))
    key_bytes = int(pool.index_head_dim)
    scale_bytes = key_bytes // int(pool.quant_block_size) * _INDEX_SCALE_BYTES
    index = []
    for buffer in pool.index_k_with_scale_buffer:
        if buffer.shape[0] == 0:  # the layer takes the indexer's choice from the layer before
            continue
        pages = buffer.view(-1, tokens * (key_bytes + scale_bytes))
        index.append(strip(pages, offset=0, page_size=tokens, elements=key_bytes))
        index.append(
            strip(pages, offset=tokens * key_bytes, page_size=tokens, elements=scale_bytes)
        )
    return SlotBytes((*latent, *index))


# ---- DeepSeek-V4 ---------------------------------------------------------------------------------

# By the name of SGLang's KVLayout: bytes of a token's values, bytes of its scales, and whether the
# scales of a token follow its values at once instead of the values of all tokens of the page.
_DSV4_LAYOUTS = {
    "v4": (576, 8, False),
    "v41": (512, 16, False),
    "v41_fp4": (256, 32, False),
    "v41_new": (512, 16, True),
    "v41_fp4_new": (256, 32, True),
}
_V4 = "v4"  # before it had a name


def _dsv4(pool: Any) -> SlotBytes:
    """Values and scales of a token in byte pages; what pads a page belongs to nobody."""
    layout = getattr(pool, "kv_layout", _V4)
    known = _DSV4_LAYOUTS.get(getattr(layout, "value", layout))
    if known is None:
        raise UnsupportedLayout(f"layout {layout!r} of {type(pool).__name__} has no adapter")
    values, scales, together = known
    tokens = int(pool.page_size)
    sources: list[RealKvSource] = []
    for buffer in pool.kv_buffer:
        pages = buffer.view(torch.uint8)
        if together:
            sources.append(strip(pages, offset=0, page_size=tokens, elements=values + scales))
        else:
            sources.append(strip(pages, offset=0, page_size=tokens, elements=values))
            sources.append(strip(pages, offset=tokens * values, page_size=tokens, elements=scales))
    return SlotBytes(tuple(sources))


def _dsv4_uniform(pool: Any) -> SlotBytes:
    """512 values of one byte a token, no scales."""
    return SlotBytes(
        tuple(row_source(buffer, page_size=int(pool.page_size)) for buffer in pool.kv_buffer)
    )


def _rows(buffers: Iterable[torch.Tensor]) -> tuple[RealKvSource, ...]:
    """Sources of buffers [slots, ...] in which a row is a slot."""
    return tuple(row_source(buffer) for buffer in buffers)


def _buffers(pool: Any, *names: str) -> list[torch.Tensor]:
    """The per-layer buffers of those attributes that the pool has."""
    return [buffer for name in names for buffer in (getattr(pool, name, None) or ())]


# By exact class name: a subclass may write its bytes in another way.
LAYOUTS: Mapping[str, Layout] = {
    "MHATokenToKVPool": Layout(
        group="full",
        covers="K and V of every layer (NHD, HND, FP8, FP4 with its scales)",
        left_out="FP4 for TRT-LLM: block scales of V, which interleave four slots",
        slot_bytes=_mha,
    ),
    "PageMajorMHATokenToKVPool": Layout(
        group="full", covers="K and V of every layer (up to 0.5.16)", slot_bytes=_mha_page_major
    ),
    "MHATokenToKVPoolFP4": Layout(
        group="full", covers="K, V and their block scales", slot_bytes=_mha_fp4
    ),
    "MHATokenToKVPoolMXFP8": Layout(
        group="full",
        covers="K and V of every layer",
        left_out="block scales, which interleave the slots of a page",
        slot_bytes=_mha_mxfp8,
    ),
    "MHATokenToKOnlyPool": Layout(group=None, covers="K", slot_bytes=_k_only),
    "MLATokenToKVPool": Layout(group="mla", covers="the latent of every layer", slot_bytes=_mla),
    "MLATokenToKVPoolFP4": Layout(
        group="mla", covers="the latent and its block scales", slot_bytes=_mla_fp4
    ),
    "DSATokenToKVPool": Layout(
        group="mla",
        covers="the latent, the indexer's keys and their scales",
        left_out="index keys that pool several tokens; index keys on ROCm",
        slot_bytes=_dsa,
    ),
    "DeepSeekV4SingleKVPool": Layout(
        group=None, covers="values and scales of a token", slot_bytes=_dsv4
    ),
    "DeepSeekV4UniformFP8KVPool": Layout(
        group=None, covers="values of a token", slot_bytes=_dsv4_uniform
    ),
}
