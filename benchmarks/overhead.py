"""What the overhead benchmarks of both engines share: the switch, the measurements, the table.

One engine serves every side: without the canary, with it but without the scrub, and with the scrub.
A byte of shared memory says which, so that all sides share weights, graphs, clocks and allocator
state. Before each measurement the prefix cache is forgotten: what one side computed is never read
by another. The process that measures has a :class:`Bench`, the engine's worker a
:class:`WorkerSide`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from kvcanary_plugin.cache import KVCacheGroup
from kvcanary_plugin.drill.metrics_client import MetricsSnapshot
from kvcanary_plugin.kernels import RealKvSource
from kvcanary_plugin.lifecycle import SlotEvents
from kvcanary_plugin.metrics import (
    FORWARDS,
    GROUP_STATE,
    INTERNAL_ERRORS,
    RING_DROPPED,
    SLOTS_REVERIFIED,
    SLOTS_SCRUBBED,
    SLOTS_SEALED,
    SLOTS_VERIFIED,
    VIOLATIONS,
)

SWITCH_VARIABLE: Final = "CANARY_BENCHMARK_SWITCH"
REPORT_VARIABLE: Final = "CANARY_BENCHMARK_REPORT"
OFF, ON, SCRUB = 0, 1, 2
SIDES: Final = {OFF: "off", ON: "on", SCRUB: "scrub"}
_FIRST_PLAIN_TOKEN: Final = 3
_TURNS_OF_FIRST_TOKEN: Final = 14  # in a repeat

Samples = dict[str, dict[str, list[float]]]


class Switch:
    """Which side the engine serves: one byte that two processes share."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 1)

    @classmethod
    def create(cls) -> Switch:
        """A new one, set to off; engine processes started from here on find it."""
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(bytes([OFF]))
        os.environ[SWITCH_VARIABLE] = file.name
        return cls(file.name)

    @classmethod
    def of_environment(cls) -> Switch:
        """The one that the parent process has created."""
        return cls(os.environ[SWITCH_VARIABLE])

    @property
    def side(self) -> int:
        """OFF, ON or SCRUB."""
        return self._memory[0]

    @side.setter
    def side(self, side: int) -> None:
        self._memory[0] = side


# ---- the engine's worker -------------------------------------------------------------------------


class WorkerSide:
    """Follows the switch in the process of the engine that runs the forwards."""

    def __init__(self) -> None:
        self._switch = Switch.of_environment()
        self._report_file = Path(os.environ[REPORT_VARIABLE])
        self._canary: Any = None
        self._side = -1
        self._times: dict[str, list[float]] = {}
        _follow_allocators_only_when(lambda: self._switch.side != OFF)

    def watch(self, canary: Any) -> None:
        """This is the worker's canary: time its steps, and let the switch set its scrub."""
        self._canary = canary
        self._scrub = canary.monitor.config.scrub
        original = canary.around_forward

        @contextmanager
        def around_forward(translate: Callable[[], Any], **options: Any) -> Iterator[None]:
            steps: list[Any] = []

            def translate_and_keep() -> Any:
                steps.append(translate())
                return steps[0]

            forward = original(translate_and_keep, **options)
            begin = time.perf_counter()
            forward.__enter__()
            before = time.perf_counter() - begin
            yield
            begin = time.perf_counter()
            forward.__exit__(None, None, None)
            kind = steps[0].kind.value if steps else "failed"
            seconds = before + time.perf_counter() - begin
            self._times.setdefault(f"{kind}, {SIDES[self._side]}", []).append(seconds * 1e6)

        canary.around_forward = around_forward

    def is_off(self) -> bool:
        """Whether the engine is to serve without the canary; asked before each forward."""
        side = self._switch.side
        if side != self._side and self._canary is not None:
            self._side = side
            self._change_side()
        return side == OFF

    def _change_side(self) -> None:
        monitor = self._canary.monitor
        scrub = self._scrub
        if self._side != SCRUB:
            nothing = {"percent_of_step_time": 0.0, "bytes_per_second": None}
            scrub = scrub.model_copy(update=nothing)
        monitor.reconfigure(monitor.config.model_copy(update={"scrub": scrub}))
        # An idle turn of the scrub that has begun ends before the engine writes unseen.
        with monitor._gate.engine_works():
            pass
        if self._side != OFF and not any(g.group.tracks_allocation for g in monitor.guards):
            # Elsewhere the allocator says that what was written unseen is gone.
            monitor.forget_everything()
        self._write_report()  # between two measurements: it takes milliseconds

    def _write_report(self) -> None:
        guards = self._canary.monitor.guards
        report = {
            "host_us": {
                name: {
                    "forwards": len(values),
                    "median": round(statistics.median(values), 1),
                    "p95": round(sorted(values)[int(len(values) * 0.95)], 1),
                }
                for name, values in self._times.items()
            },
            "device_bytes": device_bytes(self._canary),  # by the object that holds them
            "slots": {guard.group.name: guard.group.num_slots for guard in guards},
        }
        unfinished = self._report_file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(report), encoding="utf-8")
        unfinished.replace(self._report_file)


