"""Translate SGLang's ``ForwardBatch`` into a :class:`ForwardStep`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from kvcanary_plugin.cache import KVCacheGroup
from kvcanary_plugin.forward import ForwardKind, ForwardStep, HostTokens, Int64Array
from kvcanary_plugin.hooks.sglang.versions import own_tokens, request_row
from kvcanary_plugin.identity import identity_key
from kvcanary_plugin.kernels import translate_out_cache_loc
from kvcanary_plugin.violations import RequestNames

_REQUESTS = "_kvcanary_requests"
_UID = "_kvcanary_uid"
_KEY = "_kvcanary_identity_key"
_UNKNOWN_UID = -1


class UnsupportedForward(RuntimeError):
    """A forward that this hook cannot translate, so that its writes would go unseen."""


@dataclass(frozen=True, slots=True)
class _Requests:
    """The scheduler's requests of a batch, row by row, and which of them compute prompt tokens."""

    rows: tuple[Any, ...]
    computes_prompt: tuple[bool, ...]
    has_beams: bool = False
    error: Exception | None = None  # why they are not known


_NO_REQUESTS = _Requests((), ())


def _requests_of(batch: Any) -> _Requests:
    known: _Requests = getattr(batch, _REQUESTS, _NO_REQUESTS)
    return known


@dataclass(frozen=True, slots=True)
class _BatchIdentity:
    """uids and identity keys of a batch, on the device; reused while the batch stays the same."""

    request_ids: list[str]
    uids: torch.Tensor
    keys: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _DecodeBuffers:
    """What a decode of ``size`` requests needs, made once for decodes that follow each other."""

    size: int
    prefix: torch.Tensor
    ones: torch.Tensor
    host_ones: Int64Array


