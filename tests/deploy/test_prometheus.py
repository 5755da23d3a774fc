"""The rules in a real Prometheus that scrapes a real /metrics of our own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcanary_plugin.drill.server import free_port
from tests.deploy.exporter import Exporter
from tests.deploy.prometheus_harness import SKIP_REASON, Prometheus, is_installed

pytestmark = pytest.mark.skipif(not is_installed(), reason=SKIP_REASON)


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with Exporter(free_port()) as running:
        yield running


@pytest.fixture
def prometheus(exporter: Exporter, tmp_path: Path) -> Iterator[Prometheus]:
    with Prometheus([exporter.url], directory=tmp_path / "prometheus") as running:
        running.wait_for_targets()
        yield running


def wait_for_new_samples(prometheus: Prometheus, count: int) -> None:
    """Until ``count`` more scrapes lie in the database."""
    sought = "count_over_time(kvcanary_forwards_total{kind='decode',result='checked'}[1h])"
    before = max(point.value for point in prometheus.wait_for_data(sought))
    prometheus.wait_for_data(f"max({sought}) >= {before + count}")


def test_nothing_fires_while_healthy_and_a_violation_fires(
    exporter: Exporter, prometheus: Prometheus
) -> None:
    wait_for_new_samples(prometheus, 5)
    assert prometheus.firing_alerts() == []

    exporter.send("violation real_kv")
    prometheus.wait_for_alert(
        "KVCanaryViolation", check="real_kv", group="full", dp_rank="0", pool="blue"
    )
    (fired,) = prometheus.firing_alerts()
    assert fired["severity"] == "page"


def test_a_canary_that_stops_fires_as_blind_on_its_rank_alone(
    exporter: Exporter, prometheus: Prometheus
) -> None:
    exporter.send("blind")
    prometheus.wait_for_alert("KVCanaryBlind", reason="stopped", dp_rank="1")
    prometheus.wait_for_alert("KVCanaryInternalErrors", where="launch")
    assert {alert["dp_rank"] for alert in prometheus.firing_alerts()} == {"1"}


def test_a_violation_from_before_the_first_scrape_fires(tmp_path: Path) -> None:
    with Exporter(free_port()) as exporter:
        exporter.send("violation chain")
        with Prometheus([exporter.url], directory=tmp_path) as prometheus:
            prometheus.wait_for_alert("KVCanaryViolation", check="chain")
