"""Long writes run beside the forward: the same records, and nobody reads them too early."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcanary_plugin import gate as gate_module
from kvcanary_plugin import monitor as monitor_module
from kvcanary_plugin.gate import EngineGate
from kvcanary_plugin.kernels import LaunchTag, SlotState
from kvcanary_plugin.kernels.consts import FIELD_REAL_KV_HASH
from kvcanary_plugin.kernels.reference import STATE_MASK
from tests.monitor.gpu_engine import PROMPT, REQUESTS, GpuEngine
from tests.monitor.world import Part, World, checking_everything

LENGTHS = (300, 1, 700)


def computed(*, write_input_assert: bool, **settings: object) -> World:
    """Three requests, two of them long, whose tokens two groups hold in different slots.

    With the write-input assert on, no write runs beside the forward.
    """
    config = checking_everything(
        write_input_assert=write_input_assert, checks={"token": False}, **settings
    )
    world = World(slots=2048, width=1024, swa_slots=1100, swa_window=128, config=config)
    dice = np.random.default_rng(5)
    slots = (dice.permutation(2047) + 1)[: sum(LENGTHS)]
    assert world.lookup is not None
    world.lookup[slots] = torch.from_numpy(dice.permutation(1099) + 1)[: sum(LENGTHS)]
    parts, start = [], 0
    for number, length in enumerate(LENGTHS, start=1):
        tokens = dice.integers(0, 1000, length).tolist()
        mine = slots[start : start + length].tolist()
        parts.append(Part(uid=number, row=number, tokens=tokens, slots=mine))
        start += length
    assert world.forward(*parts, stores_kv=False) == []
    return world


@pytest.mark.parametrize("recorded", [0, 8])
def test_a_long_write_leaves_the_records_that_a_write_before_the_forward_leaves(recorded: int):
    """The copy of its inputs is the recorder's where there is one."""
    recorder = {"forwards": recorded}
    beside = computed(write_input_assert=False, recorder=recorder)
    before = computed(write_input_assert=True, recorder=recorder)
    for one, other in zip(beside.monitor.guards, before.monitor.guards, strict=True):
        assert one.slots_run(LaunchTag.WRITE) == other.slots_run(LaunchTag.WRITE) == sum(LENGTHS)
        assert torch.equal(one.records, other.records)
        assert torch.equal(one.slots.state, other.slots.state)
        assert torch.equal(one.slots.writer_uid, other.slots.writer_uid)


