"""A long healthy run: mixed traffic until so many forwards were checked, and not one violation."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from kvcanary_plugin.drill.metrics_client import MetricsSnapshot
from kvcanary_plugin.drill.server import EngineServer
from kvcanary_plugin.drill.settled import settled
from kvcanary_plugin.drill.traffic import TrafficSpec, run_traffic
from kvcanary_plugin.metrics import (
    FORWARDS,
    GROUP_STATE,
    INTERNAL_ERRORS,
    RING_DROPPED,
    SLOTS_VERIFIED,
    VIOLATIONS,
)

_ROUND: Final = TrafficSpec(conversations=96, concurrency=10, burst=48, abort_share=0.12)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakResult:
    """What a soak came to.

    Fields:
        forwards: forwards of the engine, all kinds.
        unchecked: those that were not fully checked.
        slots_verified: slots compared before a forward read them.
        violations: must be zero.
        troubles: dropped rows, internal errors, groups that are not guarded any more.
        requests: requests served to their end.
        aborted: requests given up by the client.
        cached_tokens: prompt tokens that came from the prefix cache.
        prompt_tokens: prompt tokens in all.
        failures: requests that the server did not serve, one line each.
        seconds: wall time.
    """

    forwards: int
    unchecked: int
    slots_verified: int
    violations: int
    troubles: tuple[str, ...]
    requests: int
    aborted: int
    cached_tokens: int
    prompt_tokens: int
    failures: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing at all was wrong."""
        return not (self.violations or self.unchecked or self.troubles or self.failures)

    def as_text(self) -> str:
        """The result in a few lines."""
        lines = [
            f"{self.forwards} forwards in {self.seconds:.0f} s, {self.unchecked} not fully checked",
            (
                f"{self.requests} requests served, {self.aborted} given up by the client;"
                f" {self.cached_tokens} of {self.prompt_tokens} prompt tokens from the prefix cache"
            ),
            f"{self.slots_verified} slots verified, {self.violations} violations",
            *self.troubles,
            *self.failures[:10],
        ]
        return "\n".join(lines)


def run_soak(
    server: EngineServer,
    *,
    forwards: int,
    seed: int = 0,
    conversations: int = _ROUND.conversations,
    progress: Callable[[str], None] = lambda _: None,
) -> SoakResult:
    """Send rounds of ``conversations`` until the server has run ``forwards`` more forwards."""
    begin = time.monotonic()
    before = settled(server.metrics)
    results = []
    for number in itertools.count():
        results.append(
            run_traffic(
                server.url,
                replace(_ROUND, seed=seed + number, conversations=conversations),
                dialect=server.dialect,
            )
        )
        now = settled(server.metrics)
        done = int(now.total(FORWARDS) - before.total(FORWARDS))
        violations = int(now.total(VIOLATIONS) - before.total(VIOLATIONS))
        progress(f"{done} forwards, {violations} violations")
        if done >= forwards or violations:
            break
    checked = int(now.total(FORWARDS, result="checked") - before.total(FORWARDS, result="checked"))
    return SoakResult(
        forwards=done,
        unchecked=done - checked,
        slots_verified=int(now.total(SLOTS_VERIFIED) - before.total(SLOTS_VERIFIED)),
        violations=violations,
        troubles=_troubles(now),
        requests=sum(result.requests for result in results),
        aborted=sum(result.aborted for result in results),
        cached_tokens=sum(result.cached_tokens for result in results),
        prompt_tokens=sum(result.prompt_tokens for result in results),
        failures=tuple(failure for result in results for failure in result.failures),
        seconds=time.monotonic() - begin,
    )


def _troubles(snapshot: MetricsSnapshot) -> tuple[str, ...]:
    counters = (
        f"{name} is {snapshot.total(name):.0f}"
        for name in (RING_DROPPED, INTERNAL_ERRORS)
        if snapshot.total(name)
    )
    states = (
        f"group {sample.labels['group']} is {sample.labels['state']}"
        for sample in snapshot.series(GROUP_STATE)
        if sample.labels["state"] != "guarded" and sample.value
    )
    return (*counters, *states)
