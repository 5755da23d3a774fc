"""The one place that knows what differs between vLLM versions."""

from __future__ import annotations

from typing import Any, Literal

from kvcanary_plugin.metrics import RankLabels

RunnerKind = Literal["v1", "v2"]

# What the hooks wrap or read on a model runner.
_V1_ATTRIBUTES = (
    "execute_model",
    "_model_forward",
    "_sample",
    "input_batch",
    "input_ids",
    "positions",
    "num_computed_tokens",
    "query_start_loc",
    "seq_lens",
)
_V2_ATTRIBUTES = (
    "execute_model",
    "prepare_attn",
    "prepare_dummy_attn",
    "postprocess_sampled",
    "kv_connector",
    "block_tables",
    "req_states",
)

# Dimensions of a latent cache, [blocks, tokens, size], the one that the CPU backend does not pack.
_LATENT = 3


class UnsupportedRunnerError(RuntimeError):
    """A model runner, or a vLLM around it, that lacks something that the hooks need."""


def engine_version() -> str:
    """Version of the installed vLLM."""
    import vllm

    return str(vllm.__version__)


def runner_kind(runner: Any) -> RunnerKind:
    """Which of vLLM's two model runners this is. UnsupportedRunnerError if neither."""
    lacking: dict[RunnerKind, list[str]] = {
        "v1": [name for name in _V1_ATTRIBUTES if not hasattr(runner, name)],
        "v2": [name for name in _V2_ATTRIBUTES if not hasattr(runner, name)],
    }
    for kind, names in lacking.items():
        if not names:
            return kind
    raise UnsupportedRunnerError(
        f"model runner {type(runner).__name__} of vLLM {engine_version()} lacks "
        + " and, as the other kind, ".join(", ".join(names) for names in lacking.values())
    )


def table_page_sizes(tables: Any) -> list[int]:
    """Slots per entry of each of a V2 runner's block tables.

    Up to 0.26 the tables count in the kernels' blocks and name the scheduler's ``block_sizes``.
    """
    return [int(size) for size in getattr(tables, "kernel_block_sizes", tables.block_sizes)]


def packing_of(layer: Any) -> str | None:
    """What the K/V of a layer is packed for; None where it lies by its strides.

    The CPU backend's attention names its instruction set: on the layer, up to 0.26 on its backend.
    """
    cache = layer.kv_cache
    if isinstance(cache, (list, tuple)):
        cache = cache[0] if cache else None
    if cache is None or cache.device.type != "cpu" or cache.ndim <= _LATENT:
        return None
    named = getattr(layer, "isa", None) or getattr(getattr(layer, "impl", None), "isa", None)
    return str(named) if named is not None else "an unnamed instruction set"


def rank_labels(parallel_config: Any) -> RankLabels:
    """Tensor, pipeline and data parallel rank of this worker process."""
    from vllm.distributed import get_pp_group, get_tp_group

    tp, pp = get_tp_group(), get_pp_group()
    dp_rank = int(parallel_config.data_parallel_rank)
    return RankLabels(
        tp_rank=int(tp.rank_in_group),
        pp_rank=int(pp.rank_in_group),
        dp_rank=dp_rank,
        process_index=(dp_rank * pp.world_size + pp.rank_in_group) * tp.world_size
        + tp.rank_in_group,
    )
