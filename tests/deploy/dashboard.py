"""The panels of the Grafana dashboard as queries that Prometheus can run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.deploy.paths import DASHBOARD

# What Grafana puts in place of its variables when everything is selected.
VARIABLES = {"$job": ".*", "$instance": ".*"}


@dataclass(frozen=True)
class PanelQuery:
    """One query of one panel."""

    panel: str
    kind: str
    unit: str
    expression: str
    legend: str


def load_dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return content


def iter_queries(*, rate_interval: str = "5m") -> Iterator[PanelQuery]:
    """Every query with its variables filled in, in the order of the panels.

    A rate takes two scrapes within ``rate_interval``: it may well be longer than a test.
    """
    for panel in load_dashboard()["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for variable, value in {**VARIABLES, "$__rate_interval": rate_interval}.items():
                expression = expression.replace(variable, value)
            yield PanelQuery(
                panel=panel["title"],
                kind=panel["type"],
                unit=panel["fieldConfig"]["defaults"]["unit"],
                expression=expression,
                legend=target["legendFormat"],
            )
