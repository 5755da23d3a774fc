from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcanary_plugin.drill.server import MODELS, MODELS_DIRECTORY, PRESETS, ServerSpec


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
