"""Plant faults in a running engine, for drills and tests. Refused unless the settings allow it.

A fault is asked for by writing one JSON object to the control file::

    {"id": 3, "fault": "flip_kv", "group": "full", "source": -1}

and is planted in the first forward that offers a target (a request with enough prefix, or a prompt
chunk). What was done is appended as one JSON line to ``<control file>.done``, so that a drill can
compare the report with the truth. A fault that no forward reads at once gets a second line when one
does: ``{"id": 3, "read_step": 21}``. With ``"dry_run": true`` the place is found and nothing is
done: the silent twin of the fault. Planting synchronises with the device; it is no part of the hot
path.

What would bring the engine itself down (a page-table entry that names nothing, say) is put right
after the forward.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from kvcanary_plugin.forward import ForwardStep
from kvcanary_plugin.guard import GroupGuard
from kvcanary_plugin.kernels import consts
from kvcanary_plugin.kernels.reference import STATE_MASK
from kvcanary_plugin.metrics import RankLabels

logger = logging.getLogger(__name__)

_MINIMUM_PREFIX = 6
_MINIMUM_CHUNK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRequest:
    """What to plant.

    Fields:
        id: chosen by whoever asks; comes back with the result.
        fault: a key of ``FAULTS``.
        group: name of the KV cache group; None takes the first.
        source: index into the group's sources, for ``flip_kv``; negative counts from the end.
        tp_rank: plant on this tensor-parallel rank only; None plants on every rank that watches.
        dry_run: look for a place and say which, but do nothing there.
    """

    id: int
    fault: str
    group: str | None = None
    source: int = -1
    tp_rank: int | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.fault not in _EVERY_FAULT:
            raise ValueError(
                f"kvcanary: fault {self.fault!r} is not one of {', '.join(sorted(_EVERY_FAULT))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedFault:
    """What was planted, where: the truth that a report is compared with.

    ``dry_run``: the place was found, and nothing was done.
    """

    id: int
    fault: str
    step: int
    group: str
    slot: int
    position: int
    request_uid: int
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """A place in the coming forward.

    Fields:
        guard: the group.
        step: the forward.
        batch_row: the request, -1 for none.
        position: its position, -1 for none.
        slot: the slot that a report has to name.
        source: strip of real K/V.
    """

    guard: GroupGuard
    step: ForwardStep
    batch_row: int
    position: int
    slot: int
    source: int


# Puts right after the forward what a fault changed, if anything.
_Undo = Callable[[], None] | None


class FaultInjector:
    """Watches a control file and plants what it asks for. One per engine rank."""

    def __init__(
        self, *, control_file: Path, guards: tuple[GroupGuard, ...], ranks: RankLabels
    ) -> None:
        self._control_file = control_file
        self._done_file = Path(f"{control_file}.done")
        self._guards = guards
        self._ranks = ranks
        # What lies there from an earlier server was not meant for this one.
        self._seen_state = self._control_file_state()
        self._pending: FaultRequest | None = None
        self._unread: PlantedFault | None = None
        self._under_forward: Callable[[], _Undo] | None = None
        self._undo: _Undo = None
        logger.warning("kvcanary: faults are allowed; watching %s", control_file)

    def before_forward(self, step: ForwardStep) -> None:
        """Plant the pending fault if ``step`` offers a target for it."""
        self._note_first_read(step)
        self._read_control_file()
        if self._pending is None:
            return
        target = self._find_target(self._pending, step)
        if target is None:
            return
        request, self._pending = self._pending, None
        if request.dry_run:
            pass
        elif request.fault in _UNDER_FORWARD:
            self._under_forward = partial(_EVERY_FAULT[request.fault], target)
        else:
            self._undo = _EVERY_FAULT[request.fault](target)
        planted = PlantedFault(
            id=request.id,
            fault=request.fault,
            step=step.step,
            group=target.guard.group.name,
            slot=target.slot,
            position=target.position,
            request_uid=int(step.request_uids[target.batch_row]) if target.batch_row >= 0 else -1,
            dry_run=request.dry_run,
        )
        logger.warning("kvcanary: planted %s", planted)
        self._say_done(asdict(planted))
        if request.fault == "drop_write":
            self._unread = planted

    def under_forward(self) -> None:
        """Between the canary's look at the page table and the engine's forward."""
        if self._under_forward is not None:
            self._undo, self._under_forward = self._under_forward(), None

    def after_forward(self) -> None:
        """Put right what the engine would not survive."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _note_first_read(self, step: ForwardStep) -> None:
        """Say when the dropped token is missed: the forwards until then may be of others alone."""
        planted = self._unread
        if planted is None:
            return
        reads = (step.request_uids == planted.request_uid) & (step.prefix_lens > planted.position)
        if bool(reads.any()):
            self._say_done({"id": planted.id, "read_step": step.step})
            self._unread = None

    def _say_done(self, entry: dict[str, object]) -> None:
        with self._done_file.open("a", encoding="utf-8") as done:
            done.write(json.dumps(entry) + "\n")

    def _control_file_state(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._control_file)
        except FileNotFoundError:
            return None
        return (status.st_mtime_ns, status.st_ino)

    def _read_control_file(self) -> None:
        state = self._control_file_state()
        if state is None or state == self._seen_state:
            return
        self._seen_state = state
        request = FaultRequest(**json.loads(self._control_file.read_text(encoding="utf-8")))
        if request.tp_rank is None or request.tp_rank == self._ranks.tp_rank:
            self._pending = request

    def _find_target(self, request: FaultRequest, step: ForwardStep) -> _Target | None:
        guard = next(
            (g for g in self._guards if request.group in (None, g.group.name)), self._guards[0]
        )
        if request.fault in _FINDERS:
            return _FINDERS[request.fault](guard, step)
        if request.fault in _ALLOCATOR_FAULTS and not guard.slots.tracks_allocation:
            return None
        if request.fault in _UNDER_FORWARD and not guard.group.table_stable_through_forward:
            return None
        plants_in_inputs = request.fault in _INPUT_FAULTS
        lens = step.extend_lens if plants_in_inputs else step.prefix_lens
        minimum = _MINIMUM_CHUNK if plants_in_inputs else _MINIMUM_PREFIX
        if request.fault == "swap_table":
            minimum += guard.group.page_size  # two pages of the prefix
        uids = step.request_uids
        candidates = torch.nonzero((lens >= minimum) & (uids >= 0)).flatten().tolist()
        if request.fault == "drop_write":
            candidates = _decoding(step)
        in_prefix = not plants_in_inputs and request.fault != "drop_write"
        for batch_row in candidates:
            if request.fault == "rotate_inputs" and not _rotation_is_seen_first(step, batch_row):
                continue
            prefix = int(step.prefix_lens[batch_row])
            # Late in the prefix, so that a sliding window still reads it; not the very last slot,
            # so that it has a successor whose chain can break.
            position = prefix - 3 if in_prefix else prefix
            written = step.out_cache_loc[guard.index]
            slot = (
                _slot_at(guard, step, batch_row, position)
                if in_prefix
                else int(written[_flat_start(step, batch_row)])
            )
            if in_prefix and bool((written == slot).any()):
                continue  # another request writes the shared slot in this very forward
            if request.fault in ("null_entry", "change_table"):
                slot = consts.PADDING_SLOT
            if request.fault == "unfilled_slot":
                free = _a_free_slot(guard, step)
                if free is None:
                    continue
                slot = free
            return _Target(
                guard=guard,
                step=step,
                batch_row=batch_row,
                position=position,
                slot=slot,
                source=request.source,
            )
        return None


