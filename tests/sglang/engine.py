"""SGLang's own pools, allocators and batches under a real session, without scheduler and model.

A test allocates slots, writes page-table rows and runs forwards; what a model would store is random
bytes. The runner around it all is a stand-in with the attributes that the hook reads.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.hooks.sglang.attach import Session
from kvcanary_plugin.hooks.sglang.batch import BatchTranslator
from kvcanary_plugin.monitor import CanaryMonitor
from kvcanary_plugin.ring import RingReader
from kvcanary_plugin.violations import RequestNames, Violation
from tests.monitor.world import checking_everything

SIZE, SWA_SIZE, LAYERS, HEADS, DIM = 160, 96, 2, 2, 4
ROWS, WIDTH = 6, 96
WINDOW = 8


@dataclass(eq=False)
class Request:
    """What the hook reads of a scheduler's request."""

    rid: str
    row: int
    tokens: list[int]
    slots: list[int] = field(default_factory=list)
    lora_id: str | None = None
    extra_key: str | None = None
    multimodal_inputs: Any = None
    to_finish: Any = None
    shared: int = 0  # slots of the prefix that are not its own

    @property
    def kv(self) -> Any:
        return SimpleNamespace(req_pool_idx=self.row)

    @property
    def full_untruncated_fill_ids(self) -> Any:
        return array("q", self.tokens)


