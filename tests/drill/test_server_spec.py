from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcanary_plugin.drill import server
from kvcanary_plugin.drill.engines import ENGINES
from kvcanary_plugin.drill.server import (
    CUDA_MODEL,
    MODELS,
    MODELS_DIRECTORY,
    PRESETS,
    EngineSpec,
    ServerSpec,
    free_port,
)
from kvcanary_plugin.drill.vllm_server import VLLMServerSpec


def test_every_model_has_a_packaged_configuration_and_a_preset():
    for model in MODELS:
        config = json.loads((MODELS_DIRECTORY / model / "config.json").read_text())
        assert config["vocab_size"] == 512
    assert {spec.model for spec in PRESETS.values()} == set(MODELS)


def test_an_unknown_model_is_refused_with_the_names_there_are():
    with pytest.raises(
        ValueError, match=r"model \.\.\. got 'gpt'; allowed tiny-gemma2, tiny-llama"
    ):
        ServerSpec(model="gpt")


def test_a_port_goes_to_nobody_else_before_its_server_listens(monkeypatch):
    first, other = free_port(), free_port()
    monkeypatch.setattr(server.secrets, "choice", lambda _: offered.pop(0))
    in_another_process = f"""
from kvcanary_plugin.drill import server
server.secrets.choice = lambda _: offered.pop(0)
offered = [{first}, {other}, {first}]
try:
    server.free_port()
except IndexError:
    print("none of them")
"""
    run = [sys.executable, "-c", in_another_process]
    assert subprocess.check_output(run, text=True) == "none of them\n"
    offered = [first, other]
    with pytest.raises(IndexError):
        free_port()


def test_a_config_without_the_plugin_is_refused():
    with pytest.raises(ValueError, match=r"plugin \.\.\. got False"):
        ServerSpec(plugin=False, kvcanary_config=Path("kvcanary.yaml"))


def test_the_specs_own_flags_come_last_and_its_environment_wins(monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/another/server")
    spec = ServerSpec(
        flags=("--page-size", "16"),
        env=(("OMP_NUM_THREADS", "2"),),
        kvcanary_config=Path("kvcanary.yaml"),
    )

    command = spec.command(model_path=Path("model"), host="127.0.0.1", port=8000)
    environment = spec.environment()

    assert command[-4:] == ["--kvcanary-config", "kvcanary.yaml", "--page-size", "16"]
    assert environment["OMP_NUM_THREADS"] == "2"
    assert "PROMETHEUS_MULTIPROC_DIR" not in environment
    assert "SGLANG_PLUGINS" not in environment
    assert ServerSpec(plugin=False).environment()["SGLANG_PLUGINS"] == "none"


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_on_a_gpu_the_default_model_has_heads_that_gpu_kernels_take(engine):
    spec = engine.spec(model=engine.default_model("cuda"), device="cuda")
    config = json.loads((MODELS_DIRECTORY / CUDA_MODEL / "config.json").read_text())

    assert spec.model == CUDA_MODEL
    assert config["head_dim"] == 128
    assert config["vocab_size"] == 512
    assert engine.default_model("cpu") == engine.full_model


def _command(spec: EngineSpec) -> list[str]:
    return spec.command(model_path=Path("model"), host="127.0.0.1", port=8000)


def test_sglang_on_a_gpu_decodes_in_graphs_and_on_a_cpu_does_not(monkeypatch):
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    on_cpu, on_gpu = ServerSpec(), ServerSpec(model=CUDA_MODEL, device="cuda")

    assert "--disable-cuda-graph" in _command(on_cpu)
    assert "--disable-cuda-graph" not in _command(on_gpu)
    assert "--cuda-graph-bs-decode" in _command(on_gpu)
    assert on_cpu.environment()["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in on_gpu.environment()


def test_vllm_on_a_gpu_runs_graphs_and_chooses_its_own_runner(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "chosen by the caller")
    on_cpu, on_gpu = VLLMServerSpec(), VLLMServerSpec(model=CUDA_MODEL, device="cuda")

    assert "--enforce-eager" in _command(on_cpu)
    assert "--enforce-eager" not in _command(on_gpu)
    assert on_cpu.environment()["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert on_gpu.environment()["VLLM_USE_V2_MODEL_RUNNER"] == "chosen by the caller"
