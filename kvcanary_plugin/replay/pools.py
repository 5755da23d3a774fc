"""Slots of the engine's pools in small: their numbers, records, states and bytes.

K/V bytes are made up from token and position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvcanary_plugin.guard import GroupGuard
from kvcanary_plugin.incident_file import FoundSlot, Group
from kvcanary_plugin.kernels import LaunchTag
from kvcanary_plugin.kernels.consts import RECORD_FIELDS, UNKNOWN, SlotState
from kvcanary_plugin.kernels.hashes import splitmix64_mix3, splitmix64_tensor, to_signed
from kvcanary_plugin.kernels.reference import fold_slots
from kvcanary_plugin.replay.case import Case
from kvcanary_plugin.replay.numbering import Chains, SlotNumbering, Tokens, int64

_KV_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class PoolSlots:
    """Slots of one pool: the groups of it, its numbering, its made-up K/V."""

    groups: list[str]
    numbering: SlotNumbering
    kv: torch.Tensor
    found: dict[int, FoundSlot]


def slots_of_pools(case: Case) -> list[PoolSlots]:
    """Every slot that the incident names, pool by pool."""
    members: dict[str, list[Group]] = {}
    for group in case.evidence.groups:
        key = f"pool {group.pool}" if group.pool is not None else f"group {group.name}"
        members.setdefault(key, []).append(group)
    named = _named_slots(case)
    pools = []
    for groups in members.values():
        names = [group.name for group in groups]
        numbering = SlotNumbering(
            {slot for name in names for slot in named[name]},
            groups[0].num_slots,
            extra=case.reader.first if case.reader is not None else 0,
        )
        kv = torch.zeros((numbering.size, _KV_BYTES), dtype=torch.uint8)
        found = {
            record.slot: record
            for slots in case.evidence.slots
            if slots.group in names
            for record in slots.rows()
        }
        pools.append(PoolSlots(names, numbering, kv, found))
    return pools


def _named_slots(case: Case) -> dict[str, set[int]]:
    """What the incident names as slots, group by group."""
    evidence, root = case.evidence, case.root
    named: dict[str, set[int]] = {group.name: set() for group in evidence.groups}
    named[root.group].update((root.slot, case.slot_before))
    for slots in evidence.slots:
        named[slots.group].update(slots.slot)
    for request in evidence.requests:
        for row in request.rows:
            named[row.group].update(row.slots)
    for forward in evidence.window:
        for part in forward.parts:
            for name in named:
                named[name].update(part.slots[name])
                named[name].add(part.seeds[name])
        for event in forward.events:
            named[event.group].update(event.slots or ())
            named[event.group].update(event.sources or ())
    return named


class Pool:
    """One pool under its monitor.

    Args:
        slots: of the pool.
        guard: of any of its groups; they share records and states.
        tokens, chains: what stands here for those of the file.
    """

    def __init__(self, slots: PoolSlots, guard: GroupGuard, tokens: Tokens, chains: Chains) -> None:
        self.groups = slots.groups
        self.numbering = slots.numbering
        self.kv = slots.kv
        self.found = slots.found
        self.records = guard.records.view(torch.int64)[:, :RECORD_FIELDS]
        self.states = guard.slots
        self._seal = guard.context(LaunchTag.SEAL)
        self._tokens = tokens
        self._chains = chains

    def put(self, found: FoundSlot, *, prev: int | None = None) -> None:
        """A record as found; the chain behind it is what its successors continue.

        ``prev``: its previous hash, for one that is not known here.
        """
        token = self._tokens.here(found.token)
        if prev is None or self._chains.knows(found.prev_hash):
            prev = self._chains.here(found.prev_hash)
        behind = to_signed(splitmix64_mix3(prev, token, found.position))
        self._chains.bind(found.next_hash, behind)
        slot = self.numbering.dense(found.slot)
        self.store([slot], [token], [found.position], [prev])
        self.set_state(slot, found.state, found.owner_uid, found.writer_uid, found.writer_step)

    def put_unwritten(self, slot: int) -> None:
        dense = self.numbering.dense(slot)
        self.set_state(dense, "allocated", UNKNOWN, UNKNOWN, UNKNOWN)

    def store(
        self,
        slots: Sequence[int],
        tokens: Sequence[int],
        positions: Sequence[int],
        previous: Sequence[int],
    ) -> None:
        """Records with their made-up bytes, sealed."""
        where, token, position = int64(slots), int64(tokens), int64(positions)
        self.store_bytes(where, token, position)
        fold = fold_slots(self._seal, where)
        self.records[where] = torch.stack((token, position, int64(previous), fold), dim=1)

    def store_bytes(
        self, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """K/V that nothing but token and position decide: int64 [n] each."""
        first = splitmix64_tensor(splitmix64_tensor(tokens) ^ positions)
        both = torch.stack((first, splitmix64_tensor(first + 1)), dim=1)
        self.kv[slots] = both.view(torch.uint8)

    def set_state(self, slot: int, state: str, owner: int, writer: int, step: int) -> None:
        self.states.state[slot] = int(SlotState[state.upper()])
        self.states.owner_uid[slot] = owner
        self.states.writer_uid[slot] = writer
        self.states.writer_step[slot] = step
