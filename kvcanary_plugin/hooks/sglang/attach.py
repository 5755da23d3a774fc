"""Put the canary around ``ModelRunner.forward``: outside CUDA graphs, on the forward's stream."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvcanary_plugin.canary import Canary, UnguardedGroup
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.hooks.sglang import flag, versions
from kvcanary_plugin.hooks.sglang.allocators import follow, followable
from kvcanary_plugin.hooks.sglang.batch import BatchTranslator
from kvcanary_plugin.hooks.sglang.pools import guarded_pools
from kvcanary_plugin.metrics import RankLabels

logger = logging.getLogger(__name__)

_ENGINE = "sglang"
_ATTRIBUTE = "_kvcanary_session"


class Session:
    """The canary of one model runner."""

    def __init__(self, config: CanaryConfig, model_runner: Any) -> None:
        pools = guarded_pools(model_runner)
        unguarded = [UnguardedGroup(group.name, group.reason) for group in pools.unsupported]
        self._canary = Canary(
            config=config,
            config_path=flag.config_path(),
            engine=_ENGINE,
            ranks=versions.rank_labels(model_runner),
            groups=pools.groups,
            unguarded=unguarded,
            max_requests=model_runner.req_to_token_pool.req_to_token.shape[0],
        )
        self._translator = (
            BatchTranslator(
                groups=pools.groups,
                names=self._canary.names,
                max_tokens=max(int(model_runner.max_total_num_tokens), 1),
            )
            if pools.groups
            else None
        )

        self._follow_allocators(model_runner)

    def forward(self, run: Callable[[], Any], forward_batch: Any) -> Any:
        """The engine's forward ``run`` with the canary's steps around it."""
        if self._translator is None:
            return run()
        self._end_requests_that_were_hit()
        with self._canary.around_forward(lambda: self._translate(forward_batch)):
            return run()

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

    def _follow_allocators(self, model_runner: Any) -> None:
        if self._canary.monitor is None:
            return
        parts = followable(model_runner.token_to_kv_pool_allocator)
        for guard in self._canary.monitor.guards:
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
        logger.warning("kvcanary: the draft model's KV pool is not guarded")
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
