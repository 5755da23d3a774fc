"""What the canary costs a real SGLang engine on a GPU: paired, in one process, with and without.

    python -m benchmarks.sglang_overhead --model DIR --config configs/production.yaml --out DIR

One engine serves all measurements; a byte of shared memory switches the canary's steps around each
forward off and on, so that both sides share weights, graphs, clocks and allocator state. Before
each measurement the prefix cache is flushed: what one side computed is never read by the other.
Prints a Markdown table and writes every sample to DIR/overhead.json.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SWITCH_VARIABLE = "CANARY_BENCHMARK_SWITCH"
HOST_TIMES_VARIABLE = "CANARY_BENCHMARK_HOST_TIMES"
LONG_PROMPT = 8192
DECODE_PROMPT = 1024
OUTPUT = 200
VOCABULARY = 128000
ON, OFF = 1, 0


def run_scheduler(*arguments: Any, **keywords: Any) -> None:
    """A scheduler process whose canary can be switched; replaces the engine's own entry."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    from kvcanary_plugin.hooks.sglang import attach

    with open(os.environ[SWITCH_VARIABLE], "r+b") as file:
        switch = mmap.mmap(file.fileno(), 1)
    guarded = attach.Session.forward
    times = _HostTimes(Path(os.environ[HOST_TIMES_VARIABLE]))

    @functools.wraps(guarded)
    def forward(self: Any, run: Callable[[], Any], batch: Any) -> Any:
        if switch[0] == OFF:
            return run()
        inside = 0.0

        def timed() -> Any:
            nonlocal inside
            begin = time.perf_counter()
            result = run()
            inside = time.perf_counter() - begin
            return result

        begin = time.perf_counter()
        result = guarded(self, timed, batch)
        times.add(batch.forward_mode.name, time.perf_counter() - begin - inside)
        return result

    attach.Session.forward = forward  # type: ignore[method-assign]
    run_scheduler_process(*arguments, **keywords)