def _flat_start(step: ForwardStep, batch_row: int) -> int:
    return int(step.extend_lens[:batch_row].sum())


def _decoding(step: ForwardStep) -> list[int]:
    """Requests that write one token of their output.

    Not the one token that a chunk of a prompt may have: an engine may give such a slot back for an
    equal one of another request before anybody reads it.
    """
    writes_one = torch.nonzero((step.extend_lens == 1) & (step.request_uids >= 0)).flatten()
    of_prompts = {host.batch_row for host in step.host_tokens}
    return [row for row in writes_one.tolist() if row not in of_prompts]


def _rotation_is_seen_first(step: ForwardStep, batch_row: int) -> bool:
    """Whether the first token of the request's chunk is another one once they are rotated."""
    start = _flat_start(step, batch_row)
    end = start + int(step.extend_lens[batch_row])
    return int(step.input_ids[start]) != int(step.input_ids[end - 1])


def _slot_at(guard: GroupGuard, step: ForwardStep, batch_row: int, position: int) -> int:
    group = guard.group
    row = int(step.request_rows[batch_row])
    page = int(group.page_table[row, position // group.page_size])
    slot = page * group.page_size + position % group.page_size
    return int(group.full_to_swa[slot]) if group.full_to_swa is not None else slot


def _flip_kv(target: _Target) -> None:
    """Invert one byte in the middle of a slot's strip of real K/V."""
    source = target.guard.group.sources[target.source]
    row = source.tensor[target.slot // source.page_size]
    strip = row.reshape(-1).view(torch.uint8)
    offset = (target.slot % source.page_size) * source.num_bytes_per_token
    byte = offset + source.num_bytes_per_token // 2
    strip[byte] = strip[byte] ^ 0xFF


def _swap_table(target: _Target) -> None:
    """Exchange the slot's entry in the request's row of the page table with the one before it."""
    group = target.guard.group
    row = int(target.step.request_rows[target.batch_row])
    column = target.position // group.page_size
    pair = group.page_table[row, column - 1 : column + 1].clone()
    group.page_table[row, column - 1 : column + 1] = pair.flip(0)


def _rewrite_record(target: _Target) -> None:
    """Put another token into the slot's record."""
    record = target.guard.records[target.slot].view(torch.int64)
    record[consts.FIELD_TOKEN] += 1


def _shift_positions(target: _Target) -> None:
    """Let every position of the request's chunk come out one too high."""
    start = _flat_start(target.step, target.batch_row)
    end = start + int(target.step.extend_lens[target.batch_row])
    target.step.positions[start:end] += 1


def _rotate_inputs(target: _Target) -> None:
    """Give every position of the chunk its neighbour's token."""
    start = _flat_start(target.step, target.batch_row)
    end = start + int(target.step.extend_lens[target.batch_row])
    target.step.input_ids[start:end] = target.step.input_ids[start:end].roll(1)


def _drop_write(target: _Target) -> None:
    """Send the new token's K/V to the padding slot, so that its own slot keeps what was there."""
    index = _flat_start(target.step, target.batch_row)
    target.guard.events.own_queued()  # the allocator handed out this very tensor
    for out_cache_loc in target.step.out_cache_loc:
        out_cache_loc[index] = consts.PADDING_SLOT


def _break_chain(target: _Target) -> None:
    """Let the slot's record continue another sequence."""
    record = target.guard.records[target.slot].view(torch.int64)
    record[consts.FIELD_PREV_HASH] ^= 1


def _null_entry(target: _Target) -> _Undo:
    """Let the request's entry name no slot for this forward: a lookup entry where there is one."""
    table, place = _entry_of(target)
    return _replaced(table, place, consts.PADDING_SLOT)


def _unfilled_slot(target: _Target) -> _Undo:
    """Hand out a free slot and let the request's entry name it, for this forward."""
    events, slots = target.guard.events, _as_slots(target.guard, target.slot)
    events.alloc(slots)
    table, place = _entry_of(target)
    put_back = _replaced(table, place, target.slot)

    def undo() -> None:
        put_back()
        events.free(slots)

    return undo


def _other_identity(target: _Target) -> None:
    """Let the request be another tenant's: the prefix that the cache gave it is not its own."""
    step = target.step
    keys = step.identity_keys
    keys = torch.zeros_like(step.request_uids) if keys is None else keys.clone()
    keys[target.batch_row] ^= 1
    # Frozen for everybody else.
    object.__setattr__(step, "identity_keys", keys)
    for host in step.host_tokens:
        if host.batch_row == target.batch_row:
            object.__setattr__(host, "identity_key", host.identity_key ^ 1)


def _free_in_use(target: _Target) -> None:
    """Let the allocator say that a slot was given back while the request still reads it."""
    target.guard.events.free(_as_slots(target.guard, target.slot))


def _hand_out_in_use(target: _Target) -> None:
    """Let the allocator say that a slot was handed out while the request still reads it."""
    target.guard.events.alloc(_as_slots(target.guard, target.slot))


def _write_into_owned(target: _Target) -> None:
    """Send the new token's K/V to a slot that another running request owns."""
    index = _flat_start(target.step, target.batch_row)
    target.guard.events.own_queued()  # the allocator handed out this very tensor
    target.step.out_cache_loc[target.guard.index][index] = target.slot


def _change_table(target: _Target) -> _Undo:
    """Let the request's entry name another slot while the forward runs."""
    table, place = _entry_of(target)
    return _replaced(table, place, consts.PADDING_SLOT)


def _as_slots(guard: GroupGuard, slot: int) -> torch.Tensor:
    return torch.tensor([slot], dtype=torch.int64, device=guard.group.device)


def _entry_of(target: _Target) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The entry through which the request finds its slot: (tensor, index)."""
    group = target.guard.group
    row = int(target.step.request_rows[target.batch_row])
    place = (row, target.position // group.page_size)
    if group.full_to_swa is not None:
        return group.full_to_swa, (int(group.page_table[place]),)
    return group.page_table, place


def _replaced(table: torch.Tensor, place: tuple[int, ...], value: int) -> Callable[[], None]:
    before = int(table[place])
    table[place] = value

    def put_back() -> None:
        table[place] = before

    return put_back


def _a_free_slot(guard: GroupGuard, step: ForwardStep) -> int | None:
    """A slot that nobody has and that is not among those handed out for this forward."""
    free = (guard.slots.state & STATE_MASK) == int(consts.SlotState.FREE)
    free[consts.PADDING_SLOT] = False
    written = step.out_cache_loc[guard.index].long()
    free[written[(written > 0) & (written < free.shape[0])]] = False
    slots = torch.nonzero(free).flatten()
    # Allocators hand out from the low end: what is queued for the next forward lies there.
    return int(slots[-1]) if slots.numel() else None


def _find_free_slot(guard: GroupGuard, step: ForwardStep) -> _Target | None:
    if not guard.slots.tracks_allocation or not int((step.request_uids >= 0).sum()):
        return None
    slot = _a_free_slot(guard, step)
    if slot is None:
        return None
    return _Target(guard=guard, step=step, batch_row=-1, position=-1, slot=slot, source=0)


def _find_admission(guard: GroupGuard, step: ForwardStep) -> _Target | None:
    """A request that is given a cached prefix, none of which is written in this very forward."""
    written = step.out_cache_loc[guard.index]
    for host in step.host_tokens:
        if host.prefix_len > 0:
            position = host.prefix_len - 1
            slot = _slot_at(guard, step, host.batch_row, position)
            if not bool((written == slot).any()):
                return _Target(
                    guard=guard,
                    step=step,
                    batch_row=host.batch_row,
                    position=position,
                    slot=slot,
                    source=0,
                )
    return None


def _find_two_owners(guard: GroupGuard, step: ForwardStep) -> _Target | None:
    """A decoding request, and a slot that another request of the batch has written for itself."""
    if not guard.slots.tracks_allocation:
        return None
    uids, written = step.request_uids.tolist(), step.out_cache_loc[guard.index]
    for writer in (
        torch.nonzero((step.extend_lens == 1) & (step.request_uids >= 0)).flatten().tolist()
    ):
        for owner, prefix in enumerate(step.prefix_lens.tolist()):
            if uids[owner] in (-1, uids[writer]) or prefix < _MINIMUM_PREFIX:
                continue
            slot = _slot_at(guard, step, owner, prefix - 2)
            owned = int(guard.slots.owner_uid[slot]) == uids[owner]
            if owned and not bool((written == slot).any()):
                return _Target(
                    guard=guard,
                    step=step,
                    batch_row=writer,
                    position=int(step.prefix_lens[writer]),
                    slot=slot,
                    source=0,
                )
    return None


# Planted in what is written, in the records and in the inputs; possible in every engine.
FAULTS: dict[str, Callable[[_Target], _Undo]] = {
    "flip_kv": _flip_kv,
    "swap_table": _swap_table,
    "rewrite_record": _rewrite_record,
    "shift_positions": _shift_positions,
    "rotate_inputs": _rotate_inputs,
    "drop_write": _drop_write,
}
# Planted in tables, in identities, and in what the allocator says; some need its events, or a table
# that stays as it is through the forward. Where they are missing, no target is found.
GUARD_FAULTS: dict[str, Callable[[_Target], _Undo]] = {
    "break_chain": _break_chain,
    "null_entry": _null_entry,
    "unfilled_slot": _unfilled_slot,
    "other_identity": _other_identity,
    "free_in_use": _free_in_use,
    "free_twice": _free_in_use,
    "hand_out_in_use": _hand_out_in_use,
    "write_into_owned": _write_into_owned,
    "change_table": _change_table,
}

_EVERY_FAULT = FAULTS | GUARD_FAULTS
_INPUT_FAULTS = frozenset({"shift_positions", "rotate_inputs"})
_ALLOCATOR_FAULTS = frozenset({"unfilled_slot", "free_in_use", "hand_out_in_use"})
_UNDER_FORWARD = frozenset({"change_table"})
# Faults that look for a place of their own kind.
_FINDERS: dict[str, Callable[[GroupGuard, ForwardStep], _Target | None]] = {
    "free_twice": _find_free_slot,
    "other_identity": _find_admission,
    "write_into_owned": _find_two_owners,
}
