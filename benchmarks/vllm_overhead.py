"""What the canary costs a real vLLM engine on a GPU: paired, in one process, with and without.

    python -m benchmarks.vllm_overhead --model DIR --config configs/production.yaml --out DIR

Three sides (``benchmarks.overhead``): without the canary, with it, with its scrub as well. Prints a
Markdown table, then serves mixed traffic until so many forwards were checked, and writes every
sample to DIR/overhead.json. Exit status 1 if anything was violated or left unchecked. The model
runner is the one that VLLM_USE_V2_MODEL_RUNNER (0 or 1) chooses.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks.overhead import WorkerSide, arguments_of, engine_keywords, run


class SwitchedWorker:
    """What the benchmark adds to vLLM's worker class (``worker_extension_cls``)."""

    def follow_benchmark_switch(self) -> None:
        """Everything that the canary has wrapped on the runner is left out while it is off."""
        side = WorkerSide()
        side.watch(self._kvcanary_session.canary)  # type: ignore[attr-defined]
        runner: Any = self.model_runner  # type: ignore[attr-defined]

        def switched(hooked: Any, original: Any) -> Any:
            @functools.wraps(original)
            def method(*args: Any, **kwargs: Any) -> Any:
                return (original if side.is_off() else hooked)(*args, **kwargs)

            return method

        for name, hooked in list(vars(runner).items()):
            if isinstance(hooked, functools.partial) and hasattr(hooked, "__wrapped__"):
                setattr(runner, name, switched(hooked, hooked.__wrapped__))


class VLLMEngine:
    """``AsyncLLM`` as the benchmark needs it."""

    def __init__(self, *, config: Path, keywords: dict[str, Any]) -> None:
        # As `vllm serve` does: CUDA cannot be used in a fork of a process that has asked torch for
        # its GPUs, which the import of tvm_ffi does.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.plugins import load_general_plugins
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        load_general_plugins()
        self._sampling = functools.partial(
            SamplingParams, temperature=0, ignore_eos=True, detokenize=False
        )
        self._kinds = RequestOutputKind
        self._names = (f"bench-{number}" for number in itertools.count())
        self.loop = asyncio.new_event_loop()

        async def start() -> Any:
            arguments = AsyncEngineArgs(
                additional_config={"kvcanary": str(config)},
                worker_extension_cls=f"benchmarks.vllm_overhead.{SwitchedWorker.__name__}",
                **keywords,
            )
            engine = AsyncLLM.from_engine_args(arguments)
            await engine.collective_rpc(SwitchedWorker.follow_benchmark_switch.__name__)
            return engine

        self._engine = self.loop.run_until_complete(start())

    async def stream(self, prompt: list[int], tokens: int) -> AsyncIterator[int]:
        async for output in self._outputs(prompt, tokens, self._kinds.DELTA):
            yield len(output.outputs[0].token_ids)

    async def serve(self, prompt: list[int], tokens: int) -> None:
        async for _ in self._outputs(prompt, tokens, self._kinds.FINAL_ONLY):
            pass

    async def give_up(self, prompt: list[int], tokens: int, *, after: int) -> None:
        outputs = self._outputs(prompt, tokens, self._kinds.DELTA)
        count = 0
        async for _ in outputs:
            count += 1
            if count >= after:
                break
        await outputs.aclose()  # which aborts the request

    def forget_prefixes(self) -> bool:
        return bool(self.loop.run_until_complete(self._engine.reset_prefix_cache()))

    def metrics(self) -> str:
        from prometheus_client import REGISTRY, generate_latest

        return generate_latest(REGISTRY).decode()

    def shutdown(self) -> None:
        self._engine.shutdown()

    def _outputs(self, prompt: list[int], tokens: int, kind: Any) -> Any:
        sampling = self._sampling(max_tokens=tokens, min_tokens=tokens, output_kind=kind)
        return self._engine.generate({"prompt_token_ids": prompt}, sampling, next(self._names))


def main() -> None:
    arguments = arguments_of(__doc__)
    keywords = engine_keywords(
        arguments,
        {
            "model": str(arguments.model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": 16384,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "gpu_memory_utilization": 0.9,
            "seed": 1,
            "compilation_config": {"cudagraph_capture_sizes": [1, 8, 64, 256]},
        },
    )
    run(arguments, lambda: VLLMEngine(config=arguments.config, keywords=keywords))


if __name__ == "__main__":
    main()