def _first(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """The first ``size`` entries; a view is made only where there are more."""
    return tensor if tensor.shape[0] == size else tensor[:size]


class BatchTranslator:
    """Turns the batches of one model runner into steps; counts steps and hands out request uids."""

    def __init__(
        self, *, groups: tuple[KVCacheGroup, ...], names: RequestNames, max_tokens: int
    ) -> None:
        """
        Args:
            groups: the guarded groups, in the order of ``ForwardStep.out_cache_loc``.
            names: learns the request id behind each uid.
            max_tokens: tokens that one forward may hold; more grows the translation buffer.
        """
        self._groups = groups
        self._names = names
        self._device = groups[0].device
        self._next_uid = 1
        self._step = 0
        self._identity: _BatchIdentity | None = None
        self._decode: _DecodeBuffers | None = None
        self._weights = 0  # updates of the weights behind which the cache was flushed
        self._requests: WeakValueDictionary[int, Any] = WeakValueDictionary()
        rows = groups[0].page_table.shape[0]
        self._ones = torch.ones(rows, dtype=torch.int64, device=self._device)
        self._drafts: dict[int, torch.Tensor] = {}
        self._decode_prefix = torch.empty(rows, dtype=torch.int64, device=self._device)
        self._translated = {
            index: torch.empty(max_tokens, dtype=torch.int64, device=self._device)
            for index, group in enumerate(groups)
            if group.full_to_swa is not None
        }

    @staticmethod
    def remember_requests(forward_batch: Any, schedule_batch: Any) -> None:
        """Keep the scheduler's requests with the batch that was made from them."""
        try:
            known = BatchTranslator._requests_in(schedule_batch)
        except Exception as error:  # of ours: `translate` raises it, where it is kept from engines
            known = _Requests((), (), error=error)
        setattr(forward_batch, _REQUESTS, known)

    @staticmethod
    def _requests_in(schedule_batch: Any) -> _Requests:
        decoding = {
            id(request) for request in (getattr(schedule_batch, "decoding_reqs", None) or ())
        }
        requests = tuple(schedule_batch.reqs)
        prompt = tuple(id(request) not in decoding for request in requests)
        beams = getattr(schedule_batch, "beam_tail", None)
        if beams is not None:
            # Rows of a beam search stand behind the others; they act for the request they are of.
            requests += tuple(
                requests[entry.leader_idx]
                for entry in beams.entries
                for _ in range(entry.start, entry.end)
            )
        return _Requests(requests, prompt, has_beams=beams is not None)

    def request(self, uid: int) -> Any | None:
        """The scheduler's request behind ``uid``; None when it is gone."""
        return self._requests.get(uid)

    def new_weights(self) -> None:
        """What is computed from now on has another identity; nothing older is left to share."""
        self._weights += 1
        self._identity = None

    def translate(self, forward_batch: Any) -> ForwardStep:
        """The step that ``forward_batch`` is about to run. No device synchronisation.

        Raises:
            UnsupportedForward: for a forward mode whose reads and writes this hook does not know,
                or requests that it could not make out.
        """
        self._step += 1
        problem = _requests_of(forward_batch).error
        if problem is not None:
            raise UnsupportedForward("the requests of a batch are not known") from problem
        mode = forward_batch.forward_mode
        if mode.is_idle() or forward_batch.batch_size == 0:
            return self._empty_step()
        if mode.is_decode():
            return self._decode_step(forward_batch)
        if mode.is_extend_without_speculative() and not mode.is_split_prefill():
            return self._extend_step(forward_batch)
        if mode.is_target_verify():
            return self._verify_step(forward_batch)
        raise UnsupportedForward(f"forward mode {mode.name} is not supported")

    def _decode_step(self, batch: Any) -> ForwardStep:
        size = int(batch.batch_size)
        buffers = self._decode
        if buffers is None or buffers.size != size:
            buffers = self._decode = _DecodeBuffers(
                size, self._decode_prefix[:size], self._ones[:size], np.ones(size, dtype=np.int64)
            )
        # Not `positions`: what is verified must not hang on the input that may be wrong.
        prefix = torch.sub(_first(batch.seq_lens, size), 1, out=buffers.prefix)
        lens_on_host = getattr(batch, "seq_lens_cpu", None)
        host_prefix = None
        if lens_on_host is not None:
            host_prefix = np.subtract(lens_on_host.numpy()[:size], 1, dtype=np.int64)
        return self._step_of(
            batch,
            kind=ForwardKind.DECODE if getattr(batch, "rids", None) else ForwardKind.DUMMY,
            prefix=prefix,
            extend=buffers.ones,
            host_prefix=host_prefix,
            host_extend=buffers.host_ones if host_prefix is not None else None,
            max_extend_len=1,
            host_tokens=(),
            rebuild_identity=False,
        )

    def _verify_step(self, batch: Any) -> ForwardStep:
        """The target model runs over drafts: as many tokens for each request, behind its own."""
        size = int(batch.batch_size)
        count = int(batch.spec_info.draft_token_num)
        extend = self._drafts.get(count)
        if extend is None:
            extend = self._drafts[count] = self._ones * count
        lens_on_host = getattr(batch, "seq_lens_cpu", None)
        return self._step_of(
            batch,
            kind=ForwardKind.VERIFY if getattr(batch, "rids", None) else ForwardKind.DUMMY,
            prefix=batch.seq_lens[:size],
            extend=extend[:size],
            # The host may lag behind the device, and positions continue the chain's anyway.
            host_prefix=None,
            host_extend=None,
            host_tokens=(),
            rebuild_identity=False,
            max_prefix_len=int(lens_on_host[:size].max()) if lens_on_host is not None else None,
            max_extend_len=count,
            drafts_a_tree=batch.spec_info.tree_topk != 1,
        )

    def _extend_step(self, batch: Any) -> ForwardStep:
        prefix_on_host = getattr(batch, "extend_prefix_lens_cpu", None)
        extend_on_host = getattr(batch, "extend_seq_lens_cpu", None)
        host_prefix = host_extend = None
        if prefix_on_host is not None and extend_on_host is not None:
            host_prefix = np.asarray(prefix_on_host, dtype=np.int64)
            host_extend = np.asarray(extend_on_host, dtype=np.int64)
        kind = ForwardKind.MIXED if batch.forward_mode.is_mixed() else ForwardKind.PREFILL
        return self._step_of(
            batch,
            kind=kind if getattr(batch, "rids", None) else ForwardKind.DUMMY,
            prefix=batch.extend_prefix_lens,
            extend=batch.extend_seq_lens,
            host_prefix=host_prefix,
            host_extend=host_extend,
            host_tokens=self._host_tokens(batch, host_prefix, host_extend),
            rebuild_identity=True,
        )

    def _step_of(
        self,
        batch: Any,
        *,
        kind: ForwardKind,
        prefix: torch.Tensor,
        extend: torch.Tensor,
        host_prefix: Int64Array | None,
        host_extend: Int64Array | None,
        host_tokens: tuple[HostTokens, ...],
        rebuild_identity: bool,
        max_prefix_len: int | None = None,
        max_extend_len: int | None = None,
        drafts_a_tree: bool = False,
    ) -> ForwardStep:
        identity = self._identity_of(batch, rebuild=rebuild_identity)
        if max_prefix_len is None:
            width = self._groups[0].page_table.shape[1]
            max_prefix_len = int(host_prefix.max()) if host_prefix is not None else width
        return ForwardStep(
            kind=kind,
            step=self._step,
            request_rows=_first(batch.req_pool_indices, int(batch.batch_size)),
            request_uids=identity.uids,
            prefix_lens=prefix,
            extend_lens=extend,
            max_prefix_len=max_prefix_len,
            input_ids=batch.input_ids,
            positions=batch.positions,
            out_cache_loc=tuple(
                self._slots_in(index, batch.out_cache_loc) for index in range(len(self._groups))
            ),
            identity_keys=identity.keys,
            host_prefix_lens=host_prefix,
            host_extend_lens=host_extend,
            max_extend_len=max_extend_len,
            host_tokens=host_tokens,
            drafts_a_tree=drafts_a_tree,
            rows_trade_places=_requests_of(batch).has_beams,
        )

    def _slots_in(self, group_index: int, out_cache_loc: torch.Tensor) -> torch.Tensor:
        """The slots being written, in the numbering of a group."""
        lookup = self._groups[group_index].full_to_swa
        if lookup is None:
            return out_cache_loc
        count = out_cache_loc.shape[0]
        if count > self._translated[group_index].shape[0]:
            self._translated[group_index] = torch.empty(
                2 * count, dtype=torch.int64, device=self._device
            )
        output = self._translated[group_index][:count]
        translate_out_cache_loc(
            out_cache_loc=out_cache_loc, full_to_swa_index_mapping=lookup, output=output
        )
        return output

    def _identity_of(self, batch: Any, *, rebuild: bool) -> _BatchIdentity:
        request_ids: list[str] = getattr(batch, "rids", None) or []
        kept = self._identity
        size = int(batch.batch_size)
        # A request is always prefilled before it decodes, so equal ids in a decode are equal
        # requests; an id that a client uses again arrives with a prefill, which rebuilds. A beam
        # search adds rows to the ids.
        if (
            not rebuild
            and kept is not None
            and kept.request_ids == request_ids
            and request_ids
            and kept.uids.shape[0] == size
        ):
            return kept
        requests = _requests_of(batch).rows
        uids = np.full(size, _UNKNOWN_UID, dtype=np.int64)
        keys = np.zeros(size, dtype=np.int64)
        known = min(len(requests), size)
        uids[:known], keys[:known] = self.identities_of(requests[:size])
        identity = _BatchIdentity(
            request_ids=list(request_ids),
            uids=torch.from_numpy(uids).to(self._device, non_blocking=True),
            keys=torch.from_numpy(keys).to(self._device, non_blocking=True) if keys.any() else None,
        )
        self._identity = identity
        return identity

    def identities_of(self, requests: Sequence[Any]) -> tuple[Int64Array, Int64Array]:
        """uids and identity keys of scheduler requests."""
        return (
            np.array([self._uid_of(request) for request in requests], dtype=np.int64),
            np.array([self._identity_key_of(request) for request in requests], dtype=np.int64),
        )

    def requests_arrive(self) -> None:
        """Requests that no forward brings the prompt of are about to decode."""
        self._identity = None

    def prompts_of(self, requests: Sequence[Any]) -> tuple[HostTokens, ...]:
        """All tokens of scheduler requests whose prompts are in the pool already."""
        return tuple(
            self._host_tokens_of(
                request,
                batch_row=row,
                prefix_len=len(own_tokens(request)) - 1,
                num_tokens=len(own_tokens(request)),
            )
            for row, request in enumerate(requests)
        )

    def _uid_of(self, request: Any) -> int:
        uid = getattr(request, _UID, None)
        if uid is None:
            uid = self._next_uid
            self._next_uid += 1
            setattr(request, _UID, uid)
        self._requests[uid] = request
        self._names.remember(uid, request.rid)
        return int(uid)

    def _host_tokens(
        self, batch: Any, prefix: Int64Array | None, extend: Int64Array | None
    ) -> tuple[HostTokens, ...]:
        known = _requests_of(batch)
        if prefix is None or extend is None:
            return ()
        return tuple(
            self._host_tokens_of(
                request,
                batch_row=row,
                prefix_len=int(prefix[row]),
                num_tokens=int(prefix[row] + extend[row]),
            )
            for row, (request, computes_prompt) in enumerate(
                zip(known.rows, known.computes_prompt, strict=False)
            )
            if computes_prompt
        )

    def _host_tokens_of(
        self, request: Any, *, batch_row: int, prefix_len: int, num_tokens: int
    ) -> HostTokens:
        """A copy of the request's first tokens, as many of ``num_tokens`` as it has."""
        tokens = np.frombuffer(own_tokens(request)[:num_tokens], dtype=np.int64)
        return HostTokens(
            batch_row=batch_row,
            request_row=request_row(request),
            request_uid=self._uid_of(request),
            prefix_len=prefix_len,
            num_tokens=tokens.shape[0],
            source=tokens,
            identity_key=self._identity_key_of(request),
        )

    def _empty_step(self) -> ForwardStep:
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        return ForwardStep(
            kind=ForwardKind.DUMMY,
            step=self._step,
            request_rows=nothing,
            request_uids=nothing,
            prefix_lens=nothing,
            extend_lens=nothing,
            max_prefix_len=0,
            input_ids=nothing,
            positions=nothing,
            out_cache_loc=tuple(nothing for _ in self._groups),
        )

    def _identity_key_of(self, request: Any) -> int:
        """SGLang's ``extra_key`` carries salt and LoRA id together.

        Images and the like need no part of it: the engine pads the prompt with tokens made from
        the hash of their content, and the text before them may be shared.
        """
        weights, key = getattr(request, _KEY, (None, 0))
        if weights != self._weights:
            key = identity_key(
                lora_id=getattr(request, "lora_id", None),
                cache_salt=getattr(request, "extra_key", None),
                weight_version=str(self._weights) if self._weights else None,
            )
            setattr(request, _KEY, (self._weights, key))
        return int(key)
