"""What happened to slots before a forward, put into the engine."""

from __future__ import annotations

import torch

from kvcanary_plugin.incident_file import Event
from kvcanary_plugin.kernels.consts import PADDING_SLOT, UNKNOWN
from kvcanary_plugin.replay.intact import broken
from kvcanary_plugin.replay.numbering import int64
from kvcanary_plugin.replay.pools import Pool
from kvcanary_plugin.replay.small_engine import SmallEngine


def apply_event(engine: SmallEngine, event: Event) -> None:
    group = engine.groups[event.group]
    pool, guard = group.pool, group.guard
    slots = (
        list(range(1, pool.numbering.size))
        if event.slots is None
        else [pool.numbering.dense(s) for s in event.slots if s > PADDING_SLOT]
    )
    if event.kind == "move":
        sources = [pool.numbering.dense(s) for s in event.sources or [] if s > PADDING_SLOT]
        if len(sources) != len(slots):
            raise broken("a move does not name a source for every slot")
        engine.monitor.copy_slots(guard.index, torch.tensor(sources), torch.tensor(slots))
        pool.kv[torch.tensor(slots)] = pool.kv[torch.tensor(sources)]
        _follow_move(engine, pool, torch.tensor(sources), torch.tensor(slots))
    elif event.kind == "reset":
        engine.monitor.forget_slots(guard.index, torch.tensor(slots))
    elif event.kind == "alloc":
        guard.events.alloc(int64(slots))
    elif event.kind == "free":
        guard.events.free(int64(slots))
    else:
        for slot in slots:
            pool.set_state(slot, "external", UNKNOWN, event.uid, UNKNOWN)


def _follow_move(
    engine: SmallEngine, pool: Pool, sources: torch.Tensor, destinations: torch.Tensor
) -> None:
    """Where a row names a slot that was moved, it names the new one from now on."""
    now = torch.arange(pool.numbering.size)
    now[sources] = destinations
    for name in pool.groups:
        engine.groups[name].table.follow_move(now)
