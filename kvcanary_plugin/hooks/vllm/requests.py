"""Who stands in a batch: uids and identity keys by request id, and who moved to another row.

Both model runners hand over the request ids of a batch in the order of its rows. As long as nobody
comes, goes or moves, everything here is reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvcanary_plugin.forward import Int64Array
from kvcanary_plugin.hooks.vllm.media import Media, media_of
from kvcanary_plugin.identity import identity_key
from kvcanary_plugin.violations import RequestNames

# Attribute under which the scheduler's side passes on what vLLM does not send to its workers.
CACHE_SALT = "_kvcanary_cache_salt"
_UNKNOWN_UID = -1


class AdmittedTokens:
    """The tokens that a request was admitted with, converted when somebody asks for them first.

    Any thread may ask.

    Args:
        tokens: those of the scheduler, which may append to them later.
        media: what stands behind their placeholders.
    """

    def __init__(self, tokens: Sequence[int], media: Media) -> None:
        self.num_tokens = len(tokens)
        self._tokens: Sequence[int] | None = tokens
        self._media = media
        self._marked: Int64Array | None = None

    def marked(self) -> Int64Array:
        """int64 [num_tokens], with the marks of media."""
        tokens = self._tokens  # before the other: what replaces them is there when they are gone
        if tokens is None:
            assert self._marked is not None
            return self._marked
        marked = self._media.marked(np.asarray(tokens[: self.num_tokens], dtype=np.int64))
        self._marked = marked
        self._tokens = None
        return marked


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """What stays with a request from its admission on.

    Fields:
        uid: unique per admission; an id that a client uses again is another request.
        key: identity key, 0 for none.
        tokens: what it was admitted with, where the runner keeps none on the host.
        media: what stands behind the placeholders of its prompt.
    """

    uid: int
    key: int
    tokens: AdmittedTokens | None
    media: Media


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The requests of a batch in the order of its rows.

    Fields:
        request_ids: as the runner names them.
        uids: int64 [bs] on the device, until the next batch is made.
        keys: int64 [bs] there, None when no request has one.
        rows: int64 [bs] on the device: 0, 1, ... A batch is the first rows of its block table.
        requests: what is known of each; None for a request from before the canary.
    """

    request_ids: list[str]
    uids: torch.Tensor
    keys: torch.Tensor | None
    rows: torch.Tensor
    requests: list[KnownRequest | None]


@dataclass(frozen=True, slots=True, eq=False)
class BatchChange:
    """How a batch differs from the one before.

    Fields:
        entered: rows of the requests that did not stand in the batch before.
        moved: (old rows, new rows) of those that stand in another row now, or None.
    """

    entered: Sequence[int]
    moved: tuple[Int64Array, Int64Array] | None


UNCHANGED = BatchChange(entered=(), moved=None)


