"""A whole canary, drain thread included: what scrub, re-verify and adoption show as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import prometheus_client
import pytest
import torch
import yaml

from kvcanary_plugin.canary import Canary, UnguardedGroup, UnsupportedEngineError
from kvcanary_plugin.config import load_config
from kvcanary_plugin.forward import ForwardKind
from kvcanary_plugin.metrics import RankLabels
from tests.monitor.world import Part, World
from tests.waiting import replace_text, wait_until

PROMPT = [11, 7, 7, 300, 0]
SLOTS = [5, 6, 9, 2, 31]
SETTINGS: dict[str, object] = {
    "verify": {"real_kv": "none"},
    "reverify": {"sample": 1.0},
    "scrub": {"bytes_per_second": 1_000_000_000},
    "drain": {"interval_seconds": 0.02},
}


class Served:
    """A world whose forwards run through a whole canary."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text(yaml.safe_dump(SETTINGS))
        self.world = World()
        self.canary = Canary(
            config=load_config(str(path), {}),
            config_path=str(path),
            engine="test",
            ranks=RankLabels(),
            groups=self.world.groups,
            unguarded=(),
            max_requests=8,
        )

    def forward(self, *parts: Part) -> None:
        self.world.step += 1
        for part in parts:
            self.world.put_row(part.row, part.slots, part.prefix)
        step = self.world._step_of(parts, ForwardKind.PREFILL)
        with self.canary.around_forward(lambda: step):
            self.world._store(step)


@pytest.mark.parametrize(
    ("allowed", "has_groups", "starts"),
    [("draft", True, True), ("", True, False), ("mamba", True, False), ("draft", False, False)],
)
def test_mode_raise_starts_with_unguarded_groups_that_the_settings_name(
    registry: prometheus_client.CollectorRegistry, allowed: str, has_groups: bool, starts: bool
) -> None:
    world = World()
    variables = {"KVCANARY_MODE": "raise", "KVCANARY_ALLOW_UNGUARDED": allowed}
    config = load_config(None, variables)

    def start() -> Canary:
        return Canary(
            config=config,
            config_path=None,
            engine="test",
            ranks=RankLabels(),
            groups=world.groups if has_groups else (),
            unguarded=[UnguardedGroup("draft", "a reason")],
            max_requests=8,
        )

    if starts:
        start().close()
        return
    with pytest.raises(UnsupportedEngineError, match="group draft: a reason") as refused:
        start()
    assert ("allow_unguarded: [draft]" in str(refused.value)) is has_groups


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    return registry


@pytest.fixture
def served(registry: prometheus_client.CollectorRegistry, tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "config.yaml")
    yield served
    served.canary.close()


@pytest.fixture
def value(registry: prometheus_client.CollectorRegistry) -> Callable[..., float]:
    def read(name: str, **labels: str) -> float:
        return sum(
            sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    return read


def idle_turns_of(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one at each idle turn from now on; each comes after a poll of the drain."""
    turns: list[None] = []
    drain = served.canary.drain
    on_idle = drain._on_idle
    assert on_idle is not None
    monkeypatch.setattr(drain, "_on_idle", lambda: turns.append(on_idle()))
    return turns


def test_an_idle_engine_shows_turns_and_a_fault_in_a_resident(
    served: Served, value: Callable[..., float]
):
    served.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS))
    wait_until(lambda: value("kvcanary_slots_scrubbed_total", group="full") >= 10 * len(SLOTS))
    assert value("kvcanary_violations_total") == 0
    assert value("kvcanary_scrub_cycle_seconds", group="full") > 0
    served.world.bytes_of(served.world.full_kv[0], 9)[0] ^= 1
    wait_until(lambda: value("kvcanary_violations_total", check="real_kv", phase="scrub") >= 1)
    assert value("kvcanary_internal_errors_total") == 0


def test_a_reload_stops_the_scrub_of_an_idle_engine(
    served: Served, value: Callable[..., float], monkeypatch: pytest.MonkeyPatch
):
    served.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS))
    wait_until(lambda: value("kvcanary_slots_scrubbed_total") > 0)
    off = {**SETTINGS, "scrub": {"bytes_per_second": 0}}
    replace_text(served.path, yaml.safe_dump(off))
    wait_until(lambda: value("kvcanary_config_reloads_total", result="ok") == 1)
    idle_turns = idle_turns_of(served, monkeypatch)
    wait_until(lambda: len(idle_turns) > 2, "the poll that took over has ended, and others")
    before = value("kvcanary_slots_scrubbed_total")
    wait_until(lambda: len(idle_turns) > 15)
    assert value("kvcanary_slots_scrubbed_total") == before


def test_re_verified_and_external_slots_are_counted(served: Served, value: Callable[..., float]):
    monitor = served.canary.monitor
    assert monitor is not None
    monitor.adopt_slots(0, torch.tensor(SLOTS), torch.tensor(PROMPT), torch.arange(5))
    served.world.put_row(1, SLOTS)
    served.forward(Part(uid=1, row=1, tokens=[*PROMPT, 4], slots=[12], prefix=5))
    wait_until(lambda: value("kvcanary_slots_reverified_total", group="full") == len(PROMPT))
    wait_until(lambda: value("kvcanary_external_slots", group="full") == len(SLOTS))
    assert value("kvcanary_violations_total") == 0


def test_checks_that_the_engine_does_not_serve_show_as_unsupported(
    served: Served, value: Callable[..., float]
):
    def supported(check: str) -> float:
        return value("kvcanary_check_supported", group="full", check=check)

    assert supported("real_kv") == supported("table_changed") == supported("chain") == 1
    assert supported("freed_read") == supported("double_alloc") == supported("write_owned") == 0
