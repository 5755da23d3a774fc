"""What stood in the engine before the recorded window began."""

from __future__ import annotations

import torch

from kvcanary_plugin.kernels.consts import SlotState
from kvcanary_plugin.kernels.hashes import chain_start, splitmix64_mix3, to_signed
from kvcanary_plugin.replay.pools import Pool
from kvcanary_plugin.replay.small_engine import SmallEngine


def put_what_stood_before(engine: SmallEngine) -> None:
    """The reader's row, and records and states from before the window."""
    _put_reader_rows(engine)
    for key, head in engine.case.evidence.chain_heads:
        engine.chains.bind(head, to_signed(chain_start(key)))
    _put_made_up_slots(engine)
    for pool in engine.pools:
        _put_found_slots(engine, pool)


def _put_reader_rows(engine: SmallEngine) -> None:
    """The reader's row as it was found, and made-up slots where the file does not tell."""
    case, root, reader = engine.case, engine.case.root, engine.case.reader
    if reader is None:
        return
    for table_row in reader.rows:
        group = engine.groups[table_row.group]
        numbering = group.pool.numbering
        made_up = [numbering.first_extra + position for position in range(reader.first)]
        found = [numbering.dense(slot) for slot in table_row.slots]
        for row in engine.rows.of(reader.uid):
            for position, slot in enumerate([*made_up, *found]):
                group.table.set_entry(row, position, slot)
    # The violation itself names the entry as it was at that step, the file one a little later.
    if root.phase in ("verify", "reverify") and not case.root_is_written_in_window:
        group = engine.root_group
        row = engine.rows.here(reader.uid, reader.request_row)
        slot = group.pool.numbering.dense(case.slot_before)
        group.table.set_entry(row, root.read_position, slot)


def _put_made_up_slots(engine: SmallEngine) -> None:
    reader = engine.case.reader
    if reader is None or reader.first == 0:
        return
    running = to_signed(chain_start(engine.case.reader_key))
    previous = []
    for position in range(reader.first):
        previous.append(running)
        running = to_signed(splitmix64_mix3(running, 0, position))
    positions = range(reader.first)
    for pool in engine.pools:
        slots = [pool.numbering.first_extra + position for position in positions]
        pool.store(slots, [0] * len(slots), positions, previous)
        pool.states.state[torch.tensor(slots)] = int(SlotState.SEALED)
    for table_row in reader.rows:
        pool = engine.groups[table_row.group].pool
        found = pool.found.get(table_row.slots[0]) if table_row.slots else None
        if found is not None:
            engine.chains.bind(found.prev_hash, running)


def _put_found_slots(engine: SmallEngine, pool: Pool) -> None:
    first, last = engine.case.evidence.window[0].step, engine.case.root.step
    rewritten, changed = _written_in_window(engine, pool), _first_changes(engine, pool)
    for found in sorted(pool.found.values(), key=lambda found: found.position):
        is_later = found.writer_step > last
        if is_later or (found.slot in rewritten and found.writer_step >= first):
            pool.put_unwritten(found.slot)
        else:
            pool.put(found)
        # What was found is the state after the window's events, not before them.
        dense = pool.numbering.dense(found.slot)
        if changed.get(found.slot) == "alloc":
            pool.states.state[dense] = int(SlotState.FREE)
        elif changed.get(found.slot) == "free" and found.state == "free":
            pool.states.state[dense] = int(SlotState.SEALED)


def _written_in_window(engine: SmallEngine, pool: Pool) -> set[int]:
    return {
        slot
        for forward in engine.case.evidence.window
        for part in forward.parts
        for name in pool.groups
        for slot in part.slots[name]
    }


def _first_changes(engine: SmallEngine, pool: Pool) -> dict[int, str]:
    """The first event of the window that gave out or took back each slot."""
    changes: dict[int, str] = {}
    for forward in engine.case.evidence.window:
        for event in forward.events:
            if engine.groups[event.group].pool is pool and event.kind in ("alloc", "free"):
                for slot in event.slots or ():
                    changes.setdefault(slot, event.kind)
    return changes
