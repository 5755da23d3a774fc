"""The demonstration: a healthy server, then faults, then what the server's own /metrics say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from kvcanary_plugin.drill.drill import (
    Drill,
    DrillResult,
    FaultCase,
    SilentResult,
    as_table,
    write_drill_config,
)
from kvcanary_plugin.drill.engines import Engine
from kvcanary_plugin.drill.metrics_client import MetricsSnapshot
from kvcanary_plugin.drill.server import EngineServer
from kvcanary_plugin.drill.settled import settled
from kvcanary_plugin.drill.traffic import TrafficSpec, run_traffic
from kvcanary_plugin.metrics import (
    FORWARDS,
    GROUP_STATE,
    INTERNAL_ERRORS,
    RING_DROPPED,
    SLOTS_SEALED,
    SLOTS_VERIFIED,
    VIOLATIONS,
)

_HEALTHY_TRAFFIC: Final = TrafficSpec(conversations=32, concurrency=6, burst=32)
# Far above what a run that verifies next to nothing would reach.
_LEAST_SLOTS_VERIFIED: Final = 5000

Say = Callable[[str], None]


def run_demo(engine: Engine, *, model: str, say: Say = print) -> int:
    """Serve, plant, report. Returns 0 only if all of it came out as promised."""
    with TemporaryDirectory(prefix="kvcanary-demo-") as name:
        directory = Path(name)
        config = write_drill_config(directory)
        say(
            f"Starting a real {engine.title} server on the CPU ({model}, random weights)"
            " under the canary."
        )
        with engine.start(model, config=config, log_path=directory / "server.log") as server:
            say(f"Up after {server.startup_seconds:.0f} s at {server.url}; metrics at /metrics.\n")
            problems = _healthy_phase(server, say)
            drill = Drill(server, directory)
            problems += _fault_phase(drill, engine.cases(model), say)
            _show_metrics(server, say)
            problems += _report_in_log(server, say)
        for problem in problems:
            say(f"FAILED: {problem}")
        say(
            "Demo failed."
            if problems
            else "Every fault was reported; the healthy phase was silent."
        )
        return 1 if problems else 0


def _healthy_phase(server: EngineServer, say: Say) -> list[str]:
    say("Healthy phase: concurrent requests, shared prefixes, long prompts in chunks, aborts.")
    result = run_traffic(server.url, _HEALTHY_TRAFFIC, dialect=server.dialect)
    snapshot = settled(server.metrics)
    verified = int(snapshot.total(SLOTS_VERIFIED))
    violations = int(snapshot.total(VIOLATIONS))
    say(
        f"  {result.requests} requests served, {result.aborted} given up by the client;"
        f" {result.tokens} tokens at {result.tokens_per_second:.0f}/s;"
        f" {result.cached_tokens} of {result.prompt_tokens} prompt tokens were in the prefix cache"
    )
    say(
        f"  {int(snapshot.total(FORWARDS))} forwards, {verified} slots verified,"
        f" {int(snapshot.total(SLOTS_SEALED))} sealed, {violations} violations\n"
    )
    problems = list(result.failures)
    if violations:
        problems.append(f"healthy phase: {violations} violations")
    if verified < _LEAST_SLOTS_VERIFIED:
        problems.append(f"healthy phase: only {verified} slots verified")
    problems += _unguarded(snapshot)
    return problems


def _unguarded(snapshot: MetricsSnapshot) -> list[str]:
    problems = []
    unchecked = int(snapshot.total(FORWARDS) - snapshot.total(FORWARDS, result="checked"))
    if unchecked:
        problems.append(f"{unchecked} forwards were not fully checked")
    for name in (INTERNAL_ERRORS, RING_DROPPED):
        if snapshot.total(name):
            problems.append(f"{name} is {snapshot.total(name):.0f}")
    if not snapshot.total(GROUP_STATE, state="guarded"):
        problems.append("no group is guarded")
    return problems


def _fault_phase(drill: Drill, cases: Sequence[FaultCase], say: Say) -> list[str]:
    silent = drill.run_silent()
    say(f"The drill's own traffic without a fault: {_as_text(silent)}.")
    problems = [f"silent run: {silent.violations} violations"] if silent.violations else []
    say("Planting faults, one after the other:\n")
    results: list[DrillResult] = []
    for result in drill.run(cases):
        results.append(result)
        say(f"  {result.case.title}: {_as_words(result)}")
    say(f"\n{as_table(results)}\n")
    problems += [f"not detected: {r.case.title}" for r in results if not r.detected]
    problems += [f"seen too late: {r.case.title}" for r in results if r.steps_until_seen]
    return problems


def _as_text(silent: SilentResult) -> str:
    return (
        f"{silent.forwards} forwards, {silent.slots_verified} slots verified,"
        f" {silent.violations} violations"
    )


def _as_words(result: DrillResult) -> str:
    if not result.planted:
        return "found no target"
    place = f"slot {result.planted['slot']}, position {result.planted['position']}"
    if result.report is None:
        return f"planted at {place}, NOT reported"
    seen: Any = result.report
    return (
        f"planted at {place}, step {result.planted['step']};"
        f" reported as {' + '.join(seen['checks'])} at step {seen['step']},"
        f" request {seen['request_id']}"
    )


def _show_metrics(server: EngineServer, say: Say) -> None:
    say("From the server's /metrics:")
    for line in server.metrics().splitlines():
        if line.startswith(VIOLATIONS) and not line.endswith(" 0.0"):
            say(f"  {line}")
    say("")


def _report_in_log(server: EngineServer, say: Say) -> list[str]:
    reports = [line for line in server.log().splitlines() if "real_kv violation" in line]
    if not reports:
        return ["no report of the flipped byte in the server's log"]
    say("A report as the server's log has it:")
    say(f"  {reports[0]}\n")
    return []
