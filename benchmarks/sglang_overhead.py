"""What the canary costs a real SGLang engine on a GPU: paired, in one process, with and without.

    python -m benchmarks.sglang_overhead --model DIR --config configs/production.yaml --out DIR

Three sides (``benchmarks.overhead``): without the canary, with it, with its scrub as well. Prints a
Markdown table, then serves mixed traffic until so many forwards were checked, and writes every
sample to DIR/overhead.json. Exit status 1 if anything was violated or left unchecked.
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
from kvcanary_plugin.drill import http_client

METRICS_PORT_VARIABLE = "KVCANARY_METRICS__PORT"


def run_scheduler(*arguments: Any, **keywords: Any) -> None:
    """A scheduler process whose canary can be switched; replaces the engine's own entry."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    from kvcanary_plugin.canary import Canary
    from kvcanary_plugin.hooks.sglang import attach

    worker = WorkerSide()
    make_canary = Canary.__init__

    @functools.wraps(make_canary)
    def init(self: Any, **settings: Any) -> None:
        make_canary(self, **settings)
        worker.watch(self)

    around, after_new_batch, after_sample = (
        attach.around_forward,
        attach.after_new_batch,
        attach.after_sample,
    )

    @functools.wraps(around)
    def around_forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        if worker.is_off():
            return original(*args, **kwargs)
        return around(original, *args, **kwargs)

    def unless_off(hook: Any) -> Any:
        @functools.wraps(hook)
        def switched(*args: Any, **kwargs: Any) -> None:
            if not worker.is_off():
                hook(*args, **kwargs)

        return switched

    Canary.__init__ = init  # type: ignore[method-assign]
    attach.around_forward = around_forward
    attach.after_new_batch = unless_off(after_new_batch)
    attach.after_sample = unless_off(after_sample)
    run_scheduler_process(*arguments, **keywords)


class SGLangEngine:
    """``sglang.Engine`` as the benchmark needs it."""

    def __init__(self, *, config: Path, keywords: dict[str, Any]) -> None:
        # The class itself: `sglang.Engine` is a proxy on which an attribute has no effect.
        from sglang.srt.entrypoints.engine import Engine

        port = os.environ.setdefault(METRICS_PORT_VARIABLE, "9401")
        self._metrics_url = f"http://127.0.0.1:{port}"
        Engine.run_scheduler_process_func = staticmethod(run_scheduler)
        self._engine = Engine(kvcanary_config=str(config), **keywords)
        self.loop: asyncio.AbstractEventLoop = self._engine.loop
        self._names = (f"bench-{number}" for number in itertools.count())

    async def stream(self, prompt: list[int], tokens: int) -> AsyncIterator[int]:
        outputs = await self._engine.async_generate(
            input_ids=prompt, sampling_params=_sampling(tokens), stream=True
        )
        so_far = 0
        async for output in outputs:
            count = output["meta_info"]["completion_tokens"]
            if count > so_far:
                yield count - so_far
                so_far = count

    async def serve(self, prompt: list[int], tokens: int) -> None:
        await self._engine.async_generate(input_ids=prompt, sampling_params=_sampling(tokens))

    async def give_up(self, prompt: list[int], tokens: int, *, after: int) -> None:
        name = next(self._names)
        outputs = await self._engine.async_generate(
            input_ids=prompt, sampling_params=_sampling(tokens), stream=True, rid=name
        )
        count = 0
        try:
            async for _ in outputs:
                count += 1
                if count == max(after, 1):
                    self._engine.tokenizer_manager.abort_request(rid=name)
        except ValueError:  # how a request that was aborted in the queue ends
            pass

    def forget_prefixes(self) -> bool:
        return bool(self._engine.flush_cache().success)

    def metrics(self) -> str:
        _, text = http_client.get(self._metrics_url, "/metrics", timeout=10.0)
        return text

    def shutdown(self) -> None:
        self._engine.shutdown()


def _sampling(tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}


def main() -> None:
    arguments = arguments_of(__doc__)
    keywords = engine_keywords(
        arguments,
        {
            "model_path": str(arguments.model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "cuda_graph_backend_prefill": "disabled",
            "cuda_graph_bs_decode": [1, 8, 64, 256],
            "max_total_tokens": 655360,
            "max_running_requests": 256,
            "chunked_prefill_size": 8192,
            "max_prefill_tokens": 16384,
            "mem_fraction_static": 0.85,
            "log_level": "info",
            "random_seed": 1,
        },
    )
    run(arguments, lambda: SGLangEngine(config=arguments.config, keywords=keywords))


if __name__ == "__main__":
    main()
