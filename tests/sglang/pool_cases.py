"""SGLang's own pool classes on the CPU, and how each of them writes one slot.

``store`` goes through the engine's own methods. Where those are Triton kernels, it does so under a
Triton that interprets them (``test_triton_stores``); without, and where they are CUDA kernels, it
writes the addresses that the engine's own description of the layout gives, and the case says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

LAYERS = 3
HEADS = 2
DIM = 64
RANK, ROPE = 48, 16
PAGE = 64  # what DSA wants
SIZE = 2 * PAGE

runtime_context = pytest.importorskip("sglang.srt.runtime_context")
memory_pool = pytest.importorskip("sglang.srt.mem_cache.memory_pool")
dsv4 = pytest.importorskip("sglang.srt.mem_cache.deepseek_v4_memory_pool")
swa_pool = pytest.importorskip("sglang.srt.mem_cache.swa_memory_pool")
swa_allocator = pytest.importorskip("sglang.srt.mem_cache.allocator.swa")
environ = pytest.importorskip("sglang.srt.environ")
fp4_methods = pytest.importorskip("sglang.srt.layers.quantization.fp4_kv_cache_quant_method")
native_fp4 = pytest.importorskip("sglang.srt.layers.quantization.nvfp4_kv_cache")

Store = Callable[[Any, int], None]


@dataclass(frozen=True, slots=True)
class Case:
    """A pool class in one layout.

    Fields:
        name: of the test.
        make: builds the pool.
        store: writes the bytes of one slot, in every layer.
        left_out: the buffers whose bytes are known to be no source.
    """

    name: str
    make: Callable[[], Any]
    store: Store
    left_out: Callable[[Any], list[torch.Tensor]] = lambda _pool: []


def layer(layer_id: int) -> Any:
    """What a pool reads of an attention layer."""
    return SimpleNamespace(
        layer_id=layer_id, k_scale=None, v_scale=None, k_scale_float=None, v_scale_float=None
    )


def at(slot: int) -> torch.Tensor:
    return torch.tensor([slot])


@contextmanager
def one_rank() -> Iterator[None]:
    """A process without parallel groups, kernels settings and speculation."""
    nothing = SimpleNamespace(
        is_sm120=False,
        speculative_algorithm=None,
        features=SimpleNamespace(enable_encoder_swa_bounded_replay=False),
        kernel=SimpleNamespace(dsv4_attn_backend="auto", enable_deepseek_v4_fp4_indexer=False),
    )
    alone = runtime_context.get_parallel().override(
        attn_dcp_size=1, attn_dcp_rank=0, dcp_enabled=False
    )
    with alone, pytest.MonkeyPatch.context() as patch:
        for name in ("get_exec", "get_spec", "get_platform"):
            patch.setattr(dsv4, name, lambda: nothing)
        # Triton is a stub without a GPU: what the engine compiles runs as it is written.
        torch.compiler.set_stance("force_eager")
        try:
            yield
        finally:
            torch.compiler.set_stance("default")


# ---- MHA -----------------------------------------------------------------------------------------


def mha(cls: Any = None, *, page_size: int = 1, dtype: torch.dtype, **kwargs: Any) -> Any:
    return (cls or memory_pool.MHATokenToKVPool)(
        **{
            "size": SIZE,
            "page_size": page_size,
            "dtype": dtype,
            "head_num": HEADS,
            "head_dim": DIM,
            "layer_num": LAYERS,
            "device": "cpu",
            "enable_memory_saver": False,
        }
        | kwargs
    )


def hnd() -> Any:
    with environ.envs.SGLANG_USE_HND_KVCACHE.override(True):
        return mha(page_size=16, dtype=torch.float32)


def store_kv(pool: Any, slot: int) -> None:
    for layer_id in range(LAYERS):
        k = torch.randn(1, HEADS, DIM, dtype=torch.bfloat16)
        v = torch.randn(1, HEADS, getattr(pool, "v_head_dim", DIM), dtype=torch.bfloat16)
        pool.set_kv_buffer(layer(layer_id), at(slot), k, v)


def move_kv(pool: Any, slot: int) -> None:
    """From a slot with random bytes, as accepted drafts are moved."""
    source = pool.size
    store_kv(pool, source)
    pool.move_kv_cache(at(slot), at(source))


def native_move() -> Any:
    with environ.envs.SGLANG_NATIVE_MOVE_KV_CACHE.override(True):
        return mha(dtype=torch.float32)


def nvfp4(native: bool) -> Any:
    method = fp4_methods.NVFP4KVCacheMethod(LAYERS, "cpu", page_size=16, native_scale_layout=native)
    with pytest.MonkeyPatch.context() as patch:
        # The access kinds follow from the attention backends of a server that runs.
        patch.setattr(method, "has_native_fp4_access", lambda: True, raising=False)
        patch.setattr(method, "needs_dequant_workspace", lambda: False, raising=False)
        patch.setattr(method, "dequant_workspace_dtype", lambda: None, raising=False)
        return mha(page_size=16, dtype=torch.float4_e2m1fn_x2, quant_method=method)


def store_nvfp4(pool: Any, slot: int) -> None:
    """Not the Triton kernel: its addresses, those of V's scales by the engine's own reference."""
    page, offset = divmod(slot, 16)
    for buffer in [
        *pool.k_buffer,
        *pool.v_buffer,
        *(pool.k_scale_buffer or ()),
        *(pool.v_scale_buffer or ()),
    ]:
        buffer[slot] = torch.randint_like(buffer[slot], 1, 255)
    if pool.native_k_scale_buffer is None:
        return
    scales = torch.arange(DIM // 16)
    for k, v in zip(pool.native_k_scale_buffer, pool.native_v_scale_buffer, strict=True):
        k[page, :, offset] = torch.randint(1, 255, k[page, :, offset].shape, dtype=torch.uint8)
        token, scale = native_fp4.nvfp4_v_scale_swizzle_indices(
            torch.tensor(offset), scales, len(scales)
        )
        v[page, :, token, scale] = torch.randint(1, 255, (HEADS, len(scales)), dtype=torch.uint8)


def mxfp8() -> Any:
    return mha(
        memory_pool.MHATokenToKVPoolMXFP8,
        page_size=128,
        dtype=torch.float8_e4m3fn,
        head_dim=128,
        size=256,
    )


def store_mxfp8(pool: Any, slot: int) -> None:
    """What a retracted request brings back; the scales' kernel is Triton, and they are left out."""
    pool._write_scales = lambda *_: None
    pieces = pool.get_cpu_copy(at(slot))
    for chunks in pieces:
        for k, v, *_scales in chunks:
            for part in (k, v):
                part.view(torch.uint8).copy_(torch.randint(1, 255, part.shape, dtype=torch.uint8))
    pool.load_cpu_copy(pieces, at(slot))


