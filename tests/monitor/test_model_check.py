"""Random runs of the simulated engine: healthy ones are silent, harmful faults are reported.

The long form runs with ``-m soak`` (or ``python -m tests.monitor.model_check``, which prints the
table that stands in docs/detection.md).
"""

from __future__ import annotations

import pytest

from tests.monitor.model_check import (
    FAULTS,
    Outcome,
    as_markdown,
    is_visible,
    run_fault,
    run_faults,
    run_healthy,
)
from tests.monitor.simulated_engine import ENGINES

SHORT_EVENTS = 6_000
LONG_EVENTS = 2_000_000
LEAST_SHARE_REPORTED = 0.99
# Kinds that show in every run in which they are planted, by the check that must be among the first.
CERTAIN = {
    "table entries exchanged": "position",
    "double free": "double_free",
    "early free": "freed_read",
    "wrong token": "write_input",
    "foreign write": "write_owned",
    "row reused under the forward": "table_changed",
    "dummy batch writes a live slot": "write_owned",
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_healthy_engine_is_silent(name: str):
    run = run_healthy(events=SHORT_EVENTS, seed=11, engines=[name])
    assert run.violations == []
    assert run.events["forward"] > 100
    assert run.slots_verified > 3000


def test_a_short_run_has_everything_that_engines_do():
    run = run_healthy(events=6 * SHORT_EVENTS, seed=400)
    everyday = ("prefix hit", "eviction", "fold", "preemption", "abort", "move", "row move")
    special = ("flush", "rejected tokens", "offload", "load", "window eviction", "weight update")
    assert {kind for kind in (*everyday, *special) if not run.events[kind]} == set()
    assert run.violations == []


@pytest.mark.parametrize("kind", CERTAIN)
def test_a_fault_is_reported_by_its_check(kind: str):
    fault = next(fault for fault in FAULTS if fault.kind == kind)
    outcomes = [run_fault(fault, "token slots", seed=seed) for seed in range(20, 23)]
    assert all(outcome.planted for outcome in outcomes)
    assert all(outcome.seen_at is not None for outcome in outcomes), outcomes
    assert any(CERTAIN[kind] in outcome.checks for outcome in outcomes), outcomes


@pytest.mark.soak
def test_two_million_events_are_silent(capsys: pytest.CaptureFixture[str]):
    run = run_healthy(events=LONG_EVENTS, seed=1)
    with capsys.disabled():
        print(
            f"\n{run.num_events} events, {run.events['forward']} forwards, {run.slots_verified}"
            f" slots verified, {run.seconds:.0f} s, {len(run.violations)} violations"
        )
    assert run.num_events >= 200_000
    assert run.violations == []


@pytest.mark.soak
def test_harmful_faults_are_reported(capsys: pytest.CaptureFixture[str]):
    outcomes = run_faults(runs_per_kind=100, seed=1)
    with capsys.disabled():
        print("\n" + as_markdown(outcomes))
    harmful: list[Outcome] = [o for o in outcomes if o.harmed_at is not None and is_visible(o)]
    missed = [outcome for outcome in harmful if outcome.missed]
    assert len(harmful) > 1000
    assert len(missed) <= (1 - LEAST_SHARE_REPORTED) * len(harmful), missed
