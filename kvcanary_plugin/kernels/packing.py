"""The static part of a launch, validated and packed once per context (struct LaunchContext)."""

from __future__ import annotations

import torch

from kvcanary_plugin.kernels.arguments import check_vector, refuse
from kvcanary_plugin.kernels.consts import (
    PARTIAL_READ_BYTES,
    RECORD_BYTES,
    RECORD_STRIDE_ALIGNMENT,
    VIOLATION_FIELDS,
    RealKvHashMode,
)
from kvcanary_plugin.kernels.context import (
    PackedContext,
    RealKvSource,
    VerifyOrWriteContext,
)


def packed(context: VerifyOrWriteContext) -> PackedContext:
    """The launch words of ``context``; the first call validates its tensors (ValueError).

    The addresses are read once: a context whose tensors move (a resized or re-mapped pool) must be
    replaced by a new one.
    """
    ready = context.packed_words
    if ready is None:
        check_context(context)
        ready = _pack(context)
        object.__setattr__(context, "packed_words", ready)  # the one field that is a cache
    return ready


def check_context(context: VerifyOrWriteContext) -> None:
    """Everything about the static tensors that a kernel relies on."""
    records = context.canary_buf
    _check_records(records)
    _check_ring(context.violation_ring, device=records.device)
    for name, tensor, dtype in (
        ("violation_write_index", context.violation_write_index, torch.int32),
        ("slot_run_counter", context.slot_run_counter, torch.int64),
        ("kernel_run_counter", context.kernel_run_counter, torch.int64),
        ("enable_chain_position_assert", context.enable_chain_position_assert, torch.int32),
    ):
        check_vector(name, tensor, device=records.device, dtypes=(dtype,), size=1)
    _check_slot_table(context)
    _check_counter_mirror(context.counter_mirror, device=records.device)
    for index, source in enumerate(context.real_kv_sources):
        _check_source(f"real_kv_sources[{index}]", source, records=records)


def folds_real_kv(context: VerifyOrWriteContext) -> bool:
    """Whether a launch with this context looks at real KV bytes at all."""
    return context.real_kv_hash_mode != RealKvHashMode.NONE and bool(context.real_kv_sources)


def read_bytes(source: RealKvSource, mode: RealKvHashMode) -> int:
    """Bytes of a slot that a launch in ``mode`` (not NONE) folds of ``source``."""
    if mode == RealKvHashMode.PARTIAL:
        return min(PARTIAL_READ_BYTES, source.read_bytes)
    return source.read_bytes


def row_bytes(source: RealKvSource) -> int:
    """Bytes of one row of the source's tensor."""
    return source.tensor[0].numel() * source.tensor.element_size()


def _pack(context: VerifyOrWriteContext) -> PackedContext:
    records, table = context.canary_buf, context.slot_table
    sources = _source_table(context)
    words = [
        records.data_ptr(),
        records.shape[0],
        records.stride(0),
        context.violation_ring.data_ptr(),
        context.violation_ring.shape[0],
        context.violation_write_index.data_ptr(),
        context.slot_run_counter.data_ptr(),
        context.kernel_run_counter.data_ptr(),
        0 if context.counter_mirror is None else context.counter_mirror.data_ptr(),
        context.enable_chain_position_assert.data_ptr(),
        0 if table is None else table.state.data_ptr(),
        0 if table is None else table.owner_uid.data_ptr(),
        0 if table is None else table.writer_uid.data_ptr(),
        0 if table is None else table.writer_step.data_ptr(),
        0 if table is None else int(table.tracks_allocation),
        0 if sources is None else sources.data_ptr(),
        0 if sources is None else sources.shape[0],
        int(context.real_kv_hash_mode),
        context.kernel_kind,
        -1 if records.device.type == "cpu" else records.device.index,
    ]
    return PackedContext(
        launch=torch.tensor(words, dtype=torch.int64),
        source_table=sources,
        device=records.device,
        device_type=records.device.type,
    )


def _source_table(context: VerifyOrWriteContext) -> torch.Tensor | None:
    """struct Source, one row a source: int64 [num_sources, 5] beside the records."""
    if not folds_real_kv(context):
        return None
    rows = [
        [
            source.tensor.data_ptr(),
            source.tensor.stride(0) * source.tensor.element_size(),
            source.page_size,
            source.num_bytes_per_token,
            read_bytes(source, context.real_kv_hash_mode),
        ]
        for source in context.real_kv_sources
    ]
    return torch.tensor(rows, dtype=torch.int64).to(context.canary_buf.device)


