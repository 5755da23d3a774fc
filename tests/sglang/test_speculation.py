"""Drafts that are verified, accepted and rejected: SGLang's own verify inputs and its own move.

No machine without a GPU runs speculation. What is missing here are the model, which is a function
of the tokens before, and three small kernels, which stand below in Python.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary_plugin.hooks.sglang import attach
from kvcanary_plugin.violations import Violation
from tests.monitor.world import checking_everything, found
from tests.sglang.engine import Engine, Request

NODES = 6
SEEDS = int(os.environ.get("KVCANARY_SPECULATION_SEEDS", "1"))
VOCABULARY = 50


def next_token(tokens: Sequence[int]) -> int:
    """What the target model says behind ``tokens``."""
    return hash(tuple(tokens[-3:])) % VOCABULARY


@dataclass
class Drafts:
    """A tree of drafts behind ``tokens``, whose last one is the root: it has no K/V yet."""

    tokens: list[int]
    parents: list[int]
    nodes: list[int] = field(default_factory=list)

    def path_to(self, node: int) -> list[int]:
        return [] if node < 0 else [*self.path_to(self.parents[node]), node]

    def accepted(self) -> list[int]:
        """The nodes that the target model would have said itself, from the root on."""
        path = [0]
        while True:
            wanted = next_token(self.tokens + [self.nodes[node] for node in path[1:]])
            children = [n for n in range(len(self.nodes)) if self.parents[n] == path[-1]]
            good = [node for node in children if self.nodes[node] == wanted]
            if not good:
                return path
            path.append(good[0])


def draft(rng: random.Random, tokens: list[int], *, chain: bool) -> Drafts:
    """A tree in which about every second node is what the target model says."""
    parents = [-1] + [n - 1 if chain else rng.randrange(n) for n in range(1, NODES)]
    drafts = Drafts(list(tokens), parents, [tokens[-1]])
    for node in range(1, NODES):
        above = [drafts.nodes[n] for n in drafts.path_to(parents[node])]
        right = next_token(tokens + above[1:])
        siblings = {drafts.nodes[n] for n in range(node) if parents[n] == parents[node]}
        right_too = right not in siblings and rng.random() < 0.6
        others = [t for t in range(VOCABULARY) if t not in siblings and t != right]
        drafts.nodes.append(right if right_too else rng.choice(others))
    return drafts


def verify_input(all_drafts: Sequence[Drafts], *, kind: str) -> Any:
    """What the engine hands to the target model's forward."""
    nodes = [node for drafts in all_drafts for node in drafts.nodes]
    positions = [
        len(drafts.tokens) - 1 + len(drafts.path_to(node)) - 1
        for drafts in all_drafts
        for node in range(NODES)
    ]
    common = {
        "draft_token": torch.tensor(nodes, dtype=torch.int64),
        "positions": torch.tensor(positions, dtype=torch.int64),
        "custom_mask": torch.ones(1, dtype=torch.bool),
        "retrieve_index": None,
        "retrieve_next_token": None,
        "retrieve_next_sibling": None,
        "draft_token_num": NODES,
    }
    if kind == "ngram":
        from sglang.srt.speculative.ngram_info import NgramVerifyInput

        return NgramVerifyInput(**common)
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    return EagleVerifyInput(
        **common,
        retrieve_cum_len=None,
        spec_steps=NODES - 1,
        topk=1 if kind == "chain" else 4,
        capture_hidden_mode=None,
        seq_lens_sum=0,
        seq_lens_cpu=None,
    )


def paths(all_drafts: Sequence[Drafts]) -> torch.Tensor:
    """``accept_index`` as the engine's sampler returns it."""
    result = torch.full((len(all_drafts), NODES), -1, dtype=torch.int32)
    for row, drafts in enumerate(all_drafts):
        for depth, node in enumerate(drafts.accepted()):
            result[row, depth] = row * NODES + node
    return result


