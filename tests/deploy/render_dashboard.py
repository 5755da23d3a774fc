"""Draws the dashboard's panels from a real Prometheus, for the docs; needs matplotlib.

``python -m tests.deploy.render_dashboard docs/images/dashboard.png`` serves two ranks for forty
seconds, plants one violation half-way, and asks for exactly the queries of the panels.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvcanary_plugin.drill.server import free_port
from tests.deploy.dashboard import PanelQuery, iter_queries
from tests.deploy.exporter import Exporter
from tests.deploy.prometheus_harness import Prometheus

_SECONDS = 40.0
_COLUMNS = 3
_UNITS = {"ops": "per second", "s": "seconds", "short": "count", "percentunit": "share"}


def main(output: Path) -> None:
    directory = Path(tempfile.mkdtemp())
    with (
        Exporter(free_port()) as exporter,
        Prometheus([exporter.url], directory=directory) as prometheus,
    ):
        prometheus.wait_for_targets()
        time.sleep(_SECONDS / 2)
        exporter.send("violation real_kv 12")
        time.sleep(_SECONDS / 2)
        draw(prometheus, output)


def draw(prometheus: Prometheus, output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, list[PanelQuery]] = {}
    for query in iter_queries(rate_interval="5s"):
        panels.setdefault(query.panel, []).append(query)
    stats = [title for title, queries in panels.items() if queries[0].kind == "stat"]
    graphs = [title for title, queries in panels.items() if queries[0].kind == "timeseries"]
    rows = -(-len(graphs) // _COLUMNS)
    figure, axes = pyplot.subplots(rows, _COLUMNS, figsize=(13, 2.2 * rows + 0.6))
    headline = "     ".join(f"{title}: {stat(prometheus, panels[title])}" for title in stats)
    figure.suptitle(headline, fontsize=8)
    for axis in axes.flat[len(graphs) :]:
        axis.axis("off")
    for axis, title in zip(axes.flat, graphs, strict=False):
        graph(axis, prometheus, title, panels[title])
    figure.tight_layout(rect=(0, 0, 1, 0.985))
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=75)


def stat(prometheus: Prometheus, queries: list[PanelQuery]) -> str:
    points = [point for query in queries for point in prometheus.query(query.expression)]
    unit = {"percentunit": ".0%", "s": ".1f"}.get(queries[0].unit, ".0f")
    return ", ".join(
        " ".join(filter(None, [*point.labels.values(), format(point.value, unit)]))
        for point in points
    )


def graph(axis: Any, prometheus: Prometheus, title: str, queries: list[PanelQuery]) -> None:
    now = time.time()
    for query in queries:
        for labels, samples in prometheus.query_range(query.expression, seconds=_SECONDS):
            legend = query.legend
            for name, value in labels.items():
                legend = legend.replace(f"{{{{{name}}}}}", value.partition(":")[0])
            axis.plot([t - now for t, _ in samples], [v for _, v in samples], label=legend, lw=1)
    axis.set_title(f"{title} ({_UNITS[queries[0].unit]})", fontsize=8)
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=6)
    if len(axis.lines) <= 4:
        axis.legend(fontsize=5, loc="lower left")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
