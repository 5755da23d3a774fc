"""The whole way: a real SGLang server, a planted fault, a real Prometheus, a firing alert."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvcanary_plugin.commands.status import server_status
from kvcanary_plugin.drill.drill import FULL_CASES, Drill, write_drill_config
from kvcanary_plugin.drill.server import ServerSpec, SGLangServer
from kvcanary_plugin.drill.traffic import TrafficSpec, run_traffic
from tests.deploy.dashboard import iter_queries
from tests.deploy.prometheus_harness import SKIP_REASON, Prometheus, is_installed

pytestmark = pytest.mark.e2e

# Nothing fills these on the healthy run: no violation, no traffic of such a kind.
EMPTY_WHILE_HEALTHY = {"Violations since the start"}


@dataclass(frozen=True)
class Site:
    """A guarded server, with the Prometheus that scrapes it."""

    server: SGLangServer
    prometheus: Prometheus
    directory: Path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if importlib.util.find_spec("sglang") is None and not os.environ.get("REQUIRE_ENGINE"):
        pytest.skip("sglang is not installed; `make venv` builds an environment that has it")
    if not is_installed():
        pytest.skip(SKIP_REASON)
    directory = tmp_path_factory.mktemp("site")
    spec = ServerSpec(kvcanary_config=write_drill_config(directory))
    with (
        SGLangServer(spec, log_path=directory / "server.log") as server,
        Prometheus([f"{server.url}/metrics"], directory=directory / "prometheus") as prometheus,
    ):
        prometheus.wait_for_targets()
        yield Site(server, prometheus, directory)


def test_healthy_traffic_fires_nothing_and_a_planted_fault_fires_the_violation_alert(
    site: Site,
) -> None:
    result = run_traffic(site.server.url, TrafficSpec(conversations=24, concurrency=6))
    assert not result.failures
    site.prometheus.wait_until(
        lambda: bool(site.prometheus.query("kvcanary:forwards_checked:ratio5m == 1")),
        "the traffic is in the database",
    )
    assert site.prometheus.firing_alerts() == []
    assert server_status(site.server.url).exit_status == 0
    for query in iter_queries():
        if query.panel not in EMPTY_WHILE_HEALTHY:
            assert site.prometheus.query(query.expression.replace("5s", "60s")), query

    case = FULL_CASES[0]
    (planted,) = Drill(site.server, site.directory).run([case])
    assert planted.detected
    site.prometheus.wait_for_alert("KVCanaryViolation", check=case.checks[0], timeout=15.0)
    assert {alert["alertname"] for alert in site.prometheus.firing_alerts()} == {
        "KVCanaryViolation"
    }
    status = server_status(site.server.url)
    assert (status.exit_status, status.verdict) == (1, "violations")
