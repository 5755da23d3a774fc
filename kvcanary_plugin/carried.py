"""Slots that leave and come back: to a host tier, to disk, to another node.

Whoever stores the bytes of slots elsewhere takes their records along (:func:`export_records`) and
puts both back together (:func:`import_records`): the bytes that arrive are compared with the fold
of the bytes that left. Bytes that come without records are adopted as they are found
(:func:`adopt`): records are written from the reader's own history, and only what changes from then
on is seen.

All of it runs on the current stream and waits for nothing, but for the two functions that turn
records into bytes and back.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kvcanary_plugin.guard import GroupGuard
from kvcanary_plugin.kernels import (
    LaunchTag,
    SlotState,
    WritePlan,
    launch_canary_scrub_kernel,
    launch_canary_seal_kernel,
    launch_canary_write_kernel,
)
from kvcanary_plugin.kernels.consts import (
    FIELD_REAL_KV_HASH,
    PADDING_SLOT,
    RECORD_FIELDS,
    UNKNOWN,
)
from kvcanary_plugin.kernels.packing import read_bytes
from kvcanary_plugin.kernels.reference import STATE_MASK

# Magic, version, slots, layout, digest of everything else; then the records, then the states.
_HEADER: Final = struct.Struct("<4sHxxQQ16s")
_MAGIC: Final = b"KVCR"
_VERSION: Final = 1
_BYTES_PER_SLOT: Final = RECORD_FIELDS * 8 + 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CarriedRecords:
    """Records of slots on their way; a slice of it (pages, chunks) is one as well.

    Fields:
        records: int64 [n, 4], the four fields of each record, on the device of the records.
        states: uint8 [n], :class:`SlotState` of each slot when it left: what was SEALED or
            EXTERNAL carries the fold of its bytes, what was WRITTEN a record without one, the rest
            nothing.
        layout: what a fold covers; folds are compared only with those of the same layout.
    """

    records: torch.Tensor
    states: torch.Tensor
    layout: int

    def __len__(self) -> int:
        return int(self.states.shape[0])

    def __getitem__(self, which: slice | torch.Tensor) -> CarriedRecords:
        return CarriedRecords(
            records=self.records[which], states=self.states[which], layout=self.layout
        )

    def to_bytes(self) -> bytes:
        """For storage and for other nodes: a header (version, digest) and 33 bytes a slot.

        Waits for the device.
        """
        payload = self.records.cpu().numpy().astype("<i8").tobytes() + (
            self.states.cpu().numpy().tobytes()
        )
        return _HEADER.pack(_MAGIC, _VERSION, len(self), self.layout, self._digest(payload)) + (
            payload
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, device: torch.device | str) -> CarriedRecords:
        """The records that :meth:`to_bytes` wrote, on ``device``.

        Raises:
            ValueError: the bytes are cut short, damaged, or of another version. What they belong to
                was not carried: adopt it, or leave it unwritten.
        """
        if len(data) < _HEADER.size:
            raise ValueError(
                f"kvcanary: carried records got {len(data)} bytes; allowed at least the"
                f" {_HEADER.size} of the header; store and fetch all of them"
            )
        magic, version, count, layout, digest = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION:
            raise ValueError(
                f"kvcanary: carried records got format {magic!r} version {version}; allowed"
                f" {_MAGIC!r} version {_VERSION}; drop what other versions have stored"
            )
        payload = data[_HEADER.size :]
        if len(payload) != count * _BYTES_PER_SLOT:
            raise ValueError(
                f"kvcanary: carried records got {len(payload)} bytes for {count} slots; allowed"
                f" {count * _BYTES_PER_SLOT}; store and fetch all of them"
            )
        split = count * RECORD_FIELDS * 8
        records = np.frombuffer(payload[:split], dtype="<i8").astype(np.int64)
        states = np.frombuffer(payload[split:], dtype=np.uint8).copy()
        carried = cls(
            records=torch.from_numpy(records.reshape(count, RECORD_FIELDS)).to(device),
            states=torch.from_numpy(states).to(device),
            layout=layout,
        )
        if carried._digest(payload) != digest:
            raise ValueError(
                "kvcanary: carried records got bytes that differ from their digest; allowed are the"
                " bytes as written; look at what stored or sent them"
            )
        return carried

    def _digest(self, payload: bytes) -> bytes:
        content = hashlib.blake2b(digest_size=16)
        content.update(struct.pack("<HQQ", _VERSION, len(self), self.layout))
        content.update(payload)
        return content.digest()


def fold_layout(guard: GroupGuard) -> int:
    """What the folds of a group cover, as a number: equal ones may be compared."""
    covered = [read_bytes(source, guard.seal_mode) for source in guard.group.sources]
    text = f"{guard.seal_mode.name} {covered}" if guard.sealed_bytes_per_slot else "nothing"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def export_records(guard: GroupGuard, slots: torch.Tensor) -> CarriedRecords:
    """The records of ``slots`` (int64 [n], on the device), as they are on the current stream.

    Call it where the bytes are read, behind the seal of the forward that wrote them. Slots outside
    the pool carry nothing.
    """
    real, inside = _real_slots(guard, slots)
    states = (guard.slots.state[inside] & STATE_MASK).to(torch.uint8)
    return CarriedRecords(
        records=_fields(guard)[inside],
        states=torch.where(real, states, torch.full_like(states, int(SlotState.FREE))),
        layout=fold_layout(guard),
    )


def import_records(
    guard: GroupGuard,
    slots: torch.Tensor,
    carried: CarriedRecords,
    *,
    step: int,
    verify: bool = True,
) -> None:
    """Put ``carried`` into ``slots`` (int64 [n], on the device), whose bytes have come back.

    A slot whose bytes were sealed when it left becomes EXTERNAL, and its bytes are compared with
    the carried fold at once (`real_kv`, phase adopt). Under another layout the fold of the bytes as
    found takes its place. A slot that carries nothing counts as not written; one that is FREE in a
    pool with allocator events stays so.

    Args:
        step: number of the last forward.
        verify: whether the bytes are there on the current stream. If not, nothing looks at them
            until :func:`verify_bytes` says so.

    Raises:
        ValueError: not one carried record per slot.
    """
    if len(carried) != slots.shape[0]:
        raise ValueError(
            f"kvcanary: carried got {len(carried)} records for {slots.shape[0]} slots; allowed one"
            " for each; slice them alike"
        )
    real, inside = _real_slots(guard, slots)
    fields, table = _fields(guard), guard.slots
    fields[inside] = torch.where(real[:, None], carried.records, fields[inside])
    for column, value in ((table.writer_uid, UNKNOWN), (table.writer_step, step)):
        before = column[inside]
        column[inside] = torch.where(real, torch.full_like(before, value), before)
    has_record = carried.states >= int(SlotState.WRITTEN)
    written = torch.full_like(carried.states, int(SlotState.WRITTEN))
    nothing = torch.full_like(carried.states, int(SlotState.ALLOCATED))
    _set_states(guard, slots, torch.where(has_record, written, nothing))
    if verify:
        verify_bytes(guard, slots, carried, step=step)


def verify_bytes(
    guard: GroupGuard, slots: torch.Tensor, carried: CarriedRecords, *, step: int
) -> None:
    """The bytes of imported ``slots`` are there now: compare them with the carried folds.

    Arguments as for :func:`import_records`.
    """
    had_bytes = carried.states >= int(SlotState.SEALED)
    external = torch.full_like(carried.states, int(SlotState.EXTERNAL))
    states, _ = _states(guard, slots)
    _set_states(guard, slots, torch.where(had_bytes, external, states))
    if carried.layout == fold_layout(guard):
        _compare(guard, slots, step)
    else:
        _seal_as_found(guard, torch.where(had_bytes, slots, torch.full_like(slots, UNKNOWN)), step)


@dataclass(frozen=True, slots=True, eq=False)
class LoadInFlight:
    """Imported slots of a group whose bytes are still on their way.

    Fields:
        slots: int64 [n].
        carried: their records.
        words: int32 [n], state word of each slot behind the import.
    """

    slots: torch.Tensor
    carried: CarriedRecords
    words: torch.Tensor


def import_in_flight(
    guard: GroupGuard, slots: torch.Tensor, carried: CarriedRecords, *, step: int
) -> LoadInFlight:
    """:func:`import_records` of slots (int64 [n]) whose bytes arrive later, on another stream."""
    import_records(guard, slots, carried, step=step, verify=False)
    return LoadInFlight(slots, carried, _states(guard, slots)[1])


def bytes_arrived(guard: GroupGuard, load: LoadInFlight, *, step: int) -> None:
    """:func:`verify_bytes` of the slots of ``load`` that nobody has given back meanwhile."""
    _, words = _states(guard, load.slots)
    same = torch.where(words == load.words, load.slots, torch.full_like(load.slots, UNKNOWN))
    verify_bytes(guard, same, load.carried, step=step)


def adopt(
    guard: GroupGuard,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    *,
    previous_slot: int = UNKNOWN,
    request_uid: int = UNKNOWN,
    identity_key: int = 0,
    step: int,
    bytes_are_there: bool = True,
) -> None:
    """Take ``slots`` for what their reader believes they hold, and their bytes as they are.

    What was wrong before is not seen here; the token history and the prefix identity of later
    readers are compared with these records.

    Args:
        slots: int64 [n] on the device, of one sequence in its order.
        tokens: int32 | int64 [n], the sequence's own tokens.
        positions: int32 | int64 [n], their positions.
        previous_slot: slot of the token before the first; -1 when the sequence starts here.
        request_uid: the request that had them loaded; -1 leaves the slots without an owner.
        identity_key: identity key of the sequence.
        step: number of the last forward.
        bytes_are_there: whether they are, on the current stream. If not, nothing looks at them
            until the same is adopted again, with bytes.
    """
    plan = _plan_of_one_sequence(
        slots, previous_slot=previous_slot, request_uid=request_uid, identity_key=identity_key
    )
    adopt_sequences(
        guard, plan, slots, tokens, positions, step=step, bytes_are_there=bytes_are_there
    )


def adopt_sequences(
    guard: GroupGuard,
    plan: WritePlan,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    *,
    step: int,
    bytes_are_there: bool = True,
) -> None:
    """:func:`adopt` for the slots of several sequences, which ``plan`` tells apart."""
    launch_canary_write_kernel(
        context=guard.adopted_records,
        plan=plan,
        input_ids=tokens,
        positions=positions,
        out_cache_loc=slots,
        enable_write_input_assert=False,
        expected_input_tokens=None,
        expected_input_positions=None,
        step=step,
    )
    state = SlotState.WRITTEN
    if bytes_are_there:
        _seal_as_found(guard, slots, step)
        state = SlotState.EXTERNAL
    states = torch.full((slots.shape[0],), int(state), dtype=torch.uint8, device=slots.device)
    _set_states(guard, slots, states)


def take_folds_along(guard: GroupGuard, slots: torch.Tensor, carried: CarriedRecords) -> None:
    """The engine has moved bytes to ``slots`` (int64 [n], on the device), which have new records.

    The folds of ``carried``, exported where the bytes were, become theirs: a move that went wrong
    is seen by whoever looks at the bytes next.
    """
    real, inside = _real_slots(guard, slots)
    folds = _fields(guard)[:, FIELD_REAL_KV_HASH]
    moved = carried.records[:, FIELD_REAL_KV_HASH]
    folds[inside] = torch.where(real, moved, folds[inside])
    _set_states(guard, slots, carried.states)


class ExternalSlots:
    """How many slots of a group were adopted or imported and are live; counted now and then.

    Args:
        guard: the group.
        clock: seconds, monotonic.
    """

    _SECONDS = 1.0

    def __init__(self, guard: GroupGuard, *, clock: Callable[[], float] = time.monotonic) -> None:
        state = guard.slots.state
        self._low_bytes = state.view(torch.uint8)[::4]
        self._count = torch.zeros(1, dtype=torch.int64, pin_memory=state.device.type == "cuda")
        self._clock = clock
        self._counted_at: float | None = None

    def refresh(self) -> None:
        """Counts again on the current stream if the last time is a while ago."""
        now = self._clock()
        if self._counted_at is not None and now - self._counted_at < self._SECONDS:
            return
        self._counted_at = now
        external = (self._low_bytes == int(SlotState.EXTERNAL)).sum()
        self._count.copy_(external.reshape(1), non_blocking=True)

    @property
    def count(self) -> int:
        """The last count that has arrived on the host; never waits."""
        return int(self._count[0])


# ---- slots on the device, without waiting --------------------------------------------------------


def _real_slots(guard: GroupGuard, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of ``slots`` are slots of the pool, and ``slots`` with the padding slot for others."""
    real = (slots > PADDING_SLOT) & (slots < guard.group.num_slots)
    return real, torch.where(real, slots, torch.full_like(slots, PADDING_SLOT))


