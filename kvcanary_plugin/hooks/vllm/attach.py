"""Put the canary around a worker's forwards: outside every CUDA graph, on the forward's stream.

Everything is wrapped on the runner object, when its KV cache exists and no graph is captured yet.
The canary looks on from the end of the warm-up, whose steps use blocks that no scheduler gave out.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from kvcanary_plugin.canary import Canary, UnguardedGroup
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.forward import ForwardKind, ForwardStep
from kvcanary_plugin.hooks.vllm import aborts, batch_v1, batch_v2, features, flag, versions
from kvcanary_plugin.hooks.vllm.pools import GuardedCaches, guarded_caches
from kvcanary_plugin.hooks.vllm.requests import CACHE_SALT, RequestBook
from kvcanary_plugin.hooks.vllm.transfers import LoadedSlots
from kvcanary_plugin.metrics import RankLabels

logger = logging.getLogger(__name__)

_ENGINE = "vllm"
_ATTRIBUTE = "_kvcanary_session"
_KV_CACHE = "kv_cache"


class Session:
    """The canary of one worker."""

    def __init__(
        self, *, config: CanaryConfig, config_path: str, worker: Any, vllm_config: Any
    ) -> None:
        self._runner = worker.model_runner
        self._translator: batch_v1.V1Translator | batch_v2.V2Translator | None = None
        self._caches = _caches(self._runner, vllm_config)
        self.canary = Canary(
            config=config,
            config_path=config_path,
            engine=_ENGINE,
            ranks=versions.rank_labels(vllm_config.parallel_config),
            groups=self._caches.groups,
            unguarded=self._caches.unguarded,
            max_requests=int(self._runner.max_num_reqs),
        )
        self._arrays_stay = features.arrays_stay_through_forward(vllm_config)
        self._is_warm = False
        self._forward_done = ExitStack()
        self._prepared: batch_v2.PreparedBatch | None = None
        self._scheduler_output: Any = None
        if self._caches.groups:
            self._hook_runner()
            _wrap(worker, "compile_or_warm_up_model", self._after_warm_up)
            for name in ("sleep", "wake_up"):
                if hasattr(worker, name):
                    _wrap(worker, name, self._around_sleep)
            if hasattr(worker, "discard"):
                _wrap(worker, "discard", self._around_discard)

    def _hook_runner(self) -> None:
        runner = self._runner
        is_v2 = versions.runner_kind(runner) == "v2"
        self._book = RequestBook(
            names=self.canary.names,
            device=self._caches.groups[0].device,
            max_requests=int(runner.max_num_reqs),
            keeps_tokens=is_v2,
        )
        assert self.canary.monitor is not None
        self._loads = LoadedSlots(monitor=self.canary.monitor, caches=self._caches)
        if is_v2:
            self._translator = batch_v2.V2Translator(
                runner=runner, caches=self._caches, book=self._book
            )
            _wrap(runner, "execute_model", self._execute_model_v2)
            _wrap(runner, "prepare_attn", self._prepare_attn)
            _wrap(runner, "prepare_dummy_attn", self._prepare_dummy_attn)
            _wrap(runner, "postprocess_sampled", self._postprocess_sampled)
            runner.kv_connector = _ForwardNotice(runner.kv_connector, self._before_forward_v2)
        else:
            self._translator = batch_v1.V1Translator(
                runner=runner, caches=self._caches, book=self._book
            )
            _wrap(runner, "execute_model", self._execute_model_v1)
            _wrap(runner, "_model_forward", self._model_forward)
            _wrap(runner, "_sample", self._sample)

    # --- both runners ---------------------------------------------------------------------------

    def _after_warm_up(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._is_warm = True
        return result

    def _around_sleep(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Before the memory of K/V is given away, and again when it is back: nothing is written."""
        assert self.canary.monitor is not None
        self.canary.monitor.forget_everything()
        return original(*args, **kwargs)

    def _around_discard(
        self, original: Callable[..., Any], tags: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """The same where the engine gives memory away by name, to be back when it wakes up."""
        assert self.canary.monitor is not None
        if _KV_CACHE in tags:
            self.canary.monitor.forget_everything()
        return original(tags, *args, **kwargs)

    @contextmanager
    def _around_forward(
        self, translate: Callable[[], ForwardStep], longest_extend: Callable[[], int]
    ) -> Iterator[None]:
        """The engine's forward with the canary's steps around it."""
        self._report_requests_that_were_hit()
        with self.canary.around_forward(
            translate, arrays_stay=self._arrays_stay, longest_extend=longest_extend
        ):
            yield
        assert self.canary.monitor is not None
        with self.canary.monitor.guard_errors("hook"):
            self._loads.after_forward()
            self._book.forward_is_launched()

    def _report_requests_that_were_hit(self) -> None:
        """Mode abort: the scheduler's process ends them."""
        hit = self.canary.requests_to_abort()
        monitor = self.canary.monitor
        if hit and monitor is not None:
            with monitor.guard_errors("hook"):
                names = (self.canary.names.get(uid) for uid in hit)
                aborts.report(name for name in names if name is not None)

    def _noting_loads(self, step: ForwardStep) -> ForwardStep:
        if step.kind is not ForwardKind.DUMMY:
            self._loads.before_forward(self._book.batch)
        return step

    def _scheduled(self, scheduler_output: Any) -> None:
        """Before the runner acts on a step: who comes and goes, which blocks it copies, clears."""
        monitor = self.canary.monitor
        assert monitor is not None
        with monitor.guard_errors("hook"):
            self._book.scheduled(scheduler_output)
            cleared = getattr(scheduler_output, "new_block_ids_to_zero", None)
            copies = getattr(scheduler_output, "kv_cache_block_copies", None)
            for index, block_size in self._pools() if cleared or copies else ():
                if cleared:
                    monitor.forget_slots(index, self._slots_of(cleared, block_size))
                if copies:
                    source, destination = zip(*(tuple(copy)[:2] for copy in copies), strict=True)
                    monitor.copy_slots(
                        index,
                        self._slots_of(source, block_size),
                        self._slots_of(destination, block_size),
                    )
            # Last: blocks that are loaded may have been cleared for it.
            self._loads.scheduled(scheduler_output)

    def _pools(self) -> list[tuple[int, int]]:
        """(index of its first group, block size) of every pool of records."""
        sizes = self._caches.block_sizes
        return [(sizes.index(size), size) for size in dict.fromkeys(sizes)]

    def _slots_of(self, blocks: Any, block_size: int) -> torch.Tensor:
        slots = torch.tensor(list(blocks), dtype=torch.int64)[:, None] * block_size
        slots = (slots + torch.arange(block_size)).flatten()
        return slots.to(self._caches.groups[0].device, non_blocking=True)

    # --- V1 runner ------------------------------------------------------------------------------

    def _execute_model_v1(
        self, original: Callable[..., Any], scheduler_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._is_warm:
            self._scheduled(scheduler_output)
        self._scheduler_output = scheduler_output
        try:
            return original(scheduler_output, *args, **kwargs)
        finally:
            self._scheduler_output = None

    def _model_forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        scheduler_output, translator = self._scheduler_output, self._translator
        if scheduler_output is None or not self._is_warm:
            return original(*args, **kwargs)
        assert isinstance(translator, batch_v1.V1Translator)
        with self._around_forward(
            lambda: self._noting_loads(translator.translate(scheduler_output)),
            lambda: translator.longest_extend(scheduler_output),
        ):
            return original(*args, **kwargs)

    def _sample(self, original: Callable[..., Any], logits: Any, spec_decode_metadata: Any) -> Any:
        result = original(logits, spec_decode_metadata)
        monitor, translator = self.canary.monitor, self._translator
        if self._is_warm and monitor is not None and monitor.history is not None:
            assert isinstance(translator, batch_v1.V1Translator)
            with monitor.guard_errors("oracle"):
                for sampled in translator.sampled(result.sampled_token_ids, spec_decode_metadata):
                    monitor.record_sampled(*sampled)
        return result

    # --- V2 runner ------------------------------------------------------------------------------

    def _execute_model_v2(
        self, original: Callable[..., Any], scheduler_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._is_warm:
            return original(scheduler_output, *args, **kwargs)
        is_dummy = kwargs.get("dummy_run", args[1] if len(args) > 1 else False)
        if not is_dummy:
            self._scheduled(scheduler_output)
        self._prepared = None
        # The forward begins in _before_forward_v2 and is launched when execute_model returns.
        with ExitStack() as self._forward_done:
            return original(scheduler_output, *args, **kwargs)

    def _prepare_attn(self, original: Callable[..., Any], input_batch: Any) -> Any:
        block_tables, slot_mappings = original(input_batch)
        self._prepared = batch_v2.PreparedBatch(input_batch, slot_mappings, is_dummy=False)
        return block_tables, slot_mappings

    def _prepare_dummy_attn(
        self, original: Callable[..., Any], input_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        block_tables, slot_mappings = original(input_batch, *args, **kwargs)
        self._prepared = batch_v2.PreparedBatch(input_batch, slot_mappings, is_dummy=True)
        return block_tables, slot_mappings

    def _before_forward_v2(self) -> None:
        prepared, translator = self._prepared, self._translator
        self._prepared = None
        if prepared is None or not self._is_warm:
            return
        assert isinstance(translator, batch_v2.V2Translator)
        self._forward_done.enter_context(
            self._around_forward(
                lambda: self._noting_loads(translator.translate(prepared)),
                lambda: translator.longest_extend(prepared),
            )
        )

    def _postprocess_sampled(
        self,
        original: Callable[..., Any],
        idx_mapping: Any,
        sampled_tokens: Any,
        num_sampled: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        monitor, translator = self.canary.monitor, self._translator
        # On another rank than the last the tokens arrive later, for a batch that is gone.
        is_last_rank = getattr(self._runner, "is_last_pp_rank", True)
        if self._is_warm and is_last_rank and monitor is not None and monitor.history is not None:
            assert isinstance(translator, batch_v2.V2Translator)
            with monitor.guard_errors("oracle"):
                for sampled in translator.sampled(sampled_tokens, num_sampled, idx_mapping):
                    monitor.record_sampled(*sampled)
        return original(idx_mapping, sampled_tokens, num_sampled, *args, **kwargs)


class _ForwardNotice:
    """Stands before a runner's KV connector, which is called right before every forward."""

    def __init__(self, connector: Any, before_forward: Callable[[], None]) -> None:
        self._connector = connector
        self._before_forward = before_forward

    def pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self._connector.pre_forward(*args, **kwargs)
        self._before_forward()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)


def _wrap(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Let ``owner.name(...)`` call ``replacement(original, ...)``."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(functools.partial(replacement, original)))


def _caches(runner: Any, vllm_config: Any) -> GuardedCaches:
    """The runner's groups; none of them guarded where something moves K/V that no hook sees."""
    kind = versions.runner_kind(runner)
    kv_cache_config = runner.kv_cache_config
    target_layers = {id(module) for module in runner.get_model().modules()}
    caches = guarded_caches(
        groups=kv_cache_config.kv_cache_groups,
        num_blocks=int(kv_cache_config.num_blocks),
        tables=batch_v1.block_tables(runner) if kind == "v1" else batch_v2.block_tables(runner),
        layers=vllm_config.compilation_config.static_forward_context,
        is_target_layer=lambda layer: id(layer) in target_layers,
        packing_of=versions.packing_of,
    )
    problem = features.unsupported_setup(vllm_config)
    if problem is None:
        return caches
    return GuardedCaches(
        groups=(),
        group_ids=(),
        block_sizes=(),
        unguarded=(
            *(UnguardedGroup(group.name, problem) for group in caches.groups),
            *caches.unguarded,
        ),
    )


def extend_worker(unsupported_because: str | None) -> None:
    """Attach a session to every worker of this process whose KV cache is initialised.

    With a reason not to, they only show it, if they are asked to guard anything.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.initialize_from_config

    @functools.wraps(original)
    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _attach(self.worker, self.vllm_config, unsupported_because)
        return result

    WorkerWrapperBase.initialize_from_config = initialize_from_config


def extend_scheduler_output() -> None:
    """Let the scheduler tell its workers the cache salt of a request, which vLLM does not send."""
    from vllm.v1.core.sched.output import NewRequestData

    original = NewRequestData.from_request.__func__

    @functools.wraps(original)
    def from_request(cls: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        admitted = original(cls, request, *args, **kwargs)
        salt = getattr(request, "cache_salt", None)
        if salt is not None:
            setattr(admitted, CACHE_SALT, salt)
        return admitted

    NewRequestData.from_request = classmethod(from_request)


def _attach(worker: Any, vllm_config: Any, unsupported_because: str | None) -> None:
    settings = flag.config_of_worker(vllm_config.additional_config)
    if settings is None:
        logger.info(
            "kvcanary: installed but not enabled; give the server %s FILE to enable it", flag.FLAG
        )
        return
    config, config_path = settings
    try:
        if unsupported_because is not None:
            raise versions.UnsupportedRunnerError(unsupported_because)
        session = Session(
            config=config, config_path=config_path, worker=worker, vllm_config=vllm_config
        )
    except versions.UnsupportedRunnerError as problem:
        Canary(
            config=config,
            config_path=config_path,
            engine=_ENGINE,
            ranks=RankLabels(),
            groups=(),
            unguarded=[UnguardedGroup("full", str(problem))],
            max_requests=1,
        )
    else:
        setattr(worker, _ATTRIBUTE, session)
