"""The scrub through the monitor: what it finds, what it must leave alone, and what it may spend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from kvcanary_plugin import scrub as scrub_module
from kvcanary_plugin.cache import KVCacheGroup, row_source
from kvcanary_plugin.config.model import Scrub
from kvcanary_plugin.forward import ForwardKind
from kvcanary_plugin.gate import EngineGate
from kvcanary_plugin.kernels import LaunchTag, launch_canary_scrub_range_kernel
from kvcanary_plugin.kernels.reference import fold_slots, record_fields
from kvcanary_plugin.monitor import CanaryMonitor
from kvcanary_plugin.scrub import Scrubber, Turn
from kvcanary_plugin.scrub_budget import Prepaid, ScrubBudget
from tests.monitor.world import BYTES_PER_LAYER, LAYERS, Part, World, checking_everything, found
from tests.waiting import wait_until

PROMPT = [11, 7, 7, 300, 0]
SLOTS = [5, 6, 9, 2, 31]
BYTES_PER_SLOT = 2 * LAYERS * BYTES_PER_LAYER
# Everything, after each forward.
UNLIMITED = {"bytes_per_second": 10**13}


def scrubbing(scrub: dict[str, object] = UNLIMITED, **settings: object) -> World:
    """A world in which only the scrub looks at bytes, and request 1 has computed PROMPT."""
    config = checking_everything(verify={"real_kv": "none"}, scrub=scrub)
    world = World(config=config, **settings)  # type: ignore[arg-type]
    if world.tracks_allocation:
        world.monitor.guards[0].events.alloc(torch.tensor(SLOTS))
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
    return world


def pause(world: World, forwards: int = 2) -> list:
    """Forwards of somebody else, so that the scrub gets its turn."""
    return [v for _ in range(forwards) for v in world.forward(kind=ForwardKind.DUMMY)]


def become_idle(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """No forward has come for long enough, without waiting for it."""
    monkeypatch.setattr(scrub_module, "_IDLE_SECONDS", 0.0)
    world.monitor.on_idle()  # from here on the time counts


def idle_until(world: World, done: Callable[[], bool]) -> None:
    def is_done_after_an_idle_turn() -> bool:
        world.monitor.on_idle()
        return done()

    wait_until(is_done_after_an_idle_turn, "what the idle scrub has to come to")


def scrubbed(world: World) -> int:
    return world.monitor.guards[0].slots_run(LaunchTag.SCRUB)


# --- what it finds --------------------------------------------------------------------------------


@pytest.mark.parametrize("strip", range(2 * LAYERS))
def test_a_flipped_byte_in_a_resident_nobody_reads_is_real_kv_in_phase_scrub(strip: int):
    world = scrubbing()
    world.bytes_of(world.full_kv[strip], 9)[-1] ^= 1
    (violation, *_) = pause(world)
    assert (violation.checks, violation.phase) == (("real_kv",), "scrub")
    assert (violation.slot, violation.position, violation.writer_uid) == (9, 2, 1)
    assert violation.request_uid is None


def test_bytes_that_stay_as_they_are_are_silent_turn_after_turn():
    world = scrubbing()
    assert pause(world, forwards=5) == []
    assert scrubbed(world) == 6 * len(SLOTS)


def test_a_difference_that_an_event_explains_by_the_next_forward_is_no_violation():
    # Slot 9 goes to a load that stores at once; the event waits for the next forward.
    world = scrubbing(tracks_allocation=True)
    events = world.monitor.guards[0].events

    def load_begins() -> None:
        events.free(torch.tensor(SLOTS))
        events.alloc(torch.tensor([9]))
        world.bytes_of(world.full_kv[0], 9)[:] = 77

    assert world.forward(kind=ForwardKind.DUMMY, meanwhile=load_begins) == []
    assert pause(world) == []


def test_the_same_difference_without_an_event_is_a_violation():
    world = scrubbing(tracks_allocation=True)

    def late_bytes() -> None:
        world.bytes_of(world.full_kv[0], 9)[:] = 77

    assert world.forward(kind=ForwardKind.DUMMY, meanwhile=late_bytes) == []
    assert ("real_kv", 9) in found(pause(world))


def test_bytes_that_land_after_a_transfer_is_done_are_found_without_a_reader():
    # Two requests: the late bytes of the first one's transfer hit slots that the second one owns.
    world = scrubbing()
    assert world.forward(Part(uid=2, row=2, tokens=[1, 2, 3], slots=[20, 21, 22])) == []
    for slot in (21, 22):
        world.bytes_of(world.full_kv[1], slot)[3] ^= 0x10
    violations = pause(world)
    assert found(violations) == {("real_kv", 21), ("real_kv", 22)}
    assert {v.writer_uid for v in violations} == {2}


# --- what it leaves alone -------------------------------------------------------------------------


def test_free_slots_are_passed_over_whatever_their_bytes():
    world = scrubbing(tracks_allocation=True)
    world.monitor.guards[0].events.free(torch.tensor([9, 31]))
    world.full_kv[0][:] += 1
    violations = pause(world, forwards=4)
    assert found(violations) == {("real_kv", 5), ("real_kv", 6), ("real_kv", 2)}


def test_slots_of_a_forward_that_failed_before_its_seal_are_left_alone():
    world = scrubbing()
    part = Part(uid=2, row=2, tokens=[1, 2], slots=[40, 41])
    world.step += 1
    world.put_row(2, part.slots)
    world.monitor.before_forward(world._step_of([part], ForwardKind.PREFILL))
    world.bytes_of(world.full_kv[0], 40)[:] = 9  # half of it is stored, then it fails
    assert pause(world, forwards=3) == []
    assert scrubbed(world) == 4 * len(SLOTS)


def test_forgotten_slots_are_left_alone():
    world = scrubbing()
    world.monitor.forget_slots(0, torch.tensor([9]))
    world.bytes_of(world.full_kv[0], 9)[:] = 1
    assert pause(world) == []


@pytest.mark.parametrize("changes", [{"mode": "off"}, {"scrub": {"percent_of_step_time": 0}}])
def test_mode_off_and_a_budget_of_zero_stop_it_while_serving(changes: dict[str, object]):
    world = scrubbing()
    settings = {"verify": {"real_kv": "none"}, "scrub": UNLIMITED, **changes}
    world.monitor.reconfigure(checking_everything(**settings))
    before = scrubbed(world)
    pause(world)
    world.monitor.on_idle()
    assert scrubbed(world) == before


def test_a_budget_may_be_given_and_taken_while_serving():
    world = scrubbing({"percent_of_step_time": 0})
    pause(world)
    assert scrubbed(world) == 0
    world.monitor.reconfigure(checking_everything(scrub=UNLIMITED))
    pause(world)
    assert scrubbed(world) > 0


def test_groups_that_share_slots_are_walked_once_and_only_if_they_fold_alike():
    world = World()
    own = world.groups[0]

    def group(name: str, sources: tuple, **fields: object) -> KVCacheGroup:
        return KVCacheGroup(
            name=name,
            num_slots=own.num_slots,
            page_table=own.page_table,
            page_size=1,
            padding_row=0,
            sources=sources,
            pool="one",
            **fields,  # type: ignore[arg-type]
        )

    def monitor(*groups: KVCacheGroup) -> CanaryMonitor:
        config = checking_everything(scrub=UNLIMITED)
        return CanaryMonitor(
            config=config,
            groups=groups,
            max_requests=4,
            raise_pending=lambda: None,
            on_error=lambda where, error: None,
        )

    alike = monitor(group("a", own.sources), group("b", own.sources))
    assert set(alike.scrubber.readings()) == {"a", "b"}
    assert alike.scrubber.left_out == {}
    different = monitor(group("a", own.sources), group("b", own.sources[:1]))
    assert set(different.scrubber.left_out) == {"a", "b"}
    reused = monitor(group("a", own.sources, freed_slots_keep_bytes=False))
    assert set(reused.scrubber.left_out) == {"a"}
    tracked = monitor(group("a", own.sources, freed_slots_keep_bytes=False, tracks_allocation=True))
    assert tracked.scrubber.left_out == {}


# --- an idle engine -------------------------------------------------------------------------------


def test_an_idle_engine_is_scrubbed_and_a_fault_found(monkeypatch: pytest.MonkeyPatch):
    world = scrubbing()
    become_idle(world, monkeypatch)
    assert world.violations() == []
    world.bytes_of(world.full_kv[2], 2)[0] ^= 4
    seen = []
    idle_until(world, lambda: bool(seen) or bool(seen.extend(world.violations())))
    assert found(seen) == {("real_kv", 2)}


def test_an_idle_engine_with_whole_bytes_is_silent(monkeypatch: pytest.MonkeyPatch):
    world = scrubbing()
    become_idle(world, monkeypatch)
    before = scrubbed(world)
    idle_until(world, lambda: scrubbed(world) >= before + 20 * len(SLOTS))
    assert world.violations() == []


def test_events_queued_on_an_idle_engine_count_for_the_idle_scrub(monkeypatch: pytest.MonkeyPatch):
    world = scrubbing(tracks_allocation=True)
    become_idle(world, monkeypatch)
    world.monitor.guards[0].events.free(torch.tensor(SLOTS))
    world.monitor.guards[0].events.alloc(torch.tensor(SLOTS))
    world.full_kv[0][:] += 1  # a load fills them
    before = world.monitor.guards[0].launches_run(LaunchTag.LIFECYCLE)
    idle_until(world, lambda: world.monitor.guards[0].launches_run(LaunchTag.LIFECYCLE) > before)
    for _ in range(5):
        time.sleep(0.002)
        world.monitor.on_idle()
    assert world.violations() == []


def test_nothing_is_scrubbed_inside_a_forward_or_right_after_it(monkeypatch: pytest.MonkeyPatch):
    world = scrubbing({"bytes_per_second": 10**12})
    before = scrubbed(world)
    left_at = world.monitor._gate._left_at
    assert left_at is not None
    now = left_at + 0.09
    monkeypatch.setattr(world.monitor._gate, "_clock", lambda: now)
    world.monitor.on_idle()  # the last forward was just now
    assert scrubbed(world) == before
    inside = []

    def in_another_thread() -> None:
        thread = threading.Thread(target=world.monitor.on_idle)
        thread.start()
        thread.join()
        inside.append(scrubbed(world))

    now += 0.02
    world.forward(kind=ForwardKind.DUMMY, meanwhile=in_another_thread)
    assert inside == [before]
    now += 0.11
    after = scrubbed(world)
    idle_until(world, lambda: scrubbed(world) > after)


@pytest.mark.usefixtures("threads_alternate")
def test_an_idle_thread_never_sees_a_slot_that_a_forward_rewrites(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scrub_module, "_IDLE_SECONDS", 0.0)
    world = scrubbing()
    stop, idle_errors = threading.Event(), []

    def scrub_all_the_time() -> None:
        while not stop.is_set():
            try:
                world.monitor.on_idle()
            except Exception as error:
                idle_errors.append(error)
                return

    def reload_all_the_time() -> None:
        budgets = [UNLIMITED, {"percent_of_step_time": 50}, {"percent_of_step_time": 0}]
        for number in range(10**9):
            if stop.wait(0.003):
                return
            world.monitor.reconfigure(
                checking_everything(verify={"real_kv": "none"}, scrub=budgets[number % 3])
            )

    threads = [threading.Thread(target=t) for t in (scrub_all_the_time, reload_all_the_time)]
    for thread in threads:
        thread.start()
    try:
        before = scrubbed(world)
        for number in range(100_000):
            if number >= 150 and scrubbed(world) > before:
                break
            # The same slots again and again, each time with other bytes.
            tokens = [number, number + 1, number + 2, 5, 6]
            assert world.forward(Part(uid=number, row=2, tokens=tokens, slots=SLOTS)) == []
            time.sleep(0.0005)
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
    assert not idle_errors
    assert not any(thread.is_alive() for thread in threads)
    assert scrubbed(world) > before
    world.monitor.reconfigure(checking_everything(scrub=UNLIMITED))
    assert pause(world) == []


def test_a_forward_that_waits_comes_before_the_next_idle_turn():
    gate = EngineGate(torch.device("cpu"))
    with gate.idle_turn() as may:
        assert may
        forward = threading.Thread(target=gate.engine_enters, daemon=True)
        forward.start()
        wait_until(lambda: gate._engine_waits, "the forward waiting for the idle turn")
    with gate.idle_turn() as may:
        assert not may
    forward.join(120)
    assert not forward.is_alive()


def test_no_piece_of_an_idle_turn_begins_inside_a_forward(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scrub_module, "_IDLE_SECONDS", 0.0)
    world = scrubbing({"bytes_per_second": BYTES_PER_SLOT * 100_000})
    pieces, stop = [], threading.Event()

    def slow_launch(**arguments: object) -> None:
        launch_canary_scrub_range_kernel(**arguments)  # type: ignore[arg-type]
        pieces.append(arguments)
        time.sleep(0.02)

    def idle_all_the_time() -> None:
        while not stop.is_set():
            world.monitor.on_idle()

    monkeypatch.setattr(scrub_module, "launch_canary_scrub_range_kernel", slow_launch)
    idle = threading.Thread(target=idle_all_the_time)
    idle.start()
    try:
        wait_until(lambda: len(pieces) > 2, "a few pieces of idle turns")
        world.monitor.before_forward(world._step_of([], ForwardKind.DUMMY))
        so_far = len(pieces)
        time.sleep(0.2)
        assert len(pieces) == so_far
        world.monitor.after_forward()
        so_far = len(pieces)
        wait_until(lambda: len(pieces) > so_far, "an idle turn after the forward")
    finally:
        stop.set()
        idle.join(120)
    assert not idle.is_alive()


# --- the budget -----------------------------------------------------------------------------------


class FakeEngine:
    """Steps and folds that take exactly as long as they are said to take."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        scrub: dict[str, object],
        fold_seconds: float,
        slots: int = 4000,
        live: float = 1.0,
    ) -> None:
        self.now = 0.0
        self.fold_seconds = fold_seconds
        self.scrub_seconds = 0.0
        self.longest_chunk = 0.0
        self.step_seconds = 0.0
        monkeypatch.setattr(scrub_module, "launch_canary_scrub_range_kernel", self._timed_launch)
        config = checking_everything(scrub=UNLIMITED, ring={"capacity": 64})
        self.world = World(slots=slots, config=config)
        monitor = self.world.monitor
        self.guard = monitor.guards[0]
        state = self.guard.slots.state
        state[1:] = torch.where(torch.arange(1, slots) % 100 < 100 * live, 3, 0).to(torch.int32)
        self.guard.records.view(torch.int64)[:, 3] = 0
        self.scrubber = scrub_module.Scrubber(
            guards=monitor.guards,
            settings=Scrub.model_validate(scrub),
            gate=monitor._gate,
            clock=lambda: self.now,
        )

    def _timed_launch(self, **arguments: object) -> None:
        before = self.guard.slots_run(LaunchTag.SCRUB)
        launch_canary_scrub_range_kernel(**arguments)  # type: ignore[arg-type]
        seconds = (self.guard.slots_run(LaunchTag.SCRUB) - before) * self.fold_seconds
        self.now += seconds
        self.scrub_seconds += seconds
        self.longest_chunk = max(self.longest_chunk, seconds)

    def step(self, seconds: float, *, gap: float = 0.0) -> None:
        self.now += gap
        self.scrubber.step_begins()
        self.now += seconds
        self.step_seconds += seconds
        self.scrubber.after_forward(1)


