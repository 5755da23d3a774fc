"""The one place that knows what differs between SGLang versions."""

from __future__ import annotations

from typing import Any

from kvcanary_plugin.metrics import RankLabels

# What the plugin hooks, by the dotted path that SGLang's hook registry resolves.
ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
FROM_CLI_ARGS = "sglang.srt.server_args.ServerArgs.from_cli_args"
CONFIGURE_SCHEDULER = "sglang.srt.managers.scheduler.configure_scheduler_process"
POOLS_READY = "sglang.srt.model_executor.model_runner.ModelRunner._init_post_memory_pool_components"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
SAMPLE = "sglang.srt.model_executor.model_runner.ModelRunner.sample"
KEEP_DRAFTS = "sglang.srt.speculative.spec_utils.move_accept_tokens_to_target_kvcache"
PREBUILT = (
    "sglang.srt.disaggregation.decode_schedule_batch_mixin"
    ".ScheduleBatchDisaggregationDecodeMixin.process_prebuilt"
)
BACKUP = "sglang.srt.mem_cache.l2_transfer.L2TransferEngine.submit_device_to_host"
LOAD_BACK = "sglang.srt.mem_cache.l2_transfer.L2TransferEngine.submit_host_to_device"
ATTACH_STORAGE = "sglang.srt.managers.cache_controller.HiCacheController.attach_storage_backend"
NEW_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
RELEASE_MEMORY = f"{_UPDATER}.release_memory_occupation"
FLUSH_AFTER_UPDATE = f"{_UPDATER}.flush_cache_after_weight_update"

MAIN_PROCESS_TARGETS = (ADD_CLI_ARGS, FROM_CLI_ARGS)
SCHEDULER_TARGETS = (
    POOLS_READY,
    FORWARD,
    SAMPLE,
    NEW_BATCH,
    RELEASE_MEMORY,
    FLUSH_AFTER_UPDATE,
)


def engine_version() -> str:
    """Version of the installed SGLang."""
    import sglang

    return str(sglang.__version__)


def lacks(*targets: str) -> str:
    """Why an engine without ``targets`` is not guarded."""
    return (
        f"SGLang {engine_version()} has no {', '.join(targets)}; "
        "the versions that this plugin knows are listed in docs/compatibility.md"
    )


def rank_labels(model_runner: Any) -> RankLabels:
    """Tensor, pipeline and data parallel rank of this process."""
    try:
        from sglang.srt.runtime_context import get_parallel

        ranks: Any = get_parallel()
    except ImportError:  # before 0.5.21 the runner carries its ranks itself
        ranks = model_runner
    tp_rank, pp_rank, dp_rank = (
        int(getattr(ranks, name, 0) or 0) for name in ("tp_rank", "pp_rank", "dp_rank")
    )
    tp_size, pp_size = (int(getattr(ranks, name, 1) or 1) for name in ("tp_size", "pp_size"))
    return RankLabels(
        tp_rank=tp_rank,
        pp_rank=pp_rank,
        dp_rank=dp_rank,
        process_index=(dp_rank * pp_size + pp_rank) * tp_size + tp_rank,
    )


def own_tokens(request: Any) -> Any:
    """``array('q')`` of a request's prompt and committed output, as the scheduler keeps it."""
    tokens = getattr(request, "full_untruncated_fill_ids", None)
    return request.fill_ids if tokens is None else tokens


def request_row(request: Any) -> int:
    """Row of a request in the page table."""
    kv = getattr(request, "kv", None)
    if hasattr(kv, "req_pool_idx"):
        request = kv  # from 0.5.21 on
    return int(request.req_pool_idx)


def puts_frees_off(allocator: Any) -> bool:
    """Whether the allocator collects frees now, to carry them out together later."""
    is_open = getattr(allocator, "is_not_in_free_group", None)  # before 0.5.21
    return allocator.free_group is not None if is_open is None else not is_open
