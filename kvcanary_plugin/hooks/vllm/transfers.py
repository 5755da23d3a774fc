"""K/V that a connector brings: from host memory, from disk, from another engine.

The scheduler's side of a connector is told which tokens of a request will be loaded, and into which
blocks (``update_state_after_alloc``); the workers are not. So the plugin notes it there, and it
travels with the next scheduler output. Of a request's tokens::

    [0, start)      cached by this engine: their records stand
    [start, end)    loaded: records are written when the load begins, from the request's own tokens
    [end, ...)      computed by this engine's forwards

Bytes may arrive at any time until the request runs, and those of a layer even within its first
forward. Nobody compares them before that forward is done; then they are taken as they are.
Blocks whose load failed are computed again, and with that written like any other.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvcanary_plugin.forward import Int64Array
from kvcanary_plugin.hooks.vllm import features
from kvcanary_plugin.hooks.vllm.media import media_of
from kvcanary_plugin.hooks.vllm.pools import GuardedCaches
from kvcanary_plugin.hooks.vllm.requests import Batch, key_of_request
from kvcanary_plugin.monitor import CanaryMonitor

logger = logging.getLogger(__name__)

# Attributes of a scheduler output: the loads that begin with it; why none are known any more.
LOADS = "_kvcanary_loads"
LOADS_UNKNOWN = "_kvcanary_loads_unknown"
_NULL_BLOCK = 0
_PADDING_SLOT = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a connector will load for one request. Travels from the scheduler to the workers.

    Fields:
        request_id: whose tokens.
        start: its first token that is loaded.
        tokens: int32 [end], its tokens up to the last one that is loaded, with marks of media.
        block_ids: its blocks in each KV cache group, from its first token on.
        key: its identity key.
    """

    request_id: str
    start: int
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    block_ids: tuple[list[int], ...]
    key: int


class UnknownLoadsError(RuntimeError):
    """Blocks are loaded that the scheduler's side could not say anything about."""


