"""What the canary keeps for one group: records, slot states, counters, launch contexts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvcanary_plugin.cache import KVCacheGroup
from kvcanary_plugin.kernels import (
    LaunchTag,
    RealKvHashMode,
    SlotState,
    SlotTable,
    VerifyOrWriteContext,
    WritePlan,
    allocate_records,
    pack_kernel_kind,
)
from kvcanary_plugin.kernels.consts import VIOLATION_FIELDS
from kvcanary_plugin.kernels.packing import packed, read_bytes
from kvcanary_plugin.lifecycle import SlotEvents


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ViolationSink:
    """Where launches put what they find.

    Fields:
        ring: int64 [capacity, 16]; pinned host memory for CUDA groups, plain memory on CPU.
        write_index: int32 [1] on the device of the groups.
    """

    ring: torch.Tensor
    write_index: torch.Tensor

    @classmethod
    def allocate(cls, *, capacity: int, device: torch.device) -> ViolationSink:
        """An empty sink of ``capacity`` rows."""
        if capacity <= 0:
            raise ValueError(f"kvcanary: ring capacity must be positive, got {capacity}")
        return cls(
            ring=torch.zeros(
                (capacity, VIOLATION_FIELDS),
                dtype=torch.int64,
                pin_memory=device.type == "cuda",
            ),
            write_index=torch.zeros(1, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotRecords:
    """Records and slot states of one pool; groups of the same pool share them."""

    records: torch.Tensor
    slots: SlotTable

    @classmethod
    def allocate(cls, group: KVCacheGroup) -> SlotRecords:
        """Fresh ones for the pool of ``group``."""
        return cls(
            records=allocate_records(num_slots=group.num_slots, device=group.device),
            slots=SlotTable.allocate(
                num_slots=group.num_slots,
                device=group.device,
                tracks_allocation=group.tracks_allocation,
            ),
        )

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """The engine copied K/V from slots ``source`` to ``destination`` (int64 [n], distinct)."""
        for tensor in (
            self.records,
            self.slots.state,
            self.slots.owner_uid,
            self.slots.writer_uid,
            self.slots.writer_step,
        ):
            tensor[destination] = tensor[source]

    def forget(self, slots: torch.Tensor | slice) -> None:
        """The K/V of ``slots`` (int64 [n], or a slice) is gone: nobody has written them."""
        self.slots.state[slots] = int(
            SlotState.FREE if self.slots.tracks_allocation else SlotState.ALLOCATED
        )
        self.slots.owner_uid[slots] = -1
        self.slots.writer_uid[slots] = -1
        self.slots.writer_step[slots] = -1


# Rows that the first look of the scrub may leave behind between two forwards.
_SUSPECTS = 256


class GroupGuard:
    """Records, slot states, counters and launch contexts of one group."""

    def __init__(
        self,
        *,
        group: KVCacheGroup,
        index: int,
        sink: ViolationSink,
        slot_records: SlotRecords,
        max_requests: int,
        verify_mode: RealKvHashMode,
        seal_mode: RealKvHashMode,
    ) -> None:
        device = group.device
        self.group = group
        self.index = index
        self.slot_records = slot_records
        self.records = slot_records.records
        self.slots = slot_records.slots
        self.events = SlotEvents()
        self.write_plan = WritePlan.allocate(write_req_capacity=max_requests, device=device)
        self.chain_position_assert = torch.ones(1, dtype=torch.int32, device=device)
        self.seal_mode = seal_mode
        self.suspects = ViolationSink.allocate(capacity=_SUSPECTS, device=device)
        self._contexts = {
            tag: self._make_context(tag, mode, sink)
            for tag, mode in (
                (LaunchTag.LIFECYCLE, RealKvHashMode.NONE),
                (LaunchTag.VERIFY, verify_mode),
                (LaunchTag.WRITE, RealKvHashMode.NONE),
                (LaunchTag.SEAL, seal_mode),
                (LaunchTag.REVERIFY, verify_mode),
                (LaunchTag.ADOPT, seal_mode),
            )
        }
        # The scrub looks twice (see scrub.py): only what its second look finds is a violation.
        self._contexts[LaunchTag.SCRUB] = self._make_context(
            LaunchTag.SCRUB, seal_mode, self.suspects
        )
        self.scrub_second_look = self._make_context(LaunchTag.SCRUB, seal_mode, sink)
        # The same launch as the write, where a token need not follow the one before it.
        self.tree_write = replace(
            self._contexts[LaunchTag.WRITE],
            enable_chain_position_assert=torch.zeros(1, dtype=torch.int32, device=device),
        )
        # Records of adopted slots; their bytes are folded by a launch of its own, slot by slot.
        self.adopted_records = self._make_context(LaunchTag.ADOPT, RealKvHashMode.NONE, sink)

    def _make_context(
        self, tag: LaunchTag, mode: RealKvHashMode, sink: ViolationSink
    ) -> VerifyOrWriteContext:
        device = self.group.device
        return VerifyOrWriteContext(
            canary_buf=self.records,
            kernel_kind=pack_kernel_kind(tag, self.index),
            violation_ring=sink.ring,
            violation_write_index=sink.write_index,
            slot_run_counter=torch.zeros(1, dtype=torch.int64, device=device),
            kernel_run_counter=torch.zeros(1, dtype=torch.int64, device=device),
            real_kv_sources=self.group.sources if mode is not RealKvHashMode.NONE else (),
            real_kv_hash_mode=mode,
            enable_chain_position_assert=self.chain_position_assert,
            slot_table=self.slots,
            counter_mirror=(
                torch.zeros(2, dtype=torch.int64, pin_memory=True)
                if device.type == "cuda"
                else None
            ),
        )

    @property
    def sealed_bytes_per_slot(self) -> int:
        """Bytes of a slot that a fold reads; 0 where nothing is sealed."""
        if self.seal_mode == RealKvHashMode.NONE:
            return 0
        return sum(read_bytes(source, self.seal_mode) for source in self.group.sources)

    @property
    def may_verify_later(self) -> bool:
        """Whether a verify reads only tables and records, which stay while a forward runs."""
        reads_bytes = self._contexts[LaunchTag.VERIFY].real_kv_hash_mode is not RealKvHashMode.NONE
        return self.group.table_stable_through_forward and not reads_bytes

    def pack_contexts(self) -> None:
        """Checks and packs every context now, so that no later launch copies anything."""
        beside = (self.scrub_second_look, self.tree_write, self.adopted_records)
        for context in (*self._contexts.values(), *beside):
            packed(context)

    def context(self, tag: LaunchTag) -> VerifyOrWriteContext:
        """The launch context of one step of the forward."""
        return self._contexts[tag]

    def slots_run(self, tag: LaunchTag) -> int:
        """Slots that step ``tag`` has gone through since the start; never synchronises."""
        context = self._contexts[tag]
        if context.counter_mirror is not None:
            return int(context.counter_mirror[0])
        return int(context.slot_run_counter[0])

    def launches_run(self, tag: LaunchTag) -> int:
        """Launches of step ``tag`` that have begun since the start; never synchronises."""
        context = self._contexts[tag]
        if context.counter_mirror is not None:
            return int(context.counter_mirror[1])
        return int(context.kernel_run_counter[0])
