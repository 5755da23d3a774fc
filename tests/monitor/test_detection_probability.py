"""The formulas of docs/detection-probability.md, tried out: seeded faults, counted detections.

Every comparison allows 4.5 standard deviations of the expected count: the seeds are fixed, and with
other seeds one run in a hundred thousand would fall outside.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

from kvcanary_plugin.forward import ForwardKind
from kvcanary_plugin.kernels import LaunchTag
from kvcanary_plugin.kernels.reference import fold_slots, record_fields
from kvcanary_plugin.ring import RingReader
from tests.monitor.test_scrub import BYTES_PER_SLOT, FakeEngine
from tests.monitor.world import BYTES_PER_LAYER, LAYERS, Part, World, checking_everything

PROMPT = [11, 7, 7, 300, 0]
SLOTS = [5, 6, 9, 2, 31]
SIGMAS = 4.5
FOLDED_PER_LAYER = 16  # of BYTES_PER_LAYER


def assert_frequency(count: int, trials: int, probability: float) -> None:
    deviation = math.sqrt(trials * probability * (1 - probability))
    assert abs(count - trials * probability) <= SIGMAS * deviation + 1e-9, (
        f"{count} of {trials}, expected {trials * probability:.1f} +- {deviation:.1f}"
    )


def partial_world() -> World:
    world = World(
        config=checking_everything(verify={"real_kv": "partial"}, seal={"real_kv": "partial"})
    )
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
    return world


def decode(world: World, **how: object) -> list:
    part = Part(uid=1, row=1, tokens=[*PROMPT, 4], slots=[12], prefix=5, host_knows_tokens=False)
    return world.forward(part, kind=ForwardKind.DECODE, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("changed_bytes", [1, 3])
def test_partial_mode_sees_the_share_of_bytes_it_looks_at(changed_bytes: int):
    world, dice, trials, seen = partial_world(), random.Random(11), 300, 0
    places = [(strip, byte) for strip in range(2 * LAYERS) for byte in range(BYTES_PER_LAYER)]
    for _ in range(trials):
        slot = dice.choice(SLOTS)
        changed = dice.sample(places, changed_bytes)
        for strip, byte in changed:
            world.bytes_of(world.full_kv[strip], slot)[byte] ^= dice.randint(1, 255)
        seen += bool(decode(world))
        _compute_again(world)
    looked_at, all_bytes = 2 * LAYERS * FOLDED_PER_LAYER, 2 * LAYERS * BYTES_PER_LAYER
    missed = math.comb(all_bytes - looked_at, changed_bytes) / math.comb(all_bytes, changed_bytes)
    assert_frequency(seen, trials, 1 - missed)


def _compute_again(world: World) -> None:
    """The request computes its prompt again: good bytes, sealed anew."""
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_sampled_re_verify_sees_a_lasting_fault_after_one_over_share_forwards(share: float):
    world = World(config=checking_everything(reverify={"sample": share}))
    world.monitor.reverifier._dice = random.Random(5)
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
    trials, within_two, forwards = 150, 0, 0
    for _ in range(trials):
        needed = 0
        seen: list = []
        while not seen:
            needed += 1
            # In each forward the row changes after the verify and is right again before the next.
            seen = decode(world, meanwhile=lambda: world.put_row(1, [60, 61]))
            world.put_row(1, SLOTS)
        forwards += needed
        within_two += needed <= 2
    assert_frequency(within_two, trials, 1 - (1 - share) ** 2)
    # The number of forwards is geometric: mean 1 / share, variance (1 - share) / share^2.
    deviation = math.sqrt(trials * (1 - share)) / share
    assert abs(forwards - trials / share) <= SIGMAS * deviation


def test_the_scrub_finds_a_fault_after_half_a_cycle_on_average_and_one_at_most(
    monkeypatch: pytest.MonkeyPatch,
):
    live, step_seconds, cycle_steps = 600, 0.010, 40
    rate = live * BYTES_PER_SLOT / (cycle_steps * step_seconds)
    engine = FakeEngine(
        monkeypatch, scrub={"bytes_per_second": int(rate)}, fold_seconds=0.0, slots=live + 1
    )
    _seal_as_it_is(engine)
    reader, dice = RingReader(engine.world.monitor.sink.ring), random.Random(3)
    for _ in range(2 * cycle_steps):
        engine.step(step_seconds)
    trials, waits = 250, []
    for _ in range(trials):
        for _ in range(dice.randrange(cycle_steps)):
            engine.step(step_seconds)
        slot, strip = dice.randrange(1, live + 1), dice.randrange(2 * LAYERS)
        place = engine.world.bytes_of(engine.world.full_kv[strip], slot)
        place[dice.randrange(BYTES_PER_LAYER)] ^= dice.randint(1, 255)
        wait = 0
        while len(reader.read().rows) == 0:
            engine.step(step_seconds)
            wait += 1
            assert wait <= 2 * cycle_steps + 2
        waits.append(wait - 1)  # the second look takes one step more
        _seal_as_it_is(engine)
        engine.step(step_seconds)
        engine.step(step_seconds)
        reader.read()
    # Uniform over the cycle: mean half of it, variance a twelfth of its square. Whole steps add
    # half a step.
    mean = sum(waits) / trials
    deviation = cycle_steps / math.sqrt(12 * trials)
    assert abs(mean - (cycle_steps / 2 + 0.5)) <= SIGMAS * deviation + 0.5
    assert max(waits) <= 1.1 * cycle_steps + 1
    quarter = sum(wait <= cycle_steps / 4 for wait in waits)
    assert_frequency(quarter, trials, 0.25)


def _seal_as_it_is(engine: FakeEngine) -> None:
    """Takes the bytes of now for good: the fold of each slot goes into its record."""
    context = engine.guard.context(LaunchTag.SEAL)
    slots = torch.arange(1, engine.guard.group.num_slots)
    record_fields(context)[slots, 3] = fold_slots(context, slots)