@pytest.mark.parametrize("percent", [0.5, 1.0, 5.0])
@pytest.mark.parametrize("live", [1.0, 0.05])
def test_the_share_of_step_time_holds(monkeypatch: pytest.MonkeyPatch, percent: float, live: float):
    engine = FakeEngine(
        monkeypatch,
        scrub={"percent_of_step_time": percent},
        fold_seconds=20e-6,
        slots=int(4000 / live),
        live=live,
    )
    for number in range(600):
        engine.step(0.010 if number % 10 else 0.200, gap=0.5 * (number % 50 == 0))
    share = engine.scrub_seconds / engine.step_seconds
    assert 0.9 * percent / 100 <= share <= 1.02 * percent / 100


def test_the_share_follows_when_folds_become_ten_times_dearer(monkeypatch: pytest.MonkeyPatch):
    engine = FakeEngine(
        monkeypatch, scrub={"percent_of_step_time": 2.0}, fold_seconds=5e-6, slots=8000
    )
    for _ in range(200):
        engine.step(0.020)
    engine.fold_seconds = 50e-6
    engine.scrub_seconds = engine.step_seconds = 0.0
    for _ in range(400):
        engine.step(0.020)
    assert 0.9 * 0.02 <= engine.scrub_seconds / engine.step_seconds <= 1.02 * 0.02