def _follow_allocators_only_when(is_on: Callable[[], bool]) -> None:
    """Slot events are dropped while the canary is off, as if nobody listened."""

    def guarded(original: Callable[..., None]) -> Callable[..., None]:
        def method(*args: Any, **kwargs: Any) -> None:
            if is_on():
                original(*args, **kwargs)

        return method

    for name in ("alloc", "free", "free_pages", "move", "reset"):
        setattr(SlotEvents, name, guarded(getattr(SlotEvents, name)))


def device_bytes(canary: Any) -> dict[str, int]:
    """Device memory of all tensors that the canary's own objects hold, by class of the object."""
    device = canary.monitor.guards[0].group.device
    views: dict[tuple[int, int], tuple[str, int]] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", canary)]
    while waiting:
        holder, thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            if thing.device.type == device.type:
                # Not its whole storage: events are views of an allocator's list of free slots.
                num_bytes = thing.numel() * thing.element_size()
                views[thing.untyped_storage().data_ptr(), thing.storage_offset()] = (
                    holder,
                    num_bytes,
                )
        elif isinstance(thing, dict):
            waiting += [(holder, item) for item in list(thing.values())]
        elif isinstance(thing, (list, tuple, set, deque)):
            waiting += [(holder, item) for item in list(thing)]
        # The last two describe the engine's own memory.
        elif type(thing).__module__.startswith("kvcanary_plugin") and not isinstance(
            thing, (KVCacheGroup, RealKvSource)
        ):
            names = [*getattr(type(thing), "__slots__", ()), *getattr(thing, "__dict__", ())]
            waiting += [(type(thing).__name__, getattr(thing, name, None)) for name in names]
    totals: dict[str, int] = {}
    for holder, num_bytes in views.values():
        totals[holder] = totals.get(holder, 0) + num_bytes
    return totals


# ---- the process that measures -------------------------------------------------------------------


class BenchEngine(Protocol):
    """What the benchmark needs of an engine. The coroutines run in ``loop``."""

    loop: asyncio.AbstractEventLoop

    def stream(self, prompt: list[int], tokens: int) -> AsyncIterator[int]:
        """Serve greedily; yields how many tokens have come, each time some have."""

    async def serve(self, prompt: list[int], tokens: int) -> None:
        """Serve greedily to the end."""

    async def give_up(self, prompt: list[int], tokens: int, *, after: int) -> None:
        """Serve until ``after`` outputs have come, then abort the request."""

    def forget_prefixes(self) -> bool:
        """Forget every cached prefix; False when the engine refuses for now."""

    def metrics(self) -> str:
        """The canary's metrics in the text format."""

    def shutdown(self) -> None:
        """End all processes."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is served. Lengths in tokens.

    Fields:
        vocabulary: token ids are below it.
        context: longest prompt with its output.
        long_prompt: prompt of the time to the first token.
        decode_prompt: prompt of each request of the time between tokens.
        output: tokens of each of them.
        requests: how many of them run together, one measurement for each number.
    """

    vocabulary: int
    context: int
    long_prompt: int = 8192
    decode_prompt: int = 1024
    output: int = 200
    requests: tuple[int, ...] = (64, 256)


@dataclass(kw_only=True)
class MixedTraffic:
    """What the mixed traffic came to."""

    served: int = 0
    given_up: int = 0
    seconds: float = 0.0