def _fields(guard: GroupGuard) -> torch.Tensor:
    return guard.records.view(torch.int64)[:, :RECORD_FIELDS]


def _states(guard: GroupGuard, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(states uint8 [n], words int32 [n]) of ``slots``, of the padding slot for those outside."""
    _, inside = _real_slots(guard, slots)
    words = guard.slots.state[inside]
    return (words & STATE_MASK).to(torch.uint8), words


def _set_states(guard: GroupGuard, slots: torch.Tensor, states: torch.Tensor) -> None:
    """Sets the states (uint8 [n]) of ``slots``; one that the allocator gave back stays FREE."""
    real, inside = _real_slots(guard, slots)
    before, words = _states(guard, slots)
    changes = real
    if guard.slots.tracks_allocation:
        changes = real & (before != int(SlotState.FREE))
    changed = (words & ~STATE_MASK) | states.to(torch.int32)
    guard.slots.state[inside] = torch.where(changes, changed, words)


def _compare(guard: GroupGuard, slots: torch.Tensor, step: int) -> None:
    launch_canary_scrub_kernel(
        context=guard.context(LaunchTag.ADOPT),
        slots=slots,
        num_valid=torch.full((1,), slots.shape[0], dtype=torch.int32, device=slots.device),
        step=step,
    )


def _seal_as_found(guard: GroupGuard, slots: torch.Tensor, step: int) -> None:
    launch_canary_seal_kernel(
        context=guard.context(LaunchTag.ADOPT),
        plan=_plan_of_one_sequence(slots),
        out_cache_loc=slots,
        step=step,
    )


def _plan_of_one_sequence(
    slots: torch.Tensor,
    *,
    previous_slot: int = UNKNOWN,
    request_uid: int = UNKNOWN,
    identity_key: int = 0,
) -> WritePlan:
    """Filled by launches: a copy of numbers from the host would wait for the device."""

    def one(value: int) -> torch.Tensor:
        return torch.full((1,), value, dtype=torch.int64, device=slots.device)

    return WritePlan(
        write_offsets=torch.arange(2, device=slots.device) * slots.shape[0],
        write_seed_slot_indices=one(previous_slot),
        write_num_valid_reqs=torch.ones(1, dtype=torch.int32, device=slots.device),
        write_request_uids=one(request_uid),
        write_identity_keys=one(identity_key),
    )
