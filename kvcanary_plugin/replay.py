"""Runs an incident once more: its slots, table rows and forwards, through a monitor on the CPU.

The first run has nothing but what was recorded. If the violation comes out of it, the recorded
events explain it (a forward wrote into a foreign slot), or it stood so when the window began. If it
does not, further runs put in, just before the step that saw it, what was found to differ: at the
slot itself, then around it. What had to be put in is what somebody changed from outside.

Slots are numbered anew, densely, so that a replay is as small as its incident. K/V bytes are made
up from token and position. Hashes of the file are those of an engine with other tokens, or keyed
ones: each is bound to the hash that stands in its place here (:class:`_Chains`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

import numpy as np
import torch

from kvcanary_plugin.cache import KVCacheGroup, row_source
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.forward import ForwardKind, ForwardStep, HostTokens
from kvcanary_plugin.incident_file import (
    Event,
    Evidence,
    Forward,
    Group,
    Incident,
    IncidentFileError,
    Part,
    Place,
    Slots,
)
from kvcanary_plugin.kernels import LaunchTag, launch_canary_scrub_kernel
from kvcanary_plugin.kernels.consts import (
    PADDING_SLOT,
    RECORD_FIELDS,
    UNKNOWN,
    SlotState,
)
from kvcanary_plugin.kernels.hashes import (
    chain_start,
    splitmix64_mix3,
    splitmix64_tensor,
    to_signed,
)
from kvcanary_plugin.kernels.reference import fold_slots
from kvcanary_plugin.monitor import CanaryMonitor
from kvcanary_plugin.ring import RingReader
from kvcanary_plugin.violations import RequestNames, Violation

# A file that asks for more is not one that the canary wrote.
MAX_POSITIONS: Final = 1 << 24
MAX_TABLE_ENTRIES: Final = 1 << 26
_KV_BYTES: Final = 16
_PADDING_ROW: Final = 0
_REPLAYED_PHASES: Final = ("lifecycle", "verify", "write", "reverify", "scrub")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a replay came to.

    Fields:
        violation: the replayed violation at the incident's place, None if it did not come.
        outside: what had to be changed by hand for it to come; empty if nothing.
        explanation: one sentence.
        forwards: how many were run.
        seen: what the replay reported for that request in that step, for the case that it is not
            the same.
    """

    violation: Violation | None
    outside: tuple[str, ...]
    explanation: str
    forwards: int
    seen: tuple[Violation, ...]

    @property
    def reproduced(self) -> bool:
        """Whether the same violation came out."""
        return self.violation is not None


def replay(incident: Incident) -> Replay:
    """Runs ``incident`` on the CPU.

    Raises:
        IncidentFileError: it has no evidence to run, or one that contradicts itself.
    """
    evidence, root = incident.evidence, incident.root
    if evidence is None:
        raise IncidentFileError(
            f"kvcanary: incident {incident.id} holds no evidence"
            f" ({incident.no_evidence_because}); there is nothing to replay"
        )
    _check(evidence, root)
    if root.phase not in _REPLAYED_PHASES:
        return _silent(f"rows of phase {root.phase} cannot be replayed", 0)
    if not any(forward.step == root.step for forward in evidence.window):
        return _silent(f"the recorded window does not hold step {root.step}", 0)
    try:
        return _run_again(evidence, root)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise _broken(f"{type(error).__name__}: {error}") from error


def _run_again(evidence: Evidence, root: Place) -> Replay:
    """Runs until the violation comes, each time with more that was found to differ."""
    forwards = len(evidence.window)
    for by_hand in ByHand:
        run = _Run(evidence, root, by_hand)
        found = run.run()
        if found is not None:
            changes = tuple(run.changes)
            explanation = (
                "not explained by recorded events: " + "; ".join(changes)
                if changes
                else _from_recorded(evidence, root)
            )
            return Replay(
                violation=found,
                outside=changes,
                explanation=explanation,
                forwards=forwards,
                seen=(),
            )
    return _silent(
        "neither the recorded events nor the state that was found lead to it",
        forwards,
        tuple(run.seen),
    )


def _silent(explanation: str, forwards: int, seen: tuple[Violation, ...] = ()) -> Replay:
    return Replay(violation=None, outside=(), explanation=explanation, forwards=forwards, seen=seen)


def _check(evidence: Evidence, root: Place) -> None:
    """IncidentFileError for evidence that names what it does not have."""
    names = {group.name for group in evidence.groups}
    named = {root.group}
    named.update(row.group for request in evidence.requests for row in request.rows)
    named.update(slots.group for slots in evidence.slots)
    for forward in evidence.window:
        named.update(event.group for event in forward.events)
        for part in forward.parts:
            if set(part.slots) != names or set(part.seeds) != names:
                raise _broken(f"step {forward.step} does not name the slots of every group")
            if part.prompt is not None and part.prompt.first > MAX_POSITIONS:
                raise _broken(f"step {forward.step} has a prompt longer than a replay holds")
        if forward.kind not in set(ForwardKind):
            raise _broken(f"step {forward.step} has kind {forward.kind!r}")
    if not names or named - names:
        raise _broken(f"groups {sorted(named - names)} are not among its groups")
    steps = [forward.step for forward in evidence.window]
    if steps != sorted(set(steps)):
        raise _broken("the steps of its window do not increase")
    for request in evidence.requests:
        if request.first + max((len(row.slots) for row in request.rows), default=0) > MAX_POSITIONS:
            raise _broken(f"request {request.uid} has more positions than a replay holds")


