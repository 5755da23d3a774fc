"""The metrics: complete at zero, named by the rules, visible in every way they are scraped."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry

from kvcanary_plugin.config import CHECK_NAMES, load_config
from kvcanary_plugin.drill.server import free_port
from kvcanary_plugin.forward import ForwardKind, ForwardResult
from kvcanary_plugin.metrics import (
    METRICS,
    RANK_LABELS,
    CanaryMetrics,
    ErrorPlace,
    GroupState,
    Metric,
    RankLabels,
)
from kvcanary_plugin.violations import PHASES

ROOT = Path(__file__).parents[2]


def make(
    registry: CollectorRegistry,
    ranks: RankLabels | None = None,
    extra_labels: dict[str, str] | None = None,
) -> CanaryMetrics:
    return CanaryMetrics(
        engine="test",
        ranks=ranks or RankLabels(),
        groups=["full", "swa"],
        extra_labels=extra_labels,
        version="1.2.3",
        backend="cpu",
        registry=registry,
    )


def series_of(registry: CollectorRegistry, name: str) -> dict[frozenset[tuple[str, str]], float]:
    return {
        frozenset(sample.labels.items()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        text: str = response.read().decode()
        return text


# --- the table --------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_metric_follows_the_naming_practice(metric: Metric) -> None:
    assert re.fullmatch(r"kvcanary_[a-z_]+[a-z]", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.help.endswith((".", "never", "first"))
    assert not set(metric.labels) & set(RANK_LABELS)


def test_names_are_unique() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


# --- series -----------------------------------------------------------------------------------


def test_every_series_exists_at_zero_from_the_start(registry: CollectorRegistry) -> None:
    make(registry)
    expected = {
        "kvcanary_violations_total": len(CHECK_NAMES) * 2 * len(PHASES),
        "kvcanary_slots_verified_total": 2,
        "kvcanary_slots_written_total": 2,
        "kvcanary_slots_sealed_total": 2,
        "kvcanary_slots_scrubbed_total": 2,
        "kvcanary_slots_reverified_total": 2,
        "kvcanary_reverify_left_out_requests_total": 2,
        "kvcanary_forwards_total": len(ForwardKind) * len(ForwardResult),
        "kvcanary_incidents_total": 1,
        "kvcanary_ring_dropped_total": 1,
        "kvcanary_internal_errors_total": len(get_args(ErrorPlace)),
        "kvcanary_config_reloads_total": 2,
        "kvcanary_drain_polls_total": 1,
        "kvcanary_last_check_timestamp_seconds": 1,
        "kvcanary_group_state": 2 * len(get_args(GroupState)),
        "kvcanary_mode": 4,
        "kvcanary_check_enabled": len(CHECK_NAMES),
        "kvcanary_check_supported": len(CHECK_NAMES) * 2,
        "kvcanary_write_input_assert_enabled": 1,
        "kvcanary_external_slots": 2,
        "kvcanary_scrub_cycle_seconds": 2,
        "kvcanary_scrub_oldest_unchecked_seconds": 2,
        "kvcanary_scrub_progress_ratio": 2,
        "kvcanary_build_info": 1,
    }
    assert set(expected) == {metric.name for metric in METRICS}
    for name, count in expected.items():
        series = series_of(registry, name)
        assert len(series) == count, name
        assert set(series.values()) == {1.0 if name == "kvcanary_build_info" else 0.0}, name
        for labels in series:
            assert {"engine", "tp_rank", "pp_rank", "dp_rank"} <= {label for label, _ in labels}


def test_nothing_that_happens_makes_a_series_that_was_not_there(
    registry: CollectorRegistry,
) -> None:
    metrics = make(registry)

    def names() -> set[tuple[str, frozenset[tuple[str, str]]]]:
        return {(m.name, labels) for m in METRICS for labels in series_of(registry, m.name)}

    before = names()
    for check in CHECK_NAMES:
        for phase in PHASES:
            metrics.violations(check, "swa", phase)
    for kind in ForwardKind:
        for result in ForwardResult:
            metrics.forward(kind, result)
    for where in get_args(ErrorPlace):
        metrics.internal_error(where)
    metrics.config_reload("ok")
    metrics.config_reload("refused")
    metrics.group_state("full", "blind")
    metrics.settings(load_config(None, {}))
    metrics.scrub("full", cycle_seconds=1, oldest_unchecked_seconds=2)
    assert names() == before


def test_counts_arrive(registry: CollectorRegistry, sample: Callable[..., float]) -> None:
    metrics = make(registry)
    metrics.violations("real_kv", "full", "verify", 3)
    metrics.slots("kvcanary_slots_verified_total", "swa", 1000)
    metrics.forward(ForwardKind.DECODE, ForwardResult.CHECKED, 2)
    metrics.incident()
    metrics.ring_dropped(7)
    metrics.internal_error("drain")
    metrics.last_check(1234.5)
    metrics.external_slots("full", 9)
    metrics.scrub("full", cycle_seconds=60.0, oldest_unchecked_seconds=90.0)
    violation = {"check": "real_kv", "group": "full", "phase": "verify"}
    assert sample("kvcanary_violations_total", **violation) == 3
    assert sample("kvcanary_slots_verified_total", group="swa") == 1000
    assert sample("kvcanary_forwards_total", kind="decode", result="checked") == 2
    assert sample("kvcanary_incidents_total") == 1
    assert sample("kvcanary_ring_dropped_total") == 7
    assert sample("kvcanary_internal_errors_total", where="drain") == 1
    assert sample("kvcanary_last_check_timestamp_seconds") == 1234.5
    assert sample("kvcanary_external_slots", group="full") == 9
    assert sample("kvcanary_scrub_cycle_seconds", group="full") == 60
    assert sample("kvcanary_scrub_oldest_unchecked_seconds", group="full") == 90
    assert sample("kvcanary_build_info", version="1.2.3", backend="cpu") == 1


def test_group_has_one_state(registry: CollectorRegistry, sample: Callable[..., float]) -> None:
    metrics = make(registry)
    metrics.group_state("swa", "guarded")
    metrics.group_state("swa", "blind")
    states = ("guarded", "unsupported", "blind")
    values = [sample("kvcanary_group_state", group="swa", state=state) for state in states]
    assert values == [0, 0, 1]


def test_a_canary_that_is_off_looks_different_from_a_clean_one(
    registry: CollectorRegistry, sample: Callable[..., float]
) -> None:
    metrics = make(registry)
    metrics.settings(load_config(None, {}))
    assert sample("kvcanary_mode", mode="log") == 1
    assert sample("kvcanary_check_enabled", check="chain") == 1
    assert sample("kvcanary_check_enabled", check="token") == 0
    metrics.settings(load_config(None, {"KVCANARY_MODE": "off"}))
    assert sample("kvcanary_mode", mode="log") == 0
    assert sample("kvcanary_mode", mode="off") == 1
    assert sample("kvcanary_check_enabled", check="chain") == 0


def test_the_write_input_assert_is_shown_as_it_is_switched(
    registry: CollectorRegistry, sample: Callable[..., float]
) -> None:
    metrics = make(registry)
    for mode, switch, shown in (("log", "true", 1), ("log", "false", 0), ("off", "true", 0)):
        variables = {"KVCANARY_MODE": mode, "KVCANARY_WRITE_INPUT_ASSERT": switch}
        metrics.settings(load_config(None, variables))
        assert sample("kvcanary_write_input_assert_enabled") == shown
        # Positions are compared with one another whatever the switch says.
        assert sample("kvcanary_check_enabled", check="write_input") == (mode != "off")


def test_two_ranks_on_one_registry_have_series_of_their_own(registry: CollectorRegistry) -> None:
    make(registry, RankLabels(dp_rank=0)).ring_dropped(1)
    make(registry, RankLabels(dp_rank=1)).ring_dropped(2)
    series = series_of(registry, "kvcanary_ring_dropped_total")
    assert {dict(labels)["dp_rank"]: value for labels, value in series.items()} == {"0": 1, "1": 2}


def test_extra_labels_are_on_every_series(registry: CollectorRegistry) -> None:
    make(registry, extra_labels={"pool": "blue"})
    for metric in METRICS:
        for labels in series_of(registry, metric.name):
            assert dict(labels)["pool"] == "blue"


def test_without_a_registry_the_default_one_is_used() -> None:
    program = """
        import prometheus_client
        from kvcanary_plugin.metrics import CanaryMetrics, RankLabels
        CanaryMetrics(engine="e", ranks=RankLabels(), groups=["full"])
        assert "kvcanary_violations_total{" in prometheus_client.generate_latest().decode()
    """
    run_python(program)


# --- own endpoint -----------------------------------------------------------------------------


def test_own_endpoint_serves_the_metrics(registry: CollectorRegistry) -> None:
    metrics = make(registry)
    port = metrics.serve(port=free_port(), address="127.0.0.1")
    try:
        metrics.ring_dropped(5)
        text = scrape(port)
    finally:
        metrics.close()
    assert re.search(r'kvcanary_ring_dropped_total\{[^}]*engine="test"[^}]*\} 5\.0', text)
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_each_rank_serves_on_a_port_of_its_own(registry: CollectorRegistry) -> None:
    port = free_port()
    metrics = make(registry)
    try:
        assert metrics.serve(port=port - 1, address="127.0.0.1", rank_offset=1) == port
        assert "kvcanary_build_info" in scrape(port)
    finally:
        metrics.close()


def test_port_in_use_is_a_clear_error(registry: CollectorRegistry) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"metrics\.port got {port}.*in use.*free port"):
            make(registry).serve(port=port, address="127.0.0.1")


def test_address_of_another_machine_is_a_clear_error(registry: CollectorRegistry) -> None:
    with pytest.raises(RuntimeError, match=r"192\.0\.2\.1:\d+ cannot be listened on"):
        make(registry).serve(port=free_port(), address="192.0.2.1")


def test_port_that_the_rank_pushes_out_of_range_is_a_clear_error(
    registry: CollectorRegistry,
) -> None:
    with pytest.raises(RuntimeError, match="at most 65534"):
        make(registry).serve(port=65535, address="127.0.0.1", rank_offset=1)


# --- multiprocess mode ------------------------------------------------------------------------


def run_python(program: str, **environ: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_importing_the_plugin_does_not_import_prometheus_client() -> None:
    """Its import decides on multiprocess mode, and the engine sets that up after plugins load."""
    run_python("""
        import sys
        import kvcanary_plugin.cli, kvcanary_plugin.drain, kvcanary_plugin.metrics
        assert "prometheus_client" not in sys.modules
    """)


RANK = """
    import kvcanary_plugin.metrics as m
    from kvcanary_plugin.config import load_config
    rank = {rank}
    metrics = m.CanaryMetrics(
        engine="test", ranks=m.RankLabels(tp_rank=rank), groups=["full"], version="1", backend="cpu"
    )
    metrics.settings(load_config(None, {{}}))
    metrics.violations("chain", "full", "verify", 10 + rank)
    metrics.group_state("full", "guarded")
    metrics.last_check(100.0 + rank)
