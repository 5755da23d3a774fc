"""Beam search: rows of the page table that belong to no request of their own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary_plugin.hooks.sglang.batch import BatchTranslator
from tests.monitor.world import found
from tests.sglang.engine import Engine, Request

pytest.importorskip("sglang.srt.beam_search", reason="before 0.5.23 there is no beam search")

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def engine(sglang_session: None) -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


class BeamSearch:
    """A leader and its members, in lockstep, with the engine's own functions between steps."""

    def __init__(self, engine: Engine, leader: Request, rows: list[int], seed: int) -> None:
        from sglang.srt.beam_search.fork import alias_members_prompt_kv

        self.engine, self.leader, self.rng = engine, leader, random.Random(seed)
        self.rows = torch.tensor([leader.row, *rows])
        self.length = len(PROMPT)
        alias_members_prompt_kv(engine.table, self.rows[1:], leader.row, self.length)

    def decode(self, *others: Request) -> list[Any]:
        """One token of every beam, and of ``others``, which are no beams."""
        from sglang.srt.beam_search.batch_tail import BeamTail, BeamTailEntry
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        requests = [self.leader, *others]
        for other in others:
            other.tokens.append(self.rng.randrange(100))
            self.engine.give_slots(other, 1)
        new = self.engine.allocator.alloc(len(self.rows))
        self.engine.table[self.rows, self.length] = new.to(torch.int32)
        self.length += 1
        members = len(self.rows) - 1
        tail_of = [self.leader.row, *(o.row for o in others), *self.rows[1:].tolist()]
        lens = [self.length, *(len(o.tokens) for o in others), *[self.length] * members]
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(lens),
            input_ids=torch.tensor([self.rng.randrange(100) for _ in lens]),
            req_pool_indices=torch.tensor(tail_of),
            seq_lens=torch.tensor(lens),
            out_cache_loc=torch.cat(
                [new[:1], torch.tensor([o.slots[-1] for o in others], dtype=torch.int64), new[1:]]
            ),
            seq_lens_sum=sum(lens),
            positions=torch.tensor(lens) - 1,
            seq_lens_cpu=torch.tensor(lens),
            rids=[request.rid for request in requests],
        )
        tail = BeamTail(num_base_rows=len(requests), entries=[BeamTailEntry(None, 0, 0, members)])
        BatchTranslator.remember_requests(batch, SimpleNamespace(reqs=requests, beam_tail=tail))
        return self.engine.forward(batch)

    def fork(self) -> None:
        """Every beam goes on from one that was good; what nobody needs any more is given back."""
        from sglang.srt.beam_search.fork import collect_orphan_slots, remap_kv_mapping

        parents = torch.tensor([self.rng.randrange(len(self.rows)) for _ in self.rows])
        old, new = remap_kv_mapping(
            self.engine.table,
            rows=self.rows,
            parent_idx=parents,
            prefix_len=len(PROMPT),
            seq_len=self.length,
        )
        orphans = collect_orphan_slots(old, new)
        if orphans.numel():
            self.engine.allocator.free(orphans.long())


def searching(engine: Engine, seed: int = 0) -> BeamSearch:
    leader = Request("leader", 1, list(PROMPT), extra_key="tenant")
    assert engine.prefill(leader) == []
    return BeamSearch(engine, leader, [2, 3], seed)


@pytest.mark.parametrize("seed", range(4))
def test_beams_that_fork_and_die_are_silent(engine: Engine, seed: int):
    search = searching(engine, seed)
    other = Request("other", 4, [30, 31, 32])
    assert engine.prefill(other) == []
    for _ in range(6):
        assert search.decode(other) == []
        search.fork()
    # The rows and slots of the beams go to others.
    engine.allocator.free(
        torch.unique(engine.table[search.rows, len(PROMPT) : search.length]).long()
    )
    for row in (2, 3):
        assert engine.prefill(Request(f"next {row}", row, [40 + row, 41, 42])) == []


def test_a_request_that_becomes_a_beam_search_changes_the_size_of_its_batch(engine: Engine):
    leader = Request("leader", 1, list(PROMPT))
    assert engine.prefill(leader) == []
    assert engine.decode(leader, tokens=[3]) == []
    assert BeamSearch(engine, leader, [2, 3], 0).decode() == []


def test_a_beam_that_goes_on_from_two_parents_is_found(engine: Engine):
    search = searching(engine)
    for _ in range(3):
        assert search.decode() == []
    mixed = search.length - 2
    row, parent = int(search.rows[1]), int(search.rows[2])
    wrong = int(engine.table[parent, mixed])
    engine.table[row, mixed] = wrong
    checks = {check for check, _ in found(search.decode())}
    assert "chain" in checks


def test_a_slot_given_back_while_a_beam_reads_it_is_found(engine: Engine):
    search = searching(engine)
    for _ in range(3):
        assert search.decode() == []
    slot = engine.table[search.rows[2], search.length - 1]
    engine.allocator.free(slot.reshape(1).long())
    assert ("freed_read", int(slot)) in found(search.decode())
