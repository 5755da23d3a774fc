"""The overhead benchmarks on an engine that is made up: what is switched off, what is counted."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch

from benchmarks import overhead
from benchmarks.overhead import OFF, ON, SCRUB, Bench, Load, Switch, as_table, problems_in
from kvcanary_plugin.lifecycle import SlotEvents


@pytest.fixture
def switch(monkeypatch, tmp_path):
    monkeypatch.setenv(overhead.REPORT_VARIABLE, str(tmp_path / "worker.json"))
    monkeypatch.setenv(overhead.SWITCH_VARIABLE, "")  # taken back afterwards
    return Switch.create()


@pytest.fixture
def worker(switch, monkeypatch):
    for name in ("alloc", "free", "free_pages", "move", "reset"):
        monkeypatch.setattr(SlotEvents, name, getattr(SlotEvents, name))
    return overhead.WorkerSide()


def test_the_worker_sees_what_the_measuring_process_switches(switch, worker):
    for side in (OFF, ON, SCRUB):
        switch.side = side
        assert worker.is_off() == (side == OFF)


def test_no_allocator_is_listened_to_while_the_canary_is_off(switch, worker):
    events = SlotEvents()
    slots = torch.arange(3)

    switch.side = OFF
    events.alloc(slots)
    assert not events.take()
    switch.side = ON
    events.alloc(slots)
    assert len(events.take()) == 1


class MadeUpEngine:
    """Serves at once; keeps what it was asked."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self.loop = asyncio.new_event_loop()
        self.forgotten_on: list[int] = []
        self.prompts: list[int] = []
        self.given_up = 0

    async def stream(self, prompt, tokens):
        await self.serve(prompt, tokens)
        for _ in range(tokens):
            yield 1

    async def serve(self, prompt, tokens):
        assert tokens > 0
        self.prompts.append(len(prompt))

    async def give_up(self, prompt, tokens, *, after):
        assert 0 <= after <= tokens
        self.given_up += 1

    def forget_prefixes(self) -> bool:
        self.forgotten_on.append(self._switch.side)
        return True


LOAD = Load(
    vocabulary=512, context=400, long_prompt=128, decode_prompt=32, output=20, requests=(2, 6)
)


def test_every_side_is_measured_as_often_and_begins_without_cached_prefixes(switch, monkeypatch):
    monkeypatch.setattr(overhead.time, "sleep", lambda _: None)
    engine = MadeUpEngine(switch)
    checks = []

    samples = overhead.measure(
        Bench(engine, switch, LOAD),
        sides=(OFF, ON, SCRUB),
        repeats=2,
        seconds=1e9,
        check_guarded=lambda: checks.append(switch.side),
    )

    assert [
        {len(values) for values in sides.values()} for name, sides in sorted(samples.items())
    ] == [{2 * 3}, {2}, {2 * 14}], "what is short is measured in more turns of a repeat"
    assert len(checks) == 3, "after the warm-up and after each repeat"
    # Told of by the side that begins: the canary hears what is forgotten.
    warm_up, forwards, backwards = [OFF, ON, SCRUB], [OFF, ON, SCRUB], [SCRUB, ON, OFF]
    first = 7 * (forwards + backwards) + (forwards + backwards + forwards) + forwards
    second = 7 * (backwards + forwards) + (backwards + forwards + backwards) + backwards
    assert engine.forgotten_on == warm_up + first + second


def test_time_that_is_up_ends_the_repeats(switch, monkeypatch):
    monkeypatch.setattr(overhead.time, "sleep", lambda _: None)
    samples = overhead.measure(
        Bench(MadeUpEngine(switch), switch, LOAD),
        sides=(OFF, ON),
        repeats=3,
        seconds=0.0,
        check_guarded=lambda: None,
    )

    assert all(not values for sides in samples.values() for values in sides.values())


def test_mixed_traffic_has_prompts_beyond_a_chunk_and_fits_the_context(switch):
    engine = MadeUpEngine(switch)
    rounds = iter([False] * 4 + [True])

    result = Bench(engine, switch, LOAD).mixed_traffic(until=lambda _: next(rounds))

    assert result.served == len(engine.prompts)
    assert result.given_up == engine.given_up > 0
    assert LOAD.long_prompt < max(engine.prompts) < LOAD.context


def test_the_table_has_medians_and_the_differences_of_the_pairs():
    table = as_table({"work": {"off": [10.0, 20.0], "on": [11.0, 20.0], "scrub": [10.0, 21.0]}})

    assert (
        "| work | 15.00 (10.00 - 20.00) | 15.50 | +5.00 % (+0.00 .. +10.00), mean +5.00 % |"
        in table
    )
    assert "| 15.50 | +2.50 % (+0.00 .. +5.00), mean +2.50 % | 2 |" in table

    table = as_table({"work": {"off": [10.0, 10.0, 20.0], "on": [10.1, 10.2, 20.6]}})

    assert "+2.00 % (+1.00 .. +3.00), mean +2.00 ± 0.58 % | 3 |" in table


HEALTHY = """
kvcanary_violations_total{check="chain"} 0
kvcanary_ring_dropped_total 0
kvcanary_internal_errors_total{where="hook"} 0
kvcanary_forwards_total{result="checked"} 5
kvcanary_forwards_total{result="error"} 0
kvcanary_group_state{state="guarded"} 1
kvcanary_group_state{state="blind"} 0
"""


@pytest.mark.parametrize(
    ("line", "instead", "problem"),
    [
        ('{check="chain"} 0', '{check="chain"} 2', "kvcanary_violations_total is 2"),
        ('{result="error"} 0', '{result="error"} 3', "3 forwards were not fully checked"),
        ('{result="checked"} 5', '{result="checked"} 0', "no forward was checked"),
        ('{state="guarded"} 1', '{state="guarded"} 0', "no group is guarded"),
    ],
)
def test_what_is_no_healthy_run_is_a_problem(line, instead, problem):
    assert problems_in(HEALTHY) == []
    assert problem in problems_in(HEALTHY.replace(line, instead))


def test_a_report_of_the_worker_reads_as_bytes_a_slot():
    report = {
        "host_us": {"decode, on": {"forwards": 7, "median": 40.0, "p95": 60.0}},
        "device_bytes": {"SlotTable": 280, "Records": 320},
        "slots": {"full": 10},
    }

    text = overhead.worker_summary(json.loads(json.dumps(report)))

    assert "decode, on: median 40.0, p95 60.0 (7 forwards)" in text
    assert "60.0 bytes a slot (Records 32.0, SlotTable 28.0)" in text
