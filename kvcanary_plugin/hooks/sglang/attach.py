"""Put the canary around ``ModelRunner.forward``: outside CUDA graphs, on the forward's stream."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from kvcanary_plugin.canary import Canary, UnguardedGroup
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.hooks.sglang import flag, host_tier, memory, transfers, versions
from kvcanary_plugin.hooks.sglang.allocators import follow, followable
from kvcanary_plugin.hooks.sglang.batch import BatchTranslator
from kvcanary_plugin.hooks.sglang.copies import PoolCopies, follow_copies
from kvcanary_plugin.hooks.sglang.features import features_in_use, unsupported_pool
from kvcanary_plugin.hooks.sglang.host_tier import HostTier
from kvcanary_plugin.hooks.sglang.pools import guarded_pools
from kvcanary_plugin.metrics import RankLabels
from kvcanary_plugin.monitor import CanaryMonitor

logger = logging.getLogger(__name__)

_ENGINE = "sglang"
_ATTRIBUTE = "_kvcanary_session"


class Session:
    """The canary of one model runner."""

    def __init__(self, config: CanaryConfig, model_runner: Any) -> None:
        pools = guarded_pools(model_runner)
        unguarded = list(pools.unsupported)
        groups = pools.groups
        pool = model_runner.token_to_kv_pool
        problem = unsupported_pool(model_runner.server_args, type(pool).__name__)
        if problem is not None:
            unguarded += [UnguardedGroup(group.name, problem) for group in groups]
            groups = ()
        for feature in features_in_use(model_runner.server_args):
            unguarded += feature.unguarded
        self._canary = Canary(
            config=config,
            config_path=flag.config_path(),
            engine=_ENGINE,
            ranks=versions.rank_labels(model_runner),
            groups=groups,
            unguarded=unguarded,
            max_requests=model_runner.req_to_token_pool.req_to_token.shape[0],
        )
        self._translator = (
            BatchTranslator(
                groups=groups,
                names=self._canary.names,
                max_tokens=max(int(model_runner.max_total_num_tokens), 1),
            )
            if groups
            else None
        )

        self.flushes = memory.Flushes(model_runner.token_to_kv_pool_allocator)
        self._copies: PoolCopies | None = None
        self._host_tier: HostTier | None = None  # only with a hierarchical cache
        if self._canary.monitor is not None:
            self._follow_allocators(model_runner, self._canary.monitor)
            self._copies = follow_copies(pool, self._canary.monitor)
            if getattr(model_runner.server_args, "enable_hierarchical_cache", False):
                self._host_tier = HostTier(self._canary.monitor)
                for guard in self._canary.monitor.guards:
                    # The engine moves K/V between the host and the pools inside of a pool.
                    part = getattr(pool, f"{guard.group.name}_kv_pool", pool)
                    setattr(part, _ATTRIBUTE, self._host_tier.follow(guard))
            # Some hooks see no model runner.
            setattr(model_runner.token_to_kv_pool_allocator, _ATTRIBUTE, self)

    def forward(self, run: Callable[[], Any], forward_batch: Any) -> Any:
        """The engine's forward ``run`` with the canary's steps around it."""
        monitor = self._canary.monitor
        if monitor is None or self._translator is None:
            return run()
        with monitor.guard_errors("hook"):
            self._end_requests_that_were_hit()
            self._put_back_loads()
        with self._canary.around_forward(lambda: self._translate(forward_batch)):
            return run()

    def keep_drafts(self, move: Callable[[], Any], path: torch.Tensor) -> Any:
        """The engine's ``move`` puts the K/V of accepted drafts into place: so do the records."""
        monitor = self._canary.monitor
        if monitor is None or self._copies is None:
            return move()
        with monitor.engine_works():
            self._copies.moves_are_followed = False
            try:
                result = move()
            finally:
                self._copies.moves_are_followed = True
            monitor.keep_drafts(path)
        return result

    @property
    def monitor(self) -> CanaryMonitor | None:
        """What guards the pools; None when nothing does."""
        return self._canary.monitor

    def new_weights(self) -> None:
        """Requests that start from now on compute their K/V with other weights."""
        if self._translator is not None:
            self._translator.new_weights()

    def adopt_prebuilt(self, schedule_batch: Any) -> None:
        """The slots of ``schedule_batch`` have been filled by another server."""
        monitor = self._canary.monitor
        if monitor is None or self._translator is None or monitor.blind_because is not None:
            return
        with monitor.guard_errors("hook"):
            self._put_back_loads()  # what is adopted may continue them
            transfers.adopt_prebuilt(monitor, self._translator, schedule_batch)

    def storage_is_attached(self) -> None:
        """From now on bytes come to the host that never were in the pools: the canary is blind."""
        if self._canary.monitor is not None:
            with self._canary.monitor.guard_errors("hook"):
                raise host_tier.StorageAttachedError(
                    "a storage backend was attached to the hierarchical cache"
                )

    def sampled(self, forward_batch: Any, tokens: Any) -> None:
        """Tell the oracle which token comes next for each request of the batch."""
        if self._canary.monitor is None or not hasattr(tokens, "shape"):
            return
        count = tokens.shape[0]
        self._canary.monitor.record_sampled(
            forward_batch.req_pool_indices[:count], forward_batch.seq_lens[:count], tokens
        )

    def _end_requests_that_were_hit(self) -> None:
        """Mode abort: the scheduler finishes them, with this error, after their current token."""
        uids = self._canary.requests_to_abort()
        if not uids or self._translator is None:
            return
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        for uid in uids:
            request = self._translator.request(uid)
            if request is not None:
                logger.error("kvcanary: ending request %r: its KV cache is corrupted", request.rid)
                request.to_finish = FINISH_ABORT(
                    "kvcanary: the KV cache of this request is corrupted; send it again", 500
                )

    def _put_back_loads(self) -> None:
        """Before slots are looked at or written: what the host has sent has its records again."""
        if self._host_tier is not None and self._host_tier.has_loads:
            self._host_tier.before_forward()

    @staticmethod
    def _follow_allocators(model_runner: Any, monitor: CanaryMonitor) -> None:
        parts = followable(model_runner.token_to_kv_pool_allocator)
        for guard in monitor.guards:
            if guard.group.tracks_allocation:
                follow(parts[guard.group.name], guard.events)
            else:
                logger.warning(
                    "kvcanary: group %s: allocator class %s is not followed; freed_read,"
                    " write_owned, double_free and double_alloc cannot be seen",
                    guard.group.name,
                    type(model_runner.token_to_kv_pool_allocator).__name__,
                )

    def _translate(self, forward_batch: Any) -> Any:
        assert self._translator is not None
        return self._translator.translate(forward_batch)


