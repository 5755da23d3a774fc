"""The whole way of an alert, whatever the engine: a real server, a planted fault, a Prometheus."""

from __future__ import annotations

from pathlib import Path

from kvcanary_plugin.commands.status import server_status
from kvcanary_plugin.drill.drill import FULL_CASES, Drill
from kvcanary_plugin.drill.server import EngineServer
from kvcanary_plugin.drill.traffic import TrafficSpec, run_traffic
from tests.deploy.dashboard import iter_queries
from tests.deploy.prometheus_harness import Prometheus

# Nothing fills these on the healthy run: no violation, no traffic of such a kind.
EMPTY_WHILE_HEALTHY = {"Violations since the start"}


def assert_that_only_a_fault_fires(
    server: EngineServer, prometheus: Prometheus, drill_directory: Path, *, engine: str
) -> None:
    """Healthy traffic fires nothing and fills the dashboard; a fault fires one alert.

    Args:
        server: new, started with the settings that ``write_drill_config`` wrote.
        prometheus: scrapes it.
        drill_directory: where these settings are.
        engine: label of its metrics.
    """
    prometheus.wait_for_targets()
    traffic = TrafficSpec(conversations=24, concurrency=6)
    result = run_traffic(server.url, traffic, dialect=server.dialect)
    assert not result.failures
    prometheus.wait_for_data("kvcanary:forwards_checked:ratio5m == 1")
    assert prometheus.firing_alerts() == []
    assert server_status(server.url).exit_status == 0
    for query in iter_queries():
        if query.panel not in EMPTY_WHILE_HEALTHY:
            prometheus.wait_for_data(query.expression)

    case = FULL_CASES[0]
    (planted,) = Drill(server, drill_directory).run([case])
    assert planted.detected
    prometheus.wait_for_alert("KVCanaryViolation", engine=engine, check=case.checks[0])
    assert {alert["alertname"] for alert in prometheus.firing_alerts()} == {"KVCanaryViolation"}
    status = server_status(server.url)
    assert (status.exit_status, status.verdict) == (1, "violations")