def _broken(what: str) -> IncidentFileError:
    return IncidentFileError(f"kvcanary: evidence contradicts itself: {what}; give an intact file")


# ---- numbering -----------------------------------------------------------------------------------


class _Numbering:
    """Slots of one pool, numbered 1, 2, ... in a replay; what is no slot stays none.

    Args:
        slots: all that the incident names, slots or not.
        num_slots: of the engine's pool.
        extra: further slots, for positions of which the file does not tell.
    """

    def __init__(self, slots: Iterable[int], num_slots: int, extra: int) -> None:
        self._num_slots = num_slots
        self._known = sorted({slot for slot in slots if PADDING_SLOT < slot < num_slots})
        self._dense = {slot: index for index, slot in enumerate(self._known, start=1)}
        self.first_extra = len(self._known) + 1
        self.size = self.first_extra + extra

    def dense(self, slot: int) -> int:
        if slot <= PADDING_SLOT:
            return slot
        if slot >= self._num_slots:
            return self.size + (slot - self._num_slots)
        return self._dense[slot]

    def original(self, dense: int) -> int:
        if dense <= PADDING_SLOT:
            return dense
        if dense >= self.size:
            return self._num_slots + (dense - self.size)
        if dense >= self.first_extra:
            return UNKNOWN  # a made-up slot: nothing of the engine's stands there
        return self._known[dense - 1]


class _Chains:
    """Which hash here stands for which hash of the file.

    A record's predecessor is found by its hash, so that continuing the chain of a record there
    means continuing the chain of its counterpart here; a hash whose origin is not known stands for
    itself, and continues nothing.
    """

    def __init__(self) -> None:
        self._here: dict[int, int] = {}

    def bind(self, in_file: int, here: int) -> None:
        """``here`` stands for ``in_file``, unless something else does already."""
        self._here.setdefault(in_file, here)

    def rebind(self, in_file: int, here: int) -> None:
        """``here`` stands for ``in_file``: a write that was replayed knows better than a guess."""
        self._here[in_file] = here

    def knows(self, in_file: int) -> bool:
        return in_file in self._here

    def here(self, in_file: int) -> int:
        return self._here.get(in_file, in_file)


class _Tokens:
    """Token ids of a replay: small numbers in the order of their appearance; -1 stays."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def here(self, token: int) -> int:
        return token if token < 0 else self._numbers.setdefault(token, len(self._numbers) + 1)


@dataclass(frozen=True, slots=True)
class _Found:
    """A record and its slot's state as the file has them."""

    slot: int
    token: int
    position: int
    prev_hash: int
    next_hash: int
    state: str
    owner_uid: int
    writer_uid: int
    writer_step: int


def _columns(slots: Slots) -> list[_Found]:
    return [
        _Found(*values)
        for values in zip(
            slots.slot,
            slots.token,
            slots.position,
            slots.prev_hash,
            slots.next_hash,
            slots.state,
            slots.owner_uid,
            slots.writer_uid,
            slots.writer_step,
            strict=True,
        )
    ]


# ---- one run -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Pool:
    """Slots of one pool: the groups of it, its numbering, its made-up K/V."""

    groups: list[int]
    numbering: _Numbering
    kv: torch.Tensor
    found: dict[int, _Found] = field(default_factory=dict)


class ByHand(Enum):
    """What a run puts in just before the root's step, and names in ``changes``."""

    NOTHING = "nothing"
    ROOT = "the root's entry of the page table, record, state and bytes"
    EVERYTHING = "the page-table row and every record as well"


