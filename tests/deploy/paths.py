"""Where the files under test are."""

from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
DEPLOY: Final = ROOT / "deploy"
DOCS: Final = ROOT / "docs"
RULES: Final = DEPLOY / "prometheus" / "kvcanary.rules.yaml"
DASHBOARD: Final = DEPLOY / "grafana" / "kvcanary.json"
# As the services of the compose file and the examples for Kubernetes are called.
ENGINES: Final = ("sglang", "vllm")


def load_rules() -> list[dict[str, Any]]:
    """Every rule of every group, in order."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alert_names() -> tuple[str, ...]:
    """Names of the alerts, each once, in the order of the file."""
    return tuple(dict.fromkeys(rule["alert"] for rule in load_rules() if "alert" in rule))
