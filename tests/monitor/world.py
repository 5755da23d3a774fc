"""A minimal paged engine for scenarios: pools, page table, forwards, and no scheduler.

Each test says which request computes which tokens into which slots; the world turns that into a
``ForwardStep``, runs the monitor's steps around a forward that stores K/V bytes, and decodes what
lies in the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvcanary_plugin.cache import KVCacheGroup, row_source
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.forward import ForwardKind, ForwardStep, HostTokens
from kvcanary_plugin.kernels import translate_out_cache_loc
from kvcanary_plugin.monitor import CanaryMonitor
from kvcanary_plugin.ring import RingReader
from kvcanary_plugin.violations import RequestNames, Violation

LAYERS = 2
BYTES_PER_LAYER = 24


@dataclass
class Part:
    """One request's share of a forward: compute ``tokens[prefix:]`` into ``slots``."""

    uid: int
    row: int
    tokens: Sequence[int]
    slots: Sequence[int]
    prefix: int = 0
    identity_key: int = 0
    inputs: Sequence[int] | None = None
    positions: Sequence[int] | None = None
    host_knows_tokens: bool = True

    @property
    def computed(self) -> Sequence[int]:
        return self.tokens[self.prefix :]


@dataclass
class World:
    """Pools, page table and monitor of one engine rank."""

    slots: int = 64
    rows: int = 8
    width: int = 48
    swa_slots: int = 0
    swa_window: int = 0
    page_size: int = 1
    tracks_allocation: bool = False
    table_stable: bool = True
    token_offset: int = 0
    config: CanaryConfig = field(default_factory=lambda: checking_everything())

    def __post_init__(self) -> None:
        self.table = torch.zeros((self.rows, self.width), dtype=torch.int32)
        self.full_kv = self._pool(self.slots)
        groups = [self._group("full", self.slots, self.full_kv)]
        self.lookup: torch.Tensor | None = None
        if self.swa_slots:
            self.lookup = torch.zeros(self.slots + 1, dtype=torch.int64)
            self.swa_kv = self._pool(self.swa_slots)
            groups.append(self._group("swa", self.swa_slots, self.swa_kv, self.lookup))
        self.groups = groups
        self.errors: list[tuple[str, BaseException]] = []
        self.names = RequestNames()
        self.monitor = CanaryMonitor(
            config=self.config,
            groups=groups,
            max_requests=self.rows,
            raise_pending=lambda: None,
            on_error=lambda where, error: self.errors.append((where, error)),
        )
        self._reader = RingReader(self.monitor.sink.ring)
        self.step = 0

    def _pool(self, slots: int) -> list[torch.Tensor]:
        return [
            torch.zeros(
                (slots // self.page_size, self.page_size * BYTES_PER_LAYER), dtype=torch.uint8
            )
            for _ in range(2 * LAYERS)
        ]

    def _group(
        self, name: str, slots: int, kv: list[torch.Tensor], lookup: torch.Tensor | None = None
    ) -> KVCacheGroup:
        return KVCacheGroup(
            name=name,
            num_slots=slots,
            page_table=self.table,
            page_size=self.page_size,
            padding_row=0,
            sources=tuple(row_source(buffer, page_size=self.page_size) for buffer in kv),
            full_to_swa=lookup,
            tracks_allocation=self.tracks_allocation,
            table_stable_through_forward=self.table_stable,
            token_offset=self.token_offset,
            swa_window_size=self.swa_window if lookup is not None else 0,
        )

    def put_row(self, row: int, slots: Sequence[int], start: int = 0) -> None:
        """Fill a page-table row: ``slots[i]`` holds position ``start + i``."""
        for offset, slot in enumerate(slots):
            position = start + offset
            self.table[row, position // self.page_size] = slot // self.page_size

    def forward(
        self,
        *parts: Part,
        kind: ForwardKind = ForwardKind.PREFILL,
        meanwhile: Callable[[], None] = lambda: None,
        stores_kv: bool = True,
    ) -> list[Violation]:
        """Run one forward; ``meanwhile`` happens between the canary's two halves."""
        self.step += 1
        for part in parts:
            self.put_row(part.row, part.slots, part.prefix)
        step = self._step_of(parts, kind)
        self.monitor.before_forward(step)
        if stores_kv:
            self._store(step)
        meanwhile()
        self.monitor.after_forward()
        assert not self.errors, self.errors
        return self.violations()

    def _step_of(self, parts: Sequence[Part], kind: ForwardKind) -> ForwardStep:
        def flat(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64)

        full = flat([slot for part in parts for slot in part.slots])
        out_cache_loc = [full]
        if self.lookup is not None:
            translated = torch.empty_like(full)
            translate_out_cache_loc(
                out_cache_loc=full, full_to_swa_index_mapping=self.lookup, output=translated
            )
            out_cache_loc.append(translated)
        prefix = [part.prefix for part in parts]
        extend = [len(part.computed) for part in parts]
        keys = [part.identity_key for part in parts]
        return ForwardStep(
            kind=kind,
            step=self.step,
            request_rows=flat([part.row for part in parts]),
            request_uids=flat([part.uid for part in parts]),
            prefix_lens=flat(prefix),
            extend_lens=flat(extend),
            max_prefix_len=max(prefix, default=0),
            input_ids=flat([t for part in parts for t in (part.inputs or part.computed)]),
            positions=flat(
                [
                    p
                    for part in parts
                    for p in (part.positions or range(part.prefix, len(part.tokens)))
                ]
            ),
            out_cache_loc=tuple(out_cache_loc),
            identity_keys=flat(keys) if any(keys) else None,
            host_prefix_lens=np.array(prefix, dtype=np.int64),
            host_extend_lens=np.array(extend, dtype=np.int64),
            host_tokens=tuple(
                HostTokens(
                    batch_row=row,
                    request_row=part.row,
                    request_uid=part.uid,
                    prefix_len=part.prefix,
                    num_tokens=len(part.tokens),
                    source=np.array(part.tokens, dtype=np.int64),
                    identity_key=part.identity_key,
                )
                for row, part in enumerate(parts)
                if part.host_knows_tokens
            ),
        )

    def _store(self, step: ForwardStep) -> None:
        """The engine's forward: K/V of each token into its slot, in every group."""
        pools = [self.full_kv] + ([self.swa_kv] if self.lookup is not None else [])
        for kv, out_cache_loc in zip(pools, step.out_cache_loc, strict=True):
            for index, slot in enumerate(out_cache_loc.tolist()):
                if slot > 0:
                    seed = hash((int(step.input_ids[index]), int(step.positions[index]))) & 0xFFFF
                    generator = torch.Generator().manual_seed(seed)
                    for buffer in kv:
                        self.bytes_of(buffer, slot).copy_(
                            torch.randint(
                                0, 256, (BYTES_PER_LAYER,), dtype=torch.uint8, generator=generator
                            )
                        )

    def bytes_of(self, buffer: torch.Tensor, slot: int) -> torch.Tensor:
        """The bytes of one slot in one strip."""
        start = (slot % self.page_size) * BYTES_PER_LAYER
        return buffer[slot // self.page_size, start : start + BYTES_PER_LAYER]

    def violations(self) -> list[Violation]:
        """What the ring gained since the last call, decoded."""
        rows = self._reader.read().rows
        names = [group.name for group in self.groups]
        return [Violation.from_row(row, names, self.names) for row in rows]


def checking_everything(**changes: object) -> CanaryConfig:
    """Settings with every check on and every byte compared before each forward."""
    settings: dict[str, object] = {
        "write_input_assert": True,
        "checks": {"token": True},
        "verify": {"real_kv": "all"},
        "seal": {"real_kv": "all"},
        "scrub": {"percent_of_step_time": 0},
        "reverify": {"sample": 0},  # which would see a few of the same things again, by chance
        **changes,
    }
    return CanaryConfig.model_validate(settings)


def found(violations: Sequence[Violation]) -> set[tuple[str, int]]:
    """(check, slot) pairs of a list of violations."""
    return {(check, violation.slot) for violation in violations for check in violation.checks}
