"""What every launch needs to know: records, sink, counters, sources, slot states."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvcanary_plugin.kernels.consts import (
    RECORD_BYTES,
    RealKvHashMode,
    SlotState,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RealKvSource:
    """One strip of real KV memory per slot, usually the K or the V of one layer.

    Slot ``s`` owns the bytes ``tensor[s // page_size]`` at offset
    ``(s % page_size) * num_bytes_per_token``, ``num_bytes_per_token`` of them. Nothing is copied:
    rows are stepped by ``tensor.stride(0)``, so a view into an interleaved buffer works.

    Fields:
        tensor: shape [rows, ...], any dtype, any device; everything behind the first dimension
            contiguous.
        page_size: slots per row, >= 1.
        num_bytes_per_token: bytes of one slot, >= 1; ``page_size`` of them fit into a row.
        read_bytes: bytes of a slot that mode ALL folds, 1 .. num_bytes_per_token; a last partial
            8-byte word is zero-extended.
    """

    tensor: torch.Tensor
    page_size: int
    num_bytes_per_token: int
    read_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotTable:
    """Lifecycle state and provenance, one entry a slot (28 bytes beside the 32 of the record).

    Fields:
        state: int32 [num_slots]; low byte :class:`SlotState`, upper 24 bits the generation, which
            every allocation advances.
        owner_uid: int64 [num_slots]; the live owner, -1 when nobody has claimed the slot yet. The
            first write after an allocation claims it.
        writer_uid: int64 [num_slots]; the request that last wrote the slot, -1 unknown.
        writer_step: int64 [num_slots]; the step of that write, -1 unknown. Set before the verify of
            the same forward, so that slots written in this forward are left out of it.
        tracks_allocation: whether alloc / free events reach this table. Without them no slot is
            ever FREE and owners are not compared (`freed_read`, `write_owned`, `double_free` and
            `double_alloc` cannot be seen).
    """

    state: torch.Tensor
    owner_uid: torch.Tensor
    writer_uid: torch.Tensor
    writer_step: torch.Tensor
    tracks_allocation: bool

    @classmethod
    def allocate(
        cls, *, num_slots: int, device: torch.device, tracks_allocation: bool
    ) -> SlotTable:
        """A table for a fresh pool: all FREE with allocator events, all ALLOCATED without."""
        if num_slots <= 0:
            raise ValueError(f"kvcanary: SlotTable num_slots must be positive, got {num_slots}")
        initial = SlotState.FREE if tracks_allocation else SlotState.ALLOCATED
        return cls(
            state=torch.full((num_slots,), int(initial), dtype=torch.int32, device=device),
            owner_uid=torch.full((num_slots,), -1, dtype=torch.int64, device=device),
            writer_uid=torch.full((num_slots,), -1, dtype=torch.int64, device=device),
            writer_step=torch.full((num_slots,), -1, dtype=torch.int64, device=device),
            tracks_allocation=tracks_allocation,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedContext:
    """A validated context in the form that kernels take (``packing.packed`` makes it).

    Fields:
        launch: int64 [20] on CPU, struct LaunchContext.
        source_table: int64 [num_sources, 5] on the records' device; None without real KV. Kept
            here because ``launch`` holds its address.
        device: the records' device.
        device_type: its type, which takes too long to ask for in every launch.
    """

    launch: torch.Tensor
    source_table: torch.Tensor | None
    device: torch.device
    device_type: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyOrWriteContext:
    """The part of a launch that stays the same from forward to forward.

    Fields:
        canary_buf: uint8 [num_slots, stride], contiguous; stride >= 32 and a multiple of 16.
        kernel_kind: tag stamped into every violation row: a ``LaunchTag``, or one packed with a
            group index by ``pack_kernel_kind``.
        violation_ring: int64 [capacity, 16], contiguous, capacity >= 1. On CPU plain memory; on
            CUDA pinned host memory or device memory.
        violation_write_index: int32 [1]; the number of violations ever recorded.
        slot_run_counter: int64 [1]; verify adds the entries it looked at, write the entries stored.
        kernel_run_counter: int64 [1]; plus one per launch.
        real_kv_sources: the strips folded into the real-KV hash; any number, may be empty.
        real_kv_hash_mode: how much of each source this launch folds.
        enable_chain_position_assert: int32 [1]; 1 lets the write step check that positions follow
            each other.
        slot_table: lifecycle state and provenance; None leaves those checks and columns out (-1).
        counter_mirror: int64 [2] in pinned host memory, CUDA only: (slot_run, kernel_run) as the
            next launch publishes them, for a reader that must not synchronise. None elsewhere.
        packed_words: filled by the first launch; not for callers.
    """

    canary_buf: torch.Tensor
    kernel_kind: int
    violation_ring: torch.Tensor
    violation_write_index: torch.Tensor
    slot_run_counter: torch.Tensor
    kernel_run_counter: torch.Tensor
    real_kv_sources: tuple[RealKvSource, ...]
    real_kv_hash_mode: RealKvHashMode
    enable_chain_position_assert: torch.Tensor
    slot_table: SlotTable | None = None
    counter_mirror: torch.Tensor | None = None
    packed_words: PackedContext | None = field(default=None, init=False, repr=False)


def allocate_records(*, num_slots: int, device: torch.device) -> torch.Tensor:
    """Zeroed records of a pool: uint8 [num_slots, 32] on ``device``."""
    if num_slots <= 0:
        raise ValueError(f"kvcanary: num_slots must be positive, got {num_slots}")
    return torch.zeros((num_slots, RECORD_BYTES), dtype=torch.uint8, device=device)
