"""What the torch references share: records, slot states, real-KV folds and the ring as tensors.

The references define the bytes; they favour the obvious over the fast and work on any device. They
synchronise wherever it is convenient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcanary_plugin.kernels.consts import (
    FIELD_POSITION,
    FIELD_PREV_HASH,
    FIELD_REAL_KV_HASH,
    FIELD_TOKEN,
    PADDING_SLOT,
    RECORD_FIELDS,
    UNKNOWN,
    VIOLATION_FIELDS,
    SlotState,
    ViolationField,
)
from kvcanary_plugin.kernels.context import RealKvSource, VerifyOrWriteContext
from kvcanary_plugin.kernels.hashes import (
    splitmix64_mix3_tensor,
    splitmix64_tensor,
    word_keys,
)
from kvcanary_plugin.kernels.packing import folds_real_kv, read_bytes, row_bytes

STATE_MASK = 0xFF


@dataclass(frozen=True, slots=True)
class Records:
    """Copies of the records of some slots: four int64 tensors of one shape."""

    token: torch.Tensor
    position: torch.Tensor
    prev_hash: torch.Tensor
    real_kv_hash: torch.Tensor

    def chain(self) -> torch.Tensor:
        """The running hash behind each record: what its successor stores."""
        return splitmix64_mix3_tensor(self.prev_hash, self.token, self.position)


def record_fields(context: VerifyOrWriteContext) -> torch.Tensor:
    """The four fields of every record, in place: an int64 view [num_slots, 4]."""
    return context.canary_buf.view(torch.int64)[:, :RECORD_FIELDS]


def read_records(context: VerifyOrWriteContext, slots: torch.Tensor) -> Records:
    """The records of ``slots``, all of them inside the pool."""
    fields = record_fields(context)[slots]
    return Records(
        token=fields[..., FIELD_TOKEN],
        position=fields[..., FIELD_POSITION],
        prev_hash=fields[..., FIELD_PREV_HASH],
        real_kv_hash=fields[..., FIELD_REAL_KV_HASH],
    )


def num_slots(context: VerifyOrWriteContext) -> int:
    return context.canary_buf.shape[0]


def in_pool(context: VerifyOrWriteContext, slots: torch.Tensor) -> torch.Tensor:
    """Where ``slots`` may be read: 0 <= slot < num_slots."""
    return (slots >= 0) & (slots < num_slots(context))


def clamped(context: VerifyOrWriteContext, slots: torch.Tensor) -> torch.Tensor:
    """``slots`` moved into the pool, for gathers whose result is masked afterwards."""
    return slots.clamp(0, num_slots(context) - 1)


def in_flight(context: VerifyOrWriteContext, slots: torch.Tensor, step: int) -> torch.Tensor:
    """Where ``slots`` (in the pool) are written in this forward."""
    if context.slot_table is None or step == UNKNOWN:
        return torch.zeros_like(slots, dtype=torch.bool)
    return context.slot_table.writer_step[slots] == step


def states(context: VerifyOrWriteContext, slots: torch.Tensor) -> torch.Tensor:
    """Lifecycle states of ``slots`` (in the pool): int64, -1 without a slot table."""
    if context.slot_table is None:
        return torch.full_like(slots, UNKNOWN)
    return context.slot_table.state[slots].to(torch.int64) & STATE_MASK


def has_sealed_bytes(context: VerifyOrWriteContext, slots: torch.Tensor) -> torch.Tensor:
    """Where a record's real-KV hash stands for bytes: SEALED or EXTERNAL, or no slot table."""
    if context.slot_table is None:
        return torch.ones_like(slots, dtype=torch.bool)
    state = states(context, slots)
    return (state == SlotState.SEALED) | (state == SlotState.EXTERNAL)


# ---- the real-KV fold ----------------------------------------------------------------------------


def fold_slots(context: VerifyOrWriteContext, slots: torch.Tensor) -> torch.Tensor:
    """``fold(slot)`` of the contract for ``slots`` [n] (in the pool), in the context's mode.

    int64 [n]; 0 in mode NONE and without sources.
    """
    if not folds_real_kv(context):
        return torch.zeros_like(slots)
    total = torch.zeros_like(slots)
    for index, source in enumerate(context.real_kv_sources):
        words = _words(source, slots, read_bytes(source, context.real_kv_hash_mode))
        keys = word_keys(index, words.shape[1], words.device)
        total += splitmix64_tensor(words ^ keys).sum(dim=1)
    return splitmix64_tensor(total)


def _words(source: RealKvSource, slots: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """The first ``num_bytes`` of each slot as int64 [n, words], zero-extended at the end."""
    row = torch.div(slots, source.page_size, rounding_mode="floor")
    first_byte = (slots % source.page_size) * source.num_bytes_per_token
    columns = first_byte[:, None] + torch.arange(num_bytes, device=slots.device)
    content = _row_bytes(source)[row[:, None], columns]
    padding = -num_bytes % 8
    return torch.nn.functional.pad(content, (0, padding)).contiguous().view(torch.int64)


def _row_bytes(source: RealKvSource) -> torch.Tensor:
    """The source as bytes [rows, row_bytes], in place, rows stepped by stride(0)."""
    tensor = source.tensor
    item = tensor.element_size()
    flat = tensor.as_strided(
        (tensor.shape[0], row_bytes(source) // item), (tensor.stride(0), 1), tensor.storage_offset()
    )
    return flat.view(torch.uint8)


# ---- violations ----------------------------------------------------------------------------------


def violation_rows(
    context: VerifyOrWriteContext, *, step: int, columns: dict[ViolationField, torch.Tensor]
) -> torch.Tensor:
    """Rows [n, 16] from columns of equal length; kind, provenance and state are filled in.

    Fields that are not given are -1, the sequence excepted (:func:`record_violations` sets it).
    """
    slots = columns[ViolationField.SLOT]
    rows = torch.full(
        (slots.numel(), VIOLATION_FIELDS), UNKNOWN, dtype=torch.int64, device=slots.device
    )
    rows[:, ViolationField.KERNEL_KIND] = context.kernel_kind
    rows[:, ViolationField.STEP] = step
    table = context.slot_table
    if table is not None:
        known = in_pool(context, slots)
        safe = clamped(context, slots)
        for field, values in (
            (ViolationField.WRITER_UID, table.writer_uid[safe]),
            (ViolationField.WRITER_STEP, table.writer_step[safe]),
            (ViolationField.SLOT_STATE, states(context, safe)),
        ):
            rows[:, field] = torch.where(known, values, torch.full_like(values, UNKNOWN))
    for field, values in columns.items():
        rows[:, field] = values
    return rows


def record_violations(context: VerifyOrWriteContext, rows: torch.Tensor) -> None:
    """Append ``rows`` to the ring in their order; the newest replace the oldest."""
    ring, index = context.violation_ring, context.violation_write_index
    capacity = ring.shape[0]
    first = int(index.item()) & 0xFFFFFFFF  # the count is an unsigned number in 32 bits
    for offset, row in enumerate(rows.to(ring.device)):
        number = (first + offset) & 0xFFFFFFFF
        ring[number % capacity] = row
        ring[number % capacity, ViolationField.SEQUENCE] = number + 1
    index += rows.shape[0]


def is_real_slot(context: VerifyOrWriteContext, slots: torch.Tensor) -> torch.Tensor:
    """Where ``slots`` are inside the pool and not the padding slot."""
    return in_pool(context, slots) & (slots != PADDING_SLOT)
