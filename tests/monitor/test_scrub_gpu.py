"""Scrub, re-verify and carried records on a GPU: streams, timing, no synchronisation."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvcanary_plugin import scrub as scrub_module
from kvcanary_plugin.kernels import LaunchTag
from kvcanary_plugin.violations import Violation
from tests.monitor.gpu_engine import REQUESTS, GpuEngine, no_synchronisation
from tests.monitor.world import checking_everything

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def found(violations: list[Violation]) -> set[tuple[str, int]]:
    return {(check, v.slot) for v in violations for check in v.checks}


def test_a_flipped_byte_of_a_slot_nobody_reads_is_found_and_whole_ones_are_not():
    engine = GpuEngine(scrub={"percent_of_step_time": 20})
    for _ in range(60):
        engine.decode(engine.compute)
    assert engine.violations() == []
    assert engine.guard.slots_run(LaunchTag.SCRUB) > 0
    engine.kv[3][7777, 100] ^= 1
    for _ in range(200):
        engine.decode(engine.compute)
        torch.cuda.synchronize()
    violations = engine.violations()
    assert found(violations) == {("real_kv", 7777)}
    assert violations[0].phase == "scrub"
    assert engine.monitor.scrubber.readings()["full"].cycle_seconds > 0


def test_the_share_of_step_time_holds_on_the_device():
    def seconds(engine: GpuEngine) -> float:
        began = time.perf_counter()
        for number in range(160):
            engine.decode(engine.compute)
            if number % 2:  # an engine is two steps ahead of the device at most
                torch.cuda.synchronize()
        return time.perf_counter() - began

    # 64 layers: several shares of a step for one turn over the pool.
    off = GpuEngine(layers=64, scrub={"percent_of_step_time": 0})
    on = GpuEngine(layers=64, scrub={"percent_of_step_time": 10})
    seconds(off), seconds(on)  # until the prices are known
    pairs = [(seconds(off), seconds(on)) for _ in range(5)]
    shares = sorted(with_scrub / without - 1 for without, with_scrub in pairs)
    print("share of step time at a budget of 0.10:", [f"{share:.3f}" for share in shares])
    assert 0.07 <= shares[2] <= 0.12


@contextmanager
def idle_thread(engine: GpuEngine) -> Iterator[None]:
    """A thread that scrubs whenever the engine is idle."""
    engine.is_alone = False
    torch.cuda.synchronize()
    stop, errors = threading.Event(), []

    def idle() -> None:
        while not stop.is_set():
            try:
                engine.monitor.on_idle()
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=idle)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
    assert not errors


def test_an_idle_thread_scrubs_and_never_meets_a_forward(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scrub_module, "_IDLE_SECONDS", 0.0)
    engine = GpuEngine(scrub={"percent_of_step_time": 50})
    with idle_thread(engine):
        for number in range(150):

            def rewrite(value: int = number % 251) -> None:
                torch.cuda._sleep(200_000)
                for layer in engine.kv:
                    layer[engine.next_slot : engine.next_slot + REQUESTS] = value
                torch.cuda._sleep(200_000)

            engine.decode(rewrite)
            if number % 10 == 0:
                time.sleep(0.01)
        before = engine.guard.launches_run(LaunchTag.SCRUB)
        time.sleep(0.5)
        assert engine.guard.launches_run(LaunchTag.SCRUB) > before
        assert engine.violations() == []
        engine.kv[0][123, 0] ^= 1
        torch.cuda.synchronize()
        deadline = time.monotonic() + 20
        seen: list[Violation] = []
        while not seen and time.monotonic() < deadline:
            time.sleep(0.05)
            seen = engine.violations()
    assert found(seen) == {("real_kv", 123)}


def test_an_idle_thread_spoils_no_graph_that_the_engine_captures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scrub_module, "_IDLE_SECONDS", 0.0)
    engine = GpuEngine(scrub={"percent_of_step_time": 50})
    engine.decode(engine.compute)
    counted, graph, nodes = torch.zeros((), device="cuda"), torch.cuda.CUDAGraph(), 0
    with idle_thread(engine):
        before = engine.guard.launches_run(LaunchTag.SCRUB)
        with torch.cuda.graph(graph):
            while engine.guard.launches_run(LaunchTag.SCRUB) < before + 3 and nodes < 5000:
                counted.add_(1)
                nodes += 1
                time.sleep(0.001)
        assert engine.guard.launches_run(LaunchTag.SCRUB) >= before + 3
    graph.replay()
    assert int(counted) == nodes
    assert engine.violations() == []


def test_a_row_that_changes_under_the_forward_is_table_changed():
    engine = GpuEngine(scrub={"percent_of_step_time": 0})
    engine.monitor.reconfigure(engine.config.model_copy(update={"reverify": _always()}))
    engine.decode()
    assert engine.violations() == []

    def row_changes() -> None:
        engine.table[2, 1000:] = 5

    engine.decode(row_changes)
    (violation,) = engine.violations()
    assert (violation.checks, violation.position) == (("table_changed",), 1000)
    assert (violation.request_uid, violation.slot) == (2, 5)


def _always() -> object:
    return checking_everything(reverify={"sample": 1.0}).reverify


def test_carried_records_come_back_and_a_changed_byte_with_them():
    engine = GpuEngine(scrub={"percent_of_step_time": 0})
    slots = torch.arange(1, 101, device="cuda")
    back = slots + 17000
    with no_synchronisation():
        carried = engine.monitor.export_slots(0, slots)
        assert carried is not None
        for layer in engine.kv:
            layer[17001:17101] = layer[1:101]
        engine.monitor.import_slots(0, back, carried)
    assert engine.violations() == []
    engine.kv[5][17050, 3] ^= 1
    engine.monitor.import_slots(0, back, carried)
    violations = engine.violations()
    assert found(violations) == {("real_kv", 17050)}
    assert violations[0].phase == "adopt"