def test_without_memory_for_a_copy_the_write_comes_before_the_forward(
    monkeypatch: pytest.MonkeyPatch,
):
    def no_room(_step: object) -> None:
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(monitor_module, "copy_of", no_room)
    world = computed(write_input_assert=False, recorder={"forwards": 0})
    assert world.monitor.blind_because is None
    assert world.monitor.guards[0].slots_run(LaunchTag.WRITE) == sum(LENGTHS)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who has waited for the branch. There are no streams on a CPU, so this only keeps a list."""
    waits: list[str] = []
    monkeypatch.setattr(gate_module, "join_writes", lambda marker: waits.append(marker.device.type))
    return waits


@pytest.fixture
def gate() -> EngineGate:
    """Of an engine that is in a forward, with writes beside it."""
    gate = EngineGate(torch.device("cpu"))
    gate.engine_enters()
    gate.branch_begins()
    return gate


def test_the_end_of_the_forward_waits_for_the_branch_once(waits: list[str], gate: EngineGate):
    gate.join_branch()
    gate.engine_leaves()
    gate.engine_enters()
    gate.engine_leaves()
    assert len(waits) == 1


def test_a_forward_that_failed_leaves_its_branch_to_the_next(waits: list[str], gate: EngineGate):
    gate.engine_enters()
    gate.engine_leaves()
    assert len(waits) == 1


def test_a_blind_forward_waits_for_the_branch_when_it_leaves(waits: list[str], gate: EngineGate):
    gate.engine_leaves()
    assert len(waits) == 1


def test_work_meanwhile_waits_for_the_branch_and_so_does_the_forward(
    waits: list[str], gate: EngineGate
):
    """The work may be on another stream than the forward."""
    with gate.engine_works():
        assert len(waits) == 1
    gate.join_branch()
    assert len(waits) == 2


def test_without_writes_beside_it_nobody_waits(waits: list[str]):
    gate = EngineGate(torch.device("cpu"))
    gate.engine_enters()
    with gate.engine_works():
        pass
    gate.join_branch()
    gate.engine_leaves()
    assert not waits


def on_gpu(**settings: object) -> GpuEngine:
    torch.manual_seed(3)  # the K/V of all these engines is the same
    return GpuEngine(scrub={"percent_of_step_time": 0}, **settings)


def extend(engine: GpuEngine, number: int) -> torch.Tensor:
    """Gives each request slots for its ``number``-th 256 tokens behind the prompt."""
    first = engine.next_slot + number * REQUESTS * 256
    slots = torch.arange(first, first + REQUESTS * 256, device="cuda")
    start = PROMPT + number * 256
    engine.table[1 : REQUESTS + 1, start : start + 256] = slots.view(REQUESTS, 256).int()
    return slots


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_the_seal_waits_for_a_write_that_outlasts_the_forward(engine_stream: None):
    """The constructor computes 4 x 4000 tokens: 0.4 ms of chain, beside no forward at all."""
    engine = on_gpu()
    torch.cuda.synchronize()
    slots = torch.arange(1, engine.next_slot, device="cuda")
    records = engine.guard.records.view(torch.int64)[slots]
    assert (engine.guard.slots.state[slots] & STATE_MASK == int(SlotState.SEALED)).all()
    assert (records[:, FIELD_REAL_KV_HASH] != 0).all()
    engine.decode()
    assert engine.violations() == []


@pytest.mark.gpu
@needs_gpu
def test_a_long_write_is_done_while_the_forward_still_runs(engine_stream: None):
    engine = on_gpu()
    slots = extend(engine, 0)
    step = engine.step_of(prefix=PROMPT, tokens=256, slots=slots)
    table, other = engine.guard.slots, torch.cuda.Stream()

    def number_written() -> int:
        with torch.cuda.stream(other):
            return int((table.writer_uid[slots] > 0).sum())

    torch.cuda.synchronize()
    assert number_written() == 0  # a kernel's first launch may wait for the whole device
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    engine.monitor.before_forward(step)
    torch.cuda._sleep(2_000_000_000)  # about a second
    forward_is_done = torch.cuda.Event()
    forward_is_done.record()
    while number_written() < REQUESTS * 256:
        assert not forward_is_done.query()
    assert not forward_is_done.query()
    engine.monitor.after_forward()
    assert engine.violations() == []


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fails", [False, True])
def test_what_the_engine_does_to_its_arrays_meanwhile_changes_no_record(
    fails: bool, engine_stream: None
):
    """Twice, with and without; one that fails is followed by the next without an end."""
    disturbed, calm = on_gpu(), on_gpu(write_input_assert=True, checks={"token": True})
    for number in range(2):
        for engine in (disturbed, calm):
            slots = extend(engine, number)
            step = engine.step_of(prefix=PROMPT + 256 * number, tokens=256, slots=slots.clone())
            arrays = (step.input_ids, step.positions, *step.out_cache_loc)
            originals = [array.clone() for array in arrays]
            engine.monitor.before_forward(step)
            if engine is disturbed:
                for array in arrays:
                    array.fill_(7)
                for array, original in zip(arrays, originals, strict=True):
                    array.copy_(original)
                torch.cuda._sleep(1_000_000)
            if not (fails and engine is disturbed):
                engine.monitor.after_forward()
            assert not engine.errors
    assert disturbed.violations() == calm.violations() == []
    fields = slice(0, 3) if fails else slice(0, 4)  # bytes were not sealed where forwards failed
    ours, theirs = (e.guard.records.view(torch.int64)[1:, fields] for e in (disturbed, calm))
    assert torch.equal(ours, theirs)


@pytest.mark.gpu
@needs_gpu
def test_work_on_another_stream_sees_the_records_of_a_write_that_still_runs(engine_stream: None):
    engine, other = on_gpu(), torch.cuda.Stream()
    slots = extend(engine, 0)
    torch.cuda.synchronize()
    engine.monitor.before_forward(engine.step_of(prefix=PROMPT, tokens=256, slots=slots))
    with torch.cuda.stream(other), engine.monitor.engine_works():
        seen = engine.guard.records.clone()
    engine.monitor.after_forward()
    torch.cuda.synchronize()
    written = engine.guard.records.view(torch.int64)[slots]
    assert (written[:, :3] != 0).any(dim=1).all()
    assert torch.equal(seen.view(torch.int64)[slots][:, :3], written[:, :3])