@dataclass
class Bench:
    """One engine and the measurements on it."""

    engine: BenchEngine
    switch: Switch
    load: Load
    _dice: random.Random = field(default_factory=lambda: random.Random(7))

    def prompt(self, length: int) -> list[int]:
        """``length`` random tokens."""
        return [
            self._dice.randrange(_FIRST_PLAIN_TOKEN, self.load.vocabulary) for _ in range(length)
        ]

    def serve_side(self, side: int) -> None:
        """From now on the engine serves ``side``, with no prefix cached."""
        time.sleep(0.1)
        # First the switch: the canary has to hear what is forgotten.
        self.switch.side = side
        deadline = time.monotonic() + 10.0
        while not self.engine.forget_prefixes():
            if time.monotonic() > deadline:
                raise SystemExit("the engine refuses to forget its prefix cache")
            time.sleep(0.1)
        # With its first forward the worker changes over, which takes it milliseconds.
        self._serve([self.prompt(8)], 1)

    def time_to_first_token(self) -> float:
        """Milliseconds of a cold long prompt with one output token."""
        return self._serve([self.prompt(self.load.long_prompt)], 1)[0] * 1e3

    def decode(self, requests: int, *, output: int | None = None) -> float:
        """Median milliseconds between tokens with ``requests`` running and prompts cached."""
        prompts = [self.prompt(self.load.decode_prompt) for _ in range(requests)]
        self._serve(prompts, 1)
        _, stamps = self._serve(prompts, output or self.load.output)
        # Several tokens that arrive together have their gap divided among them.
        gaps = [(b[0] - a[0]) / b[1] for a, b in itertools.pairwise(stamps)]
        return statistics.median(gaps[10:-5] or gaps) * 1e3

    def mixed_traffic(
        self, *, until: Callable[[float], bool], concurrency: int = 48
    ) -> MixedTraffic:
        """Shared prefixes, mixed lengths, prompts in chunks, aborts: until ``until(seconds)``."""
        result = MixedTraffic()
        begin = time.monotonic()
        half = self.load.long_prompt // 2
        beginnings = [self.prompt(self._dice.randint(half // 16, half)) for _ in range(4)]
        while not until(result.seconds):
            self._run(self._round(beginnings, result, concurrency))
            result.seconds = time.monotonic() - begin
        return result

    async def _round(
        self, beginnings: Sequence[list[int]], result: MixedTraffic, concurrency: int
    ) -> None:
        free = asyncio.Semaphore(concurrency)

        async def request() -> None:
            prompt, tokens = self._mixed_request(beginnings)
            is_given_up = self._dice.random() < 0.1
            async with free:
                if is_given_up:
                    after = self._dice.randint(0, tokens // 2)
                    await self.engine.give_up(prompt, tokens, after=after)
                    result.given_up += 1
                else:
                    await self.engine.serve(prompt, tokens)
                    result.served += 1

        await asyncio.gather(*(request() for _ in range(2 * concurrency)))

    def _mixed_request(self, beginnings: Sequence[list[int]]) -> tuple[list[int], int]:
        dice, load = self._dice, self.load
        tokens = dice.randint(1, load.output // 2)
        if dice.random() < 0.04:
            longest = min(2 * load.long_prompt, load.context - tokens - 1)
            return self.prompt(dice.randint(load.long_prompt + 1, longest)), tokens
        beginning = dice.choice(beginnings)
        shared = dice.randint(len(beginning) // 2, len(beginning))
        return beginning[:shared] + self.prompt(dice.randint(1, load.decode_prompt // 2)), tokens

    def _serve(
        self, prompts: list[list[int]], tokens: int
    ) -> tuple[float, list[tuple[float, int]]]:
        """Seconds until all are served, and (time, new tokens) of the first request's outputs."""
        stamps: list[tuple[float, int]] = []

        async def first() -> None:
            async for new in self.engine.stream(prompts[0], tokens):
                stamps.append((time.perf_counter(), new))

        async def serve() -> float:
            begin = time.perf_counter()
            await asyncio.gather(
                first(), *(self.engine.serve(prompt, tokens) for prompt in prompts[1:])
            )
            return time.perf_counter() - begin

        return self._run(serve()), stamps

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.engine.loop.run_until_complete(coroutine)


def measure(
    bench: Bench,
    *,
    sides: Sequence[int],
    repeats: int,
    seconds: float,
    check_guarded: Callable[[], None],
) -> Samples:
    """Samples by measurement and side. The sides come in turn, every other time backwards.

    Clocks drift with the temperature by more than the canary costs: what is short is measured in
    many turns in each repeat. Ends early, with the repeat that would pass ``seconds``.
    """
    load = bench.load
    # What to measure, and in how many turns of a repeat.
    works: dict[str, tuple[Callable[[], float], int]] = {
        f"time to first token, {load.long_prompt} tokens": (
            bench.time_to_first_token,
            _TURNS_OF_FIRST_TOKEN,
        )
    }
    for requests in load.requests:
        works[f"time between tokens, {requests} requests"] = (
            partial(bench.decode, requests),
            max(load.requests) // requests,
        )

    begin = time.monotonic()
    for side in sides:  # warm every side up
        bench.serve_side(side)
        bench.time_to_first_token()
        for requests in load.requests:
            bench.decode(requests, output=min(40, load.output))
    check_guarded()

    samples: Samples = {name: {SIDES[side]: [] for side in sides} for name in works}
    longest = 0.0
    for repeat in range(repeats):
        repeat_begin = time.monotonic()
        if repeat_begin - begin + longest > seconds:
            print(f"{repeat} of {repeats} repeats: the time is up", file=sys.stderr)
            break
        for name, (work, turns) in works.items():
            for turn in range(repeat, repeat + turns):
                for side in sides if turn % 2 == 0 else reversed(sides):
                    bench.serve_side(side)
                    samples[name][SIDES[side]].append(work())
        check_guarded()
        longest = max(longest, time.monotonic() - repeat_begin)
    return samples


def as_table(samples: Samples) -> str:
    """Medians, and the overhead of the pairs of neighbours: median (extremes), mean ± its error."""
    guarded = [side for side in next(iter(samples.values())) if side != SIDES[OFF]]
    titles = {SIDES[ON]: "canary", SIDES[SCRUB]: "with scrub"}
    rows = [
        "| measurement | without, ms | "
        + " | ".join(f"{titles[side]}, ms | overhead (of the pairs)" for side in guarded)
        + " | pairs |",
        "| --- | --- |" + " --- | --- |" * len(guarded) + " --- |",
    ]
    for name, sides in samples.items():
        without = sides[SIDES[OFF]]
        if not without:
            continue
        base = statistics.median(without)
        cells = [name, f"{base:.2f} ({min(without):.2f} - {max(without):.2f})"]
        for side in guarded:
            middle = statistics.median(sides[side])
            pairs = [100 * (b / a - 1) for a, b in zip(without, sides[side], strict=True)]
            cells.append(f"{middle:.2f}")
            cells.append(
                f"{statistics.median(pairs):+.2f} % ({min(pairs):+.2f} .. {max(pairs):+.2f}), "
                f"mean {statistics.mean(pairs):+.2f}{_standard_error(pairs)}"
            )
        rows.append(f"| {' | '.join(cells)} | {len(without)} |")
    return "\n".join(rows)


def _standard_error(pairs: Sequence[float]) -> str:
    return f" ± {statistics.stdev(pairs) / len(pairs) ** 0.5:.2f} %" if len(pairs) > 2 else " %"


def checked_forwards(metrics: str) -> int:
    """Forwards whose checks all ran."""
    return int(MetricsSnapshot.parse(metrics).total(FORWARDS, result="checked"))


def problems_in(metrics: str) -> list[str]:
    """What must not be on the canary's metrics of a healthy run."""
    now = MetricsSnapshot.parse(metrics)
    problems = [
        f"{name} is {now.total(name):.0f}"
        for name in (VIOLATIONS, RING_DROPPED, INTERNAL_ERRORS)
        if now.total(name)
    ]
    unchecked = int(now.total(FORWARDS) - now.total(FORWARDS, result="checked"))
    if unchecked:
        problems.append(f"{unchecked} forwards were not fully checked")
    if not now.total(FORWARDS):
        problems.append("no forward was checked")
    if not now.total(GROUP_STATE, state="guarded"):
        problems.append("no group is guarded")
    return problems


def guard_summary(metrics: str) -> str:
    """What the canary counted: every series of interest that is not zero."""
    now = MetricsSnapshot.parse(metrics)
    lines = []
    for name in (
        FORWARDS,
        VIOLATIONS,
        SLOTS_VERIFIED,
        SLOTS_SEALED,
        SLOTS_SCRUBBED,
        SLOTS_REVERIFIED,
        RING_DROPPED,
        INTERNAL_ERRORS,
        GROUP_STATE,
    ):
        for sample in now.series(name):
            if sample.value:
                labels = ", ".join(
                    value
                    for label, value in sample.labels.items()
                    if label not in ("engine", "pp_rank", "dp_rank")
                )
                lines.append(f"{name} ({labels}): {sample.value:.0f}")
    return "\n".join(lines)


def worker_summary(report: dict[str, Any]) -> str:
    """Host time of the canary's steps, and its memory on the device."""
    lines = ["host time of the canary's steps, us:"]
    for name, times in report["host_us"].items():
        lines.append(
            f"  {name}: median {times['median']}, p95 {times['p95']} ({times['forwards']} forwards)"
        )
    slots = sum(report["slots"].values())
    parts = sorted(report["device_bytes"].items(), key=lambda part: -part[1])
    total = sum(report["device_bytes"].values())
    lines.append(
        f"memory of the canary on the device: {total / 2**20:.1f} MiB for slots {report['slots']}, "
        f"{total / slots:.1f} bytes a slot ("
        + ", ".join(f"{name} {num_bytes / slots:.1f}" for name, num_bytes in parts[:5])
        + ")"
    )
    return "\n".join(lines)


# ---- the command ---------------------------------------------------------------------------------


def arguments_of(description: str | None) -> argparse.Namespace:
    """The command line that both benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument(
        "--sides", nargs="+", default=["off", "on", "scrub"], choices=SIDES.values()
    )
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1e9, help="limit of the paired part")
    parser.add_argument("--checked", type=int, default=3000, help="forwards to check in all")
    parser.add_argument("--mixed-seconds", type=float, nargs=2, default=[15, 60])
    parser.add_argument("--long-prompt", type=int, default=Load.long_prompt)
    parser.add_argument("--decode-prompt", type=int, default=Load.decode_prompt)
    parser.add_argument("--output", type=int, default=Load.output)
    parser.add_argument("--requests", type=int, nargs="+", default=list(Load.requests))
    parser.add_argument("--engine", nargs="*", default=[], metavar="KEY=JSON")
    return parser.parse_args()


def engine_keywords(arguments: argparse.Namespace, defaults: dict[str, Any]) -> dict[str, Any]:
    """``defaults`` with what ``--engine`` says instead; null leaves a keyword out."""
    pairs = (item.split("=", 1) for item in arguments.engine)
    merged = defaults | {name: json.loads(value) for name, value in pairs}
    return {name: value for name, value in merged.items() if value is not None}


def run(arguments: argparse.Namespace, start: Callable[[], BenchEngine]) -> None:
    """Start the engine, measure, print, and exit with 1 if anything was wrong."""
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    report_file, summary_file = out / "worker.json", out / "summary.txt"
    for old in (report_file, summary_file):
        old.unlink(missing_ok=True)

    def say(text: str) -> None:
        """Also into a file of its own: engines log to where this prints."""
        print(text, flush=True)
        with summary_file.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    os.environ[REPORT_VARIABLE] = str(report_file.absolute())
    switch = Switch.create()
    begin = time.monotonic()
    engine = start()
    say(f"engine up after {time.monotonic() - begin:.0f} s\n")
    model = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))
    load = Load(
        vocabulary=model["vocab_size"],
        context=model["max_position_embeddings"],
        long_prompt=arguments.long_prompt,
        decode_prompt=arguments.decode_prompt,
        output=arguments.output,
        requests=tuple(arguments.requests),
    )
    bench = Bench(engine, switch, load)

    def metrics() -> str:
        time.sleep(0.7)  # the drain counts a few times a second
        return engine.metrics()

    def check_guarded() -> None:
        if not report_file.exists():
            say("FAILED: the switch did not reach the engine's worker")
            raise SystemExit(1)
        text = metrics()
        if problems_in(text):
            say(f"FAILED: {'; '.join(problems_in(text))}\n{guard_summary(text)}")
            raise SystemExit(1)

    sides = [side for side, name in SIDES.items() if name in arguments.sides]
    begin = time.monotonic()
    samples = measure(
        bench,
        sides=sides,
        repeats=arguments.repeats,
        seconds=arguments.seconds,
        check_guarded=check_guarded,
    )
    (out / "overhead.json").write_text(json.dumps(samples), encoding="utf-8")
    say(f"{as_table(samples)}\n\npaired part: {time.monotonic() - begin:.0f} s")

    bench.serve_side(sides[-1])
    before = checked_forwards(metrics())
    least, most = arguments.mixed_seconds

    def is_enough(seconds: float) -> bool:
        is_checked = checked_forwards(metrics()) >= arguments.checked
        return seconds >= float(most) or (seconds >= float(least) and is_checked)

    mixed = bench.mixed_traffic(until=is_enough)
    text = metrics()
    say(
        f"mixed traffic: {mixed.served} requests served, {mixed.given_up} aborted,"
        f" {checked_forwards(text) - before} forwards checked in {mixed.seconds:.0f} s\n"
    )
    say(guard_summary(text))
    say(worker_summary(json.loads(report_file.read_text(encoding="utf-8"))))
    problems = problems_in(text)
    if checked_forwards(text) < arguments.checked:
        problems.append(f"fewer than {arguments.checked} forwards checked")
    say(f"FAILED: {'; '.join(problems)}" if problems else "no violation")
    engine.shutdown()
    sys.exit(1 if problems else 0)
