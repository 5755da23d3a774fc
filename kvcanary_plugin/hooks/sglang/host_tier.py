"""Slots that SGLang's hierarchical cache keeps on the host and loads back.

The records of a slot stay on the device, in rows of their own, as long as its bytes are on the
host. Loads run beside the forward that reads them, layer by layer: their records are put back when
that forward is launched, and their bytes are compared once all of them have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvcanary_plugin.carried import CarriedRecords, LoadInFlight
from kvcanary_plugin.guard import GroupGuard
from kvcanary_plugin.kernels.consts import RECORD_FIELDS
from kvcanary_plugin.monitor import CanaryMonitor


class StorageAttachedError(RuntimeError):
    """Slots will be loaded that nobody has records of."""


class HostRecords:
    """The records of one host pool's slots, on the device: 33 bytes for each.

    Args:
        num_slots: slots of the host pool.
        device: where the records of the device's slots are.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._records = torch.zeros((num_slots, RECORD_FIELDS), dtype=torch.int64, device=device)
        self._states = torch.zeros(num_slots, dtype=torch.uint8, device=device)
        self._layout = 0

    def put(self, host_slots: torch.Tensor, carried: CarriedRecords) -> None:
        """``carried`` belongs to ``host_slots`` (int64 [n], on the device) from now on."""
        self._records[host_slots] = carried.records
        self._states[host_slots] = carried.states
        self._layout = carried.layout

    def take(self, host_slots: torch.Tensor) -> CarriedRecords:
        """The records of ``host_slots`` (int64 [n], on the device)."""
        return CarriedRecords(
            records=self._records[host_slots],
            states=self._states[host_slots],
            layout=self._layout,
        )


@dataclass(frozen=True, slots=True)
class _Load:
    """A transfer back to the device that has been submitted."""

    carried: CarriedRecords
    slots: torch.Tensor
    finished: Any  # the engine's event


class HostTier:
    """Follows the transfers of one engine rank between its pools and the host."""

    def __init__(self, monitor: CanaryMonitor) -> None:
        self._monitor = monitor
        self._parts: list[TierPart] = []
        self.has_loads = False

    def follow(self, guard: GroupGuard) -> TierPart:
        """What follows the transfers of the pool of ``guard``."""
        part = TierPart(self, self._monitor, guard)
        self._parts.append(part)
        return part

    def before_forward(self) -> None:
        """On the forward's stream: records of what was submitted, bytes of what has arrived."""
        self.has_loads = False
        for part in self._parts:
            self.has_loads |= part.before_forward()


class TierPart:
    """Follows the transfers of one pool."""

    def __init__(self, tier: HostTier, monitor: CanaryMonitor, guard: GroupGuard) -> None:
        self._tier = tier
        self._monitor = monitor
        self._index = guard.index
        self._device = guard.group.device
        self._host_records: dict[int, HostRecords] = {}
        self._submitted: list[_Load] = []
        self._arriving: list[tuple[_Load, LoadInFlight]] = []

    def before_backup(self, transfer: Any, stream: Any) -> None:
        """BEFORE the bytes of a transfer leave for the host on ``stream``, whose work so far is
        done before they are read: their records leave with them."""
        if self._monitor.blind_because is not None:
            return
        with self._monitor.guard_errors("hook"):
            host_records = self._records_of(transfer.host_pool)
            host_slots, slots = self._indices(transfer)
            with self._after_the_engine(stream):
                self._read_here(host_slots, slots)
                carried = self._monitor.export_slots(self._index, slots)
                if carried is not None:
                    host_records.put(host_slots, carried)

    def after_load(self, transfer: Any, finished: Any) -> None:
        """AFTER a transfer back to the device was submitted; ``finished`` is its last event."""
        if self._monitor.blind_because is not None:
            return
        with self._monitor.guard_errors("hook"):
            host_slots, slots = self._indices(transfer)
            # Now: the host slots may be others' by the next forward.
            carried = self._records_of(transfer.host_pool).take(host_slots)
            self._submitted.append(_Load(carried, slots, finished))
            self._tier.has_loads = True

    def before_forward(self) -> bool:
        """Puts back what was submitted, compares what has arrived; whether more is on its way."""
        for load in self._submitted:
            self._read_here(load.slots, load.carried.records, load.carried.states)
            in_flight = self._monitor.import_in_flight(self._index, load.slots, load.carried)
            if in_flight is not None:
                self._arriving.append((load, in_flight))
        self._submitted = []
        still_arriving = []
        for load, in_flight in self._arriving:
            if load.finished.query():
                self._monitor.bytes_arrived(self._index, in_flight)
            else:
                still_arriving.append((load, in_flight))
        self._arriving = still_arriving
        return bool(still_arriving)

    def _records_of(self, host_pool: Any) -> HostRecords:
        records = self._host_records.get(id(host_pool))
        if records is None:
            records = self._host_records[id(host_pool)] = HostRecords(host_pool.size, self._device)
        return records

    def _indices(self, transfer: Any) -> Sequence[torch.Tensor]:
        """(host slots, slots) of a transfer, on the device."""
        return [self._here(transfer.host_indices), self._here(transfer.device_indices)]

    def _here(self, indices: torch.Tensor) -> torch.Tensor:
        if indices.device == self._device:
            return indices.to(torch.int64)
        # Pinned: the host would otherwise wait for everything in front of the copy.
        return indices.to(torch.int64).pin_memory().to(self._device, non_blocking=True)

    def _read_here(self, *tensors: torch.Tensor) -> None:
        """The current stream reads ``tensors``, made on another: nobody gets their memory before it
        has done so, however many transfers it is behind."""
        if self._device.type == "cuda":
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def _after_the_engine(self, stream: Any) -> Iterator[None]:
        """On ``stream``, behind what has been launched on the current one."""
        if self._device.type != "cuda":
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield


def around_backup(original: Any, engine: Any, transfers: Sequence[Any], attribute: str) -> Any:
    """AROUND ``L2TransferEngine.submit_device_to_host``."""
    for transfer in transfers:
        part: TierPart | None = getattr(transfer.device_pool, attribute, None)
        if part is not None:
            part.before_backup(transfer, engine.device_to_host_stream)
    return original(engine, transfers)


def around_load(
    original: Any, engine: Any, transfers: Sequence[Any], attribute: str, **how: Any
) -> Any:
    """AROUND ``L2TransferEngine.submit_host_to_device``."""
    completion = original(engine, transfers, **how)
    for transfer in transfers:
        part: TierPart | None = getattr(transfer.device_pool, attribute, None)
        if part is not None:
            part.after_load(transfer, completion.finish_event)
    return completion
