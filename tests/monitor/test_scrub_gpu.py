"""Scrub, re-verify and carried records on a GPU: streams, timing, no synchronisation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from kvcanary_plugin import scrub as scrub_module
from kvcanary_plugin.cache import KVCacheGroup, row_source
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.forward import ForwardKind, ForwardStep
from kvcanary_plugin.kernels import LaunchTag
from kvcanary_plugin.monitor import CanaryMonitor
from kvcanary_plugin.ring import RingReader
from kvcanary_plugin.violations import RequestNames, Violation
from tests.monitor.world import checking_everything

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

REQUESTS, PROMPT, SLOTS, LAYERS, BYTES = 4, 4000, 20000, 8, 4096


class GpuEngine:
    """Four requests that have computed their prompts; each forward decodes one token of each."""

    def __init__(self, *, layers: int = LAYERS, **settings: object) -> None:
        self.table = torch.zeros((8, 8192), dtype=torch.int32, device="cuda")
        self.kv = [
            torch.randint(0, 256, (SLOTS, BYTES), dtype=torch.uint8, device="cuda")
            for _ in range(layers)
        ]
        self.group = KVCacheGroup(
            name="full",
            num_slots=SLOTS,
            page_table=self.table,
            page_size=1,
            padding_row=0,
            sources=tuple(row_source(layer) for layer in self.kv),
            table_stable_through_forward=True,
        )
        base: dict[str, object] = {
            "verify": {"real_kv": "none"},
            "write_input_assert": False,
            "checks": {"token": False},
            "reverify": {"sample": 0},
            "recorder": {"forwards": 0},
        }
        self.config: CanaryConfig = checking_everything(**base, **settings)
        self.errors: list[BaseException] = []
        self.monitor = CanaryMonitor(
            config=self.config,
            groups=[self.group],
            max_requests=8,
            raise_pending=lambda: None,
            on_error=lambda where, error: self.errors.append(error),
        )
        self.guard = self.monitor.guards[0]
        self._reader = RingReader(self.monitor.sink.ring)
        self.rows = torch.arange(1, REQUESTS + 1, device="cuda")
        self.weights = torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16)
        self.step = 0
        self.is_alone = True  # the mode that forbids synchronisation is one for all threads
        self.length = PROMPT
        slots = torch.arange(1, REQUESTS * PROMPT + 1, device="cuda", dtype=torch.int32)
        self.table[1 : REQUESTS + 1, :PROMPT] = slots.view(REQUESTS, PROMPT)
        self.next_slot = REQUESTS * PROMPT + 1
        self._forward(prefix=0, tokens=PROMPT, slots=slots.long())

    def _forward(
        self,
        *,
        prefix: int,
        tokens: int,
        slots: torch.Tensor,
        work: Callable[[], None] = lambda: None,
    ) -> None:
        self.step += 1
        count = REQUESTS * tokens
        step = ForwardStep(
            kind=ForwardKind.DECODE,
            step=self.step,
            request_rows=self.rows,
            request_uids=self.rows,
            prefix_lens=torch.full((REQUESTS,), prefix, device="cuda"),
            extend_lens=torch.full((REQUESTS,), tokens, device="cuda"),
            max_prefix_len=prefix,
            input_ids=torch.arange(count, device="cuda") % 1000,
            positions=torch.arange(prefix, prefix + tokens, device="cuda").repeat(REQUESTS),
            out_cache_loc=(slots,),
        )
        with no_synchronisation(forbidden=self.step > 1 and self.is_alone):
            self.monitor.before_forward(step)
        work()
        with no_synchronisation(forbidden=self.step > 1 and self.is_alone):
            self.monitor.after_forward()
        assert not self.errors, self.errors

    def decode(self, work: Callable[[], None] = lambda: None) -> None:
        """One token of each request, into the same four slots again and again."""
        slots = torch.arange(self.next_slot, self.next_slot + REQUESTS, device="cuda")
        self.table[1 : REQUESTS + 1, self.length] = slots.int()
        self._forward(prefix=self.length, tokens=1, slots=slots, work=work)

    def compute(self) -> None:
        for _ in range(4):
            torch.mm(self.weights, self.weights)

    def violations(self) -> list[Violation]:
        torch.cuda.synchronize()
        rows = self._reader.read().rows
        return [Violation.from_row(row, ["full"], RequestNames()) for row in rows]


@contextmanager
def no_synchronisation(*, forbidden: bool = True) -> Iterator[None]:
    """Inside the block a call that waits for the device is an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error" if forbidden else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


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


def test_an_idle_thread_scrubs_and_never_meets_a_forward(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scrub_module, "_IDLE_SECONDS", 0.0)
    engine = GpuEngine(scrub={"percent_of_step_time": 50})
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
    finally:
        stop.set()
        thread.join(30)
    assert not errors
    assert found(seen) == {("real_kv", 123)}


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