class PageMajorMHATokenToKVPool:
    """The layout of that class up to 0.5.16; later versions cannot build it.

    One byte buffer; a page holds K of its slots for every layer, then V for every layer.
    """

    kv_cache_layout = "page_major_layer_major"
    size, page_size = 60, 4

    def __init__(self) -> None:
        pages = self.size // self.page_size + 1
        run = self.page_size * HEADS * DIM
        self.raw_buffer = torch.zeros(pages * 2 * LAYERS * run, dtype=torch.float32)
        self.k_buffer, self.v_buffer = (
            [
                self.raw_buffer.as_strided(
                    (pages, self.page_size, HEADS, DIM),
                    (2 * LAYERS * run, HEADS * DIM, DIM, 1),
                    (part * LAYERS + index) * run,
                )
                for index in range(LAYERS)
            ]
            for part in (0, 1)
        )


def store_page_major(pool: Any, slot: int) -> None:
    page, offset = divmod(slot, pool.page_size)
    for view in (*pool.k_buffer, *pool.v_buffer):
        view[page, offset] = torch.randn(HEADS, DIM)


# ---- MLA -----------------------------------------------------------------------------------------


def mla(cls: Any = None, *, page_size: int = 1, dtype: torch.dtype, **kwargs: Any) -> Any:
    return (cls or memory_pool.MLATokenToKVPool)(
        **{
            "size": SIZE,
            "page_size": page_size,
            "dtype": dtype,
            "kv_lora_rank": RANK,
            "qk_rope_head_dim": ROPE,
            "layer_num": LAYERS,
            "device": "cpu",
            "enable_memory_saver": False,
        }
        | kwargs
    )


def store_latent(pool: Any, slot: int) -> None:
    for layer_id in range(LAYERS):
        latent = torch.randn(1, 1, pool.kv_lora_rank + pool.qk_rope_head_dim, dtype=torch.bfloat16)
        pool.set_kv_buffer(layer(layer_id), at(slot), latent, None)


def dsa(**kwargs: Any) -> Any:
    return mla(
        memory_pool.DSATokenToKVPool,
        **{
            "page_size": PAGE,
            "dtype": torch.bfloat16,
            "index_head_dim": 128,
            "kv_cache_dim": RANK + ROPE,
        }
        | kwargs,
    )