def _check_records(records: torch.Tensor) -> None:
    name = "canary_buf"
    if not isinstance(records, torch.Tensor):
        raise refuse(name, "be a torch.Tensor", type(records).__name__)
    if records.device.type not in ("cpu", "cuda"):
        raise refuse(name, "be on a CPU or CUDA device", records.device)
    if records.dtype != torch.uint8:
        raise refuse(name, "be uint8", records.dtype)
    if records.ndim != 2 or records.shape[0] < 1:
        raise refuse(name, "have shape [num_slots >= 1, stride]", list(records.shape))
    if not records.is_contiguous():
        raise refuse(name, "be contiguous", f"strides {list(records.stride())}")
    stride = records.shape[1]
    if stride < RECORD_BYTES or stride % RECORD_STRIDE_ALIGNMENT:
        raise refuse(
            f"{name} stride",
            f"be at least {RECORD_BYTES} and a multiple of {RECORD_STRIDE_ALIGNMENT}",
            stride,
        )
    if records.data_ptr() % RECORD_STRIDE_ALIGNMENT:
        raise refuse(
            name, f"start at a multiple of {RECORD_STRIDE_ALIGNMENT} bytes", records.data_ptr()
        )


def _check_ring(ring: torch.Tensor, *, device: torch.device) -> None:
    name = "violation_ring"
    if not isinstance(ring, torch.Tensor):
        raise refuse(name, "be a torch.Tensor", type(ring).__name__)
    pinned_for_cuda = device.type == "cuda" and ring.device.type == "cpu" and ring.is_pinned()
    if ring.device != device and not pinned_for_cuda:
        allowed = f"be on the records' device {device}"
        if device.type == "cuda":
            allowed += " or in pinned host memory"
        raise refuse(name, allowed, ring.device)
    if ring.dtype != torch.int64:
        raise refuse(name, "be int64", ring.dtype)
    if ring.ndim != 2 or ring.shape[1] != VIOLATION_FIELDS or ring.shape[0] < 1:
        raise refuse(name, f"have shape [capacity >= 1, {VIOLATION_FIELDS}]", list(ring.shape))
    if not ring.is_contiguous():
        raise refuse(name, "be contiguous", f"strides {list(ring.stride())}")


def _check_slot_table(context: VerifyOrWriteContext) -> None:
    table = context.slot_table
    if table is None:
        return
    for name, tensor, dtype in (
        ("slot_table.state", table.state, torch.int32),
        ("slot_table.owner_uid", table.owner_uid, torch.int64),
        ("slot_table.writer_uid", table.writer_uid, torch.int64),
        ("slot_table.writer_step", table.writer_step, torch.int64),
    ):
        check_vector(
            name,
            tensor,
            device=context.canary_buf.device,
            dtypes=(dtype,),
            size=context.canary_buf.shape[0],
            size_like="canary_buf",
        )


def _check_counter_mirror(mirror: torch.Tensor | None, *, device: torch.device) -> None:
    if mirror is None:
        return
    name = "counter_mirror"
    if device.type != "cuda":
        raise refuse(
            name, "be None for records on CPU; read the counters themselves", mirror.device
        )
    check_vector(name, mirror, device=torch.device("cpu"), dtypes=(torch.int64,), size=2)
    if not mirror.is_pinned():
        raise refuse(name, "be in pinned host memory", "pageable memory")


def _check_source(name: str, source: RealKvSource, *, records: torch.Tensor) -> None:
    tensor = source.tensor
    if not isinstance(tensor, torch.Tensor):
        raise refuse(f"{name}.tensor", "be a torch.Tensor", type(tensor).__name__)
    if tensor.device != records.device:
        raise refuse(f"{name}.tensor", f"be on the records' device {records.device}", tensor.device)
    if tensor.ndim < 1 or tensor.shape[0] < 1:
        raise refuse(f"{name}.tensor", "have at least one row", f"shape {list(tensor.shape)}")
    if not tensor[0].is_contiguous():
        raise refuse(
            f"{name}.tensor",
            "be contiguous behind its first dimension",
            f"strides {list(tensor.stride())}",
        )
    for field, value in (
        ("page_size", source.page_size),
        ("num_bytes_per_token", source.num_bytes_per_token),
        ("read_bytes", source.read_bytes),
    ):
        if value < 1:
            raise refuse(f"{name}.{field}", "be at least 1", value)
    if source.read_bytes > source.num_bytes_per_token:
        raise refuse(
            f"{name}.read_bytes",
            f"be at most num_bytes_per_token {source.num_bytes_per_token}",
            source.read_bytes,
        )
    needed = source.page_size * source.num_bytes_per_token
    if needed > row_bytes(source):
        raise refuse(
            f"{name}.tensor",
            f"have rows of at least page_size * num_bytes_per_token = {needed} bytes",
            row_bytes(source),
        )
    slots = tensor.shape[0] * source.page_size
    if slots < records.shape[0]:
        raise refuse(
            f"{name}.tensor", f"cover the {records.shape[0]} slots of canary_buf", f"{slots} slots"
        )
