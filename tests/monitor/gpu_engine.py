"""A small engine on a GPU for scenarios of the monitor: four requests, one pool, no scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvcanary_plugin.cache import KVCacheGroup, row_source
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.forward import ForwardKind, ForwardStep
from kvcanary_plugin.monitor import CanaryMonitor
from kvcanary_plugin.ring import RingReader
from kvcanary_plugin.violations import RequestNames, Violation
from tests.monitor.world import checking_everything

REQUESTS, PROMPT, SLOTS, LAYERS, BYTES = 4, 4000, 20000, 8, 4096


class GpuEngine:
    """Four requests that have computed their prompts; each forward decodes one token of each."""

    def __init__(
        self, *, layers: int = LAYERS, arrays_stay: bool = False, **settings: object
    ) -> None:
        self.arrays_stay = arrays_stay
        self.longest_extend = 1
        self.table = torch.zeros((8, 8192), dtype=torch.int32, device="cuda")
        self.kv = [
            torch.randint(0, 256, (SLOTS, BYTES), dtype=torch.uint8, device="cuda")
            for _ in range(layers)
        ]
        self.group = KVCacheGroup(
            name="full",
            num_slots=SLOTS,
            page_table=self.table,
            page_size=1,
            padding_row=0,
            sources=tuple(row_source(layer) for layer in self.kv),
            table_stable_through_forward=True,
        )
        base: dict[str, object] = {
            "verify": {"real_kv": "none"},
            "write_input_assert": False,
            "checks": {"token": False},
            "reverify": {"sample": 0},
            "recorder": {"forwards": 0},
        }
        self.config: CanaryConfig = checking_everything(**{**base, **settings})
        self.errors: list[BaseException] = []
        self.monitor = CanaryMonitor(
            config=self.config,
            groups=[self.group],
            max_requests=8,
            raise_pending=lambda: None,
            on_error=lambda where, error: self.errors.append(error),
        )
        self.guard = self.monitor.guards[0]
        self._reader = RingReader(self.monitor.sink.ring)
        self.rows = torch.arange(1, REQUESTS + 1, device="cuda")
        self.weights = torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16)
        self.step = 0
        self.is_alone = True  # the mode that forbids synchronisation is one for all threads
        self.length = PROMPT
        slots = torch.arange(1, REQUESTS * PROMPT + 1, device="cuda", dtype=torch.int32)
        self.table[1 : REQUESTS + 1, :PROMPT] = slots.view(REQUESTS, PROMPT)
        self.next_slot = REQUESTS * PROMPT + 1
        self._forward(prefix=0, tokens=PROMPT, slots=slots.long())

    def step_of(self, *, prefix: int, tokens: int, slots: torch.Tensor) -> ForwardStep:
        """The next forward: ``tokens`` new ones of each request behind ``prefix``."""
        self.step += 1
        count = REQUESTS * tokens
        return ForwardStep(
            kind=ForwardKind.DECODE,
            step=self.step,
            request_rows=self.rows,
            request_uids=self.rows,
            prefix_lens=torch.full((REQUESTS,), prefix, device="cuda"),
            extend_lens=torch.full((REQUESTS,), tokens, device="cuda"),
            max_prefix_len=prefix,
            input_ids=torch.arange(count, device="cuda") % 1000,
            positions=torch.arange(prefix, prefix + tokens, device="cuda").repeat(REQUESTS),
            out_cache_loc=(slots,),
        )

    def _forward(
        self,
        *,
        prefix: int,
        tokens: int,
        slots: torch.Tensor,
        work: Callable[[], None] = lambda: None,
    ) -> None:
        step = self.step_of(prefix=prefix, tokens=tokens, slots=slots)
        may_wait = not (self.step > 1 and self.is_alone)
        with no_synchronisation(forbidden=not may_wait):
            looks_later = self.monitor.forward_begins(arrays_stay=self.arrays_stay)
            if looks_later:
                self.monitor.forward_follows(longest_extend=self.longest_extend)
            else:
                self.monitor.look_at(step)
        work()
        with no_synchronisation(forbidden=not may_wait):
            if looks_later:
                with self.monitor.forward_is_launched():
                    self.monitor.look_at(step)
            self.monitor.after_forward()
        assert not self.errors, self.errors

    def decode(self, work: Callable[[], None] = lambda: None) -> None:
        """One token of each request, into the same four slots again and again."""
        slots = torch.arange(self.next_slot, self.next_slot + REQUESTS, device="cuda")
        self.table[1 : REQUESTS + 1, self.length] = slots.int()
        self._forward(prefix=self.length, tokens=1, slots=slots, work=work)

    def compute(self) -> None:
        for _ in range(4):
            torch.mm(self.weights, self.weights)

    def violations(self) -> list[Violation]:
        torch.cuda.synchronize()
        rows = self._reader.read().rows
        return [Violation.from_row(row, ["full"], RequestNames()) for row in rows]


@contextmanager
def no_synchronisation(*, forbidden: bool = True) -> Iterator[None]:
    """Inside the block a call that waits for the device is an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error" if forbidden else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