def store_dsa(pool: Any, slot: int) -> None:
    """By the engine's move from a page of random bytes: its stores are CUDA and Triton kernels."""
    last_page = SIZE // PAGE
    for buffer in (*pool.kv_buffer, *pool.index_k_with_scale_buffer):
        if buffer.shape[0]:
            page = buffer[last_page if buffer.ndim == 2 else last_page * PAGE + 5]
            page.view(torch.uint8).random_(1, 255)
    pool.move_kv_cache(at(slot), at(last_page * PAGE + 5))


# ---- DeepSeek-V4 ---------------------------------------------------------------------------------


def dsv4_single(cls: Any = None, **kwargs: Any) -> Any:
    return (cls or dsv4.DeepSeekV4SingleKVPool)(
        256,
        PAGE,
        torch.float8_e4m3fn,
        448,
        64,
        LAYERS,
        "cpu",
        False,
        global_page_size=PAGE,
        **kwargs,
    )


def store_dsv4(pool: Any, slot: int) -> None:
    """Not the CUDA kernel: its addresses, by the engine's own description of the layout."""
    page, offset = divmod(slot, pool.page_size)
    layout = pool.kv_layout
    data_step, scales_from, scale_step = layout.row_addressing(pool.page_size)
    for buffer in pool.kv_buffer:
        for start, size in (
            (offset * data_step, layout.data_bytes),
            (scales_from + offset * scale_step, layout.scale_bytes),
        ):
            buffer[page, start : start + size] = torch.randint(1, 255, (size,), dtype=torch.uint8)


def store_dsv4_uniform(pool: Any, slot: int) -> None:
    for index in range(LAYERS):
        pool.set_key_buffer_fused(index, at(slot), torch.randn(1, 512))


def dsv4_model(**kwargs: Any) -> Any:
    """The pool of a whole model: window rows, compressed rows, index and compressor states."""
    return dsv4.DeepSeekV4TokenToKVPool(
        **{
            "max_num_reqs": 4,
            "swa_size": 512,
            "c4_size": 256,
            "c128_size": 8,
            "c4_state_pool_size": 64,
            "c128_state_pool_size": 64,
            "page_size": 256,
            "swa_page_size": 256,
            "dtype": torch.float8_e4m3fn,
            "c4_state_dtype": torch.float32,
            "c128_state_dtype": torch.float32,
            "qk_nope_head_dim": 448,
            "qk_rope_head_dim": 64,
            "indexer_head_dim": 128,
            "layer_num": 3,
            "device": "cpu",
            "enable_memory_saver": False,
            "compression_ratios": [0, 4, 128],
            "full_size": 1024,
        }
        | kwargs
    )


_PLAIN_POOLS = [
    Case("MHA NHD", lambda: mha(dtype=torch.bfloat16), store_kv),
    Case("MHA NHD, other size of V", lambda: mha(dtype=torch.bfloat16, v_head_dim=24), store_kv),
    Case("MHA NHD, pages", lambda: mha(page_size=16, dtype=torch.float32), store_kv),
    Case("MHA HND", hnd, store_kv),
    Case("MHA moved", native_move, move_kv),
    Case("MHA HND moved", hnd, move_kv),
    Case("MHA FP8", lambda: mha(dtype=torch.float8_e4m3fn), store_kv),
    Case(
        "MHA FP8 of the CPU backend",
        lambda: mha(dtype=torch.float8_e4m3fn, quant_method=fp4_methods.CPUFP8KVCacheMethod()),
        store_kv,
    ),
    Case(
        "MHA FP4",
        lambda: mha(memory_pool.MHATokenToKVPoolFP4, dtype=torch.float4_e2m1fn_x2),
        store_kv,
    ),
    Case(
        "MHA FP4, blocks of 16",
        lambda: mha(
            dtype=torch.float4_e2m1fn_x2, quant_method=fp4_methods.FP4MXBlock16KVCacheMethod()
        ),
        store_kv,
    ),
    Case("MHA NVFP4, linear scales", lambda: nvfp4(native=False), store_nvfp4),
    Case(
        "MHA NVFP4, scales as TRT-LLM reads them",
        lambda: nvfp4(native=True),
        store_nvfp4,
        left_out=lambda pool: pool.native_v_scale_buffer,
    ),
    Case(
        "MHA MXFP8",
        mxfp8,
        store_mxfp8,
        left_out=lambda pool: [*pool.k_scale_buffer, *pool.v_scale_buffer],
    ),
    Case("MHA page-major", PageMajorMHATokenToKVPool, store_page_major),
    Case("MLA", lambda: mla(dtype=torch.bfloat16), store_latent),
    Case("MLA FP8", lambda: mla(dtype=torch.float8_e4m3fn), store_latent),
    Case(
        "MLA FP4",
        lambda: mla(memory_pool.MLATokenToKVPoolFP4, dtype=torch.float4_e2m1fn_x2),
        store_latent,
    ),
    Case("DSA", dsa, store_dsa),
    Case(
        "DSA, layers that share an index",
        lambda: dsa(skip_topk_layers=[False, True, False]),
        store_dsa,
    ),
    Case(
        "DSA packed FP8",
        lambda: dsa(dtype=torch.float8_e4m3fn, kv_cache_dim=80, kv_lora_rank=32),
        store_dsa,
    ),
    *(
        Case(
            f"DeepSeek-V4 {layout}", lambda layout=layout: dsv4_single(kv_layout=layout), store_dsv4
        )
        for layout in ("v4", "v41", "v41_fp4", "v41_new", "v41_fp4_new")
    ),
    Case(
        "DeepSeek-V4 uniform FP8",
        lambda: dsv4_single(dsv4.DeepSeekV4UniformFP8KVPool),
        store_dsv4_uniform,
    ),
]


