from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvcanary_plugin.drill.server import MODELS, MODELS_DIRECTORY
from kvcanary_plugin.drill.weights import write_model


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__")
    tensors = {}
    end = 0
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        assert first == end, "tensors leave no gap and do not overlap"
        end = last
        values = np.frombuffer(data[start + first : start + last], np.float32)
        tensors[name] = values.reshape(entry["shape"])
    assert start + end == len(data)
    return tensors


@pytest.mark.parametrize("model", MODELS)
def test_every_packaged_model_gets_the_same_weights_at_each_writing(model, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
        write_model(MODELS_DIRECTORY / model, directory)

    assert (first / "config.json").exists()
    weights = (first / "model.safetensors").read_bytes()
    assert weights == (second / "model.safetensors").read_bytes()
    tensors = read_safetensors(first / "model.safetensors")
    layers = json.loads((first / "config.json").read_text())["num_hidden_layers"]
    assert f"model.layers.{layers - 1}.self_attn.o_proj.weight" in tensors
    assert f"model.layers.{layers}.self_attn.o_proj.weight" not in tensors
    projections = [tensor for name, tensor in tensors.items() if "proj.weight" in name]
    assert all(np.isfinite(tensor).all() and tensor.std() > 0.05 for tensor in projections)