class _HostTimes:
    """Host time of the canary's steps by forward mode; written out now and then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._times: dict[str, list[float]] = {}
        self._count = 0

    def add(self, mode: str, seconds: float) -> None:
        self._times.setdefault(mode, []).append(seconds * 1e6)
        self._count += 1
        if self._count % 200 == 0:
            summary = {
                name: {
                    "forwards": len(values),
                    "median_us": statistics.median(values),
                    "p95_us": sorted(values)[int(len(values) * 0.95)],
                }
                for name, values in self._times.items()
            }
            self._path.write_text(json.dumps(summary), encoding="utf-8")


class Bench:
    """One engine and the measurements on it."""

    def __init__(self, engine: Any, switch: mmap.mmap) -> None:
        self._engine = engine
        self._switch = switch
        self._dice = random.Random(7)

    def prompt(self, length: int) -> list[int]:
        return [self._dice.randrange(3, VOCABULARY) for _ in range(length)]

    def switch(self, state: int) -> None:
        """Set the canary on or off and forget every cached prefix."""
        time.sleep(0.3)
        self._engine.flush_cache()
        time.sleep(0.2)
        self._switch[0] = state

    def time_to_first_token(self, repeats: int = 6) -> float:
        """Median milliseconds of a cold prompt of 8192 tokens with one output token."""
        return statistics.median(
            self._serve([self.prompt(LONG_PROMPT)], 1)[0] * 1e3 for _ in range(repeats)
        )

    def decode(self, requests: int) -> float:
        """Median milliseconds between tokens with ``requests`` running and prompts cached."""
        prompts = [self.prompt(DECODE_PROMPT) for _ in range(requests)]
        self._serve(prompts, 1)
        _, stamps = self._serve(prompts, OUTPUT)
        gaps = [b - a for a, b in itertools.pairwise(stamps)][10:-5]
        return statistics.median(gaps) * 1e3

    def _serve(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[float]]:
        """Seconds until all are served, and the times of the first request's tokens."""
        stamps: list[float] = []
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}

        async def first(prompt: list[int]) -> None:
            stream = await self._engine.async_generate(
                input_ids=prompt, sampling_params=sampling, stream=True
            )
            async for _ in stream:
                stamps.append(time.perf_counter())

        async def serve() -> float:
            begin = time.perf_counter()
            others = [
                self._engine.async_generate(input_ids=prompt, sampling_params=sampling)
                for prompt in prompts[1:]
            ]
            await asyncio.gather(first(prompts[0]), *others)
            return time.perf_counter() - begin

        seconds: float = self._engine.loop.run_until_complete(serve())
        return seconds, stamps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--engine", nargs="*", default=[], metavar="KEY=JSON")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(bytes([OFF]))
    os.environ[SWITCH_VARIABLE] = file.name
    os.environ[HOST_TIMES_VARIABLE] = str(arguments.out / "host_times.json")
    with open(file.name, "r+b") as shared:
        switch = mmap.mmap(shared.fileno(), 1)

    # The class itself: `sglang.Engine` is a proxy on which an attribute has no effect.
    from sglang.srt.entrypoints.engine import Engine

    Engine.run_scheduler_process_func = staticmethod(run_scheduler)
    keywords: dict[str, Any] = {
        "model_path": str(arguments.model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "cuda_graph_backend_prefill": "disabled",
        "cuda_graph_bs_decode": [1, 8, 64, 256],
        "max_total_tokens": 655360,
        "max_running_requests": 256,
        "chunked_prefill_size": 8192,
        "max_prefill_tokens": 16384,
        "mem_fraction_static": 0.85,
        "log_level": "info",
        "random_seed": 1,
        "tp_size": arguments.tp_size,
    }
    keywords |= {
        name: json.loads(value) for name, value in (item.split("=", 1) for item in arguments.engine)
    }
    engine = Engine(kvcanary_config=str(arguments.config), **keywords)
    samples = measure(
        Bench(engine, switch),
        repeats=arguments.repeats,
        check_guarded=lambda: assert_guarded(arguments.config),
    )
    (arguments.out / "overhead.json").write_text(json.dumps(samples), encoding="utf-8")
    print(as_table(samples))
    print(guard_summary(arguments.config))
    host = arguments.out / "host_times.json"
    if host.exists():
        print("\nHost time of the canary's steps:", host.read_text(encoding="utf-8"))
    engine.shutdown()


def assert_guarded(config: Path) -> None:
    """Ends the run when the canary is blind, or when the switch did not reach the scheduler."""
    if not Path(os.environ[HOST_TIMES_VARIABLE]).exists():
        raise SystemExit("the switch is not in the scheduler process: both sides would be guarded")
    summary = guard_summary(config)
    if "metrics.port" not in summary and "'state': 'guarded'" not in summary:
        raise SystemExit(f"the canary guards nothing:{summary}")


def guard_summary(config: Path) -> str:
    """What the canary counted meanwhile, from its own endpoint (``metrics.port`` in the config)."""
    from kvcanary_plugin.config import load_config
    from kvcanary_plugin.drill import http_client
    from kvcanary_plugin.drill.metrics_client import MetricsSnapshot

    settings = load_config(config, {}).metrics
    if settings.port is None:
        return "\n(set metrics.port in the config to see what was counted)"
    time.sleep(1.0)
    _, text = http_client.get(
        f"http://{settings.address}:{settings.port}", "/metrics", timeout=10.0
    )
    now = MetricsSnapshot.parse(text)
    lines = [
        f"{name} {dict(sample.labels)} {sample.value:.0f}"
        for name in (
            "kvcanary_forwards_total",
            "kvcanary_violations_total",
            "kvcanary_slots_verified_total",
            "kvcanary_slots_sealed_total",
            "kvcanary_slots_scrubbed_total",
            "kvcanary_internal_errors_total",
            "kvcanary_group_state",
        )
        for sample in now.series(name)
        if sample.value
    ]
    return "\n".join(["", *lines])


def measure(
    bench: Bench, *, repeats: int, check_guarded: Callable[[], None]
) -> dict[str, dict[str, list[float]]]:
    """Samples by measurement and side; sides alternate in the order off on on off."""
    works: dict[str, Callable[[], float]] = {
        f"time to first token, {LONG_PROMPT} tokens": bench.time_to_first_token,
        "time between tokens, 64 requests": lambda: bench.decode(64),
        "time between tokens, 256 requests": lambda: bench.decode(256),
    }
    for state in (OFF, ON):  # warm both sides up
        bench.switch(state)
        for work in works.values():
            work()
    check_guarded()
    samples: dict[str, dict[str, list[float]]] = {name: {"off": [], "on": []} for name in works}
    for repeat in range(repeats):
        order = (OFF, ON) if repeat % 2 == 0 else (ON, OFF)
        for name, work in works.items():
            for state in order:
                bench.switch(state)
                samples[name]["on" if state == ON else "off"].append(work())
    return samples


def as_table(samples: dict[str, dict[str, list[float]]]) -> str:
    rows = [
        "| measurement | without ms | with ms | overhead | spread without |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, sides in samples.items():
        off, on = statistics.median(sides["off"]), statistics.median(sides["on"])
        spread = f"{min(sides['off']):.2f} - {max(sides['off']):.2f}"
        rows.append(f"| {name} | {off:.2f} | {on:.2f} | {100 * (on / off - 1):+.2f} % | {spread} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