def test_a_slot_dearer_than_its_share_is_saved_up_for(monkeypatch: pytest.MonkeyPatch):
    # One slot takes 1 ms, a step's share is 50 us: every twentieth step folds one.
    engine = FakeEngine(monkeypatch, scrub={"percent_of_step_time": 1.0}, fold_seconds=1e-3)
    for _ in range(2000):
        engine.step(0.005)
    assert 0.9 * 0.01 <= engine.scrub_seconds / engine.step_seconds <= 1.02 * 0.01
    assert engine.longest_chunk <= 2e-3


def test_a_gap_between_requests_is_not_saved_up_for_the_next_step(monkeypatch: pytest.MonkeyPatch):
    engine = FakeEngine(monkeypatch, scrub={"percent_of_step_time": 1.0}, fold_seconds=5e-6)
    for _ in range(100):
        engine.step(0.010)
    engine.longest_chunk = 0.0
    for _ in range(20):
        engine.step(0.010, gap=3600.0)
    assert engine.longest_chunk <= 5 * 0.01 * 0.010


def test_bytes_per_second_hold(monkeypatch: pytest.MonkeyPatch):
    rate = 1000 * BYTES_PER_SLOT
    engine = FakeEngine(monkeypatch, scrub={"bytes_per_second": rate}, fold_seconds=1e-6)
    for number in range(400):
        engine.step(0.010 + 0.001 * (number % 7))
    folded = engine.guard.slots_run(LaunchTag.SCRUB) * BYTES_PER_SLOT
    assert 0.95 <= folded / (rate * engine.now) <= 1.02


