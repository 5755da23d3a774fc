"""Starts and stops a real vLLM server, on a CPU or a GPU: every flag it gets stands here.

The server runs in the environment of this interpreter, which must have vLLM (``make venv-vllm``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, Literal

from kvcanary_plugin.drill.dialect import VLLM
from kvcanary_plugin.drill.server import (
    CHUNKED_PREFILL_SIZE,
    CONTEXT_LENGTH,
    CUDA_MODEL,
    MAX_RUNNING_REQUESTS,
    NO_COMPILING,
    Device,
    EngineServer,
    EngineSpec,
)

MODELS: Final = ("vllm-gemma3", "vllm-llama", "vllm-mla")
BLOCK_SIZE: Final = 32  # the CPU backend wants multiples of it

# Room for one request of full length and a few others.
_BLOCKS: Final = 96

_ENGINE_FLAGS: Final = (
    "--skip-tokenizer-init",
    *("--served-model-name", "tiny"),
    *("--max-model-len", str(CONTEXT_LENGTH)),
    *("--max-num-seqs", str(MAX_RUNNING_REQUESTS)),
    *("--max-num-batched-tokens", str(CHUNKED_PREFILL_SIZE)),
    *("--block-size", str(BLOCK_SIZE)),
    *("--kv-cache-memory-bytes", "64M"),
    *("--num-gpu-blocks-override", str(_BLOCKS)),
    "--enable-prompt-tokens-details",
)
_DEVICE_FLAGS: Final[Mapping[Device, tuple[str, ...]]] = MappingProxyType(
    {
        # The CPU backend interleaves bfloat16 K/V for AMX tiles, and no source describes that.
        "cpu": ("--dtype", "float32", "--enforce-eager"),
        "cuda": (
            *("--dtype", "bfloat16"),
            *("--compilation-config", '{"cudagraph_capture_sizes": [1, 2, 4, 8]}'),
        ),
    }
)
_ENGINE_ENV: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # The drill forgets cached prefixes over HTTP.
    "VLLM_SERVER_DEV_MODE": "1",
}
# Less than eight requests of usual length need: some are preempted and computed again.
_SMALL_POOL_FLAGS: Final = ("--max-model-len", "1280", "--num-gpu-blocks-override", "42")
_NGRAM_FLAGS: Final = (
    "--speculative-config",
    '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}',
)
_CORES: Final = sorted(os.sched_getaffinity(0))
_TWO_CORES: Final = (_CORES[0], _CORES[-1])
# Where `make venv-vllm` puts the Triton that the V2 runner needs, apart from what V1 imports.
_TRITON_DIRECTORY: Final = Path(sys.prefix) / "triton-interpreter"

RunnerKind = Literal["v1", "v2"]


@dataclass(frozen=True, kw_only=True)
class VLLMServerSpec(EngineSpec):
    """A vLLM server to start; ``model`` is one of :data:`MODELS`, or :data:`CUDA_MODEL`.

    Fields:
        runner: which of vLLM's model runners on a CPU; v2 runs its kernels in Triton's
            interpreter. On a GPU vLLM chooses, or VLLM_USE_V2_MODEL_RUNNER.
    """

    models: ClassVar[tuple[str, ...]] = (*MODELS, CUDA_MODEL)
    # vLLM loads only the plugins named here; this name is nobody's.
    no_plugin_env: ClassVar[Mapping[str, str]] = MappingProxyType({"VLLM_PLUGINS": "none"})

    model: str = "vllm-llama"
    runner: RunnerKind = "v1"

    def program(self, model_path: Path) -> list[str]:
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model_path)]

    def engine_flags(self) -> Sequence[str]:
        return (*_ENGINE_FLAGS, *_DEVICE_FLAGS[self.device])

    def engine_environment(self) -> dict[str, str]:
        environment = dict(_ENGINE_ENV)
        if self.device == "cuda":
            return environment
        environment |= NO_COMPILING
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1" if self.runner == "v2" else "0"
        if self.runner == "v2":
            path = os.environ.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join(
                [str(_TRITON_DIRECTORY), *([path] if path else [])]
            )
            environment["TRITON_INTERPRET"] = "1"
        return environment


# Configurations that are known to run on a CPU.
PRESETS: Final[Mapping[str, VLLMServerSpec]] = MappingProxyType(
    {
        "llama": VLLMServerSpec(),
        "gemma3": VLLMServerSpec(model="vllm-gemma3"),
        # Latent attention: the CPU backend knows one block size for it, and no prefix caching.
        "mla": VLLMServerSpec(
            model="vllm-mla",
            flags=(
                *("--attention-backend", "CPU_MLA"),
                *("--block-size", "16"),
                *("--num-gpu-blocks-override", str(2 * _BLOCKS)),
            ),
        ),
        "small-pool": VLLMServerSpec(flags=_SMALL_POOL_FLAGS),
        "ngram": VLLMServerSpec(flags=_NGRAM_FLAGS),
        "pressure": VLLMServerSpec(flags=(*_SMALL_POOL_FLAGS, *_NGRAM_FLAGS)),
        "v2-llama": VLLMServerSpec(runner="v2"),
        "v2-gemma3": VLLMServerSpec(runner="v2", model="vllm-gemma3"),
        "two-by-two": VLLMServerSpec(
            flags=("--api-server-count", "2", "--tensor-parallel-size", "2"),
            # With one NUMA node vLLM wants to be told a core for each rank.
            env=(("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, _TWO_CORES))),),
        ),
    }
)


class VLLMServer(EngineServer):
    """A running vLLM server."""

    dialect = VLLM
    ready_path = "/health"