class ScheduledLoads:
    """The scheduler's side: notes what its connector is told, and passes it on."""

    def __init__(self, connector: Any, *, rewrites_cached_tokens: bool) -> None:
        """
        Args:
            connector: the one connector of the scheduler, whose methods are wrapped.
            rewrites_cached_tokens: whether it loads tokens that this engine has in its cache.
        """
        self._rewrites_cached_tokens = rewrites_cached_tokens
        self._cached_tokens: dict[str, int] = {}
        self._begun: list[Load] = []
        self._failed: str | None = None
        for name, replacement in (
            ("get_num_new_matched_tokens", self._get_num_new_matched_tokens),
            ("update_state_after_alloc", self._update_state_after_alloc),
            ("build_connector_meta", self._build_connector_meta),
        ):
            original = getattr(connector, name)
            wrapped = functools.wraps(original)(functools.partial(replacement, original))
            setattr(connector, name, wrapped)

    def _get_num_new_matched_tokens(
        self, original: Any, request: Any, num_computed_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(request, num_computed_tokens, *args, **kwargs)
        self._cached_tokens[request.request_id] = num_computed_tokens
        return result

    def _update_state_after_alloc(
        self, original: Any, request: Any, blocks: Any, num_external_tokens: int, **kwargs: Any
    ) -> Any:
        result = original(request, blocks, num_external_tokens, **kwargs)
        with self._keeping_errors_from_the_engine():
            self._note(request, blocks, num_external_tokens)
        return result

    def _note(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        cached = self._cached_tokens.pop(request.request_id, 0)
        if num_external_tokens > 0:
            end = cached + num_external_tokens
            media = media_of(request.mm_features, prompt_len=request.num_prompt_tokens)
            tokens = media.marked(np.array(request.all_token_ids[:end], dtype=np.int64))
            self._begun.append(
                Load(
                    request_id=request.request_id,
                    start=0 if self._rewrites_cached_tokens else cached,
                    tokens=tokens.astype(np.int32),
                    block_ids=blocks.get_block_ids(),
                    key=key_of_request(request),
                )
            )

    @contextmanager
    def _keeping_errors_from_the_engine(self) -> Iterator[None]:
        """An error in here is the workers' business: they go blind."""
        try:
            yield
        except Exception as error:
            if self._failed is None:
                logger.exception("kvcanary: what a connector loads cannot be followed")
            self._failed = f"{type(error).__name__}: {error}"

    def _build_connector_meta(self, original: Any, scheduler_output: Any) -> Any:
        if self._failed is not None:
            setattr(scheduler_output, LOADS_UNKNOWN, self._failed)
        if self._begun:
            setattr(scheduler_output, LOADS, self._begun)
            self._begun = []
        return original(scheduler_output)


class LoadedSlots:
    """The worker's side: records for the slots of a load, their bytes when they must be there."""

    def __init__(self, *, monitor: CanaryMonitor, caches: GuardedCaches) -> None:
        self._monitor = monitor
        self._caches = caches
        self._on_their_way: dict[str, Load] = {}
        self._in_this_forward: list[tuple[Load, int]] = []

    def scheduled(self, scheduler_output: Any) -> None:
        """Before the runner acts on a step, and before the connector begins its loads.

        Raises:
            UnknownLoadsError: when the scheduler's side has failed.
        """
        unknown = getattr(scheduler_output, LOADS_UNKNOWN, None)
        if unknown is not None:
            raise UnknownLoadsError(unknown)
        for load in getattr(scheduler_output, LOADS, ()):
            self._on_their_way[load.request_id] = load
            self._adopt(load, uid=-1, bytes_are_there=False)
        for request_id in scheduler_output.finished_req_ids:
            self._on_their_way.pop(request_id, None)

    def before_forward(self, batch: Batch) -> None:
        """The coming forward computes ``batch``: what those load is there when it is done."""
        if self._on_their_way:
            self._in_this_forward = [
                (self._on_their_way.pop(request_id), request.uid if request is not None else -1)
                for request_id, request in zip(batch.request_ids, batch.requests, strict=True)
                if request_id in self._on_their_way
            ]

    def after_forward(self) -> None:
        """The forward is launched: from here on, in the order of its stream, the bytes stand."""
        arrived, self._in_this_forward = self._in_this_forward, []
        for load, uid in arrived:
            self._adopt(load, uid=uid, bytes_are_there=True)

    def _adopt(self, load: Load, *, uid: int, bytes_are_there: bool) -> None:
        for index, (group, group_id, block_size) in enumerate(
            zip(self._caches.groups, self._caches.group_ids, self._caches.block_sizes, strict=True)
        ):
            first, previous, slots = slots_of_load(load, group_id, block_size)
            if not (slots > _PADDING_SLOT).any():
                continue
            device = group.device
            self._monitor.adopt_slots(
                index,
                torch.from_numpy(slots).to(device, non_blocking=True),
                torch.from_numpy(load.tokens[first:]).to(device, non_blocking=True),
                torch.arange(first, load.tokens.shape[0], device=device),
                previous_slot=previous,
                request_uid=uid,
                identity_key=load.key,
                bytes_are_there=bytes_are_there,
            )


def slots_of_load(load: Load, group_id: int, block_size: int) -> tuple[int, int, Int64Array]:
    """(first token, slot of the token before it, slots from the first token on) in one group.

    Tokens that the group keeps no block for (below a sliding window), or that were not loaded,
    count for the chain all the same: they go to the padding slot, which nobody reads.
    """
    positions = np.arange(load.tokens.shape[0], dtype=np.int64)
    blocks = np.array(load.block_ids[group_id], dtype=np.int64)
    inside = positions // block_size < blocks.shape[0]
    block_of = blocks[np.minimum(positions // block_size, blocks.shape[0] - 1)]
    slots = np.where(
        inside & (block_of != _NULL_BLOCK) & (positions >= load.start),
        block_of * block_size + positions % block_size,
        _PADDING_SLOT,
    )
    if load.start and block_of[load.start - 1] != _NULL_BLOCK:
        before = load.start - 1
        previous = int(block_of[before] * block_size + before % block_size)
        return load.start, previous, slots[load.start :]
    return 0, -1, slots


def extend_scheduler_connector() -> None:
    """Let the scheduler's connector tell its workers what it loads. Once per process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    original = KVConnectorFactory.create_connector.__func__

    @functools.wraps(original)
    def create_connector(cls: Any, *args: Any, **kwargs: Any) -> Any:
        connector = original(cls, *args, **kwargs)
        if connector.role == KVConnectorRole.SCHEDULER:
            ScheduledLoads(
                connector, rewrites_cached_tokens=features.rewrites_cached_tokens(connector)
            )
        return connector

    KVConnectorFactory.create_connector = classmethod(create_connector)