@pytest.fixture(autouse=True)
def _kernels_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU kernels of sgl-kernel, which no wheel brings."""
    from sglang.kernels.ops.speculative import cache_locs, eagle

    def assign(rows: Any, table: Any, starts: Any, ends: Any, out: Any, _width: int) -> None:
        packed = [table[r, s:e] for r, s, e in zip(rows, starts, ends, strict=True)]
        flat = torch.cat(packed).to(out.dtype)
        out[: flat.numel()] = flat

    def fill_accepted(accept_index: Any, out_cache_loc: Any, out: Any) -> None:
        flat = accept_index.flatten()
        flat = out_cache_loc[flat[flat >= 0].long()]
        out[: flat.numel()] = flat

    monkeypatch.setattr(cache_locs, "assign_extend_cache_locs_cpu", assign)
    monkeypatch.setattr(eagle, "fill_accept_out_cache_loc_cpu", fill_accepted)


class Speculation:
    """Requests that decode with drafts, the way the engine's workers do."""

    def __init__(self, engine: Engine, kind: str, seed: int = 0) -> None:
        self.engine, self.kind, self.rng = engine, kind, random.Random(seed)
        self.accepted = 0

    def start(self, *requests: Request) -> list[Violation]:
        violations = self.engine.prefill(*requests)
        for request in requests:
            request.tokens.append(next_token(request.tokens))
        return violations

    def step(
        self, *requests: Request, choose: Callable[[Sequence[Drafts]], torch.Tensor] | None = None
    ) -> list[Violation]:
        """Draft, verify, accept; the last token of a request is the root and has no K/V yet."""
        lens = [len(request.tokens) - 1 for request in requests]
        for request, length in zip(requests, lens, strict=True):
            missing = length + NODES - len(request.slots)
            if missing > 0:  # the engine hands out more than it needs now
                self.engine.give_slots(request, missing + 2)
        drafts = [draft(self.rng, r.tokens, chain=self.kind == "chain") for r in requests]
        spec_info = verify_input(drafts, kind=self.kind)
        batch = self.engine.verify_batch(spec_info, requests, lens)
        violations = self.engine.forward(batch)
        if self.kind != "chain":
            self.move(batch, (choose or paths)(drafts), lens)
        for request, tree in zip(requests, drafts, strict=True):
            accepted = tree.accepted()
            request.tokens += [tree.nodes[node] for node in accepted[1:]]
            request.tokens.append(next_token(request.tokens))
            self.accepted += len(accepted) - 1
        return violations + self.engine.violations()

    def move(self, batch: Any, chosen: torch.Tensor, lens: list[int]) -> None:
        """The engine's own function, with the hook around it."""
        from sglang.srt.speculative.spec_utils import move_accept_tokens_to_target_kvcache

        original = getattr(
            move_accept_tokens_to_target_kvcache,
            "__wrapped__",
            move_accept_tokens_to_target_kvcache,
        )
        schedule_batch = SimpleNamespace(
            seq_lens=torch.tensor(lens, dtype=torch.int64),
            out_cache_loc=batch.out_cache_loc,
            req_pool_indices=batch.req_pool_indices,
            req_to_token_pool=self.engine.req_to_token_pool,
        )
        attach.around_move_drafts(
            original,
            schedule_batch,
            chosen,
            (chosen >= 0).sum(1).to(torch.int32) - 1,
            self.engine.allocator,
        )

    def finish(self, request: Request) -> None:
        """What has K/V stays for others to share; the rest goes back to the allocator."""
        kept = len(request.tokens) - 1
        self.engine.allocator.free(torch.tensor(request.slots[kept:], dtype=torch.int64))
        request.slots = request.slots[:kept]


@pytest.fixture
def engines(sglang_session: None) -> Iterator[Any]:
    made: list[Engine] = []

    def make(**how: Any) -> Engine:
        made.append(Engine(**how))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


KINDS = {"ngram": "NGRAM", "chain": "EAGLE", "tree": "EAGLE"}


def speculation(
    engines: Any, kind: str, *, swa: bool = False, seed: int = 0, looks_twice: float = 0
) -> Speculation:
    config = checking_everything(reverify={"sample": looks_twice})
    engine = engines(swa=swa, config=config, speculative_algorithm=KINDS[kind])
    return Speculation(engine, kind, seed)