def after_pools_ready(_result: Any, model_runner: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER the pools of a model runner exist: guard them."""
    config = flag.config_of_this_process()
    if config is None:
        return
    if getattr(model_runner, "is_draft_worker", False):
        return  # the target model's session shows its pool as unsupported
    missing = _hook_features(model_runner.server_args)
    if missing:
        refuse_or_show_unsupported(config, versions.lacks(*missing))
        return
    setattr(model_runner, _ATTRIBUTE, Session(config, model_runner))


def after_new_batch(
    forward_batch: Any, _cls: Any, schedule_batch: Any, *_args: Any, **_kwargs: Any
) -> None:
    """AFTER ``ForwardBatch.init_new``: keep the scheduler's requests with the batch."""
    BatchTranslator.remember_requests(forward_batch, schedule_batch)


def around_forward(
    original: Callable[..., Any], model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND ``ModelRunner.forward``."""
    session: Session | None = getattr(model_runner, _ATTRIBUTE, None)
    if session is None:
        return original(model_runner, forward_batch, *args, **kwargs)
    return session.forward(
        lambda: original(model_runner, forward_batch, *args, **kwargs), forward_batch
    )


def after_sample(
    tokens: Any, model_runner: Any, _logits: Any, forward_batch: Any, *_args: Any, **_kwargs: Any
) -> None:
    """AFTER ``ModelRunner.sample``."""
    session: Session | None = getattr(model_runner, _ATTRIBUTE, None)
    if session is not None:
        session.sampled(forward_batch, tokens)


def around_release_memory(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """AROUND ``release_memory_occupation`` of the scheduler's weight updater."""
    session = _session_of(updater)
    return memory.around_release_memory(
        session.monitor if session is not None else None,
        lambda: original(updater, request),
        request.tags,
    )


def around_flush_after_update(original: Callable[..., Any], updater: Any, *args: Any) -> Any:
    """AROUND ``flush_cache_after_weight_update`` of the scheduler's weight updater."""
    session = _session_of(updater)
    if session is None:
        return original(updater, *args)
    return memory.around_flush_after_update(
        session.flushes, session.new_weights, lambda: original(updater, *args)
    )


def _session_of(updater: Any) -> Session | None:
    session: Session | None = getattr(updater.tp_worker.model_runner, _ATTRIBUTE, None)
    return session


def around_move_drafts(
    original: Callable[..., Any],
    batch: Any,
    accept_index: torch.Tensor,
    num_correct_drafts: torch.Tensor,
    token_to_kv_pool_allocator: Any,
) -> Any:
    """AROUND ``move_accept_tokens_to_target_kvcache``; the engine's names of its arguments."""

    def move() -> Any:
        return original(batch, accept_index, num_correct_drafts, token_to_kv_pool_allocator)

    session: Session | None = getattr(token_to_kv_pool_allocator, _ATTRIBUTE, None)
    return move() if session is None else session.keep_drafts(move, accept_index)


def before_prebuilt(batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """BEFORE ``process_prebuilt``: the prompts of ``batch`` were computed by another server."""
    session: Session | None = getattr(batch.token_to_kv_pool_allocator, _ATTRIBUTE, None)
    if session is not None:
        session.adopt_prebuilt(batch)


def around_backup(original: Callable[..., Any], engine: Any, transfers: Any) -> Any:
    """AROUND ``L2TransferEngine.submit_device_to_host``."""
    return host_tier.around_backup(original, engine, transfers, _ATTRIBUTE)


def around_load(original: Callable[..., Any], engine: Any, transfers: Any, **how: Any) -> Any:
    """AROUND ``L2TransferEngine.submit_host_to_device``."""
    return host_tier.around_load(original, engine, transfers, _ATTRIBUTE, **how)


def before_attach_storage(controller: Any, *_args: Any, **_kwargs: Any) -> None:
    """BEFORE ``HiCacheController.attach_storage_backend``: bytes without records will come."""
    session: Session | None = getattr(controller.mem_pool_device_allocator, _ATTRIBUTE, None)
    if session is not None:
        session.storage_is_attached()


def _hook_features(server_args: Any) -> list[str]:
    """Hooks what these settings need; the targets that the engine does not have."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: dict[str, tuple[Callable[..., Any], HookType]] = {
        versions.KEEP_DRAFTS: (around_move_drafts, HookType.AROUND),
        versions.PREBUILT: (before_prebuilt, HookType.BEFORE),
        versions.BACKUP: (around_backup, HookType.AROUND),
        versions.LOAD_BACK: (around_load, HookType.AROUND),
        versions.ATTACH_STORAGE: (before_attach_storage, HookType.BEFORE),
    }
    targets = [target for feature in features_in_use(server_args) for target in feature.hooks]
    for target in targets:
        if target not in HookRegistry._patched:
            HookRegistry.register(target, *hooks[target])
    if targets:
        HookRegistry.apply_hooks()
    return [target for target in targets if target not in HookRegistry._patched]


def refuse_or_show_unsupported(config: CanaryConfig, reason: str) -> None:
    """An engine that cannot be guarded: no start in mode raise, a visible state otherwise."""
    Canary(
        config=config,
        config_path=flag.config_path(),
        engine=_ENGINE,
        ranks=RankLabels(tp_rank=0, pp_rank=0, dp_rank=0),
        groups=(),
        unguarded=[UnguardedGroup("full", reason)],
        max_requests=1,
    )
