"""Groups that share one allocation, and blocks that the engine copies or clears."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from kvcanary_plugin.cache import KVCacheGroup, row_source
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.forward import ForwardKind, ForwardStep, HostTokens
from kvcanary_plugin.kernels import SlotState
from kvcanary_plugin.monitor import CanaryMonitor
from kvcanary_plugin.ring import RingReader
from kvcanary_plugin.violations import RequestNames, Violation

BLOCK, BLOCKS, ROWS = 4, 8, 4
SLOTS = BLOCK * BLOCKS


def block_slots(*blocks: int) -> torch.Tensor:
    return torch.tensor([block * BLOCK + offset for block in blocks for offset in range(BLOCK)])


@dataclass
class HybridEngine:
    """Two groups over one memory: every group stores K/V of its own in its own blocks."""

    pools: tuple[str | None, str | None] = ("blocks", "blocks")
    window: int = 0

    def __post_init__(self) -> None:
        self.memory = torch.zeros((SLOTS, 16), dtype=torch.uint8)
        self.tables = [torch.zeros((ROWS, BLOCKS), dtype=torch.int32) for _ in range(2)]
        self.names = RequestNames()
        self.errors: list[BaseException] = []
        self.monitor = CanaryMonitor(
            config=CanaryConfig.model_validate(
                {
                    "verify": {"real_kv": "all"},
                    "checks": {"token": True},
                    "write_input_assert": True,
                    "scrub": {"percent_of_step_time": 0},
                }
            ),
            groups=[
                KVCacheGroup(
                    name=name,
                    num_slots=SLOTS,
                    page_table=table,
                    page_size=BLOCK,
                    padding_row=-1,
                    sources=(row_source(self.memory),),
                    swa_window_size=window,
                    pool=pool,
                )
                for name, table, window, pool in zip(
                    ("full", "swa"), self.tables, (0, self.window), self.pools, strict=True
                )
            ],
            max_requests=ROWS,
            raise_pending=lambda: None,
            on_error=lambda where, error: self.errors.append(error),
        )
        self.reader = RingReader(self.monitor.sink.ring)
        self.step = 0
        self.generator = np.random.default_rng(0)

    def forward(self, *parts: Part) -> list[Violation]:
        """``parts`` stand in the rows of the batch, in their order."""
        self.step += 1
        step = self._step_of(parts)
        self.monitor.before_forward(step)
        for slots in step.out_cache_loc:
            self.memory[slots] = torch.from_numpy(
                self.generator.integers(0, 256, (len(slots), 16), dtype=np.uint8)
            )
        self.monitor.after_forward()
        assert not self.errors, self.errors
        rows = self.reader.read().rows
        return [Violation.from_row(row, ("full", "swa"), self.names) for row in rows]

    def _step_of(self, parts: tuple[Part, ...]) -> ForwardStep:
        out: list[list[int]] = [[], []]
        for row, part in enumerate(parts):
            for group, blocks in enumerate((part.full, part.swa)):
                self.tables[group][row].zero_()
                self.tables[group][row, : len(blocks)] = torch.tensor(blocks)
                out[group] += block_slots(*blocks)[part.prefix : len(part.tokens)].tolist()
        prefix = np.array([part.prefix for part in parts])
        extend = np.array([len(part.tokens) - part.prefix for part in parts])
        moved = [(part.moved_from, row) for row, part in enumerate(parts) if part.moved_from >= 0]
        return ForwardStep(
            kind=ForwardKind.MIXED,
            step=self.step,
            request_rows=torch.arange(len(parts)),
            request_uids=torch.tensor([part.uid for part in parts]),
            prefix_lens=torch.from_numpy(prefix),
            extend_lens=torch.from_numpy(extend),
            max_prefix_len=int(prefix.max()),
            input_ids=torch.tensor([t for part in parts for t in part.tokens[part.prefix :]]),
            positions=torch.tensor(
                [p for part in parts for p in range(part.prefix, len(part.tokens))]
            ),
            out_cache_loc=tuple(torch.tensor(slots) for slots in out),
            host_prefix_lens=prefix,
            host_extend_lens=extend,
            host_tokens=tuple(
                HostTokens(
                    batch_row=row,
                    request_row=row,
                    request_uid=part.uid,
                    prefix_len=part.prefix,
                    num_tokens=len(part.tokens),
                    source=np.array(part.tokens),
                )
                for row, part in enumerate(parts)
                if part.host_knows
            ),
            moved_rows=(
                (np.array([old for old, _ in moved]), np.array([new for _, new in moved]))
                if moved
                else None
            ),
        )


@dataclass
class Part:
    """One request: it computes ``tokens[prefix:]`` into its blocks of both groups."""

    uid: int
    tokens: list[int]
    full: list[int]
    swa: list[int]
    prefix: int = 0
    host_knows: bool = True
    moved_from: int = field(default=-1)


def test_a_block_that_goes_from_one_group_to_the_other_is_silent():
    engine = HybridEngine()
    assert engine.forward(Part(1, [5, 6, 7, 8], full=[1], swa=[2])) == []
    assert engine.forward(Part(2, [9, 10, 11], full=[2], swa=[1])) == []
    assert engine.forward(Part(2, [9, 10, 11, 12], full=[2], swa=[1], prefix=3)) == []


def test_a_stale_block_that_the_other_group_took_over_is_seen_in_its_record():
    """With records of its own the group would find its old record, still right."""
    engine = HybridEngine()
    engine.forward(Part(1, [5, 6, 7, 8], full=[1], swa=[2]))
    engine.forward(Part(2, [9, 10, 11, 12], full=[3], swa=[1]))
    found = engine.forward(Part(3, [5, 6, 7, 8, 9], full=[1, 4], swa=[2, 5], prefix=4))
    assert {(v.group, v.slot) for v in found} == {("full", s) for s in range(4, 8)}
    assert all("token" in v.checks for v in found if v.phase == "verify")
    assert found[0].writer_uid == 2


def test_a_window_is_the_groups_own():
    engine = HybridEngine(window=2)
    engine.forward(Part(1, list(range(5, 13)), full=[1, 2], swa=[3, 4]))
    # The sliding group's first block is gone; its stale entry now holds another request's tokens.
    engine.forward(Part(2, [1, 2, 3, 4], full=[5], swa=[3]))
    assert (
        engine.forward(Part(1, list(range(5, 14)), full=[1, 2, 6], swa=[3, 4, 7], prefix=8)) == []
    )


def test_copied_blocks_bring_their_records():
    engine = HybridEngine()
    engine.forward(Part(1, [5, 6, 7, 8], full=[1], swa=[2]))
    for source, destination in ((1, 3), (2, 4)):
        engine.memory[block_slots(destination)] = engine.memory[block_slots(source)]
        engine.monitor.copy_slots(0, block_slots(source), block_slots(destination))
    assert engine.forward(Part(2, [5, 6, 7, 9], full=[3], swa=[4], prefix=3)) == []


def test_a_copy_that_the_canary_is_not_told_of_is_unwritten():
    engine = HybridEngine()
    engine.forward(Part(1, [5, 6, 7, 8], full=[1], swa=[2]))
    engine.memory[block_slots(3)] = engine.memory[block_slots(1)]
    found = engine.forward(Part(2, [5, 6, 7, 9], full=[3], swa=[2], prefix=3))
    assert {v.checks for v in found if v.phase == "verify"} >= {("unwritten",)}


def test_cleared_blocks_are_unwritten():
    engine = HybridEngine()
    engine.forward(Part(1, [5, 6, 7], full=[1], swa=[2]))
    engine.monitor.forget_slots(0, block_slots(1))
    found = engine.forward(Part(1, [5, 6, 7, 8], full=[1], swa=[2], prefix=3))
    assert {(v.group, v.checks) for v in found if v.phase == "verify"} >= {("full", ("unwritten",))}
    assert all(v.group == "full" for v in found if v.phase == "verify")


def test_everything_forgotten_is_everything_unwritten():
    engine = HybridEngine()
    engine.forward(Part(1, [5, 6, 7], full=[1], swa=[2]))
    engine.monitor.forget_everything()
    states = engine.monitor.guards[0].slots.state
    assert set((states & 0xFF).tolist()) == {int(SlotState.ALLOCATED)}


def test_the_oracle_follows_a_request_to_another_row():
    engine = HybridEngine()
    one, two = Part(1, [5, 6], full=[1], swa=[2]), Part(2, [7, 8], full=[3], swa=[4])
    engine.forward(one, two)
    rows = torch.arange(2)
    engine.monitor.record_sampled(rows, torch.tensor([2, 2]), torch.tensor([20, 21]))
    moved = Part(2, [7, 8, 21], full=[3], swa=[4], prefix=2, host_knows=False, moved_from=1)
    assert engine.forward(moved) == []
    assert engine.monitor.history is not None
    assert engine.monitor.history.tokens[0, :3].tolist() == [7, 8, 21]
    wrong = Part(2, [7, 8, 99], full=[3], swa=[4], prefix=2, host_knows=False)
    assert {v.checks for v in engine.forward(wrong)} == {("write_input",)}


def test_groups_of_one_pool_must_number_the_same_slots():
    table = torch.zeros((ROWS, BLOCKS), dtype=torch.int32)
    groups = [
        KVCacheGroup(
            name=name,
            num_slots=slots,
            page_table=table,
            page_size=BLOCK,
            padding_row=-1,
            sources=(),
            pool="blocks",
        )
        for name, slots in (("full", SLOTS), ("swa", SLOTS - BLOCK))
    ]
    with pytest.raises(ValueError, match="group 'swa': num_slots must be"):
        CanaryMonitor(
            config=CanaryConfig(),
            groups=groups,
            max_requests=ROWS,
            raise_pending=lambda: None,
            on_error=lambda where, error: None,
        )