# ---- stores that are Triton kernels --------------------------------------------------------------


def store_two_parts(pool: Any, slot: int) -> None:
    for layer_id in range(LAYERS):
        nope = torch.randn(1, 1, pool.kv_lora_rank, dtype=torch.bfloat16)
        rope = torch.randn(1, 1, pool.qk_rope_head_dim, dtype=torch.bfloat16)
        pool.set_mla_kv_buffer(layer(layer_id), at(slot), nope, rope)


def store_dsa_by_kernels(pool: Any, slot: int) -> None:
    store_two_parts(pool, slot)
    for layer_id in range(LAYERS):
        if pool.index_k_with_scale_buffer[layer_id].shape[0]:
            keys = torch.randn(1, 128).to(torch.float8_e4m3fn)
            pool.set_index_k_scale_buffer(layer_id, at(slot), keys, torch.rand(1, 1) + 1)


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(1, 255, shape, dtype=torch.uint8)


def store_dsv4_by_kernel(pool: Any, slot: int) -> None:
    for index in range(LAYERS):
        pool.set_key_buffer(
            index,
            at(slot),
            dsv4.NopeFp8RopeBf16Pack(
                torch.randn(1, 448).to(torch.float8_e4m3fn),
                torch.randn(1, 64, dtype=torch.bfloat16),
                random_bytes(1, 7),
            ),
        )


def store_nvfp4_by_kernel(pool: Any, slot: int) -> None:
    scales = (pool.k_scale_buffer, pool.v_scale_buffer)
    native = (pool.native_k_scale_buffer, pool.native_v_scale_buffer)
    for index in range(LAYERS):
        native_fp4.store_nvfp4_kv_cache(
            *(random_bytes(1, HEADS, DIM // 2) for _ in "kv"),
            *(random_bytes(1, HEADS, DIM // 16) for _ in "kv"),
            at(slot),
            pool.k_buffer[index],
            pool.v_buffer[index],
            *(buffers[index] if buffers is not None else None for buffers in (*scales, *native)),
            16,
        )


def store_mxfp8_by_kernel(pool: Any, slot: int) -> None:
    for layer_id in range(LAYERS):
        k, v = torch.randn(2, 1, HEADS, 128, dtype=torch.bfloat16)
        pool.set_kv_buffer(layer(layer_id), at(slot), k, v)


_INTERPRETED_POOLS = [
    Case("MLA in two parts", lambda: mla(dtype=torch.bfloat16), store_two_parts),
    Case("MLA FP8 in two parts", lambda: mla(dtype=torch.float8_e4m3fn), store_two_parts),
    Case("DSA by kernels", dsa, store_dsa_by_kernels),
    Case(
        "DSA packed FP8 by kernels",
        lambda: dsa(
            dtype=torch.float8_e4m3fn, kv_lora_rank=512, qk_rope_head_dim=64, kv_cache_dim=656
        ),
        store_dsa_by_kernels,
    ),
    Case("DeepSeek-V4 by its kernel", dsv4_single, store_dsv4_by_kernel),
    Case("NVFP4, linear scales, by its kernel", lambda: nvfp4(native=False), store_nvfp4_by_kernel),
    Case(
        "NVFP4, scales as TRT-LLM reads them, by its kernel",
        lambda: nvfp4(native=True),
        store_nvfp4_by_kernel,
        left_out=lambda pool: pool.native_v_scale_buffer,
    ),
    Case(
        "MXFP8 by its kernel",
        mxfp8,
        store_mxfp8_by_kernel,
        left_out=lambda pool: [*pool.k_scale_buffer, *pool.v_scale_buffer],
    ),
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SINGLE_POOLS = _INTERPRETED_POOLS if INTERPRETED else _PLAIN_POOLS