"""


def test_multiprocess_mode_shows_all_ranks_without_a_pid_label(tmp_path: Path) -> None:
    for rank in (0, 1):
        run_python(RANK.format(rank=rank), PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    collected = run_python(
        """
        import prometheus_client
        from prometheus_client import multiprocess
        registry = prometheus_client.CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        print(prometheus_client.generate_latest(registry).decode())
        """,
        PROMETHEUS_MULTIPROC_DIR=str(tmp_path),
    )
    assert "pid=" not in collected
    lines = [line for line in collected.splitlines() if line.startswith("kvcanary_")]

    def value(name: str, *labels: str) -> float:
        found = [
            line
            for line in lines
            if line.startswith(name + "{") and all(label in line for label in labels)
        ]
        assert len(found) == 1, found
        return float(found[0].rsplit(" ", 1)[1])

    for rank in (0, 1):
        tp = f'tp_rank="{rank}"'
        chain = ('check="chain"', 'phase="verify"', tp)
        assert value("kvcanary_violations_total", *chain) == 10 + rank
        zero = ('check="real_kv"', 'phase="scrub"', tp)
        assert value("kvcanary_violations_total", *zero) == 0
        assert value("kvcanary_group_state", 'state="guarded"', tp) == 1
        assert value("kvcanary_group_state", 'state="blind"', tp) == 0
        assert value("kvcanary_last_check_timestamp_seconds", tp) == 100 + rank
        assert value("kvcanary_mode", 'mode="log"', tp) == 1
        assert value("kvcanary_incidents_total", tp) == 0
        assert value("kvcanary_external_slots", tp) == 0, "a gauge that was never set"


def test_multiprocess_mode_serves_on_the_own_port(tmp_path: Path) -> None:
    port = free_port()
    run_python(
        RANK.format(rank=0)
        + f"""
    import urllib.request
    metrics.serve(port={port}, address="127.0.0.1")
    text = urllib.request.urlopen("http://127.0.0.1:{port}/metrics").read().decode()
    assert [line for line in text.splitlines()
            if 'check="chain"' in line and 'phase="verify"' in line and line.endswith(" 10.0")]
    """,
        PROMETHEUS_MULTIPROC_DIR=str(tmp_path),
    )


def test_prometheus_client_imported_too_early_is_said(tmp_path: Path) -> None:
    output = run_python(f"""
        import os
        import prometheus_client
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = {str(tmp_path)!r}
        from kvcanary_plugin.metrics import CanaryMetrics, RankLabels
        CanaryMetrics(engine="e", ranks=RankLabels(), groups=["full"])
    """)
    assert "prometheus_client was imported before PROMETHEUS_MULTIPROC_DIR was set" in output
