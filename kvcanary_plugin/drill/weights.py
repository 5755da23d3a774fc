"""Random weights for the packaged models, strong enough for the K/V cache to matter.

An engine's own dummy weights are so small that the next token hangs on the last token alone: a
greedy comparison would pass over a cache full of noise. Weights of usual size make every output
depend on the whole prefix.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

# With 1 the softmax over a long prefix would be close to an average.
_QUERY_GAIN: Final = 3.0
# Smaller than what a layer adds: the next token hangs on the prefix more than on the last token.
_EMBEDDING_SIZE: Final = 0.3
# Small beside what it is added to, which it would drown otherwise.
_BIAS_SIZE: Final = 0.1
# What an adapter changes, and by how much: enough for other outputs.
_ADAPTED: Final = ("q_proj", "v_proj")
_ADAPTER_RANK: Final = 8
_ADAPTER_SIZE: Final = 0.2

Shape = tuple[int, ...]


def write_model(source: Path, directory: Path) -> None:
    """Make ``directory`` a model path: the configuration in ``source`` and weights for it.

    The same configuration gives the same weights, bit for bit.
    """
    shutil.copy(source / "config.json", directory / "config.json")
    config = json.loads((source / "config.json").read_text())
    tensors = {name: _values(name, shape, config) for name, shape in _shapes(config).items()}
    _write_safetensors(directory / "model.safetensors", tensors)


def write_adapter(source: Path, directory: Path, seed: int) -> Path:
    """Make ``directory`` a LoRA adapter for the model in ``source``, and return it."""
    config = json.loads((source / "config.json").read_text())
    shapes = _attention_shapes(config)
    rng = np.random.default_rng(seed)
    tensors = {}
    for number in range(config["num_hidden_layers"]):
        for name in _ADAPTED:
            rows, columns = shapes[f"{name}.weight"]
            prefix = f"base_model.model.model.layers.{number}.self_attn.{name}"
            for part, shape in (("A", (_ADAPTER_RANK, columns)), ("B", (rows, _ADAPTER_RANK))):
                values = rng.standard_normal(shape, np.float32) * np.float32(_ADAPTER_SIZE)
                tensors[f"{prefix}.lora_{part}.weight"] = values
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _ADAPTER_RANK,
        "lora_alpha": 2 * _ADAPTER_RANK,
        "target_modules": list(_ADAPTED),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(adapter))
    _write_safetensors(directory / "adapter_model.safetensors", tensors)
    return directory


def _shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Names and shapes of a dense decoder in the Hugging Face layout."""
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    vocabulary = config["vocab_size"]
    is_gemma = _is_gemma(config)

    layer = {f"self_attn.{name}": shape for name, shape in _attention_shapes(config).items()}
    layer |= {
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if is_gemma:
        layer["pre_feedforward_layernorm.weight"] = (hidden,)
        layer["post_feedforward_layernorm.weight"] = (hidden,)

    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    if not is_gemma:  # its output layer is the embedding
        shapes["lm_head.weight"] = (vocabulary, hidden)
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def _is_gemma(config: Mapping[str, Any]) -> bool:
    return str(config["model_type"]).startswith("gemma")


def _attention_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    if config["model_type"] == "deepseek_v2":
        rank, value = config["kv_lora_rank"], config["v_head_dim"]
        plain, rotary = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        return {
            "q_proj.weight": (heads * (plain + rotary), hidden),
            "kv_a_proj_with_mqa.weight": (rank + rotary, hidden),
            "kv_a_layernorm.weight": (rank,),
            "kv_b_proj.weight": (heads * (plain + value), rank),
            "o_proj.weight": (hidden, heads * value),
        }

    head_dim = config.get("head_dim", hidden // heads)
    query = heads * head_dim
    key_value = config["num_key_value_heads"] * head_dim
    shapes: dict[str, Shape] = {
        "q_proj.weight": (query, hidden),
        "k_proj.weight": (key_value, hidden),
        "v_proj.weight": (key_value, hidden),
        "o_proj.weight": (hidden, query),
    }
    if config["model_type"] == "qwen2":
        shapes |= {
            "q_proj.bias": (query,),
            "k_proj.bias": (key_value,),
            "v_proj.bias": (key_value,),
        }
    if config["model_type"] == "gemma3_text":
        shapes |= {"q_norm.weight": (head_dim,), "k_norm.weight": (head_dim,)}
    return shapes


def _values(name: str, shape: Shape, config: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    if name.endswith("norm.weight"):
        # Gemma stores what a norm's scale has above 1.
        scale = 0.0 if _is_gemma(config) else 1.0
        return np.full(shape, scale, np.float32)
    # A seed for each name: a model with more layers begins like one with fewer.
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    if name.endswith("bias"):
        return values * np.float32(_BIAS_SIZE)
    if name == "model.embed_tokens.weight":
        # Gemma scales what it looks up by the square root of the hidden size.
        scale = shape[1] ** 0.5 if _is_gemma(config) else 1.0
        return values * np.float32(_EMBEDDING_SIZE / scale)
    gain = _QUERY_GAIN if name.endswith("q_proj.weight") else 1.0
    return values * np.float32(gain / shape[1] ** 0.5)


def _write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """The safetensors format: header length as a 64-bit integer, JSON header, raw values."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())