def test_the_share_holds_on_this_machine():
    """Folds take what they take here; the clock stands while the processor is with others."""
    table = torch.zeros((4, 64), dtype=torch.int32)
    kv = torch.randint(0, 256, (2000, 16384), dtype=torch.uint8)
    group = KVCacheGroup(
        name="full",
        num_slots=2000,
        page_table=table,
        page_size=1,
        padding_row=0,
        sources=(row_source(kv),),
    )
    monitor = CanaryMonitor(
        config=checking_everything(verify={"real_kv": "none"}, recorder={"forwards": 0}),
        groups=[group],
        max_requests=4,
        raise_pending=lambda: None,
        on_error=lambda where, error: pytest.fail(f"{where}: {error}"),
    )
    guard = monitor.guards[0]
    guard.slots.state[1:] = 3
    context = guard.context(LaunchTag.SEAL)
    record_fields(context)[:, 3] = fold_slots(context, torch.arange(2000))
    step_seconds = scrub_seconds = longest_seconds = 0.0
    scrubber = Scrubber(
        guards=monitor.guards,
        settings=Scrub(percent_of_step_time=10),
        gate=monitor._gate,
        clock=lambda: step_seconds + time.thread_time(),
    )
    for _ in range(250):
        scrubber.step_begins()
        step_seconds += 0.020
        began = time.thread_time()
        scrubber.after_forward(1)
        took = time.thread_time() - began
        scrub_seconds, longest_seconds = scrub_seconds + took, max(took, longest_seconds)
    # A chunk that took long is paid off by the steps that follow, of which the last may have none.
    assert 0.05 * step_seconds <= scrub_seconds <= 0.102 * step_seconds + longest_seconds
    assert guard.slots_run(LaunchTag.SCRUB) > 1000


