"""The engine of an incident in small: pools, page tables, and a monitor around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcanary_plugin.cache import KVCacheGroup, row_source
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.guard import GroupGuard
from kvcanary_plugin.incident_file import Group
from kvcanary_plugin.kernels.consts import PADDING_SLOT
from kvcanary_plugin.monitor import CanaryMonitor
from kvcanary_plugin.replay.case import Case
from kvcanary_plugin.replay.intact import MAX_TABLE_ENTRIES, broken
from kvcanary_plugin.replay.numbering import PADDING_ROW, Chains, Rows, Tokens
from kvcanary_plugin.replay.pools import Pool, PoolSlots, slots_of_pools


class PageTable:
    """A page table of slots for one group.

    Where the engine's slots go through a lookup table, each entry here has an index of its own,
    and the lookup table holds what it stands for.
    """

    def __init__(self, *, rows: int, width: int, is_mapped: bool) -> None:
        entries = torch.arange(rows * width, dtype=torch.int64).reshape(rows, width)
        self.lookup: torch.Tensor | None = None
        if is_mapped:
            self.table = entries + 1
            self.lookup = torch.zeros(entries.numel() + 1, dtype=torch.int64)
        else:
            self.table = torch.zeros_like(entries)

    def has(self, row: int, position: int) -> bool:
        rows, width = self.table.shape
        return 0 <= row < rows and 0 <= position < width

    def entry(self, row: int, position: int) -> int:
        value = int(self.table[row, position])
        return int(self.lookup[value]) if self.lookup is not None else value

    def set_entry(self, row: int, position: int, dense: int) -> None:
        """An entry outside of the table stays out."""
        if not self.has(row, position):
            return
        if self.lookup is not None:
            self.lookup[int(self.table[row, position])] = dense
        else:
            self.table[row, position] = dense

    def follow_move(self, now: torch.Tensor) -> None:
        """``now``: int64 [num_slots], the slot that each is from now on."""
        entries = self.table if self.lookup is None else self.lookup
        real = (entries > PADDING_SLOT) & (entries < now.shape[0])
        entries[real] = now[entries[real]]


@dataclass(frozen=True, slots=True)
class SmallGroup:
    """A group as recorded, and what stands for it here."""

    recorded: Group
    guard: GroupGuard
    pool: Pool
    table: PageTable


class SmallEngine:
    """An engine with nothing in it: no slot is written, no entry of a page table set."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.tokens = Tokens()
        self.chains = Chains()
        self.rows = Rows(case.evidence, case.root_group)
        self.width = _table_width(case, self.rows)
        groups = case.evidence.groups
        tables = {
            group.name: PageTable(rows=self.rows.count, width=self.width, is_mapped=group.is_mapped)
            for group in groups
        }
        slots = slots_of_pools(case)
        slots_of = {name: pool for pool in slots for name in pool.groups}
        self.monitor = _make_monitor(
            case,
            [_guarded(case, group, slots_of[group.name], tables[group.name]) for group in groups],
        )
        guards = {guard.group.name: guard for guard in self.monitor.guards}
        self.pools = [
            Pool(pool, guards[pool.groups[0]], self.tokens, self.chains) for pool in slots
        ]
        pool_of = {name: pool for pool in self.pools for name in pool.groups}
        self.groups = {
            group.name: SmallGroup(
                group, guards[group.name], pool_of[group.name], tables[group.name]
            )
            for group in groups
        }

    @property
    def root_group(self) -> SmallGroup:
        return self.groups[self.case.root.group]


def _table_width(case: Case, rows: Rows) -> int:
    longest = max(group.table_positions for group in case.evidence.groups)
    width = min(max(2, case.end_of_rows), longest)
    if width * rows.count > MAX_TABLE_ENTRIES:
        raise broken("its requests need a larger page table than a replay holds")
    return width


def _guarded(case: Case, group: Group, slots: PoolSlots, table: PageTable) -> KVCacheGroup:
    has_bytes = case.evidence.settings.seal_real_kv != "none"
    return KVCacheGroup(
        name=group.name,
        num_slots=slots.numbering.size,
        page_table=table.table,
        page_size=1,
        padding_row=PADDING_ROW,
        sources=(row_source(slots.kv),) if has_bytes else (),
        full_to_swa=table.lookup,
        swa_window_size=group.swa_window_size,
        token_offset=group.token_offset,
        tracks_allocation=group.tracks_allocation,
        table_stable_through_forward=True,
        pool=group.pool,
    )


def _make_monitor(case: Case, groups: Sequence[KVCacheGroup]) -> CanaryMonitor:
    settings, window = case.evidence.settings, case.evidence.window
    config = CanaryConfig.model_validate(
        {
            "mode": "log",
            "write_input_assert": settings.write_input_assert,
            "checks": {"token": settings.token, "prefix_identity": settings.prefix_identity},
            "verify": {"real_kv": settings.verify_real_kv},
            "seal": {"real_kv": settings.seal_real_kv},
            "reverify": {"sample": float(case.root.phase == "reverify")},
            "scrub": {"percent_of_step_time": 0},
            "recorder": {"forwards": 0},
        }
    )
    return CanaryMonitor(
        config=config,
        groups=groups,
        max_requests=max((len(forward.parts) for forward in window), default=1) or 1,
        raise_pending=lambda: None,
        on_error=_raise,
    )


def _raise(_where: str, error: BaseException) -> None:
    raise error