class _Run:
    """One run of the window."""

    def __init__(self, evidence: Evidence, root: Place, by_hand: ByHand) -> None:
        self._evidence = evidence
        self._root = root
        self._by_hand = by_hand
        self._groups = evidence.groups
        self._index = {group.name: index for index, group in enumerate(evidence.groups)}
        self._root_group = self._index[root.group]
        self._reader = next((r for r in evidence.requests if r.role == "reader"), None)
        self._tokens = _Tokens()
        self._chains = _Chains()
        self.changes: list[str] = []
        self.seen: list[Violation] = []
        self._rows = self._number_rows()
        self._width = self._table_width()
        self._pools = self._make_pools()
        self._pool_of = {index: pool for pool in self._pools for index in pool.groups}
        self._tables, self._lookups = self._make_tables()
        self._monitor = self._make_monitor()
        self._ring = RingReader(self._monitor.sink.ring)
        self._fill_reader_rows()
        self._fill_slots()

    def run(self) -> Violation | None:
        """The violation at the root's place, if it comes."""
        for forward in self._evidence.window:
            for event in forward.events:
                self._apply(event)
            violations = self._forward(forward)
            if forward.step == self._root.step:
                self.seen = [v for v in violations if v.request_uid == self._root.request_uid]
                return next((v for v in violations if self._is_root(v)), None)
        return None

    def _is_root(self, v: Violation) -> bool:
        root = self._root
        return (v.phase, v.group, v.slot, v.position, v.expected_position) == (
            root.phase,
            root.group,
            root.slot,
            root.position,
            root.expected_position,
        ) and set(root.checks) <= set(v.checks)

    # --- setting up -----------------------------------------------------------------------------

    def _number_rows(self) -> dict[tuple[int, int], int]:
        """Row of the replay's page table for each (uid, row of the engine's)."""
        rows: dict[tuple[int, int], int] = {}
        for forward in self._evidence.window:
            for part in forward.parts:
                rows.setdefault((part.uid, part.request_row), len(rows) + 1)
        for request in self._evidence.requests:
            rows.setdefault((request.uid, request.request_row), len(rows) + 1)
        return rows

    def _row(self, uid: int, request_row: int) -> int:
        group = self._groups[self._root_group]
        if request_row == group.padding_row:
            return _PADDING_ROW
        if not 0 <= request_row < group.table_rows:
            return len(self._rows) + 1  # outside here as well
        return self._rows[uid, request_row]

    def _rows_of(self, uid: int) -> list[int]:
        """All rows in which a request stood: some engines move requests between them."""
        return sorted({self._row(*key) for key in self._rows if key[0] == uid})

    def _table_width(self) -> int:
        needed = 2
        if self._reader is not None:
            kept = max((len(row.slots) for row in self._reader.rows), default=0)
            needed = max(needed, self._reader.first + kept)
        width = min(needed, max(group.table_positions for group in self._groups))
        if width * (len(self._rows) + 1) > MAX_TABLE_ENTRIES:
            raise _broken("its requests need a larger page table than a replay holds")
        return width

    def _make_pools(self) -> list[_Pool]:
        named: dict[str, set[int]] = {group.name: set() for group in self._groups}
        named[self._root.group].update((self._root.slot, self._slot_before()))
        for slots in self._evidence.slots:
            named[slots.group].update(slots.slot)
        for request in self._evidence.requests:
            for row in request.rows:
                named[row.group].update(row.slots)
        for forward in self._evidence.window:
            for part in forward.parts:
                for name in named:
                    named[name].update(part.slots[name])
                    named[name].add(part.seeds[name])
            for event in forward.events:
                named[event.group].update(event.slots or ())
                named[event.group].update(event.sources or ())
        members: dict[str, list[int]] = {}
        for index, group in enumerate(self._groups):
            key = f"pool {group.pool}" if group.pool is not None else f"group {group.name}"
            members.setdefault(key, []).append(index)
        pools = []
        extra = self._reader.first if self._reader is not None else 0
        for indices in members.values():
            numbering = _Numbering(
                {slot for index in indices for slot in named[self._groups[index].name]},
                self._groups[indices[0]].num_slots,
                extra,
            )
            kv = torch.zeros((numbering.size, _KV_BYTES), dtype=torch.uint8)
            pools.append(_Pool(indices, numbering, kv))
        for slots in self._evidence.slots:
            for pool in pools:
                if self._index[slots.group] in pool.groups:
                    pool.found.update((found.slot, found) for found in _columns(slots))
        return pools

    def _make_tables(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """A page table of slots for each group.

        Where the engine's slots go through a lookup table, each entry here has an index of its own,
        and the lookup table holds what it stands for.
        """
        rows = len(self._rows) + 1
        entries = torch.arange(rows * self._width, dtype=torch.int64).reshape(rows, self._width)
        tables: list[torch.Tensor] = []
        lookups: list[torch.Tensor | None] = []
        for group in self._groups:
            if group.is_mapped:
                tables.append(entries + 1)
                lookups.append(torch.zeros(entries.numel() + 1, dtype=torch.int64))
            else:
                tables.append(torch.zeros_like(entries))
                lookups.append(None)
        return tables, lookups

    def _make_monitor(self) -> CanaryMonitor:
        settings = self._evidence.settings
        config = CanaryConfig.model_validate(
            {
                "mode": "log",
                "write_input_assert": settings.write_input_assert,
                "checks": {"token": settings.token, "prefix_identity": settings.prefix_identity},
                "verify": {"real_kv": settings.verify_real_kv},
                "seal": {"real_kv": settings.seal_real_kv},
                "reverify": {"sample": float(self._root.phase == "reverify")},
                "scrub": {"percent_of_step_time": 0},
                "recorder": {"forwards": 0},
            }
        )
        groups = [self._group(index, group) for index, group in enumerate(self._groups)]
        return CanaryMonitor(
            config=config,
            groups=groups,
            max_requests=max((len(f.parts) for f in self._evidence.window), default=1) or 1,
            raise_pending=lambda: None,
            on_error=self._on_error,
        )

    def _group(self, index: int, group: Group) -> KVCacheGroup:
        pool = self._pool_of[index]
        has_bytes = self._evidence.settings.seal_real_kv != "none"
        return KVCacheGroup(
            name=group.name,
            num_slots=pool.numbering.size,
            page_table=self._tables[index],
            page_size=1,
            padding_row=_PADDING_ROW,
            sources=(row_source(pool.kv),) if has_bytes else (),
            full_to_swa=self._lookups[index],
            swa_window_size=group.swa_window_size,
            token_offset=group.token_offset,
            tracks_allocation=group.tracks_allocation,
            table_stable_through_forward=True,
            pool=group.pool,
        )

    def _on_error(self, _where: str, error: BaseException) -> None:
        raise error

    def _fill_reader_rows(self) -> None:
        """The reader's row as it was found, and made-up slots where the file does not tell."""
        reader = self._reader
        if reader is None:
            return
        for table_row in reader.rows:
            index = self._index[table_row.group]
            numbering = self._pool_of[index].numbering
            made_up = [numbering.first_extra + position for position in range(reader.first)]
            found = [numbering.dense(slot) for slot in table_row.slots]
            for row in self._rows_of(reader.uid):
                for position, slot in enumerate([*made_up, *found]):
                    self._set_entry(index, row, position, slot)
        # The violation itself names the entry as it was at that step, the file one a little later.
        if self._root.phase in ("verify", "reverify") and not _written_in_window(
            self._evidence, reader.uid, self._root.read_position, self._root.group
        ):
            row = self._row(reader.uid, reader.request_row)
            slot = self._pool_of[self._root_group].numbering.dense(self._slot_before())
            self._set_entry(self._root_group, row, self._root.read_position, slot)

    def _slot_before(self) -> int:
        """The slot that the root's entry of the page table named before its forward."""
        before = self._root.slot_before
        return before if before is not None else self._root.slot

    def _set_entry(self, index: int, row: int, position: int, dense: int) -> None:
        table, lookup = self._tables[index], self._lookups[index]
        if not (0 <= row < table.shape[0] and 0 <= position < self._width):
            return
        if lookup is not None:
            lookup[int(table[row, position])] = dense
        else:
            table[row, position] = dense

    def _entry(self, index: int, row: int, position: int) -> int:
        table, lookup = self._tables[index], self._lookups[index]
        value = int(table[row, position])
        return int(lookup[value]) if lookup is not None else value

    def _fill_slots(self) -> None:
        """Records and states from before the window."""
        for key, head in self._evidence.chain_heads:
            self._chains.bind(head, to_signed(chain_start(key)))
        self._fill_made_up_slots()
        first = self._evidence.window[0].step
        for pool in self._pools:
            rewritten, changed = self._written_in(pool), self._first_changes(pool)
            for found in sorted(pool.found.values(), key=lambda found: found.position):
                is_later = found.writer_step > self._root.step
                if is_later or (found.slot in rewritten and found.writer_step >= first):
                    self._put_unwritten(pool, found.slot)
                else:
                    self._put(pool, found)
                # What was found is the state after the window's events, not before them.
                dense = pool.numbering.dense(found.slot)
                state = self._monitor.guards[pool.groups[0]].slots.state
                if changed.get(found.slot) == "alloc":
                    state[dense] = int(SlotState.FREE)
                elif changed.get(found.slot) == "free" and found.state == "free":
                    state[dense] = int(SlotState.SEALED)

    def _first_changes(self, pool: _Pool) -> dict[int, str]:
        """The first event of the window that gave out or took back each slot."""
        changes: dict[int, str] = {}
        for forward in self._evidence.window:
            for event in forward.events:
                if self._index[event.group] in pool.groups and event.kind in ("alloc", "free"):
                    for slot in event.slots or ():
                        changes.setdefault(slot, event.kind)
        return changes

    def _fill_made_up_slots(self) -> None:
        reader = self._reader
        if reader is None or reader.first == 0:
            return
        key = next(
            (
                part.identity_key
                for forward in self._evidence.window
                for part in forward.parts
                if part.uid == reader.uid
            ),
            0,
        )
        running = to_signed(chain_start(key))
        previous = []
        for position in range(reader.first):
            previous.append(running)
            running = to_signed(splitmix64_mix3(running, 0, position))
        positions = list(range(reader.first))
        for pool in self._pools:
            slots = [pool.numbering.first_extra + position for position in positions]
            self._store(pool, slots, [0] * len(slots), positions, previous)
            states = self._monitor.guards[pool.groups[0]].slots.state
            states[torch.tensor(slots)] = int(SlotState.SEALED)
        for table_row in reader.rows:
            pool = self._pool_of[self._index[table_row.group]]
            found = pool.found.get(table_row.slots[0]) if table_row.slots else None
            if found is not None:
                self._chains.bind(found.prev_hash, running)

    def _written_in(self, pool: _Pool) -> set[int]:
        names = [self._groups[index].name for index in pool.groups]
        return {
            slot
            for forward in self._evidence.window
            for part in forward.parts
            for name in names
            for slot in part.slots[name]
        }

    def _put(self, pool: _Pool, found: _Found, *, prev: int | None = None) -> None:
        """A record as found; the chain behind it is what its successors continue.

        ``prev``: its previous hash, for one that is not known here.
        """
        token = self._tokens.here(found.token)
        if prev is None or self._chains.knows(found.prev_hash):
            prev = self._chains.here(found.prev_hash)
        behind = to_signed(splitmix64_mix3(prev, token, found.position))
        self._chains.bind(found.next_hash, behind)
        slot = pool.numbering.dense(found.slot)
        self._store(pool, [slot], [token], [found.position], [prev])
        self._set_state(
            pool, slot, found.state, found.owner_uid, found.writer_uid, found.writer_step
        )

    def _put_unwritten(self, pool: _Pool, slot: int) -> None:
        dense = pool.numbering.dense(slot)
        self._set_state(pool, dense, "allocated", UNKNOWN, UNKNOWN, UNKNOWN)

    def _store(
        self,
        pool: _Pool,
        slots: list[int],
        tokens: list[int],
        positions: list[int],
        previous: list[int],
    ) -> None:
        """Records with their made-up bytes, sealed."""
        guard = self._monitor.guards[pool.groups[0]]
        where, token, position = _int64(slots), _int64(tokens), _int64(positions)
        pool.kv[where] = _made_up_bytes(token, position)
        fold = fold_slots(guard.context(LaunchTag.SEAL), where)
        fields = guard.records.view(torch.int64)
        fields[where, :RECORD_FIELDS] = torch.stack(
            (token, position, _int64(previous), fold), dim=1
        )

    def _set_state(
        self, pool: _Pool, slot: int, state: str, owner: int, writer: int, step: int
    ) -> None:
        table = self._monitor.guards[pool.groups[0]].slots
        table.state[slot] = int(SlotState[state.upper()])
        table.owner_uid[slot] = owner
        table.writer_uid[slot] = writer
        table.writer_step[slot] = step

    # --- running --------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        index = self._index[event.group]
        pool, monitor = self._pool_of[index], self._monitor
        slots = (
            list(range(1, pool.numbering.size))
            if event.slots is None
            else [pool.numbering.dense(s) for s in event.slots if s > PADDING_SLOT]
        )
        if event.kind == "move":
            sources = [pool.numbering.dense(s) for s in event.sources or [] if s > PADDING_SLOT]
            if len(sources) != len(slots):
                raise _broken("a move does not name a source for every slot")
            monitor.copy_slots(index, torch.tensor(sources), torch.tensor(slots))
            pool.kv[torch.tensor(slots)] = pool.kv[torch.tensor(sources)]
            self._follow_move(pool, torch.tensor(sources), torch.tensor(slots))
        elif event.kind == "reset":
            monitor.forget_slots(index, torch.tensor(slots))
        elif event.kind == "alloc":
            monitor.guards[index].events.alloc(_int64(slots))
        elif event.kind == "free":
            monitor.guards[index].events.free(_int64(slots))
        else:
            for slot in slots:
                self._set_state(pool, slot, "external", UNKNOWN, event.uid, UNKNOWN)

    def _follow_move(self, pool: _Pool, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Where a row names a slot that was moved, it names the new one from now on."""
        now = torch.arange(pool.numbering.size)
        now[sources] = destinations
        for index in pool.groups:
            lookup = self._lookups[index]
            entries = self._tables[index] if lookup is None else lookup
            real = (entries > PADDING_SLOT) & (entries < pool.numbering.size)
            entries[real] = now[entries[real]]

    def _forward(self, forward: Forward) -> list[Violation]:
        root = self._root
        is_the_one = forward.step == root.step
        for part in forward.parts:
            self._put_rows_of(part)
        if is_the_one:
            self._tell_the_oracle()
            if root.phase != "reverify":
                self._change_by_hand()
        step = self._step_of(forward)
        self._monitor.before_forward(step)
        self._bind_chains(forward)
        if is_the_one and root.phase == "reverify":
            self._change_by_hand()
        self._store_bytes(step)
        self._monitor.after_forward()
        if is_the_one and root.phase == "scrub":
            self._scrub_root()
        return self._violations()

    def _put_rows_of(self, part: Part) -> None:
        """Page-table entries of the slots that the part writes, as the engine has made them."""
        row = self._row(part.uid, part.request_row)
        is_reader = self._is_reader(part)
        for index, group in enumerate(self._groups):
            numbering = self._pool_of[index].numbering
            if not is_reader:
                # Of another request nothing is checked; only what its chain continues matters.
                self._set_entry(index, row, 0, max(0, numbering.dense(part.seeds[group.name])))
                continue
            for position, slot in enumerate(
                part.slots[group.name], start=part.prefix_len + part.first
            ):
                if slot > PADDING_SLOT:
                    for each in self._rows_of(part.uid):
                        self._set_entry(index, each, position, numbering.dense(slot))

    def _is_reader(self, part: Part) -> bool:
        return self._reader is not None and part.uid == self._reader.uid

    def _step_of(self, forward: Forward) -> ForwardStep:
        parts = forward.parts
        prefix, host_prefix, extend = [], [], []
        for part in parts:
            before = part.prefix_len + part.first
            host_prefix.append(before)
            extend.append(len(part.tokens))
            if self._is_reader(part):
                prefix.append(min(before, self._end_of_reader()))
            else:
                prefix.append(int(before > 0 and max(part.seeds.values()) > PADDING_SLOT))
        flat = [
            tuple(
                self._pool_of[index].numbering.dense(slot)
                for part in parts
                for slot in part.slots[group.name]
            )
            for index, group in enumerate(self._groups)
        ]
        keys = [part.identity_key for part in parts]
        return ForwardStep(
            kind=ForwardKind(forward.kind),
            step=forward.step,
            request_rows=_int64(self._row(part.uid, part.request_row) for part in parts),
            request_uids=_int64(part.uid for part in parts),
            prefix_lens=_int64(prefix),
            extend_lens=_int64(extend),
            max_prefix_len=max(prefix, default=0),
            input_ids=_int64(self._tokens.here(t) for part in parts for t in part.tokens),
            positions=_int64(position for part in parts for position in part.positions),
            out_cache_loc=tuple(_int64(slots) for slots in flat),
            identity_keys=_int64(keys) if any(keys) else None,
            host_prefix_lens=np.array(host_prefix, dtype=np.int64),
            host_extend_lens=np.array(extend, dtype=np.int64),
            host_tokens=tuple(
                prompt
                for row, part in enumerate(parts)
                if (prompt := self._prompt(row, part, prefix[row])) is not None
            ),
        )

    def _end_of_reader(self) -> int:
        """Behind the last position of the reader of which the file tells."""
        assert self._reader is not None
        kept = max((len(row.slots) for row in self._reader.rows), default=0)
        end = self._reader.prefix_len + self._reader.extend_len
        # A context that the file holds to its end may still reach beyond the page table.
        return end if self._reader.first + kept >= end else self._reader.first + kept

    def _prompt(self, batch_row: int, part: Part, prefix: int) -> HostTokens | None:
        if part.prompt is None or not self._is_reader(part):
            return None
        tokens = [0] * part.prompt.first + [self._tokens.here(t) for t in part.prompt.tokens]
        if len(tokens) > self._width:
            del tokens[self._width :]
        return HostTokens(
            batch_row=batch_row,
            request_row=self._row(part.uid, part.request_row),
            request_uid=part.uid,
            prefix_len=min(prefix, len(tokens)),
            num_tokens=len(tokens),
            source=np.array(tokens, dtype=np.int64),
            identity_key=part.identity_key,
        )

    def _tell_the_oracle(self) -> None:
        """What the sampler had chosen is not recorded; the violation names what it expected."""
        root, reader = self._root, self._reader
        if root.expected_token is None or reader is None:
            return
        offset = self._groups[self._root_group].token_offset if root.phase == "verify" else 0
        position = root.read_position + offset
        row = self._row(reader.uid, reader.request_row)
        if 0 <= position < self._width and row <= len(self._rows):
            self._monitor.record_sampled(
                torch.tensor([row]),
                torch.tensor([position]),
                torch.tensor([self._tokens.here(root.expected_token)]),
            )

    def _bind_chains(self, forward: Forward) -> None:
        """Ties the hashes behind the records just written to those of their counterparts."""
        for part in forward.parts:
            for index, group in enumerate(self._groups):
                pool = self._pool_of[index]
                records = self._monitor.guards[index].records.view(torch.int64)
                for slot in part.slots[group.name]:
                    found = pool.found.get(slot)
                    if found is None or (found.writer_uid, found.writer_step) != (
                        part.uid,
                        forward.step,
                    ):
                        continue
                    token, position, prev, _ = records[pool.numbering.dense(slot), :4].tolist()
                    if (token, position) == (self._tokens.here(found.token), found.position):
                        behind = to_signed(splitmix64_mix3(prev, token, position))
                        self._chains.rebind(found.next_hash, behind)

    def _store_bytes(self, step: ForwardStep) -> None:
        for index, slots in enumerate(step.out_cache_loc):
            pool = self._pool_of[index]
            real = (slots > PADDING_SLOT) & (slots < pool.numbering.size)
            pool.kv[slots[real]] = _made_up_bytes(step.input_ids[real], step.positions[real])

    def _scrub_root(self) -> None:
        guard = self._monitor.guards[self._root_group]
        slot = self._pool_of[self._root_group].numbering.dense(self._root.slot)
        launch_canary_scrub_kernel(
            context=guard.scrub_second_look,
            slots=torch.tensor([slot]),
            num_valid=torch.ones(1, dtype=torch.int32),
            step=self._root.step,
        )

    def _violations(self) -> list[Violation]:
        names = [group.name for group in self._groups]
        violations = [
            Violation.from_row(row, names, RequestNames()) for row in self._ring.read().rows
        ]
        return [self._with_original_slot(violation) for violation in violations]

    def _with_original_slot(self, violation: Violation) -> Violation:
        numbering = self._pool_of[self._index[violation.group]].numbering
        return replace(violation, slot=numbering.original(violation.slot))

    # --- by hand --------------------------------------------------------------------------------

    def _change_by_hand(self) -> None:
        """Make the state just before the check what was found to be, and say what that changes."""
        if self._by_hand is ByHand.NOTHING:
            return
        if self._by_hand is ByHand.EVERYTHING:
            self._change_rows()
            for pool in self._pools:
                for found in pool.found.values():
                    if 0 <= found.writer_step <= self._root.step:
                        self._change_record(pool, found)
        self._change_root()

    def _change_rows(self) -> None:
        reader = self._reader
        if reader is None:
            return
        row = self._row(reader.uid, reader.request_row)
        for table_row in reader.rows:
            index = self._index[table_row.group]
            for position, slot in enumerate(table_row.slots, start=reader.first):
                if slot > PADDING_SLOT and self._is_read(index, position):
                    self._change_entry(index, row, position, slot)

    def _is_read(self, index: int, position: int) -> bool:
        """Whether the reader's forward reads a position in a group."""
        assert self._reader is not None
        prefix, window = self._reader.prefix_len, self._groups[index].swa_window_size
        return (prefix - window if window else 0) <= position < prefix

    def _change_entry(self, index: int, row: int, position: int, slot: int) -> None:
        if not (0 <= row < self._tables[index].shape[0] and 0 <= position < self._width):
            return
        numbering = self._pool_of[index].numbering
        before = self._entry(index, row, position)
        if before != numbering.dense(slot):
            self._set_entry(index, row, position, numbering.dense(slot))
            self.changes.append(
                f"the page-table entry for position {position} in group"
                f" {self._groups[index].name} was changed from outside: it names slot {slot},"
                f" and slot {numbering.original(before)} was recorded"
            )

    def _change_record(self, pool: _Pool, found: _Found) -> None:
        guard = self._monitor.guards[pool.groups[0]]
        dense = pool.numbering.dense(found.slot)
        records, table = guard.records.view(torch.int64), guard.slots
        token, position, prev, _ = records[dense, :RECORD_FIELDS].tolist()
        same_write = (int(table.writer_uid[dense]), int(table.writer_step[dense])) == (
            found.writer_uid,
            found.writer_step,
        )
        if found.writer_step == self._root.step and not same_write:
            return  # written by the very forward that is about to run
        differs = []
        if token != self._tokens.here(found.token):
            differs.append("token")
        if position != found.position:
            differs.append("position")
        if self._chains.knows(found.prev_hash) and prev != self._chains.here(found.prev_hash):
            differs.append("chain hash")
        if not same_write:
            differs.append("writer")
        if differs:
            self._put(pool, found, prev=prev if same_write else None)
            self.changes.append(
                f"the record of slot {found.slot} was written from outside:"
                f" {', '.join(differs)} not as recorded"
            )

    def _change_root(self) -> None:
        root, pool, reader = self._root, self._pool_of[self._root_group], self._reader
        if reader is not None and root.phase in ("verify", "reverify"):
            row = self._row(reader.uid, reader.request_row)
            self._change_entry(self._root_group, row, root.read_position, root.slot)
        dense = pool.numbering.dense(root.slot)
        if root.phase == "write" and "write_owned" in root.checks and root.writer_uid is not None:
            self._monitor.guards[self._root_group].slots.owner_uid[dense] = root.writer_uid
            self.changes.append(f"slot {root.slot} had an owner that was not recorded")
            return
        if root.phase == "write" or not PADDING_SLOT < dense < pool.numbering.size:
            return
        guard = self._monitor.guards[self._root_group]
        fields = guard.records.view(torch.int64)[dense, :RECORD_FIELDS]
        observed = [
            self._tokens.here(root.stored_token),
            root.position,
            self._chains.here(root.stored_hash),
        ]
        names = ("token", "position", "chain hash")
        if root.expected_hash is not None and not self._chains.knows(root.expected_hash):
            # What it should continue is what nobody recorded: the slot before is the wrong one.
            observed[2] = int(fields[2])
        if root.phase == "verify" and "unwritten" not in root.checks:
            differs = [
                name
                for name, here, seen in zip(names, fields[:3].tolist(), observed, strict=True)
                if here != seen
            ]
            if differs:
                fields[:3] = torch.tensor(observed)
                self.changes.append(
                    f"the record of slot {root.slot} was written from outside:"
                    f" {', '.join(differs)} not as recorded"
                )
        state = SlotState.__members__.get((root.slot_state or "").upper())
        if state is not None and int(guard.slots.state[dense]) & 0xFF != state:
            guard.slots.state[dense] = int(state)
            self.changes.append(
                f"slot {root.slot} was {root.slot_state}, which no recorded event made it"
            )
        if "real_kv" in root.checks:
            pool.kv[dense, 0] ^= 0xFF
            self.changes.append(
                f"the K/V bytes of slot {root.slot} were changed from outside, after the seal of"
                f" step {root.writer_step}"
            )


def _int64(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _made_up_bytes(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """K/V that nothing but token and position decide: uint8 [n, 16] of int64 [n] each."""
    first = splitmix64_tensor(splitmix64_tensor(tokens) ^ positions)
    return torch.stack((first, splitmix64_tensor(first + 1)), dim=1).view(torch.uint8)


# ---- explaining ----------------------------------------------------------------------------------


def _written_in_window(evidence: Evidence, uid: int, position: int, group: str) -> bool:
    """Whether the request wrote ``position`` into a real slot in the window."""
    return any(
        part.uid == uid
        and 0 <= (entry := position - part.prefix_len - part.first) < len(part.tokens)
        and part.slots[group][entry] > PADDING_SLOT
        for forward in evidence.window
        for part in forward.parts
    )


def _from_recorded(evidence: Evidence, root: Place) -> str:
    """Which recorded event leads to the violation, in words."""
    names = {request.uid: request.id for request in evidence.requests}

    def name(uid: int) -> str:
        known = names.get(uid)
        return f"request {known}" if known is not None else f"request #{uid}"

    if root.phase == "lifecycle":
        return "explained by the recorded events of the allocator: " + "; ".join(
            f"before step {forward.step} {event.kind}"
            for forward in evidence.window
            for event in forward.events
            if event.group == root.group and (event.slots is None or root.slot in event.slots)
        )
    if "write_owned" in root.checks:
        return (
            f"explained by the recorded events: slot {root.slot} was in use when step {root.step}"
            " wrote to it"
        )
    if root.phase == "write":
        return (
            f"explained by the recorded events: what went into the forward of step {root.step}"
            " is not what the scheduler has"
        )
    reader = root.request_uid if root.request_uid is not None else UNKNOWN
    for forward in reversed(evidence.window):
        for event in reversed(forward.events):
            given_up = event.kind in ("reset", "free", "alloc") and event.group == root.group
            if given_up and (event.slots is None or root.slot in event.slots):
                return (
                    f"explained by the recorded events: before step {forward.step} slot"
                    f" {root.slot} was given up ({event.kind})"
                )
        for part in forward.parts:
            entry = root.read_position - part.prefix_len - part.first
            sent = part.slots[root.group]
            if part.uid == reader and 0 <= entry < len(sent) and sent[entry] <= PADDING_SLOT:
                return (
                    f"explained by the recorded events: in step {forward.step} position"
                    f" {root.read_position} of {name(reader)} was written to slot {sent[entry]},"
                    f" not to slot {root.slot} from which it is read"
                )
            if forward.step < root.step and root.slot in sent:
                position = part.positions[sent.index(root.slot)]
                written_at = part.prefix_len + part.first + sent.index(root.slot)
                if part.uid == reader and written_at != root.read_position:
                    return (
                        f"the page table of {name(reader)} named slot {root.slot} for position"
                        f" {root.read_position} when the recorded window began (step"
                        f" {evidence.window[0].step}), although it holds position {written_at} of"
                        f" it (step {forward.step}): the cause is older, or from outside"
                    )
                return (
                    f"explained by the recorded events: in step {forward.step} {name(part.uid)}"
                    f" wrote position {position} to slot {root.slot}"
                )
    return (
        f"slot {root.slot} stood so when the recorded window began (step"
        f" {evidence.window[0].step}): the cause is older, or from outside"
    )


# ---- in words ------------------------------------------------------------------------------------


def story(incident: Incident, result: Replay) -> list[str]:
    """What happened and what the replay says of it, paragraph by paragraph."""
    root = incident.root
    lines = [f"Incident {incident.id} ({incident.engine}): {incident.cause}."]
    if incident.evidence is not None and incident.evidence.window:
        window = incident.evidence.window
        lines.append(
            f"Replayed {result.forwards} forwards, steps {window[0].step} to {window[-1].step}."
            f" What they did to slot {root.slot}:"
        )
        lines += [f"- {event}" for event in slot_history(incident.evidence, root)] or ["- nothing"]
    place = (
        f"{' + '.join(root.checks)} at slot {root.slot} of group {root.group},"
        f" position {root.read_position}, step {root.step}"
    )
    if result.violation is not None:
        lines.append(f"REPRODUCED: {place}.")
    else:
        lines.append(f"NOT REPRODUCED: {place}.")
        lines += [
            f"- the replay reports {' + '.join(v.checks)} at slot {v.slot}, position"
            f" {v.position if v.expected_position is None else v.expected_position}"
            for v in result.seen[:5]
        ]
    lines.append(f"{result.explanation[0].upper()}{result.explanation[1:]}.")
    return lines


def slot_history(evidence: Evidence, root: Place) -> list[str]:
    """What the window did to the root's slot, in words."""
    names = {request.uid: request.id for request in evidence.requests}
    history = []
    for forward in evidence.window:
        for event in forward.events:
            if event.group == root.group and (event.slots is None or root.slot in event.slots):
                history.append(f"before step {forward.step}: {event.kind}")
        for part in forward.parts:
            name = names.get(part.uid) or f"#{part.uid}"
            slots = part.slots[root.group]
            if root.slot in slots:
                position = part.prefix_len + part.first + slots.index(root.slot)
                history.append(
                    f"step {forward.step} ({forward.kind}): request {name} wrote position"
                    f" {position} to it"
                )
    if root.phase == "verify":
        reader = root.request_id or f"#{root.request_uid}"
        history.append(
            f"step {root.step}: request {reader} read it as position {root.read_position}"
        )
    return history
