"""The whole way: a real SGLang server, a planted fault, a real Prometheus, a firing alert.

The same with vLLM is in ``tests/vllm``.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from kvcanary_plugin.drill.drill import write_drill_config
from kvcanary_plugin.drill.server import ServerSpec, SGLangServer
from tests.deploy.alerting import assert_that_only_a_fault_fires
from tests.deploy.prometheus_harness import SKIP_REASON, Prometheus, is_installed

pytestmark = pytest.mark.e2e


def test_healthy_traffic_fires_nothing_and_a_planted_fault_fires_the_violation_alert(
    tmp_path: Path,
) -> None:
    if importlib.util.find_spec("sglang") is None and not os.environ.get("REQUIRE_ENGINE"):
        pytest.skip("sglang is not installed; `make venv` builds an environment that has it")
    if not is_installed():
        pytest.skip(SKIP_REASON)
    spec = ServerSpec(kvcanary_config=write_drill_config(tmp_path))
    with (
        SGLangServer(spec, log_path=tmp_path / "server.log") as server,
        Prometheus([f"{server.url}/metrics"], directory=tmp_path / "prometheus") as prometheus,
    ):
        assert_that_only_a_fault_fires(server, prometheus, tmp_path, engine="sglang")