class RequestBook:
    """Knows the running requests of one model runner by their ids."""

    def __init__(
        self, *, names: RequestNames, device: torch.device, max_requests: int, keeps_tokens: bool
    ) -> None:
        """
        Args:
            names: learns the request id behind each uid.
            device: where the batches' tensors are.
            max_requests: rows of a batch.
            keeps_tokens: whether to keep the tokens that a request is admitted with.
        """
        self._names = names
        self._device = device
        self._keeps_tokens = keeps_tokens
        self._known: dict[str, KnownRequest] = {}
        self._next_uid = 1
        self._all_rows = torch.arange(max_requests, dtype=torch.int64, device=device)
        # They stay, since two streams read them: memory that an allocator hands out waits for one.
        self._uids = torch.empty_like(self._all_rows)
        self._keys = torch.empty_like(self._all_rows)
        self._batch: Batch | None = None
        self._somebody_new = False
        self._lists: list[AdmittedTokens] = []  # not converted yet, as far as known

    def scheduled(self, scheduler_output: Any) -> None:
        """Take in what the scheduler says with a step: who is gone, who is new."""
        for request_id in scheduler_output.finished_req_ids:
            self._known.pop(request_id, None)
        for admitted in scheduler_output.scheduled_new_reqs:
            self._admit(admitted)

    def forward_is_launched(self) -> None:
        """Time for what could wait: lists of tokens take five times the room of arrays."""
        for tokens in self._lists:
            tokens.marked()
        self._lists.clear()

    def batch_of(self, request_ids: Sequence[str]) -> tuple[Batch, BatchChange]:
        """The batch with these requests in its rows, and what is new about it."""
        before = self._batch
        if before is not None and not self._somebody_new and before.request_ids == request_ids:
            return before, UNCHANGED
        batch = self._make(list(request_ids))
        change = _change(before, batch)
        self._batch, self._somebody_new = batch, False
        return batch, change

    @property
    def batch(self) -> Batch:
        """The batch that was last asked for."""
        assert self._batch is not None
        return self._batch

    def _admit(self, admitted: Any) -> None:
        tokens = getattr(admitted, "prefill_token_ids", None) if self._keeps_tokens else None
        media = media_of(
            getattr(admitted, "mm_features", None),
            prompt_len=len(getattr(admitted, "prompt_token_ids", None) or ()),
        )
        admitted_tokens = AdmittedTokens(tokens, media) if tokens is not None else None
        if admitted_tokens is not None:
            self._lists.append(admitted_tokens)
        request = KnownRequest(
            uid=self._next_uid,
            key=_key(admitted, getattr(admitted, CACHE_SALT, None)),
            tokens=admitted_tokens,
            media=media,
        )
        self._next_uid += 1
        self._known[admitted.req_id] = request
        self._names.remember(request.uid, admitted.req_id)
        self._somebody_new = True

    def _make(self, request_ids: list[str]) -> Batch:
        size = len(request_ids)
        requests = [self._known.get(request_id) for request_id in request_ids]
        uids = [request.uid if request is not None else _UNKNOWN_UID for request in requests]
        keys = [request.key if request is not None else 0 for request in requests]
        before = self._batch
        if before is not None and before.rows.shape[0] == size:
            rows = before.rows
        else:
            rows = self._all_rows[:size]
        return Batch(
            request_ids=request_ids,
            uids=_fill(self._uids, uids),
            keys=_fill(self._keys, keys) if any(keys) else None,
            rows=rows,
            requests=requests,
        )


def _fill(buffer: torch.Tensor, values: list[int]) -> torch.Tensor:
    """The front of ``buffer``, now with ``values``, behind what the stream has yet to read there.

    They come from ordinary memory: so few bytes leave it before the call returns.
    """
    host = torch.from_numpy(np.array(values, dtype=np.int64))
    return buffer[: len(values)].copy_(host, non_blocking=True)


def key_of_request(request: Any) -> int:
    """Identity key of one of the scheduler's requests; 0 for none."""
    return _key(request, getattr(request, "cache_salt", None))


def _key(request: Any, cache_salt: str | None) -> int:
    """The same for a request as the scheduler has it and as its workers see it."""
    lora = getattr(request, "lora_request", None)
    # As in vLLM's own block hashes: a name that points at another adapter is another identity.
    lora_id = f"{lora.lora_name}\n{lora.lora_path}" if lora is not None else None
    return identity_key(lora_id=lora_id, cache_salt=cache_salt)


def _change(before: Batch | None, batch: Batch) -> BatchChange:
    """Rows that are new in ``batch``, and rows whose request stood elsewhere in ``before``."""
    old_row_of = (
        {request.uid: row for row, request in enumerate(before.requests) if request is not None}
        if before is not None
        else {}
    )
    entered, old_rows, new_rows = [], [], []
    for row, request in enumerate(batch.requests):
        old_row = old_row_of.get(request.uid) if request is not None else None
        if old_row is None:
            entered.append(row)
        elif old_row != row:
            old_rows.append(old_row)
            new_rows.append(row)
    moved = (np.array(old_rows, dtype=np.int64), np.array(new_rows, dtype=np.int64))
    return BatchChange(entered=entered, moved=moved if old_rows else None)
