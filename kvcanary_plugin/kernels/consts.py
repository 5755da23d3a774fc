"""Constants of the byte contract: record, hashes, violation row, launch tags, slot states.

Every value here is pinned by ``docs/record-and-hash.md`` and mirrored in ``csrc/hash.h`` and
``csrc/record.h``; ``tests/kernels/test_byte_contract.py`` holds the three together.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final

U64_MASK: Final = (1 << 64) - 1

CANARY_CHAIN_ANCHOR: Final = 0xC0FFEE1234567890
GOLDEN: Final = 0x9E3779B97F4A7C15

# The record: the first 32 bytes of a row of canary_buf, as four int64 fields.
RECORD_FIELDS: Final = 4
RECORD_BYTES: Final = RECORD_FIELDS * 8
RECORD_STRIDE_ALIGNMENT: Final = 16
FIELD_TOKEN: Final = 0
FIELD_POSITION: Final = 1
FIELD_PREV_HASH: Final = 2
FIELD_REAL_KV_HASH: Final = 3

# Slot 0 is the engine's padding slot; below 0 means "skip".
PADDING_SLOT: Final = 0
CHAIN_HEAD: Final = -1
UNKNOWN: Final = -1
# A slot read from outside the page table: beyond every pool, so that it is reported, never read.
OUT_OF_TABLE: Final = (1 << 63) - 1

# Bytes of each source that mode PARTIAL folds.
PARTIAL_READ_BYTES: Final = 16


class ViolationField(IntEnum):
    """Column of one violation row (``violation_ring`` is int64 [capacity, 16])."""

    KERNEL_KIND = 0
    SLOT = 1
    POSITION = 2
    STORED_TOKEN = 3
    EXPECTED_TOKEN = 4
    STORED_CHAIN_HASH = 5
    EXPECTED_AUX = 6
    FAIL_REASON_BITS = 7
    STEP = 8
    REQUEST_UID = 9
    WRITER_UID = 10
    WRITER_STEP = 11
    BATCH_ROW = 12
    SLOT_STATE = 13
    EXPECTED_POSITION = 14
    SEQUENCE = 15


VIOLATION_FIELDS: Final = len(ViolationField)


class FailReason(IntFlag):
    """Bits of ``ViolationField.FAIL_REASON_BITS``: one check each."""

    VERIFY_CHAIN_HASH = 1 << 0
    VERIFY_POSITION = 1 << 1
    VERIFY_REAL_KV_HASH = 1 << 2
    WRITE_TOKEN = 1 << 3
    WRITE_POSITION = 1 << 4
    VERIFY_TOKEN = 1 << 5
    UNWRITTEN_READ = 1 << 6
    FREED_READ = 1 << 7
    OUT_OF_POOL = 1 << 8
    WRITE_OWNED = 1 << 9
    DOUBLE_FREE = 1 << 10
    DOUBLE_ALLOC = 1 << 11
    PREFIX_IDENTITY = 1 << 12
    TABLE_CHANGED = 1 << 13


class RealKvHashMode(IntEnum):
    """How much of every source a launch folds into the record's real-KV hash."""

    NONE = 0
    PARTIAL = 1
    ALL = 2


class LaunchTag(IntEnum):
    """The step of a forward whose launch saw a violation; the low byte of ``kernel_kind``.

    The group's index sits above it (see :func:`pack_kernel_kind`), so that one number in a row
    names both, and a further group or a further step costs no further tag.
    """

    VERIFY = 0
    WRITE = 1
    SEAL = 2
    REVERIFY = 3
    SCRUB = 4
    LIFECYCLE = 5
    ADOPT = 6


class SlotState(IntEnum):
    """Lifecycle state of a slot: the low byte of ``SlotTable.state``."""

    FREE = 0
    ALLOCATED = 1
    WRITTEN = 2
    SEALED = 3
    EXTERNAL = 4


class EventKind(IntEnum):
    """Lifecycle event that the scheduler side queues and the next forward applies."""

    ALLOC = 0
    FREE = 1
    MOVE = 2
    RESET = 5


def pack_kernel_kind(tag: LaunchTag, group_index: int) -> int:
    """The ``kernel_kind`` of launch ``tag`` on group ``group_index`` (0-based)."""
    return int(tag) | (group_index << 8)


def unpack_kernel_kind(kernel_kind: int) -> tuple[LaunchTag, int]:
    """Inverse of :func:`pack_kernel_kind`."""
    return LaunchTag(kernel_kind & 0xFF), kernel_kind >> 8
