"""The fault injector's control file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvcanary_plugin.faults import FaultInjector, FaultRequest
from kvcanary_plugin.forward import ForwardKind
from kvcanary_plugin.metrics import RankLabels
from tests.monitor.world import Part, World

PROMPT = [11, 7, 7, 300, 0, 4, 9, 12, 13]
SLOTS = [5, 6, 9, 2, 31, 40, 41, 42, 43]


def planted_by(world: World, injector: FaultInjector, done: Path) -> list[str]:
    """Faults that one decode of a prefilled request had planted."""
    part = Part(uid=1, row=1, tokens=[*PROMPT, 8], slots=[50], prefix=9, host_knows_tokens=False)
    world.put_row(1, [50], 9)
    injector.before_forward(world._step_of([part], ForwardKind.DECODE))
    if not done.exists():
        return []
    return [json.loads(line)["fault"] for line in done.read_text().splitlines()]


@pytest.fixture
def world() -> World:
    world = World()
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
    return world


def injector_for(world: World, control_file: Path, ranks: RankLabels) -> FaultInjector:
    return FaultInjector(control_file=control_file, guards=world.monitor.guards, ranks=ranks)


def test_a_file_left_by_an_earlier_server_plants_nothing(world: World, tmp_path: Path):
    control = tmp_path / "fault.json"
    control.write_text(json.dumps({"id": 1, "fault": "flip_kv"}))
    injector = injector_for(world, control, RankLabels())
    assert planted_by(world, injector, tmp_path / "fault.json.done") == []


def test_a_file_written_while_serving_is_planted_once(world: World, tmp_path: Path):
    control = tmp_path / "fault.json"
    injector = injector_for(world, control, RankLabels())
    control.write_text(json.dumps({"id": 1, "fault": "flip_kv"}))
    before = [buffer.clone() for buffer in world.full_kv]
    assert planted_by(world, injector, tmp_path / "fault.json.done") == ["flip_kv"]
    changed = [not torch.equal(a, b) for a, b in zip(before, world.full_kv, strict=True)]
    assert changed == [False, False, False, True]
    assert planted_by(world, injector, tmp_path / "fault.json.done") == ["flip_kv"]


def test_a_fault_for_one_rank_is_left_alone_by_the_others(world: World, tmp_path: Path):
    control = tmp_path / "fault.json"
    injector = injector_for(world, control, RankLabels(tp_rank=0))
    control.write_text(json.dumps({"id": 1, "fault": "flip_kv", "tp_rank": 1}))
    assert planted_by(world, injector, tmp_path / "fault.json.done") == []


def test_a_dropped_write_is_said_to_be_read_when_its_own_request_comes_again(world, tmp_path):
    control, done = tmp_path / "fault.json", tmp_path / "fault.json.done"
    injector = injector_for(world, control, RankLabels())
    control.write_text(json.dumps({"id": 4, "fault": "drop_write"}))
    assert planted_by(world, injector, done) == ["drop_write"]

    def comes(part: Part, kind: ForwardKind) -> tuple[int, list[str]]:
        """The forward's step, and what is said to be done by then."""
        step = world._step_of([part], kind)
        injector.before_forward(step)
        return step.step, done.read_text().splitlines()[1:]

    another = Part(uid=2, row=2, tokens=PROMPT, slots=list(range(60, 69)))
    assert comes(another, ForwardKind.PREFILL)[1] == []
    again = Part(
        uid=1, row=1, tokens=[*PROMPT, 8, 5], slots=[51], prefix=10, host_knows_tokens=False
    )
    world.put_row(1, [51], 10)
    step, said = comes(again, ForwardKind.DECODE)
    assert [json.loads(line) for line in said] == [{"id": 4, "read_step": step}]
    assert comes(again, ForwardKind.DECODE)[1] == said


def test_one_token_of_a_prompt_is_no_place_to_drop_a_write(world: World, tmp_path: Path):
    """Its slot may be given back for an equal one before anybody reads it."""
    control, done = tmp_path / "fault.json", tmp_path / "fault.json.done"
    injector = injector_for(world, control, RankLabels())
    control.write_text(json.dumps({"id": 1, "fault": "drop_write"}))
    one_more = Part(uid=2, row=2, tokens=[*PROMPT, 8], slots=[60], prefix=9)
    injector.before_forward(world._step_of([one_more], ForwardKind.PREFILL))
    assert not done.exists()
    assert planted_by(world, injector, done) == ["drop_write"]


def test_a_chunk_that_looks_the_same_at_its_start_once_rotated_is_passed_over(world, tmp_path):
    control, done = tmp_path / "fault.json", tmp_path / "fault.json.done"
    injector = injector_for(world, control, RankLabels())
    control.write_text(json.dumps({"id": 1, "fault": "rotate_inputs"}))
    alike = Part(uid=2, row=2, tokens=[7, 8, 9, 7], slots=[60, 61, 62, 63])
    other = Part(uid=3, row=3, tokens=[7, 8, 9, 10], slots=[70, 71, 72, 73])
    injector.before_forward(world._step_of([alike, other], ForwardKind.PREFILL))
    (planted,) = map(json.loads, done.read_text().splitlines())
    assert (planted["request_uid"], planted["slot"]) == (3, 70)


def test_a_fault_that_does_not_exist_is_refused_with_the_ones_that_do():
    with pytest.raises(ValueError, match="flip_kv"):
        FaultRequest(id=1, fault="set_on_fire")
