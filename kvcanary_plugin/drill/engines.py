"""A small real server of either engine, by its name: what the commands start."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from kvcanary_plugin.drill.drill import (
    FULL_CASES,
    GUARD_CASES,
    SWA_CASES,
    SWA_GUARD_CASES,
    TABLE_CASES,
    FaultCase,
)
from kvcanary_plugin.drill.server import (
    CUDA_MODEL,
    Device,
    EngineServer,
    EngineSpec,
    ServerSpec,
    SGLangServer,
)
from kvcanary_plugin.drill.vllm_server import VLLMServer, VLLMServerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine as a drill sees it.

    Fields:
        name: of its package, and of its hooks.
        title: its name in sentences.
        spec, server: its classes in this package.
        full_model, swa_model: packaged models without and with sliding-window layers.
        guards, swa_guards: faults beyond those of every engine, and of its sliding-window group.
    """

    name: str
    title: str
    spec: type[EngineSpec]
    server: type[EngineServer]
    full_model: str
    swa_model: str
    guards: tuple[FaultCase, ...]
    swa_guards: tuple[FaultCase, ...]

    def start(
        self,
        model: str,
        *,
        config: Path,
        log_path: Path,
        flags: tuple[str, ...] = (),
        device: Device = "cpu",
    ) -> EngineServer:
        """A server under the canary, not entered yet; ``model`` is one of the spec's."""
        spec = self.spec(model=model, flags=flags, kvcanary_config=config, device=device)
        return self.server(spec, log_path=log_path)

    def default_model(self, device: Device) -> str:
        """A packaged model without sliding-window layers."""
        return CUDA_MODEL if device == "cuda" else self.full_model

    def cases(self, model: str) -> tuple[FaultCase, ...]:
        """The faults of the demo."""
        return FULL_CASES + SWA_CASES if model == self.swa_model else FULL_CASES

    def every_case(self, model: str) -> tuple[FaultCase, ...]:
        """All faults that can be planted in a server of this engine."""
        guards = self.guards + self.swa_guards if model == self.swa_model else self.guards
        return self.cases(model) + guards


SGLANG: Final = Engine(
    name="sglang",
    title="SGLang",
    spec=ServerSpec,
    server=SGLangServer,
    full_model="tiny-llama",
    swa_model="tiny-swa",
    guards=GUARD_CASES,
    swa_guards=SWA_GUARD_CASES,
)
VLLM: Final = Engine(
    name="vllm",
    title="vLLM",
    spec=VLLMServerSpec,
    server=VLLMServer,
    full_model="vllm-llama",
    swa_model="vllm-gemma3",
    guards=TABLE_CASES,
    swa_guards=(),
)
ENGINES: Final[Mapping[str, Engine]] = MappingProxyType({e.name: e for e in (SGLANG, VLLM)})


class NoEngineError(RuntimeError):
    """The engine to start is not installed beside this package."""


def installed_engine(name: str | None) -> Engine:
    """The engine of that name, or the one that there is. NoEngineError if it is not installed."""
    wanted = [ENGINES[name]] if name is not None else list(ENGINES.values())
    for engine in wanted:
        if importlib.util.find_spec(engine.name) is not None:
            return engine
    raise NoEngineError(
        f"kvcanary: engine ... got {' or '.join(e.title for e in wanted)}, not installed here;"
        " allowed an engine in the environment of this command; do run it there (a checkout:"
        " `make venv` builds .venv with SGLang, `make venv-vllm` .venv-vllm with vLLM)"
    )
