"""Faults for the simulated engine, one a run, and what the canary makes of them.

``python -m tests.monitor.model_check`` runs the engines healthy and then with faults, and prints
the table that stands in docs/detection.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcanary_plugin.forward import ForwardKind
from tests.monitor.simulated_engine import (
    DAMAGED,
    ENGINES,
    Options,
    Part,
    Pool,
    Request,
    SimulatedEngine,
    mixed,
)

_WARM_UP_TURNS = 25
_TURNS_TO_PLANT = 150
_TURNS_TO_WATCH = 60


def _any(_: Options) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault.

    Fields:
        kind: what happens, in words; what ``SimulatedEngine.fires`` is asked for.
        possible: engines in which it can happen.
        visible: engines in which the canary is able to see it; elsewhere docs/detection.md says why
            not.
    """

    kind: str
    possible: Callable[[Options], bool] = _any
    visible: Callable[[Options], bool] = _any


def _has_window(options: Options) -> bool:
    return options.swa_slots > 0


def _has_host_tier(options: Options) -> bool:
    return bool(options.host_tier)


def _records_travel(options: Options) -> bool:
    return options.host_tier == "carried"


def _folds(options: Options) -> bool:
    return not options.caches_at_schedule


FAULTS = (
    Fault(kind="byte flip"),
    Fault(kind="late foreign write"),
    Fault(kind="record rewritten"),
    Fault(kind="table entries exchanged"),
    Fault(kind="wrong block in the table"),
    Fault(kind="row reused under the forward"),
    Fault(kind="stale lookup entry", possible=_has_window),
    Fault(kind="lookup entry cleared under the forward", possible=_has_window),
    Fault(kind="window mapping kept at free", possible=_has_window),
    Fault(kind="window evicted too far", possible=_has_window),
    Fault(kind="early free"),
    Fault(kind="double free"),
    Fault(kind="request cleaned up twice"),
    Fault(kind="fold frees the kept copy", possible=_folds),
    Fault(kind="evicts a page in use"),
    Fault(kind="dropped write"),
    Fault(kind="foreign write"),
    Fault(kind="dummy batch writes a live slot"),
    Fault(kind="wrong position"),
    Fault(kind="wrong token"),
    Fault(kind="wrong prefix"),
    Fault(kind="identity ignored"),
    Fault(kind="move without bytes"),
    Fault(kind="move forgets a row"),
    Fault(kind="load skipped", possible=_has_host_tier),
    Fault(kind="load without bytes", possible=_has_host_tier, visible=_records_travel),
    Fault(kind="load of another page", possible=_has_host_tier, visible=_records_travel),
)


class FaultyEngine(SimulatedEngine):
    """An engine in which ``kind`` happens once, as soon as it can after :meth:`arm`."""

    def __init__(self, options: Options, *, seed: int, kind: str, **engine: Any) -> None:
        self.kind = kind
        self.dice = random.Random(seed + 1)
        self.armed = False
        self.planted_at: int | None = None
        self._afterwards: list[Callable[[], None]] = []
        super().__init__(options, seed=seed, fault=self._asked, **engine)

    def arm(self) -> None:
        """From now on the fault may happen."""
        self.armed = True

    def _asked(self, kind: str) -> bool:
        if not self.armed or kind != self.kind:
            return False
        self.armed = False
        self.planted_at = self.step
        return True

    def _forward(self, parts: list[Part], kind: ForwardKind) -> None:
        super()._forward(parts, kind)
        while self._afterwards:
            self._afterwards.pop()()

    def before_step(self, parts: list[Part]) -> None:
        self._plant(_BEFORE_STEP, parts)

    def under_forward(self, parts: list[Part]) -> None:
        self._plant(_UNDER_FORWARD, parts)

    def _plant(
        self, how: dict[str, Callable[[FaultyEngine, list[Part]], bool]], parts: list[Part]
    ) -> None:
        if self.armed and self.kind in how and how[self.kind](self, parts):
            self._asked(self.kind)

    # --- targets ----------------------------------------------------------------------------------

    def a_pool(self) -> tuple[int, Pool]:
        pools = self._pools()
        index = self.dice.randrange(len(pools))
        return index, pools[index]

    def a_live_slot(self, pool: Pool) -> int | None:
        """A slot that a request or the tree will read again, in the numbering of ``pool``."""
        live = [slot for node in self._nodes() for slot in node.slots]
        live += [slot for request in self.running for slot in request.slots[: request.computed]]
        if pool is self.swa:
            live = [int(self.lookup[slot]) for slot in live if int(self.lookup[slot]) > 0]
        return self.dice.choice(live) if live else None

    def a_reader(self, parts: Sequence[Part], *, prefix: int = 1) -> Part | None:
        able = [part for part in parts if part.request is not None and part.prefix >= prefix]
        return self.dice.choice(able) if able else None

    def a_writer(self, parts: Sequence[Part]) -> Part | None:
        able = [part for part in parts if part.request is not None]
        return self.dice.choice(able) if able else None

    def afterwards(self, undo: Callable[[], None]) -> None:
        self._afterwards.append(undo)


