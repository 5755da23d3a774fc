"""Plant faults in a running engine, for drills and tests. Refused unless the settings allow it.

A fault is asked for by writing one JSON object to the control file::

    {"id": 3, "fault": "flip_kv", "group": "full", "source": -1}

and is planted in the first forward that offers a target (a request with enough prefix, or a prompt
chunk). What was done is appended as one JSON line to ``<control file>.done``, so that a drill can
compare the report with the truth. Planting synchronises with the device; it is no part of the hot
path.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kvcanary_plugin.forward import ForwardStep
from kvcanary_plugin.guard import GroupGuard
from kvcanary_plugin.kernels import consts
from kvcanary_plugin.metrics import RankLabels

logger = logging.getLogger(__name__)

_MINIMUM_PREFIX = 6
_MINIMUM_CHUNK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRequest:
    """What to plant.

    Fields:
        id: chosen by whoever asks; comes back with the result.
        fault: a key of ``FAULTS``.
        group: name of the KV cache group; None takes the first.
        source: index into the group's sources, for ``flip_kv``; negative counts from the end.
        tp_rank: plant on this tensor-parallel rank only; None plants on every rank that watches.
    """

    id: int
    fault: str
    group: str | None = None
    source: int = -1
    tp_rank: int | None = None

    def __post_init__(self) -> None:
        if self.fault not in FAULTS:
            raise ValueError(
                f"kvcanary: fault {self.fault!r} is not one of {', '.join(sorted(FAULTS))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedFault:
    """What was planted, where: the truth that a report is compared with."""

    id: int
    fault: str
    step: int
    group: str
    slot: int
    position: int
    request_uid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """A place in the coming forward."""

    guard: GroupGuard
    step: ForwardStep
    batch_row: int
    position: int
    slot: int
    source: int


class FaultInjector:
    """Watches a control file and plants what it asks for. One per engine rank."""

    def __init__(
        self, *, control_file: Path, guards: tuple[GroupGuard, ...], ranks: RankLabels
    ) -> None:
        self._control_file = control_file
        self._done_file = Path(f"{control_file}.done")
        self._guards = guards
        self._ranks = ranks
        self._seen_state: tuple[int, int] | None = None
        self._pending: FaultRequest | None = None
        logger.warning("kvcanary: faults are allowed; watching %s", control_file)

    def before_forward(self, step: ForwardStep) -> None:
        """Plant the pending fault if ``step`` offers a target for it."""
        self._read_control_file()
        if self._pending is None:
            return
        target = self._find_target(self._pending, step)
        if target is None:
            return
        request, self._pending = self._pending, None
        FAULTS[request.fault](target)
        planted = PlantedFault(
            id=request.id,
            fault=request.fault,
            step=step.step,
            group=target.guard.group.name,
            slot=target.slot,
            position=target.position,
            request_uid=int(step.request_uids[target.batch_row]),
        )
        logger.warning("kvcanary: planted %s", planted)
        with self._done_file.open("a", encoding="utf-8") as done:
            done.write(json.dumps(asdict(planted)) + "\n")

    def _read_control_file(self) -> None:
        try:
            status = os.stat(self._control_file)
        except FileNotFoundError:
            return
        state = (status.st_mtime_ns, status.st_ino)
        if state == self._seen_state:
            return
        self._seen_state = state
        request = FaultRequest(**json.loads(self._control_file.read_text(encoding="utf-8")))
        if request.tp_rank is None or request.tp_rank == self._ranks.tp_rank:
            self._pending = request

    def _find_target(self, request: FaultRequest, step: ForwardStep) -> _Target | None:
        guard = next(
            (g for g in self._guards if request.group in (None, g.group.name)), self._guards[0]
        )
        plants_in_inputs = request.fault in _INPUT_FAULTS
        lens = step.extend_lens if plants_in_inputs else step.prefix_lens
        minimum = _MINIMUM_CHUNK if plants_in_inputs else _MINIMUM_PREFIX
        if request.fault == "swap_table":
            minimum += guard.group.page_size  # two pages of the prefix
        uids = step.request_uids
        candidates = torch.nonzero((lens >= minimum) & (uids >= 0)).flatten()
        if request.fault == "drop_write":
            candidates = torch.nonzero((step.extend_lens == 1) & (uids >= 0)).flatten()
        in_prefix = not plants_in_inputs and request.fault != "drop_write"
        for batch_row in candidates.tolist():
            prefix = int(step.prefix_lens[batch_row])
            # Late in the prefix, so that a sliding window still reads it; not the very last slot,
            # so that it has a successor whose chain can break.
            position = prefix - 3 if in_prefix else prefix
            written = step.out_cache_loc[guard.index]
            slot = (
                _slot_at(guard, step, batch_row, position)
                if in_prefix
                else int(written[_flat_start(step, batch_row)])
            )
            if in_prefix and bool((written == slot).any()):
                continue  # another request writes the shared slot in this very forward
            return _Target(
                guard=guard,
                step=step,
                batch_row=batch_row,
                position=position,
                slot=slot,
                source=request.source,
            )
        return None


def _flat_start(step: ForwardStep, batch_row: int) -> int:
    return int(step.extend_lens[:batch_row].sum())


def _slot_at(guard: GroupGuard, step: ForwardStep, batch_row: int, position: int) -> int:
    group = guard.group
    row = int(step.request_rows[batch_row])
    page = int(group.page_table[row, position // group.page_size])
    slot = page * group.page_size + position % group.page_size
    return int(group.full_to_swa[slot]) if group.full_to_swa is not None else slot


def _flip_kv(target: _Target) -> None:
    """Invert one byte in the middle of a slot's strip of real K/V."""
    source = target.guard.group.sources[target.source]
    row = source.tensor[target.slot // source.page_size]
    strip = row.reshape(-1).view(torch.uint8)
    offset = (target.slot % source.page_size) * source.num_bytes_per_token
    byte = offset + source.num_bytes_per_token // 2
    strip[byte] = strip[byte] ^ 0xFF


def _swap_table(target: _Target) -> None:
    """Exchange the slot's entry in the request's row of the page table with the one before it."""
    group = target.guard.group
    row = int(target.step.request_rows[target.batch_row])
    column = target.position // group.page_size
    pair = group.page_table[row, column - 1 : column + 1].clone()
    group.page_table[row, column - 1 : column + 1] = pair.flip(0)


def _rewrite_record(target: _Target) -> None:
    """Put another token into the slot's record."""
    record = target.guard.records[target.slot].view(torch.int64)
    record[consts.FIELD_TOKEN] += 1


def _shift_positions(target: _Target) -> None:
    """Let every position of the request's chunk come out one too high."""
    start = _flat_start(target.step, target.batch_row)
    end = start + int(target.step.extend_lens[target.batch_row])
    target.step.positions[start:end] += 1


def _rotate_inputs(target: _Target) -> None:
    """Give every position of the chunk its neighbour's token."""
    start = _flat_start(target.step, target.batch_row)
    end = start + int(target.step.extend_lens[target.batch_row])
    target.step.input_ids[start:end] = target.step.input_ids[start:end].roll(1)


def _drop_write(target: _Target) -> None:
    """Send the new token's K/V to the padding slot, so that its own slot keeps what was there."""
    index = _flat_start(target.step, target.batch_row)
    for out_cache_loc in target.step.out_cache_loc:
        out_cache_loc[index] = consts.PADDING_SLOT


FAULTS: dict[str, Callable[[_Target], None]] = {
    "flip_kv": _flip_kv,
    "swap_table": _swap_table,
    "rewrite_record": _rewrite_record,
    "shift_positions": _shift_positions,
    "rotate_inputs": _rotate_inputs,
    "drop_write": _drop_write,
}

_INPUT_FAULTS = frozenset({"shift_positions", "rotate_inputs"})
