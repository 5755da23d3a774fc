"""Translate the V1 model runner's batches into :class:`ForwardStep`.

The runner keeps its batch in persistent buffers; a request stands in the same row of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvcanary_plugin.forward import ForwardKind, ForwardStep, HostTokens, Int64Array
from kvcanary_plugin.hooks.vllm.media import MediaPart, marked_inputs
from kvcanary_plugin.hooks.vllm.pools import BlockTable, GuardedCaches
from kvcanary_plugin.hooks.vllm.requests import Batch, KnownRequest, RequestBook


def block_tables(runner: Any) -> list[BlockTable]:
    """The block table of each KV cache group."""
    return [
        BlockTable(table=table.block_table.gpu, page_size=int(table.block_size))
        for table in runner.input_batch.block_table.block_tables
    ]


class V1Translator:
    """Turns the batches of one V1 runner into steps."""

    def __init__(self, *, runner: Any, caches: GuardedCaches, book: RequestBook) -> None:
        self._runner = runner
        self._book = book
        self._slot_mappings = [
            runner.input_batch.block_table[group_id].slot_mapping.gpu
            for group_id in caches.group_ids
        ]
        self._extend_lens = torch.empty(
            runner.max_num_reqs, dtype=torch.int32, device=caches.groups[0].device
        )
        self._extend_lens_of_decode = torch.ones_like(self._extend_lens)
        self._step = 0

    def longest_extend(self, scheduler_output: Any) -> int:
        """At most so many new tokens has a request: all have at least one."""
        return (
            int(scheduler_output.total_num_scheduled_tokens - self._runner.input_batch.num_reqs) + 1
        )

    def translate(self, scheduler_output: Any) -> ForwardStep:
        """The step that the runner's buffers hold now. No device synchronisation."""
        runner, inputs = self._runner, self._runner.input_batch
        self._step += 1
        requests = inputs.num_reqs
        tokens = scheduler_output.total_num_scheduled_tokens
        batch, change = self._book.batch_of(inputs.req_ids)
        computed = inputs.num_computed_tokens_cpu[:requests]
        prefilling = computed < inputs.num_prompt_tokens[:requests]
        kind, host_extend = ForwardKind.DECODE, None
        prompts: tuple[HostTokens, ...] = ()
        input_ids = runner.input_ids.gpu[:tokens]
        if tokens == requests and not change.entered and not prefilling.any():
            extend = self._extend_lens_of_decode[:requests]
        else:
            starts = runner.query_start_loc.gpu
            extend = torch.sub(
                starts[1 : requests + 1], starts[:requests], out=self._extend_lens[:requests]
            )
            host_extend = np.diff(runner.query_start_loc.np[: requests + 1]).astype(np.int64)
            kind = (
                ForwardKind.VERIFY
                if scheduler_output.scheduled_spec_decode_tokens
                else kind_of(prefilling.tolist())
            )
            rows = rows_to_tell_of(prefilling.tolist(), change.entered)
            prompts = tuple(self._host_tokens(batch, rows, computed, host_extend))
            input_ids = marked_inputs(
                input_ids, media_parts(batch, rows, computed, host_extend), starts=starts
            )
        # With drafts in flight only the device knows how many of them were accepted.
        exact = not getattr(runner, "use_async_spec_decode", False)
        return ForwardStep(
            kind=kind,
            step=self._step,
            request_rows=batch.rows,
            request_uids=batch.uids,
            prefix_lens=runner.num_computed_tokens[:requests],
            extend_lens=extend,
            max_prefix_len=int(computed.max()),
            input_ids=input_ids,
            positions=runner.positions[:tokens],
            out_cache_loc=tuple([mapping[:tokens] for mapping in self._slot_mappings]),
            identity_keys=batch.keys,
            host_prefix_lens=computed.astype(np.int64) if exact else None,
            host_extend_lens=(
                host_extend if host_extend is not None else np.ones(requests, dtype=np.int64)
            ),
            host_tokens=prompts,
            moved_rows=change.moved,
        )

    def sampled(
        self, sampled_token_ids: torch.Tensor, spec_decode_metadata: Any
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(request rows, positions, tokens) of what the sampler chose; token -1: rejected."""
        count, width = sampled_token_ids.shape
        first = self._runner.seq_lens[:count].to(torch.int64)
        if spec_decode_metadata is not None:
            # The first token is the one behind the last that was certain.
            drafts = torch.tensor(spec_decode_metadata.num_draft_tokens, dtype=torch.int64)
            first = first - drafts.to(first.device, non_blocking=True)
        rows = torch.arange(count, device=first.device)
        for column in range(width):
            yield rows, first + column, sampled_token_ids[:, column]

    def _host_tokens(
        self, batch: Batch, rows: list[int], computed: Any, extend: Int64Array
    ) -> Iterator[HostTokens]:
        """Tokens of the requests in ``rows``: computing their prompt, or just come (back)."""
        inputs = self._runner.input_batch
        for row in rows:
            request = batch.requests[row]
            if request is None:
                continue
            prefix = int(computed[row])
            end = min(prefix + int(extend[row]), int(inputs.num_tokens_no_spec[row]))
            tokens = request.media.marked(inputs.token_ids_cpu[row, :end].astype(np.int64))
            yield host_tokens(
                row=row, request=request, prefix=prefix, num_tokens=end, source=tokens
            )


def kind_of(prefilling: Sequence[bool]) -> ForwardKind:
    """Kind of a batch, by which of its requests still compute their prompt."""
    if all(prefilling):
        return ForwardKind.PREFILL
    return ForwardKind.MIXED if any(prefilling) else ForwardKind.DECODE


def rows_to_tell_of(prefilling: Sequence[bool], entered: Sequence[int]) -> list[int]:
    """Rows whose tokens the host tells: still computing their prompt, or new in the batch."""
    new = set(entered)
    return [row for row, computes in enumerate(prefilling) if computes or row in new]


def host_tokens(
    *,
    row: int,
    request: KnownRequest,
    prefix: int,
    num_tokens: int,
    source: Int64Array | Callable[[], Int64Array],
) -> HostTokens:
    """The tokens of a request, with the marks of media.

    An unknown one in its prefix leaves the identity check out.
    """
    known = HostTokens(
        batch_row=row,
        request_row=row,
        request_uid=request.uid,
        prefix_len=prefix,
        num_tokens=num_tokens,
        source=source,
        identity_key=request.key,
    )
    if prefix == 0 or (prefix <= num_tokens and not (known.tokens[:prefix] < 0).any()):
        return known
    return replace(known, prefix_len=0)


def media_parts(
    batch: Batch, rows: Sequence[int], computed: Any, extend: Any
) -> Iterator[MediaPart]:
    """What a forward computes of the requests in ``rows``, where they have media.

    ``computed`` and ``extend``: [bs] on the host, tokens before this forward, and of it.
    """
    for row in rows:
        request = batch.requests[row]
        if request is not None and request.media.ranges:
            start = int(computed[row])
            end = start + int(extend[row])
            yield MediaPart(media=request.media, row=row, start=start, end=end)