# --- faults in the state, before a forward --------------------------------------------------------


def _flip_byte(engine: FaultyEngine, parts: list[Part]) -> bool:
    _, pool = engine.a_pool()
    slot = engine.a_live_slot(pool)
    if slot is None:
        return False
    strip, word, bit = (engine.dice.randrange(n) for n in (2, 2, 62))
    pool.kv[strip, slot, word] ^= 1 << bit
    pool.held[slot] = DAMAGED
    return True


def _late_foreign_write(engine: FaultyEngine, parts: list[Part]) -> bool:
    _, pool = engine.a_pool()
    for _ in range(2):
        slot = engine.a_live_slot(pool)
        if slot is None:
            return False
        pool.kv[:, slot] = engine.dice.randrange(1 << 60)
        pool.held[slot] = DAMAGED
    return True


def _rewrite_record(engine: FaultyEngine, parts: list[Part]) -> bool:
    index, pool = engine.a_pool()
    slot = engine.a_live_slot(pool)
    if slot is None:
        return False
    record = engine.monitor.guards[index].records[slot].view(torch.int64)
    record[engine.dice.randrange(4)] += engine.dice.choice([1, -1, 1 << 40])
    return True


def _exchange_entries(engine: FaultyEngine, parts: list[Part]) -> bool:
    part = engine.a_reader(parts, prefix=2 * engine.entry_size)
    if part is None:
        return False
    first, second = engine.dice.sample(range(part.prefix // engine.entry_size), 2)
    row = engine.table[part.row]
    row[first], row[second] = int(row[second]), int(row[first])
    return True


def _wrong_block(engine: FaultyEngine, parts: list[Part]) -> bool:
    part = engine.a_reader(parts)
    if part is None:
        return False
    column = engine.dice.randrange(-(-part.prefix // engine.entry_size))
    last = engine.full.num_slots // engine.entry_size
    before = int(engine.table[part.row, column])
    engine.table[part.row, column] = engine.dice.choice(
        [0, -1, last, *(engine.dice.randrange(last) for _ in range(17))]
    )
    return int(engine.table[part.row, column]) != before


def _stale_lookup(engine: FaultyEngine, parts: list[Part]) -> bool:
    part = engine.a_reader(parts)
    if part is None or engine.swa is None or part.request is None:
        return False
    slot = engine.dice.choice(part.request.slots[: part.prefix][-engine.options.window :])
    engine.lookup[slot] = engine.dice.randrange(engine.swa.num_slots)
    return True


def _early_free(engine: FaultyEngine, parts: list[Part]) -> bool:
    part = engine.a_reader(parts)
    if part is None or part.request is None:
        return False
    request: Request = part.request
    private = request.slots[len(request.nodes) * engine.options.page_size : request.computed]
    if not private:
        return False
    engine._free(private[: engine.dice.randint(1, len(private))])
    return True


def _double_free(engine: FaultyEngine, parts: list[Part]) -> bool:
    if len(engine.full.free_pages) < 2:
        return False
    size = engine.options.page_size
    page = engine.dice.choice(engine.full.free_pages)
    engine._free(list(range(page * size, page * size + size)))
    return True


def _drop_write(engine: FaultyEngine, parts: list[Part]) -> bool:
    part = engine.a_writer(parts)
    if part is None:
        return False
    part.slots[engine.dice.randrange(len(part.slots))] = engine.dice.choice([0, -1])
    return True


def _foreign_write(engine: FaultyEngine, parts: list[Part]) -> bool:
    part = engine.a_writer(parts)
    slot = engine.a_live_slot(engine.full)
    if part is None or slot is None or slot in part.slots:
        return False
    part.slots[engine.dice.randrange(len(part.slots))] = slot
    return True


def _dummy_write(engine: FaultyEngine, parts: list[Part]) -> bool:
    if any(part.request is not None for part in parts):
        return False
    slot = engine.a_live_slot(engine.full)
    if slot is None:
        return False
    parts[0].slots[0] = slot
    return True


def _wrong_position(engine: FaultyEngine, parts: list[Part]) -> bool:
    part = engine.a_writer(parts)
    if part is None:
        return False
    shift = engine.dice.choice([1, -1])
    part.positions = [position + shift for position in part.positions]
    part.content = [mixed(number, shift) for number in part.content]
    return True


def _wrong_token(engine: FaultyEngine, parts: list[Part]) -> bool:
    part = engine.a_writer(parts)
    if part is None:
        return False
    index = engine.dice.randrange(len(part.inputs))
    part.inputs[index] += engine.dice.randint(1, 9)
    part.content[index:] = [mixed(number, 1) for number in part.content[index:]]
    return True


# --- faults under a running forward ---------------------------------------------------------------


def _reuse_row(engine: FaultyEngine, parts: list[Part]) -> bool:
    part = engine.a_reader(parts)
    others = [row for row in range(1, engine.table.shape[0]) if part is None or row != part.row]
    if part is None:
        return False
    before = engine.table[part.row].clone()
    other = engine.table[engine.dice.choice(others)]
    used = -(-part.prefix // engine.entry_size)
    if bool((other[:used] == before[:used]).all()):
        return False
    engine.table[part.row] = other
    row = engine.table[part.row]

    def put_back() -> None:
        row.copy_(before)

    engine.afterwards(put_back)
    return True


def _clear_lookup(engine: FaultyEngine, parts: list[Part]) -> bool:
    part = engine.a_reader(parts)
    if part is None or engine.swa is None or part.request is None:
        return False
    slot = engine.dice.choice(part.request.slots[: part.prefix][-engine.options.window :])
    engine.lookup[slot] = 0
    return True


_BEFORE_STEP: dict[str, Callable[[FaultyEngine, list[Part]], bool]] = {
    "byte flip": _flip_byte,
    "late foreign write": _late_foreign_write,
    "record rewritten": _rewrite_record,
    "table entries exchanged": _exchange_entries,
    "wrong block in the table": _wrong_block,
    "stale lookup entry": _stale_lookup,
    "early free": _early_free,
    "double free": _double_free,
    "dropped write": _drop_write,
    "foreign write": _foreign_write,
    "dummy batch writes a live slot": _dummy_write,
    "wrong position": _wrong_position,
    "wrong token": _wrong_token,
}
_UNDER_FORWARD: dict[str, Callable[[FaultyEngine, list[Part]], bool]] = {
    "row reused under the forward": _reuse_row,
    "lookup entry cleared under the forward": _clear_lookup,
}


# --- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one run.

    Fields:
        kind, engine, seed: what was run.
        planted: whether the fault found an occasion.
        harmed_at: step of the first harmful read, None without one.
        seen_at: step of the first violation, None without one.
        checks: checks of the violations of that step.
    """

    kind: str
    engine: str
    seed: int
    planted: bool
    harmed_at: int | None
    seen_at: int | None
    checks: tuple[str, ...]

    @property
    def missed(self) -> bool:
        return self.harmed_at is not None and self.seen_at is None


def run_fault(fault: Fault, engine_name: str, *, seed: int) -> Outcome:
    """One engine, one fault; watched until it is seen and has done harm, or for a while."""
    engine = FaultyEngine(ENGINES[engine_name], seed=seed, kind=fault.kind)
    for _ in range(_WARM_UP_TURNS + seed % 20):
        engine.turn()
    engine.arm()
    watched = 0
    for _ in range(_TURNS_TO_PLANT + _TURNS_TO_WATCH):
        try:
            engine.turn()
        except IndexError:
            # A broken allocator may run empty where a sound one cannot; the run ends there.
            if engine.planted_at is None:
                raise
            engine._drain()
            break
        watched += engine.planted_at is not None
        if (engine.violations and engine.harmful_reads) or watched >= _TURNS_TO_WATCH:
            break
    seen_at = min((v.step for v in engine.violations), default=None)
    first = {check for v in engine.violations if v.step == seen_at for check in v.checks}
    return Outcome(
        kind=fault.kind,
        engine=engine_name,
        seed=seed,
        planted=engine.planted_at is not None,
        harmed_at=min((step for step, *_ in engine.harmful_reads), default=None),
        seen_at=seen_at,
        checks=tuple(sorted(first)),
    )


@dataclass
class HealthyRun:
    """What a run without faults came to."""

    events: Counter[str] = field(default_factory=Counter)
    slots_verified: int = 0
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_events(self) -> int:
        return sum(self.events.values())


def run_healthy(*, events: int, seed: int, engines: Iterable[str] = tuple(ENGINES)) -> HealthyRun:
    """``events`` random events, spread evenly over the engines, none of them a fault."""
    from kvcanary_plugin.kernels import LaunchTag

    names = list(engines)
    result = HealthyRun()
    begin = time.monotonic()
    for number, name in enumerate(names):
        engine = SimulatedEngine(ENGINES[name], seed=seed + number)
        while sum(engine.events.values()) * len(names) < events:
            for violation in engine.turn():
                result.violations.append(f"{name}, seed {seed + number}: {violation}")
            if engine.harmful_reads:
                raise AssertionError(f"the engine itself is wrong: {engine.harmful_reads[0]}")
        result.events.update(engine.events)
        result.slots_verified += sum(g.slots_run(LaunchTag.VERIFY) for g in engine.monitor.guards)
    result.seconds = time.monotonic() - begin
    return result


def run_faults(*, runs_per_kind: int, seed: int) -> list[Outcome]:
    """Every kind of fault in the engines in which it can happen, in turn."""
    outcomes = []
    for fault in FAULTS:
        able = [name for name, options in ENGINES.items() if fault.possible(options)]
        for number in range(runs_per_kind):
            outcomes.append(run_fault(fault, able[number % len(able)], seed=seed + number))
    return outcomes


def is_visible(outcome: Outcome) -> bool:
    """Whether the canary is able to see this kind of fault in that engine."""
    fault = next(fault for fault in FAULTS if fault.kind == outcome.kind)
    return fault.visible(ENGINES[outcome.engine])


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    """Kinds x detected x steps to detection."""
    rows = [
        "| fault | planted | harmful | reported | steps until then | before harm | first check |",
        "| --- | ---: | ---: | ---: | --- | ---: | --- |",
    ]
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        suffix = "" if is_visible(outcome) else " (adopted, no records)"
        by_kind[outcome.kind + suffix].append(outcome)
    for kind, runs in by_kind.items():
        planted = [run for run in runs if run.planted]
        harmful = [run for run in planted if run.harmed_at is not None]
        delays = [
            run.seen_at - run.harmed_at
            for run in harmful
            if run.seen_at is not None and run.harmed_at is not None
        ]
        early = sum(
            run.seen_at is not None and (run.harmed_at is None or run.seen_at < run.harmed_at)
            for run in planted
        )
        late = [max(delay, 0) for delay in delays]
        steps = f"{statistics.median(late):.0f}, {max(late)}" if late else "-"
        checks = Counter(check for run in planted for check in run.checks)
        first = ", ".join(check for check, _ in checks.most_common(4))
        rows.append(
            f"| {kind} | {len(planted)} | {len(harmful)} | {len(delays)} | {steps} | {early}"
            f" | {first or '-'} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000, help="random events, healthy")
    parser.add_argument("--runs", type=int, default=180, help="runs of each kind of fault")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    healthy = run_healthy(events=arguments.events, seed=arguments.seed)
    print(
        f"healthy: {healthy.num_events} events ({healthy.events['forward']} forwards,"
        f" {healthy.slots_verified} slots verified) in {healthy.seconds:.0f} s,"
        f" {len(healthy.violations)} violations"
    )
    begin = time.monotonic()
    outcomes = run_faults(runs_per_kind=arguments.runs, seed=arguments.seed)
    print(f"faults: {len(outcomes)} runs in {time.monotonic() - begin:.0f} s\n")
    print(as_markdown(outcomes))
    harmful = [o for o in outcomes if o.harmed_at is not None and is_visible(o)]
    missed = [o for o in harmful if o.missed]
    print(f"\nharmful: {len(harmful)}, reported: {len(harmful) - len(missed)}")
    for outcome in missed:
        print(f"missed: {outcome}")


if __name__ == "__main__":
    main()
