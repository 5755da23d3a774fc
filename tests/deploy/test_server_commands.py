"""How the files start a server: as the drill starts the real ones of the end-to-end tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcanary_plugin.drill.server import EngineSpec, ServerSpec
from kvcanary_plugin.drill.vllm_server import VLLMServerSpec
from tests.deploy.paths import DEPLOY, ENGINES

MODEL = Path("/models/model")
CONFIG = Path("/etc/kvcanary/production.yaml")
SPECS: dict[str, EngineSpec] = {
    "sglang": ServerSpec(kvcanary_config=CONFIG),
    "vllm": VLLMServerSpec(kvcanary_config=CONFIG),
}
# What the drill starts with `python -m`, as the packages install it.
PROGRAMS = {
    "sglang": ["python3", "-m", "sglang.launch_server"],
    "vllm": ["vllm", "serve"],  # vllm.entrypoints.cli.main
}


def in_compose(engine: str) -> tuple[list[str], list[str]]:
    """(program, arguments) of a service."""
    text = (DEPLOY / "docker" / "docker-compose.yaml").read_text()
    service: dict[str, Any] = yaml.safe_load(text)["services"][engine]
    command = [str(MODEL) if word.startswith("${MODEL") else word for word in service["command"]]
    program = service.get("entrypoint", [])
    split = len(PROGRAMS[engine]) - len(program)
    return program + command[:split], command[split:]


def in_kubernetes(engine: str) -> tuple[list[str], list[str]]:
    """(program, arguments) of a container, flags apart from their values."""
    file = DEPLOY / "kubernetes" / "example" / engine / "deployment.yaml"
    (container,) = yaml.safe_load(file.read_text())["spec"]["template"]["spec"]["containers"]
    return container["command"], [word for arg in container["args"] for word in arg.split("=")]


@pytest.mark.parametrize("read", [in_compose, in_kubernetes])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_argument_is_one_that_a_real_server_is_started_with(engine: str, read: Any) -> None:
    program, arguments = read(engine)
    port = arguments[arguments.index("--port") + 1]
    started = SPECS[engine].command(model_path=MODEL, host="0.0.0.0", port=int(port))
    assert program == PROGRAMS[engine]
    assert set(arguments) <= set(started)
    # The model stands where the drill has it: behind its flag, or first.
    before_model = arguments[: arguments.index(str(MODEL))]
    assert before_model == {"sglang": ["--model-path"], "vllm": []}[engine]


@pytest.mark.parametrize("engine", ENGINES)
def test_compose_names_the_configuration_and_kubernetes_leaves_it_to_the_component(
    engine: str,
) -> None:
    _, arguments = in_compose(engine)
    assert arguments[arguments.index("--kvcanary-config") + 1] == str(CONFIG)
    assert "--kvcanary-config" not in in_kubernetes(engine)[1]
