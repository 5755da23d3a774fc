"""The dashboard: every query runs in a real Prometheus and returns data; every metric is shown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvcanary_plugin.drill.server import free_port
from kvcanary_plugin.metrics import METRICS
from tests.deploy.dashboard import PanelQuery, iter_queries, load_dashboard
from tests.deploy.exporter import Exporter
from tests.deploy.paths import DEPLOY, load_rules
from tests.deploy.prometheus_harness import SKIP_REASON, Prometheus, is_installed
from tests.deploy.render_dashboard import draw

QUERIES = tuple(iter_queries())


@pytest.fixture(scope="module")
def busy_prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes a server that has served for some seconds and had one violation."""
    if not is_installed():
        pytest.skip(SKIP_REASON)
    directory = tmp_path_factory.mktemp("prometheus")
    with (
        Exporter(free_port()) as exporter,
        Prometheus([exporter.url], directory=directory) as prometheus,
    ):
        prometheus.wait_for_targets()
        exporter.send("violation chain")
        prometheus.wait_for_alert("KVCanaryViolation")
        # Two scrapes with forwards between them.
        prometheus.wait_for_data("kvcanary:forwards_checked:ratio5m")
        yield prometheus


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.panel}: {query.legend}")
def test_the_panel_has_data_with_the_labels_of_its_legend(
    query: PanelQuery, busy_prometheus: Prometheus
) -> None:
    points = busy_prometheus.wait_for_data(query.expression)
    assert not any(math.isnan(point.value) for point in points)
    assert set(re.findall(r"{{(\w+)}}", query.legend)) <= points[0].labels.keys()


def test_the_violation_shows(busy_prometheus: Prometheus) -> None:
    by_title = {query.panel: query.expression for query in QUERIES}
    assert busy_prometheus.wait_for_data(by_title["New violations (15 min)"])[0].value >= 1
    (row,) = busy_prometheus.wait_for_data(by_title["Violations since the start"])
    assert row.labels["check"] == "chain"


def test_the_figure_of_the_docs_can_be_drawn(busy_prometheus: Prometheus, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    draw(busy_prometheus, tmp_path / "images" / "dashboard.png")
    assert (tmp_path / "images" / "dashboard.png").read_bytes().startswith(b"\x89PNG")


def test_every_metric_is_on_the_dashboard_and_nothing_else() -> None:
    text = " ".join(query.expression for query in QUERIES)
    records = {rule["record"]: rule["expr"] for rule in load_rules() if "record" in rule}
    used = set(re.findall(r"\bkvcanary[a-z_:0-9]+", text))
    metrics = {metric.name for metric in METRICS}
    assert used <= metrics | records.keys()
    through_records = " ".join(records[name] for name in used & records.keys())
    assert metrics == set(re.findall(r"\bkvcanary_[a-z_]+", text + through_records))


def test_panels_have_a_description_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    panels = load_dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] == "row" or panel["description"]
        grid = panel["gridPos"]
        cells = {
            (grid["x"] + dx, grid["y"] + dy) for dx in range(grid["w"]) for dy in range(grid["h"])
        }
        assert not cells & taken, panel["title"]
        assert grid["x"] + grid["w"] <= 24
        taken |= cells


def test_the_provisioned_data_source_is_the_one_of_the_compose_file() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    services = yaml.safe_load((DEPLOY / "docker" / "docker-compose.yaml").read_text())["services"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services
    (provider,) = yaml.safe_load((provisioning / "dashboards/kvcanary.yaml").read_text())[
        "providers"
    ]
    mounts = services["grafana"]["volumes"]
    assert any(mount.split(":")[1].startswith(provider["options"]["path"]) for mount in mounts)