def test_what_a_launch_in_advance_paid_for_free_slots_comes_back():
    prepaid = Prepaid()
    prepaid.paid(100)
    prepaid.paid(50)
    assert prepaid.owed(launches=0, folded=0) == 0
    assert prepaid.owed(launches=1, folded=30) == 70
    assert prepaid.owed(launches=1, folded=30) == 0
    prepaid.paid(10)
    assert prepaid.owed(launches=3, folded=90) == 0 + (160 - 90) - 70


def test_a_budget_in_advance_spends_its_share_of_a_half_free_pool():
    budget = ScrubBudget(Scrub(percent_of_step_time=1.0), device_type="cuda")
    bytes_per_slot, prepaid, folded, launches = 100_000, Prepaid(), 0, 0
    price = budget.seconds_of(bytes_per_slot)
    budget.learn(bytes_per_slot * 1000, 1000 * price)
    for _ in range(500):
        budget.spend(-prepaid.owed(launches=launches - 1, folded=folded), bytes_per_slot)
        known_folded = folded
        budget.earn(0.010, bytes_per_slot=bytes_per_slot)
        slots = budget.affords(bytes_per_slot)
        prepaid.paid(slots)
        budget.spend(slots, bytes_per_slot)
        launches, folded = launches + 1, known_folded + slots // 2
    price = budget.seconds_of(bytes_per_slot)
    assert 0.8 <= folded * price / (500 * 0.010 * 0.01) <= 1.02


