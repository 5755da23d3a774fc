"""Looking at a forward that is launched finds what looking before it finds, if nothing changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import torch
import yaml

from kvcanary_plugin.canary import Canary
from kvcanary_plugin.config import load_config
from kvcanary_plugin.forward import ForwardKind, ForwardResult, ForwardStep
from kvcanary_plugin.kernels import LaunchTag, SlotState
from kvcanary_plugin.kernels.consts import FIELD_PREV_HASH
from kvcanary_plugin.kernels.reference import STATE_MASK
from kvcanary_plugin.metrics import RankLabels
from kvcanary_plugin.ring import RingReader
from kvcanary_plugin.violations import RequestNames, Violation
from tests.monitor.gpu_engine import PROMPT as PROMPT_ON_GPU
from tests.monitor.gpu_engine import REQUESTS, GpuEngine
from tests.monitor.model_check import FAULTS, Fault, FaultyEngine
from tests.monitor.simulated_engine import ENGINES
from tests.monitor.world import Part, World, checking_everything, found

LONG = 256
PROMPT, SLOTS = [11, 7, 7, 300, 0], [5, 6, 9, 2, 31]
MAY_WAIT: dict[str, Any] = {
    "verify": {"real_kv": "none"},
    "checks": {"token": False},
    "write_input_assert": False,
}
# An engine with loads that run beside a forward does not say that its arrays stay.
NO_LOADS = [name for name in ENGINES if "host tier" not in name]
# Faults in arrays that do not stay, which is what this is about.
ARRAYS_CHANGE = ("row reused under the forward", "lookup entry cleared under the forward")
STATE_FAULTS = [
    fault
    for fault in FAULTS
    if fault.kind not in ARRAYS_CHANGE and any(fault.possible(ENGINES[name]) for name in NO_LOADS)
]


def run(engine_name: str, kind: str, seed: int, *, arrays_stay: bool) -> FaultyEngine:
    """A run with one fault of that kind, if it finds a place."""
    engine = FaultyEngine(
        ENGINES[engine_name],
        seed=seed,
        kind=kind,
        config=checking_everything(**MAY_WAIT),
        arrays_stay=arrays_stay,
    )
    for turn in range(100):
        if turn == 30:
            engine.arm()
        try:
            engine.turn()
        except IndexError:  # a broken allocator may run empty
            break
    assert not engine.errors
    return engine


@pytest.mark.parametrize("fault", STATE_FAULTS, ids=lambda fault: fault.kind)
def test_a_random_fault_is_found_alike_and_all_before_it_is_silent(fault: Fault):
    able = [name for name in NO_LOADS if fault.possible(ENGINES[name])]
    number = STATE_FAULTS.index(fault)
    later, before = (
        run(able[number % len(able)], fault.kind, seed=number, arrays_stay=stays)
        for stays in (True, False)
    )
    assert later.events["look later"] == later.events["forward"] > 0
    assert before.events["look later"] == 0
    assert later.violations == before.violations
    assert all(violation.step >= (later.planted_at or 0) for violation in later.violations)
    assert later.planted_at is not None or not later.violations
    for one, other in zip(later.monitor.guards, before.monitor.guards, strict=True):
        assert torch.equal(one.records, other.records)
        assert torch.equal(one.slots.state, other.slots.state)


@pytest.mark.parametrize(
    ("settings", "world_options", "arrays_stay"),
    [
        ({}, {}, False),
        ({}, {"table_stable": False}, True),
        ({"verify": {"real_kv": "all"}}, {}, True),
        ({"reverify": {"sample": 1.0}}, {}, True),
        ({"checks": {"token": True}}, {}, True),
        ({"write_input_assert": True}, {}, True),
    ],
    ids=["arrays change", "table changes", "bytes", "second look", "tokens", "inputs"],
)
def test_what_a_forward_may_change_is_looked_at_before_it(
    settings: dict[str, Any], world_options: dict[str, Any], arrays_stay: bool
):
    world = World(config=checking_everything(**(MAY_WAIT | settings)), **world_options)
    assert not world.monitor.forward_begins(arrays_stay=arrays_stay)


def test_a_canary_that_is_blind_has_nothing_to_look_at():
    world = World(config=checking_everything(**MAY_WAIT))
    assert world.monitor.forward_begins(arrays_stay=True)
    with world.monitor.guard_errors("hook"):
        raise RuntimeError("made up")
    assert not world.monitor.forward_begins(arrays_stay=True)


class Served:
    """A world whose forwards run through a whole canary; what happens is noted in its order."""

    def __init__(self, directory: Path) -> None:
        path = directory / "kvcanary.yaml"
        faults = {"allowed": True, "control_file": str(directory / "fault.json")}
        settings = {**MAY_WAIT, "reverify": {"sample": 0}, "faults": faults}
        path.write_text(yaml.safe_dump(settings))
        self.world = World()
        self.order: list[str] = []
        self.canary = Canary(
            config=load_config(str(path), {}),
            config_path=None,
            engine="test",
            ranks=RankLabels(),
            groups=self.world.groups,
            unguarded=(),
            max_requests=8,
        )
        assert self.canary.monitor is not None
        self.monitor = self.canary.monitor
        self._noted(self.monitor, "forward_follows", "look_at", "after_forward")

    def _noted(self, owner: Any, *names: str) -> None:
        for name in names:
            original: Callable[..., Any] = getattr(owner, name)

            def noted(
                *args: Any, _name: str = name, _original: Any = original, **options: Any
            ) -> Any:
                self.order.append(_name)
                return _original(*args, **options)

            setattr(owner, name, noted)

    def forward(
        self,
        part: Part,
        *,
        arrays_stay: bool = True,
        longest_extend: Callable[[], int] = lambda: 1,
        translation: Exception | None = None,
        failure: Exception | None = None,
    ) -> None:
        self.world.step += 1
        self.world.put_row(part.row, part.slots, part.prefix)
        step = self.world._step_of([part], ForwardKind.PREFILL)

        def translate() -> ForwardStep:
            self.order.append("translate")
            if translation is not None:
                raise translation
            return step

        with self.canary.around_forward(
            translate, arrays_stay=arrays_stay, longest_extend=longest_extend
        ):
            self.order.append("forward")
            if failure is not None:
                raise failure
            self.world._store(step)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    monkeypatch.setattr(prometheus_client, "REGISTRY", prometheus_client.CollectorRegistry())
    served = Served(tmp_path)
    yield served
    served.canary.close()


def a_prompt() -> Part:
    return Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)


def test_the_batch_is_translated_when_its_forward_is_launched(served: Served):
    served.canary._injector = None  # which has to see a forward before it begins
    served.forward(a_prompt())
    assert served.order == ["forward_follows", "forward", "translate", "look_at", "after_forward"]
    assert served.monitor.guards[0].slots_run(LaunchTag.SEAL) == len(SLOTS)
    served.order.clear()
    served.forward(a_prompt(), arrays_stay=False)
    assert served.order == ["translate", "look_at", "forward", "after_forward"]


def test_a_fault_is_planted_before_the_forward_all_the_same(served: Served, tmp_path: Path):
    served.forward(a_prompt())
    (tmp_path / "fault.json").write_text('{"id": 1, "fault": "break_chain"}')
    served.order.clear()
    served.forward(Part(uid=1, row=1, tokens=[*PROMPT, 4, 5, 6], slots=[40, 41, 42], prefix=5))
    served.forward(Part(uid=1, row=1, tokens=[*PROMPT, 4, 5, 6, 8], slots=[43], prefix=8))
    in_turn = ["translate", "forward_follows", "forward", "look_at", "after_forward"]
    assert served.order == 2 * in_turn  # what the look reads is there when the forward follows
    planted = json.loads((tmp_path / "fault.json.done").read_text())
    rows = RingReader(served.monitor.sink.ring).read().rows
    violations = [Violation.from_row(row, ["full"], RequestNames()) for row in rows]
    assert ("chain", planted["slot"]) in found(violations)
    assert {violation.step for violation in violations} == {planted["step"]}


def test_a_forward_that_fails_is_looked_at_no_more_and_its_error_is_the_engines(served: Served):
    served.canary._injector = None
    with pytest.raises(ValueError, match="the engine's"):
        served.forward(a_prompt(), longest_extend=lambda: LONG, failure=ValueError("the engine's"))
    assert served.order == ["forward_follows", "forward"]
    assert served.monitor.blind_because is None
    assert served.monitor.forward_counts == {(ForwardKind.UNKNOWN, ForwardResult.UNCHECKED): 1}
    assert served.monitor.forward_begins(arrays_stay=True)
    served.monitor.forward_follows(longest_extend=1)
    with served.monitor.forward_is_launched():  # the mark was of the other's forward
        assert not served.monitor._gate.is_beside_forward
    served.forward(a_prompt())
    assert served.monitor.guards[0].slots_run(LaunchTag.SEAL) == len(SLOTS)


def test_a_forward_that_fails_behind_its_look_counts_as_unchecked_too(served: Served):
    with pytest.raises(ValueError, match="the engine's"):
        served.forward(a_prompt(), arrays_stay=False, failure=ValueError("the engine's"))
    assert served.order == ["translate", "look_at", "forward"]
    assert served.monitor.forward_counts == {(ForwardKind.PREFILL, ForwardResult.UNCHECKED): 1}


def test_a_batch_whose_size_nobody_can_tell_makes_the_canary_blind(served: Served):
    served.canary._injector = None

    def unknown() -> int:
        raise AttributeError("no such field")

    served.forward(a_prompt(), longest_extend=unknown)
    assert served.order == ["forward", "after_forward"]
    assert served.monitor.blind_because == "hook: AttributeError: no such field"


def test_a_batch_that_cannot_be_translated_makes_the_canary_blind(served: Served):
    served.canary._injector = None
    served.forward(a_prompt(), translation=ValueError("no such batch"))
    assert served.order == ["forward_follows", "forward", "translate", "after_forward"]
    assert served.monitor.blind_because == "hook: ValueError: no such batch"
    assert served.monitor.forward_counts == {(ForwardKind.UNKNOWN, ForwardResult.ERROR): 1}


def test_only_a_batch_with_a_long_prompt_is_looked_at_beside_its_forward():
    monitor = World(config=checking_everything(**MAY_WAIT)).monitor
    for longest_extend, is_beside in ((1, False), (255, False), (256, True), (8192, True)):
        assert monitor.forward_begins(arrays_stay=True)
        monitor.forward_follows(longest_extend=longest_extend)
        with monitor.forward_is_launched():
            assert monitor._gate.is_beside_forward == is_beside
        assert not monitor._gate.is_beside_forward
        monitor.after_forward()


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def gpu_engine(*, arrays_stay: bool = True, **settings: object) -> GpuEngine:
    torch.manual_seed(3)  # the K/V of all these engines is the same
    return GpuEngine(arrays_stay=arrays_stay, scrub={"percent_of_step_time": 0}, **settings)


@pytest.mark.gpu
@on_gpu
def test_records_are_there_while_the_forward_still_runs(engine_stream: None):
    engine, other = gpu_engine(), torch.cuda.Stream()
    engine.decode()  # a kernel's first launch may wait for the whole device
    slots = torch.arange(engine.next_slot, engine.next_slot + REQUESTS, device="cuda") + 100
    step = engine.step_of(prefix=PROMPT_ON_GPU, tokens=1, slots=slots)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    assert engine.monitor.forward_begins(arrays_stay=True)
    engine.monitor.forward_follows(longest_extend=LONG)
    torch.cuda._sleep(2_000_000_000)  # about a second
    forward_is_done = torch.cuda.Event()
    forward_is_done.record()
    with engine.monitor.forward_is_launched():
        engine.monitor.look_at(step)
    while True:
        with torch.cuda.stream(other):
            written = int((engine.guard.slots.writer_uid[slots] > 0).sum())
        assert not forward_is_done.query()
        if written == REQUESTS:
            break
    engine.monitor.after_forward()
    torch.cuda.synchronize()
    states = engine.guard.slots.state[slots] & STATE_MASK
    assert (states == int(SlotState.SEALED)).all()
    assert engine.violations() == []


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("longest_extend", [1, LONG], ids=["behind", "beside"])
def test_what_the_engine_prepares_late_and_overwrites_at_once_is_seen_as_the_forward_sees_it(
    engine_stream: None, longest_extend: int
):
    """The arrays come to be right before the forward, and are the next batch's right after it."""
    late, calm = gpu_engine(), gpu_engine(arrays_stay=False)
    nobody = torch.zeros(REQUESTS, dtype=torch.int64, device="cuda")
    slots, uids = nobody.clone(), nobody.clone()
    for number in range(50):
        right = torch.arange(REQUESTS, device="cuda") + late.next_slot + REQUESTS * number
        for engine in (late, calm):
            engine.table[1 : REQUESTS + 1, PROMPT_ON_GPU + number] = right.int()
            prefix = PROMPT_ON_GPU + number
            step = engine.step_of(prefix=prefix, tokens=1, slots=right.clone())
            if engine is calm:
                engine.monitor.before_forward(step)
                engine.monitor.after_forward()
                continue
            step = replace(step, out_cache_loc=(slots,), request_uids=uids)
            torch.cuda._sleep(200_000)
            slots.copy_(right)
            uids.copy_(engine.rows)
            assert engine.monitor.forward_begins(arrays_stay=True)
            engine.monitor.forward_follows(longest_extend=longest_extend)
            torch.cuda._sleep(200_000)
            with engine.monitor.forward_is_launched():
                engine.monitor.look_at(step)
            engine.monitor.after_forward()
            slots.fill_(7)
            uids.fill_(99)
        assert not late.errors
        assert not calm.errors
    assert late.violations() == calm.violations() == []
    assert torch.equal(late.guard.records, calm.guard.records)
    assert torch.equal(late.guard.slots.writer_uid, calm.guard.slots.writer_uid)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("longest_extend", [1, LONG], ids=["behind", "beside"])
def test_a_graph_that_is_replayed_does_not_hold_the_canary_up_nor_synchronise_it(
    engine_stream: None, longest_extend: int
):
    engine = gpu_engine(recorder={"forwards": 8})
    engine.longest_extend = longest_extend
    graph = torch.cuda.CUDAGraph()
    engine.compute()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        engine.compute()
    for _ in range(100):
        engine.decode(graph.replay)
    assert engine.violations() == []
    engine.guard.records.view(torch.int64)[50, FIELD_PREV_HASH] ^= 1
    engine.decode(graph.replay)
    assert {(check, v.slot) for v in engine.violations() for check in v.checks} >= {("chain", 50)}