class Engine:
    """One engine rank: a pool, its allocator, a page table, a session."""

    def __init__(
        self, *, swa: bool = False, config: CanaryConfig | None = None, **server_args: Any
    ) -> None:
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

        shape = {"dtype": torch.float32, "head_num": HEADS, "head_dim": DIM, "device": "cpu"}
        if swa:
            from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
            from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

            self.pool: Any = SWAKVPool(
                size=SIZE,
                size_swa=SWA_SIZE,
                page_size=1,
                swa_attention_layer_ids=[0],
                full_attention_layer_ids=[1],
                **shape,
            )
            self.allocator: Any = SWATokenToKVPoolAllocator(
                SIZE, SWA_SIZE, 1, torch.float32, "cpu", self.pool, need_sort=False
            )
            self.parts = [self.pool.full_kv_pool, self.pool.swa_kv_pool]
        else:
            self.pool = MHATokenToKVPool(
                size=SIZE, page_size=1, layer_num=LAYERS, enable_memory_saver=False, **shape
            )
            self.allocator = TokenToKVPoolAllocator(
                SIZE, torch.float32, "cpu", self.pool, need_sort=False
            )
            self.parts = [self.pool]
        for part in self.parts:
            part.use_native_move_kv_cache = True  # the other way needs a GPU
        self.req_to_token_pool = ReqToTokenPool(
            size=ROWS - 1, max_context_len=WIDTH, device="cpu", enable_memory_saver=False
        )
        self.runner = SimpleNamespace(
            token_to_kv_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.req_to_token_pool,
            server_args=SimpleNamespace(**server_args),
            sliding_window_size=WINDOW,
            max_total_num_tokens=SIZE,
            tp_rank=0,
        )
        self.session = Session(config or checking_everything(), self.runner)
        self._names = RequestNames()
        self._reader = RingReader(self.monitor.sink.ring)

    @property
    def monitor(self) -> CanaryMonitor:
        monitor = self.session._canary.monitor
        assert monitor is not None
        return monitor

    @property
    def table(self) -> torch.Tensor:
        return self.req_to_token_pool.req_to_token

    def close(self) -> None:
        self.session._canary.close()

    def give_slots(self, request: Request, count: int) -> None:
        """Hand out ``count`` more slots, behind those that the request has."""
        slots = self.allocator.alloc(count)
        start = len(request.slots)
        request.slots += slots.tolist()
        self.table[request.row, start : start + count] = slots.to(torch.int32)

    def share(self, request: Request, slots: Sequence[int]) -> None:
        """A prefix-cache hit: the request starts with slots that others have filled."""
        request.slots = list(slots)
        self.table[request.row, : len(slots)] = torch.tensor(slots, dtype=torch.int32)

    def prefill(self, *requests: Request, prefix: int = 0) -> list[Violation]:
        """Compute all tokens of ``requests`` behind the first ``prefix`` of each."""
        for request in requests:
            self.give_slots(request, len(request.tokens) - len(request.slots))
        return self.forward(self.extend_batch(*requests, prefix=prefix))

    def decode(self, *requests: Request, tokens: Sequence[int]) -> list[Violation]:
        """One more token of each request."""
        for request, token in zip(requests, tokens, strict=True):
            request.tokens.append(token)
            self.give_slots(request, 1)
        return self.forward(self.decode_batch(*requests))

    def extend_batch(self, *requests: Request, prefix: int = 0, mode: Any = None) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        lens = [len(request.tokens) for request in requests]
        batch = self._batch(
            mode or ForwardMode.EXTEND,
            requests,
            lens=lens,
            inputs=[token for r in requests for token in r.tokens[prefix:]],
            positions=[p for length in lens for p in range(prefix, length)],
            slots=[slot for r in requests for slot in r.slots[prefix : len(r.tokens)]],
        )
        batch.extend_prefix_lens = _int32([prefix] * len(requests))
        batch.extend_seq_lens = _int32([length - prefix for length in lens])
        batch.extend_prefix_lens_cpu = [prefix] * len(requests)
        batch.extend_seq_lens_cpu = [length - prefix for length in lens]
        return batch

    def decode_batch(self, *requests: Request) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        lens = [len(request.tokens) for request in requests]
        return self._batch(
            ForwardMode.DECODE,
            requests,
            lens=lens,
            inputs=[request.tokens[-1] for request in requests],
            positions=[length - 1 for length in lens],
            slots=[r.slots[n - 1] for r, n in zip(requests, lens, strict=True)],
        )

    def verify_batch(self, spec_info: Any, requests: Sequence[Request], lens: Sequence[int]) -> Any:
        """The target model's forward over ``spec_info``'s drafts, behind ``lens`` tokens each."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        count = spec_info.draft_token_num
        batch = self._batch(
            ForwardMode.TARGET_VERIFY,
            requests,
            lens=lens,
            inputs=spec_info.draft_token.tolist(),
            positions=spec_info.positions.tolist(),
            slots=[
                slot
                for request, length in zip(requests, lens, strict=True)
                for slot in request.slots[length : length + count]
            ],
        )
        batch.spec_info = spec_info
        return batch

    def _batch(
        self,
        mode: Any,
        requests: Sequence[Request],
        *,
        lens: Sequence[int],
        inputs: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
    ) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(requests),
            input_ids=_int64(inputs),
            req_pool_indices=_int64([request.row for request in requests]),
            seq_lens=_int64(lens),
            out_cache_loc=_int64(slots),
            seq_lens_sum=sum(lens),
            positions=_int64(positions),
            seq_lens_cpu=_int64(lens),
            rids=[request.rid for request in requests],
        )
        BatchTranslator.remember_requests(batch, SimpleNamespace(reqs=list(requests)))
        return batch

    def forward(
        self, batch: Any, *, stores: Callable[[Any], None] | None = None
    ) -> list[Violation]:
        """Run ``batch`` under the canary; a model stores K/V in the slots of its tokens."""
        store = stores or self.store
        self.session.forward(lambda: store(batch), batch)
        assert self.monitor.blind_because is None, self.monitor.blind_because
        return self.violations()

    def store(self, batch: Any) -> None:
        """Fresh bytes for every token of ``batch``, in every layer of every pool."""
        self.fill(batch.out_cache_loc)

    def fill(self, slots: torch.Tensor) -> None:
        for part in self.parts:
            own = slots
            if part is not self.parts[0]:
                own = self.pool.full_to_swa_index_mapping[slots]
                own = own[own > 0]
            for buffer in (*part.k_buffer, *part.v_buffer):
                buffer[own] = torch.rand_like(buffer[own])

    def damage(self, slot: int) -> None:
        """Change a byte of the last layer's V."""
        self.parts[0].v_buffer[-1].view(torch.uint8)[slot].view(-1)[0] ^= 1

    def violations(self) -> list[Violation]:
        """What the ring gained since the last call."""
        groups = [guard.group.name for guard in self.monitor.guards]
        rows = self._reader.read().rows
        return [Violation.from_row(row, groups, self._names) for row in rows]


def _int64(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