# --- turns and gauges -----------------------------------------------------------------------------


def test_cycle_progress_and_age_follow_the_turn():
    turn = Turn(num_slots=1000, now=100.0)
    assert turn.reading(100.0).oldest_unchecked_seconds == 0
    for tenth in range(1, 11):
        ended = turn.advance(100 * tenth, 100.0 + tenth)
        assert ended == (tenth == 10)
        assert turn.reading(100.0 + tenth).progress == pytest.approx(tenth / 10 % 1)
    reading = turn.reading(110.0)
    assert reading.cycle_seconds == 10.0
    # The first slots were checked at 101: they are the oldest now, and the mark before is at 100.
    assert 9.0 <= reading.oldest_unchecked_seconds <= 10.0
    turn.advance(500, 112.0)
    assert turn.reading(112.0).oldest_unchecked_seconds <= 112.0 - 105.0
    assert turn.reading(130.0).oldest_unchecked_seconds >= 130.0 - 106.0


def test_no_slot_has_waited_longer_than_the_gauge_says():
    world = scrubbing({"bytes_per_second": 1})
    turn = Turn(num_slots=640, now=0.0)
    checked_at = [0.0] * 640
    now, position, dice = 0.0, 0, torch.Generator().manual_seed(3)
    for _ in range(2000):
        now += float(torch.rand(1, generator=dice))
        end = min(position + int(torch.randint(1, 40, (1,), generator=dice)), 640)
        checked_at[position:end] = [now] * (end - position)
        position = 0 if turn.advance(end, now) else end
        assert now - min(checked_at) <= turn.reading(now).oldest_unchecked_seconds + 1e-9
    assert world.monitor.scrubber.readings()["full"].oldest_unchecked_seconds > 0


def test_the_gauges_of_a_group_move_with_the_turns():
    world = scrubbing()
    pause(world)
    reading = world.monitor.scrubber.readings()["full"]
    assert reading.cycle_seconds > 0
    assert reading.oldest_unchecked_seconds >= 0
