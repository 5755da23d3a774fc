"""The ring in pinned host memory: seen without synchronising, never torn, counted exactly."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch

import kvcanary_plugin.kernels as kernels
from kvcanary_plugin.kernels import VerifyOrWriteContext, VerifyPlan
from kvcanary_plugin.kernels.reference import record_fields
from kvcanary_plugin.ring import RingReader
from tests.kernels import cuda_support, scenes

pytestmark = pytest.mark.gpu

ONE_SECOND = 2_000_000_000  # cycles, at least


def _pool_of_errors(
    count: int, *, ring_capacity: int = 64
) -> tuple[VerifyOrWriteContext, VerifyPlan]:
    """A pool and a plan whose every entry stands at the wrong position.

    Slot s holds token s and position 3 * s, so that a row that mixes two slots shows itself.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    context = scenes.make_context(num_slots=count + 1, device=device)
    context = cuda_support.with_pinned_ring(context, capacity=ring_capacity)
    slots = torch.arange(1, count + 1, device=device)
    fields = record_fields(context)
    fields[1:, 0] = slots
    fields[1:, 1] = 3 * slots
    plan = VerifyPlan.allocate(verify_capacity=count, device=device)
    plan.verify_slot_indices.copy_(slots)
    plan.verify_expected_tokens.fill_(-1)
    plan.verify_expected_positions.fill_(-7)
    plan.verify_prev_slot_indices.fill_(0)
    plan.verify_num_valid.fill_(count)
    plan.enable.fill_(1)
    return context, plan


def _verify(context: VerifyOrWriteContext, plan: VerifyPlan) -> None:
    kernels.launch_canary_verify_kernel(
        context=context, plan=plan, check_verify_expected_token=False, step=2
    )


def _wait_for(done: object, *, seconds: float) -> bool:
    assert callable(done)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if done():
            return True
        time.sleep(0.001)
    return False


def test_rows_are_visible_while_the_stream_is_still_busy() -> None:
    context, plan = _pool_of_errors(3)
    _verify(*_pool_of_errors(1))  # loads the kernel
    torch.cuda.synchronize()
    _verify(context, plan)
    torch.cuda._sleep(ONE_SECOND)
    finished = torch.cuda.Event()
    finished.record()
    reader = RingReader(context.violation_ring)
    seen: list[int] = []

    def all_three() -> bool:
        seen.extend(row[1] for row in reader.read().rows.tolist())
        return len(seen) == 3

    assert _wait_for(all_three, seconds=0.5)
    assert not finished.query()
    assert sorted(seen) == [1, 2, 3]
    torch.cuda.synchronize()


def test_rows_of_a_replayed_graph_are_visible_while_it_runs() -> None:
    context, plan = _pool_of_errors(2)
    _verify(context, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _verify(context, plan)
        torch.cuda._sleep(ONE_SECOND)
    reader = RingReader(context.violation_ring)
    assert len(reader.read().rows) == 2
    graph.replay()
    finished = torch.cuda.Event()
    finished.record()
    assert _wait_for(lambda: len(reader.read().rows) > 0, seconds=0.5)
    assert not finished.query()
    torch.cuda.synchronize()


def test_the_next_launch_publishes_the_counters() -> None:
    context, plan = _pool_of_errors(5)
    assert context.counter_mirror is not None
    _verify(context, plan)
    torch.cuda.synchronize()
    assert context.counter_mirror.tolist() == [0, 0]
    _verify(context, plan)
    torch.cuda.synchronize()
    assert context.counter_mirror.tolist() == [5, 1]


def test_a_million_violations_are_counted_and_the_newest_kept() -> None:
    count, capacity = 1_000_000, 4096
    context, plan = _pool_of_errors(count, ring_capacity=capacity)
    _verify(*_pool_of_errors(1))
    reader = RingReader(context.violation_ring)
    batches: list[list[list[int]]] = []
    stop = threading.Event()

    def read_on() -> None:
        while not stop.is_set():
            batches.append(reader.read().rows.tolist())

    thread = threading.Thread(target=read_on)
    thread.start()
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    _verify(context, plan)
    after.record()
    after.synchronize()
    stop.set()
    thread.join()
    last = reader.read()
    batches.append(last.rows.tolist())

    assert int(context.violation_write_index) == count
    assert int(context.slot_run_counter) == count
    assert before.elapsed_time(after) < 500  # ms; the rows themselves are a few milliseconds
    for row in (row for batch in batches for row in batch):
        assert (row[2], row[3]) == (3 * row[1], row[1])
    sequences = context.violation_ring[:, cuda_support.SEQUENCE].sort().values.tolist()
    assert sequences == list(range(count - capacity + 1, count + 1))
    slots = context.violation_ring[:, 1].numpy()
    assert len(np.unique(slots)) == capacity


def test_a_ring_of_one_row_ends_with_the_last_violation() -> None:
    context, plan = _pool_of_errors(100_000, ring_capacity=1)
    _verify(context, plan)
    torch.cuda.synchronize()
    (row,) = context.violation_ring.tolist()
    assert row[cuda_support.SEQUENCE] == 100_000
    assert (row[2], row[3]) == (3 * row[1], row[1])


AFTER_A_FAULT = """
    import torch
    from tests.kernels import test_cuda_ring as ring

    context, plan = ring._pool_of_errors(2)
    ring._verify(context, plan)
    bad = torch.tensor([1 << 40], device="cuda")
    torch.zeros(4, device="cuda")[bad]  # a device-side assert: the context is lost
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        print("context lost")
    print("slots", sorted(context.violation_ring[:2, 1].tolist()))
    print("sequences", sorted(context.violation_ring[:2, 15].tolist()))
    try:
        ring._verify(context, plan)
    except RuntimeError as error:
        print("refused:", error)
"""


def test_rows_survive_the_loss_of_the_cuda_context() -> None:
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(AFTER_A_FAULT)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "context lost" in process.stdout, process.stdout + process.stderr
    assert "slots [1, 2]" in process.stdout
    assert "sequences [1, 2]" in process.stdout
    assert "refused: kvcanary: canary_verify_plan failed" in process.stdout