@pytest.mark.parametrize("swa", [False, True], ids=["mha", "swa"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_accepting_and_rejecting_drafts_is_silent(engines: Any, kind: str, swa: bool, seed: int):
    spec = speculation(engines, kind, swa=swa, seed=seed)
    a = Request("a", 1, [1, 2, 3, 4, 5])
    b = Request("b", 2, [9, 8, 7])
    assert spec.start(a, b) == []
    for _ in range(8):
        assert spec.step(a, b) == []
    assert spec.accepted > 8
    # Whoever shares what was accepted compares it with the hash of its own tokens.
    spec.finish(a)
    c = Request("c", 3, [*a.tokens, 11, 12])
    spec.engine.share(c, a.slots)
    assert spec.engine.prefill(c, prefix=len(a.slots)) == []
    c.tokens.append(next_token(c.tokens))
    for _ in range(3):
        assert spec.step(b, c) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("swa", [False, True], ids=["mha", "swa"])
def test_requests_that_come_share_and_go_are_silent(engines: Any, kind: str, swa: bool):
    """Slots of rejected drafts, of prefixes and of requests that are gone take turns."""
    for seed in range(SEEDS):
        spec = speculation(engines, kind, swa=swa, seed=seed, looks_twice=0.5)
        rng, engine = spec.rng, spec.engine
        running: list[Request] = []
        kept: list[Request] = []  # what the prefix cache would hold
        for number in range(40):
            if len(running) < (2 if swa else 3) and rng.random() < 0.5:
                row = min({1, 2, 3} - {request.row for request in running})
                request = Request(f"{number}", row, [rng.randrange(VOCABULARY) for _ in range(5)])
                if kept and rng.random() < 0.6:
                    shared = rng.choice(kept)
                    request.tokens = [*shared.tokens[: len(shared.slots)], *request.tokens]
                    engine.share(request, shared.slots)
                assert engine.prefill(request, prefix=len(request.slots)) == []
                request.shared = len(request.slots) - 5
                request.tokens.append(next_token(request.tokens))
                running.append(request)
            if running:
                assert spec.step(*running) == []
            for request in [r for r in running if len(r.tokens) > 26 or rng.random() < 0.1]:
                running.remove(request)
                spec.finish(request)
                own = torch.tensor(request.slots[request.shared :])
                if not kept and not request.shared:
                    kept.append(request)
                elif own.numel():
                    engine.allocator.free(own)
            if kept and not any(r.shared for r in running) and rng.random() < 0.2:
                engine.allocator.free(torch.tensor(kept.pop().slots))
        assert spec.accepted > 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_slot_of_an_accepted_draft_is_found(engines: Any, kind: str):
    spec = speculation(engines, kind)
    a = Request("a", 1, [1, 2, 3, 4, 5])
    spec.start(a)
    while not spec.accepted:
        assert spec.step(a) == []
    last = a.slots[len(a.tokens) - 2]
    spec.engine.damage(last)
    assert found(spec.step(a)) == {("real_kv", last)}


@pytest.mark.parametrize("kind", ["ngram", "tree"])
def test_accepted_drafts_that_are_not_moved_into_place_are_found(
    engines: Any, kind: str, monkeypatch: pytest.MonkeyPatch
):
    spec = speculation(engines, kind, looks_twice=1)
    a = Request("a", 1, [1, 2, 3, 4, 5])
    spec.start(a)
    monkeypatch.setattr(type(spec.engine.pool), "_move_kv_cache_impl", lambda *_: None)
    seen: list[Violation] = []
    for _ in range(6):
        seen += spec.step(a)
    assert {check for check, _ in found(seen)} == {"real_kv"}


@pytest.mark.parametrize("kind", ["ngram", "tree"])
def test_a_path_that_leads_nowhere_is_found(engines: Any, kind: str):
    spec = speculation(engines, kind)
    a = Request("a", 1, [1, 2, 3, 4, 5])
    spec.start(a)
    nonsense = torch.tensor([[0, 0, 0, -1, -1, -1]], dtype=torch.int32)
    seen = spec.step(a, choose=lambda _: nonsense)
    assert found(seen) == {("write_input", a.slots[6]), ("write_input", a.slots[7])}


def with_a_wrong_branch(all_drafts: Sequence[Drafts]) -> torch.Tensor:
    """The right paths, but for the first draft of each: it is one that was rejected."""
    path = paths(all_drafts)
    for row, drafts in enumerate(all_drafts):
        accepted = drafts.accepted()
        rejected = [n for n in range(1, NODES) if drafts.parents[n] == 0 and n not in accepted]
        if len(accepted) > 1 and rejected:
            path[row, 1] = row * NODES + rejected[0]
    return path


@pytest.mark.parametrize("kind", ["ngram", "tree"])
@pytest.mark.parametrize("wrong", [False, True], ids=["right branch", "wrong branch"])
def test_a_wrong_branch_is_found_by_who_shares_it(engines: Any, kind: str, wrong: bool):
    spec = speculation(engines, kind)
    a = Request("a", 1, [1, 2, 3, 4, 5])
    spec.start(a)
    for _ in range(6):
        assert spec.step(a, choose=with_a_wrong_branch if wrong else paths) == []
    spec.finish(a)
    c = Request("c", 3, [*a.tokens, 11, 12])
    spec.engine.share(c, a.slots)
    checks = {check for check, _ in found(spec.engine.prefill(c, prefix=len(a.slots)))}
    assert checks == ({"prefix_identity", "token"} if wrong else set())


@pytest.mark.parametrize("kind", KINDS)
def test_verifying_into_a_slot_of_another_request_is_found(engines: Any, kind: str):
    spec = speculation(engines, kind)
    a = Request("a", 1, [1, 2, 3, 4, 5])
    b = Request("b", 2, [9, 8, 7])
    spec.start(a, b)
    assert spec.step(a, b) == []
    stolen = b.slots[1]
    length = len(a.tokens) - 1
    a.slots[length + 1 : length + 1] = [stolen]
    seen = found(spec.step(a, b))
    assert ("write_owned", stolen) in seen


def test_the_draft_models_pool_is_shown_and_not_guarded(engines: Any, caplog: Any):
    spec = speculation(engines, "tree")
    assert "group draft is not guarded" in caplog.text
    assert [guard.group.name for guard in spec.engine.monitor.guards] == ["full"]


def test_n_gram_drafts_leave_nothing_unguarded(engines: Any, caplog: Any):
    speculation(engines, "ngram")
    assert "not guarded" not in caplog.text
