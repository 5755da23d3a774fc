"""What is changed by hand just before the check: the state that was found, and not recorded."""

from __future__ import annotations

from enum import Enum

import torch

from kvcanary_plugin.incident_file import FoundSlot
from kvcanary_plugin.kernels.consts import PADDING_SLOT, SlotState
from kvcanary_plugin.replay.pools import Pool
from kvcanary_plugin.replay.small_engine import SmallEngine, SmallGroup


class ByHand(Enum):
    """What a run puts in just before the root's step, and names in ``changes``."""

    NOTHING = "nothing"
    ROOT = "the root's entry of the page table, record, state and bytes"
    EVERYTHING = "the page-table row and every record as well"


class HandMadeChanges:
    """Makes the state just before the check what was found to be, and says what that changes."""

    def __init__(self, engine: SmallEngine) -> None:
        self._engine = engine
        self._case = engine.case
        self.made: list[str] = []

    def make(self, by_hand: ByHand) -> None:
        if by_hand is ByHand.NOTHING:
            return
        if by_hand is ByHand.EVERYTHING:
            self._change_rows()
            for pool in self._engine.pools:
                for found in pool.found.values():
                    if 0 <= found.writer_step <= self._case.root.step:
                        self._change_record(pool, found)
        self._change_root()

    def _change_rows(self) -> None:
        reader = self._case.reader
        if reader is None:
            return
        row = self._engine.rows.here(reader.uid, reader.request_row)
        for table_row in reader.rows:
            group = self._engine.groups[table_row.group]
            for position, slot in enumerate(table_row.slots, start=reader.first):
                if slot > PADDING_SLOT and self._case.is_read(group.recorded, position):
                    self._change_entry(group, row, position, slot)

    def _change_entry(self, group: SmallGroup, row: int, position: int, slot: int) -> None:
        if not group.table.has(row, position):
            return
        numbering = group.pool.numbering
        before = group.table.entry(row, position)
        if before != numbering.dense(slot):
            group.table.set_entry(row, position, numbering.dense(slot))
            self.made.append(
                f"the page-table entry for position {position} in group"
                f" {group.recorded.name} was changed from outside: it names slot {slot},"
                f" and slot {numbering.original(before)} was recorded"
            )

    def _change_record(self, pool: Pool, found: FoundSlot) -> None:
        tokens, chains = self._engine.tokens, self._engine.chains
        dense, states = pool.numbering.dense(found.slot), pool.states
        token, position, prev, _ = pool.records[dense].tolist()
        same_write = (int(states.writer_uid[dense]), int(states.writer_step[dense])) == (
            found.writer_uid,
            found.writer_step,
        )
        if found.writer_step == self._case.root.step and not same_write:
            return  # written by the very forward that is about to run
        differs = []
        if token != tokens.here(found.token):
            differs.append("token")
        if position != found.position:
            differs.append("position")
        if chains.knows(found.prev_hash) and prev != chains.here(found.prev_hash):
            differs.append("chain hash")
        if not same_write:
            differs.append("writer")
        if differs:
            pool.put(found, prev=prev if same_write else None)
            self._tell_of_record(found.slot, differs)

    def _tell_of_record(self, slot: int, differs: list[str]) -> None:
        self.made.append(
            f"the record of slot {slot} was written from outside:"
            f" {', '.join(differs)} not as recorded"
        )

    def _change_root(self) -> None:
        root, reader, group = self._case.root, self._case.reader, self._engine.root_group
        pool = group.pool
        if reader is not None and root.phase in ("verify", "reverify"):
            row = self._engine.rows.here(reader.uid, reader.request_row)
            self._change_entry(group, row, root.read_position, root.slot)
        dense = pool.numbering.dense(root.slot)
        if root.phase == "write" and "write_owned" in root.checks and root.writer_uid is not None:
            pool.states.owner_uid[dense] = root.writer_uid
            self.made.append(f"slot {root.slot} had an owner that was not recorded")
            return
        if root.phase == "write" or not PADDING_SLOT < dense < pool.numbering.size:
            return
        if root.phase == "verify" and "unwritten" not in root.checks:
            self._change_root_record(pool.records[dense])
        state = SlotState.__members__.get((root.slot_state or "").upper())
        if state is not None and int(pool.states.state[dense]) & 0xFF != state:
            pool.states.state[dense] = int(state)
            self.made.append(
                f"slot {root.slot} was {root.slot_state}, which no recorded event made it"
            )
        if "real_kv" in root.checks:
            pool.kv[dense, 0] ^= 0xFF
            self.made.append(
                f"the K/V bytes of slot {root.slot} were changed from outside, after the seal of"
                f" step {root.writer_step}"
            )

    def _change_root_record(self, record: torch.Tensor) -> None:
        """``record``: int64 [4], as it stands."""
        root, tokens, chains = self._case.root, self._engine.tokens, self._engine.chains
        here = record[:3].tolist()
        seen = [tokens.here(root.stored_token), root.position, chains.here(root.stored_hash)]
        if root.expected_hash is not None and not chains.knows(root.expected_hash):
            # What it should continue is what nobody recorded: the slot before is the wrong one.
            seen[2] = here[2]
        names = ("token", "position", "chain hash")
        differs = [name for name, a, b in zip(names, here, seen, strict=True) if a != b]
        if differs:
            record[:3] = torch.tensor(seen)
            self._tell_of_record(root.slot, differs)
