"""Translate the V2 model runner's batches into :class:`ForwardStep`.

The runner gathers the block tables of a batch in the order of the batch, into persistent buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvcanary_plugin.forward import ForwardKind, ForwardStep, HostTokens
from kvcanary_plugin.hooks.vllm import versions
from kvcanary_plugin.hooks.vllm.batch_v1 import (
    host_tokens,
    kind_of,
    media_parts,
    rows_to_tell_of,
)
from kvcanary_plugin.hooks.vllm.media import marked_inputs
from kvcanary_plugin.hooks.vllm.pools import BlockTable, GuardedCaches
from kvcanary_plugin.hooks.vllm.requests import Batch, RequestBook


def block_tables(runner: Any) -> list[BlockTable]:
    """The block table of each KV cache group, as the forward reads it."""
    tables = runner.block_tables
    sizes = versions.table_page_sizes(tables)
    return [
        BlockTable(table=table, page_size=size)
        for table, size in zip(tables.input_block_tables, sizes, strict=True)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch:
    """What the runner has prepared for its next forward.

    Fields:
        input_batch: the runner's batch.
        slot_mappings: int64 [groups, tokens], -1 behind the batch's own tokens.
        is_dummy: whether it stands for no request (profiling, idle ranks).
    """

    input_batch: Any
    slot_mappings: torch.Tensor
    is_dummy: bool


class V2Translator:
    """Turns the batches of one V2 runner into steps."""

    def __init__(self, *, runner: Any, caches: GuardedCaches, book: RequestBook) -> None:
        self._runner = runner
        self._book = book
        self._group_ids = caches.group_ids
        self._drafts = bool(getattr(runner, "num_speculative_steps", 0))
        device = caches.groups[0].device
        self._extend_lens = torch.empty(runner.max_num_reqs, dtype=torch.int32, device=device)
        self._extend_lens_of_decode = torch.ones_like(self._extend_lens)
        self._prefix_lens = torch.empty_like(self._extend_lens)
        self._no_requests = torch.full((runner.max_num_reqs,), -1, dtype=torch.int64, device=device)
        self._all_rows = torch.arange(runner.max_num_reqs, dtype=torch.int64, device=device)
        self._step = 0

    def longest_extend(self, prepared: PreparedBatch) -> int:
        """At most so many new tokens has a request: all have at least one."""
        batch = prepared.input_batch
        return int(batch.num_tokens - batch.num_reqs) + 1

    def translate(self, prepared: PreparedBatch) -> ForwardStep:
        """The step of ``prepared``. No device synchronisation."""
        self._step += 1
        batch = prepared.input_batch
        requests = batch.num_reqs
        starts = batch.query_start_loc
        if prepared.is_dummy or batch.num_tokens != requests:
            extend = torch.sub(
                starts[1 : requests + 1], starts[:requests], out=self._extend_lens[:requests]
            )
        else:
            extend = self._extend_lens_of_decode[:requests]
        out_cache_loc = tuple([prepared.slot_mappings[group] for group in self._group_ids])
        if prepared.is_dummy:
            return self._dummy_step(batch, extend, out_cache_loc)

        members, change = self._book.batch_of(batch.req_ids)
        computed = batch.num_computed_tokens_np
        kind = ForwardKind.DECODE
        prompts: tuple[HostTokens, ...] = ()
        input_ids = batch.input_ids
        if change.entered or batch.is_prefilling_np.any():
            prefilling = batch.is_prefilling_np.tolist()
            kind = kind_of(prefilling)
            rows = rows_to_tell_of(prefilling, change.entered)
            prompts = tuple(self._host_tokens(members, rows, batch))
            input_ids = marked_inputs(
                input_ids,
                media_parts(members, rows, computed, batch.num_scheduled_tokens),
                starts=starts,
            )
        if batch.num_draft_tokens:
            kind = ForwardKind.VERIFY
        return ForwardStep(
            kind=kind,
            step=self._step,
            request_rows=members.rows,
            request_uids=members.uids,
            # What the device knows, drafts that were rejected taken off.
            prefix_lens=torch.sub(
                batch.seq_lens[:requests], extend, out=self._prefix_lens[:requests]
            ),
            extend_lens=extend,
            max_prefix_len=int(computed.max()),
            input_ids=input_ids,
            positions=batch.positions,
            out_cache_loc=out_cache_loc,
            identity_keys=members.keys,
            host_prefix_lens=None if self._drafts else computed.astype(np.int64),
            host_extend_lens=(
                None if self._drafts else batch.num_scheduled_tokens.astype(np.int64)
            ),
            max_extend_len=int(batch.num_scheduled_tokens.max()) if self._drafts else None,
            host_tokens=prompts,
            moved_rows=change.moved,
        )

    def sampled(
        self, sampled_tokens: torch.Tensor, num_sampled: torch.Tensor, idx_mapping: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(request rows, positions, tokens) of what the sampler chose; token -1: none.

        Called before the runner counts the tokens as its own.
        """
        count, width = sampled_tokens.shape
        first = self._runner.req_states.total_len.gpu[idx_mapping].to(torch.int64)
        rows = torch.arange(count, device=first.device)
        for column in range(width):
            tokens = sampled_tokens[:, column]
            yield rows, first + column, torch.where(num_sampled > column, tokens, -1)

    def _host_tokens(self, members: Batch, rows: list[int], batch: Any) -> Iterator[HostTokens]:
        """Tokens of the requests that compute what they were admitted with, or have just come."""
        for row in rows:
            request = members.requests[row]
            if request is None or request.tokens is None:
                continue
            prefix = int(batch.num_computed_tokens_np[row])
            end = prefix + int(batch.num_scheduled_tokens[row])
            yield host_tokens(
                row=row,
                request=request,
                prefix=prefix,
                num_tokens=min(end, request.tokens.num_tokens),
                source=request.tokens.marked,
            )

    def _dummy_step(
        self, batch: Any, extend: torch.Tensor, out_cache_loc: tuple[torch.Tensor, ...]
    ) -> ForwardStep:
        """A batch of nobody: its tokens must go nowhere, so that their slots are looked at."""
        requests = batch.num_reqs
        return ForwardStep(
            kind=ForwardKind.DUMMY,
            step=self._step,
            request_rows=self._all_rows[:requests],
            request_uids=self._no_requests[:requests],
            prefix_lens=torch.zeros_like(extend),
            extend_lens=extend,
            max_prefix_len=0,
            input_ids=batch.input_ids,
            positions=batch.positions,
            out_cache_loc=out_cache_loc,
        )
