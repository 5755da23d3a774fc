"""What is put into an incident's report: the recorder's window, page-table rows, records.

Runs on the drain's thread. Device arrays are read on a stream beside the engine's: the engine
neither waits for it nor knows of it, and what is read is the state of now, a moment after the
violation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.forward import HostTokens, Int64Array
from kvcanary_plugin.guard import GroupGuard
from kvcanary_plugin.incident_file import (
    Event,
    Evidence,
    Forward,
    Group,
    HostPrompt,
    Part,
    Request,
    Settings,
    Slots,
    TableRow,
)
from kvcanary_plugin.kernels import beside_the_engine
from kvcanary_plugin.kernels.consts import PADDING_SLOT, RECORD_FIELDS, UNKNOWN, SlotState
from kvcanary_plugin.kernels.hashes import chain_start, splitmix64_mix3, to_signed
from kvcanary_plugin.recorder import FlightRecorder, RecordedForward, SlotEvent
from kvcanary_plugin.veil import Veil
from kvcanary_plugin.violations import RequestNames, Violation

# Positions of a request that are kept: all of a short one, so many around the root of a long one.
MAX_POSITIONS: Final = 4096


class _TablesAreGoneError(Exception):
    """The memory of the engine's page tables is not its own any more."""


@dataclass(frozen=True, slots=True)
class _Range:
    """Positions [start, end) of a request."""

    start: int
    end: int

    @classmethod
    def around(cls, position: int, length: int) -> _Range:
        # The root's predecessor must be inside: a chain that breaks at the root needs it.
        start = max(0, min(position - MAX_POSITIONS // 2, length - MAX_POSITIONS))
        return cls(start, min(length, start + MAX_POSITIONS))


@dataclass(frozen=True, slots=True)
class _Seen:
    """A request as the last forward of the window that had it shows it."""

    uid: int
    row: int
    prefix_len: int
    extend_len: int
    kept: _Range


class EvidenceCollector:
    """Collects the evidence of an incident of one engine rank.

    Args:
        guards: the guarded groups.
        recorder: the flight recorder.
        config: returns the settings in force.
        names: request ids by uid.
        page_tables: yields whether the engine's page tables may be read, and keeps them there.
    """

    def __init__(
        self,
        *,
        guards: Sequence[GroupGuard],
        recorder: FlightRecorder,
        config: Callable[[], CanaryConfig],
        names: RequestNames,
        page_tables: Callable[[], AbstractContextManager[bool]],
    ) -> None:
        self._guards = tuple(guards)
        self._recorder = recorder
        self._config = config
        self._names = names
        self._page_tables = page_tables
        self._group_names = [guard.group.name for guard in guards]
        self._device = guards[0].group.device
        self._stream: torch.cuda.Stream | None = None

    def collect(self, root: Violation, veil: Veil) -> Evidence | None:
        """Everything that is known about ``root``, with token ids as ``veil`` shows them.

        None when the engine has given its page tables away since.
        """
        with self._beside_the_engine():
            window = self._recorder.window(until_step=root.step)
            try:
                return _Collection(self, root, veil, window).evidence()
            except _TablesAreGoneError:
                return None

    def slots_in_table(self, guard: GroupGuard, row: int, positions: _Range) -> list[int]:
        """Slots that row ``row`` names for ``positions``, in the group's own numbering, as they
        stand. Raises _TablesAreGoneError."""
        with self._page_tables() as are_there:
            if not are_there:
                raise _TablesAreGoneError
            return _slots_in_table(guard, row, positions)

    @contextmanager
    def _beside_the_engine(self) -> Iterator[None]:
        if self._device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with beside_the_engine(self._stream):
            yield

    def request_id(self, uid: int) -> str | None:
        """The engine's id of a request."""
        return self._names.get(uid)

    @property
    def guards(self) -> tuple[GroupGuard, ...]:
        """The guarded groups."""
        return self._guards

    def settings(self) -> Settings:
        """What the checks compared."""
        config = self._config()
        return Settings(
            write_input_assert=config.write_input_assert,
            token=config.checks.token,
            prefix_identity=config.checks.prefix_identity,
            verify_real_kv=config.verify.real_kv,
            seal_real_kv=config.seal.real_kv,
        )


class _Collection:
    """The evidence of one incident while it is being put together."""

    def __init__(
        self,
        collector: EvidenceCollector,
        root: Violation,
        veil: Veil,
        window: list[RecordedForward],
    ) -> None:
        self._collector = collector
        self._guards = collector.guards
        self._names = [guard.group.name for guard in self._guards]
        self._root = root
        self._veil = veil
        self._window = window
        # Per group: slots of which the report tells everything.
        self._slots: list[set[int]] = [set() for _ in self._guards]

    def evidence(self) -> Evidence:
        reader, writer = self._seen(self._root.request_uid), self._seen(self._root.writer_uid)
        requests = []
        for role, seen in (("reader", reader), ("writer", writer)):
            if seen is not None and not (role == "writer" and reader and seen.uid == reader.uid):
                requests.append(self._request(role, seen))
        self._add_slots(self._names.index(self._root.group), [self._root.slot])
        self._add_written_by(reader)
        forwards = self._forwards(reader)
        return Evidence(
            groups=[_describe(guard) for guard in self._guards],
            settings=self._collector.settings(),
            requests=requests,
            slots=[self._records(index) for index in range(len(self._guards))],
            chain_heads=self._chain_heads(),
            window=forwards,
        )

    # --- the requests ---------------------------------------------------------------------------

    def _seen(self, uid: int | None) -> _Seen | None:
        if uid is None:
            return None
        at = self._root.position
        if self._root.expected_position is not None:
            at = self._root.expected_position
        for forward in reversed(self._window):
            where = np.flatnonzero(forward.request_uids == uid)
            if where.size:
                index = int(where[0])
                prefix = int(forward.prefix_lens[index])
                extend = int(forward.extend_lens[index])
                return _Seen(
                    uid=uid,
                    row=int(forward.request_rows[index]),
                    prefix_len=prefix,
                    extend_len=extend,
                    kept=_Range.around(at, prefix + extend),
                )
        return None

    def _request(self, role: str, seen: _Seen) -> Request:
        rows = []
        for index, guard in enumerate(self._guards):
            slots = self._collector.slots_in_table(guard, seen.row, seen.kept)
            rows.append(TableRow(group=guard.group.name, slots=slots))
            if role == "reader":
                self._add_slots(index, slots)
        return Request(
            role="reader" if role == "reader" else "writer",
            uid=seen.uid,
            id=self._collector.request_id(seen.uid),
            request_row=seen.row,
            prefix_len=seen.prefix_len,
            extend_len=seen.extend_len,
            first=seen.kept.start,
            rows=rows,
        )

    def _add_written_by(self, reader: _Seen | None) -> None:
        """Slots that the reader wrote in the window: its row may name others by now."""
        if reader is None:
            return
        for forward in self._window:
            for request in np.flatnonzero(forward.request_uids == reader.uid).tolist():
                entries = _entries(forward, request)
                for index, slots in enumerate(forward.slots):
                    kept = slice(
                        max(0, reader.kept.start - int(forward.prefix_lens[request])),
                        max(0, reader.kept.end - int(forward.prefix_lens[request])),
                    )
                    self._add_slots(index, slots[entries][kept].tolist())

    def _add_slots(self, index: int, slots: Sequence[int]) -> None:
        count = self._guards[index].group.num_slots
        self._slots[index].update(slot for slot in slots if PADDING_SLOT < slot < count)

    # --- the window -----------------------------------------------------------------------------

    def _forwards(self, reader: _Seen | None) -> list[Forward]:
        kept = [np.array(sorted(slots), dtype=np.int64) for slots in self._slots]
        # Slots that somebody wrote into the reader's place, and what each write continued.
        return [self._forward(forward, reader, kept) for forward in self._window]

    def _forward(
        self, forward: RecordedForward, reader: _Seen | None, kept: list[Int64Array]
    ) -> Forward:
        tokens = forward.input_ids.shape[0]
        concerns = np.zeros(tokens, dtype=bool)
        for slots, of_interest in zip(forward.slots, kept, strict=True):
            concerns[: slots.shape[0]] |= np.isin(slots, of_interest)
        involved = np.searchsorted(forward.starts, np.flatnonzero(concerns), side="right") - 1
        if reader is not None:
            involved = np.append(involved, np.flatnonzero(forward.request_uids == reader.uid))
        parts = []
        for request in np.unique(involved).tolist():
            if reader is not None and int(forward.request_uids[request]) == reader.uid:
                chosen = self._reader_entries(forward, request, reader)
            else:
                concerned = np.flatnonzero(concerns[_entries(forward, request)])
                chosen = int(concerned[0]), int(concerned[-1]) + 1
            parts.append(self._part(forward, request, chosen))
        return Forward(
            step=forward.step,
            kind=forward.kind.value,
            requests=int(forward.request_rows.shape[0]),
            tokens=tokens,
            parts=parts,
            events=[
                found
                for event in forward.events
                if (found := self._event(event, kept[event.group])) is not None
            ],
        )

    @staticmethod
    def _reader_entries(forward: RecordedForward, request: int, reader: _Seen) -> tuple[int, int]:
        prefix, extend = int(forward.prefix_lens[request]), int(forward.extend_lens[request])
        first = min(max(0, reader.kept.start - prefix), extend)
        end = min(extend, reader.kept.end - prefix)
        return first, max(first, end)

    def _part(self, forward: RecordedForward, request: int, chosen: tuple[int, int]) -> Part:
        entries = _entries(forward, request)
        first, end = entries.start + chosen[0], entries.start + chosen[1]
        uid = int(forward.request_uids[request])
        keys = forward.identity_keys
        prompt = next(
            (p for p in forward.host_tokens if p.batch_row == request and p.request_uid == uid),
            None,
        )
        return Part(
            uid=uid,
            request_row=int(forward.request_rows[request]),
            prefix_len=int(forward.prefix_lens[request]),
            extend_len=int(forward.extend_lens[request]),
            identity_key=self._veil.identity(0 if keys is None else int(keys[request])),
            first=chosen[0],
            tokens=[self._veil.token(token) for token in forward.input_ids[first:end].tolist()],
            positions=forward.positions[first:end].tolist(),
            slots={
                name: slots[first:end].tolist()
                for name, slots in zip(self._names, forward.slots, strict=True)
            },
            seeds=self._seeds(forward, request, chosen[0]),
            prompt=self._prompt(prompt),
        )

    def _seeds(self, forward: RecordedForward, request: int, first: int) -> dict[str, int]:
        """Per group the slot before the first kept entry: its record is reported as well."""
        entries = _entries(forward, request)
        position = int(forward.prefix_lens[request]) + first - 1
        seeds = {}
        for index, guard in enumerate(self._guards):
            seed = UNKNOWN
            if first > 0:
                seed = int(forward.slots[index][entries][first - 1])
            elif position >= 0:
                seed = self._written_before(forward, request, index, position)
                if seed == UNKNOWN:
                    row = int(forward.request_rows[request])
                    (seed,) = self._collector.slots_in_table(
                        guard, row, _Range(position, position + 1)
                    )
            seeds[guard.group.name] = seed if seed > PADDING_SLOT else UNKNOWN
            self._add_slots(index, [seed])
        return seeds

    def _written_before(
        self, forward: RecordedForward, request: int, index: int, position: int
    ) -> int:
        """Slot to which the request wrote ``position`` in the latest forward before; -1 none."""
        uid = int(forward.request_uids[request])
        for earlier in reversed(self._window):
            if earlier.step >= forward.step:
                continue
            for other in np.flatnonzero(earlier.request_uids == uid).tolist():
                offset = position - int(earlier.prefix_lens[other])
                if 0 <= offset < int(earlier.extend_lens[other]):
                    return int(earlier.slots[index][_entries(earlier, other)][offset])
        return UNKNOWN

    def _prompt(self, prompt: HostTokens | None) -> HostPrompt | None:
        if prompt is None:
            return None
        reader = self._root.request_uid
        if prompt.request_uid != reader:
            return None
        kept = self._seen(reader)
        start, end = (kept.kept.start, kept.kept.end) if kept is not None else (0, MAX_POSITIONS)
        tokens = prompt.tokens[start:end].tolist()
        return HostPrompt(first=start, tokens=[self._veil.token(token) for token in tokens])

    def _event(self, event: SlotEvent, kept: Int64Array) -> Event | None:
        slots, sources = event.slots, event.sources
        if slots is not None:
            concerns = np.isin(slots, kept)
            if sources is not None:
                concerns |= np.isin(sources, kept)
                sources = sources[concerns]
                self._add_slots(event.group, sources.tolist())
            if not concerns.any():
                return None
            slots = slots[concerns]
        return Event.model_validate(
            {
                "kind": event.kind.name.lower(),
                "group": self._names[event.group],
                "slots": None if slots is None else slots.tolist(),
                "sources": None if sources is None else sources.tolist(),
                "uid": event.uid,
            }
        )

    # --- the records ----------------------------------------------------------------------------

    def _records(self, index: int) -> Slots:
        guard, table = self._guards[index], self._guards[index].slots
        slots = sorted(self._slots[index])
        on_device = torch.tensor(slots, dtype=torch.int64, device=guard.group.device)
        fields = guard.records.view(torch.int64)[:, :RECORD_FIELDS]
        records = fields[on_device].cpu().tolist()
        columns: dict[str, list[int]] = {
            "token": [self._veil.token(token) for token, *_ in records],
            "position": [position for _, position, *_ in records],
            "prev_hash": [self._veil.chain(prev) for _, _, prev, _ in records],
            "next_hash": [
                self._veil.chain(to_signed(splitmix64_mix3(prev, token, position)))
                for token, position, prev, _ in records
            ],
        }
        for name in ("owner_uid", "writer_uid", "writer_step"):
            columns[name] = getattr(table, name)[on_device].cpu().tolist()
        states = (table.state[on_device].cpu() & 0xFF).tolist()
        return Slots(
            group=guard.group.name,
            slot=slots,
            state=[SlotState(state).name.lower() for state in states],  # type: ignore[misc]
            **columns,
        )

    def _chain_heads(self) -> list[tuple[int, int]]:
        keys = {0}
        for forward in self._window:
            if forward.identity_keys is not None:
                keys.update(forward.identity_keys.tolist())
        return [
            (self._veil.identity(key), self._veil.chain(to_signed(chain_start(key))))
            for key in sorted(keys)
        ]


def _describe(guard: GroupGuard) -> Group:
    group = guard.group
    rows, width = group.page_table.shape
    return Group(
        name=group.name,
        num_slots=group.num_slots,
        page_size=group.page_size,
        padding_row=group.padding_row,
        swa_window_size=group.swa_window_size,
        token_offset=group.token_offset,
        tracks_allocation=group.tracks_allocation,
        table_positions=width * group.page_size,
        table_rows=rows,
        is_mapped=group.full_to_swa is not None,
        pool=group.pool,
    )


def _entries(forward: RecordedForward, request: int) -> slice:
    """Flat entries of a request of a forward."""
    return slice(int(forward.starts[request]), int(forward.starts[request + 1]))


def _slots_in_table(guard: GroupGuard, row: int, positions: _Range) -> list[int]:
    """Slots that row ``row`` names for ``positions``, in the group's own numbering, as they stand.

    -1 outside the table. The rules are those of the verify launch: a page <= 0 stands for itself,
    and what the lookup table cannot know stays as it is.
    """
    group = guard.group
    rows, width = group.page_table.shape
    wanted = np.arange(positions.start, positions.end, dtype=np.int64)
    slots = np.full(wanted.shape, UNKNOWN, dtype=np.int64)
    inside = wanted < width * group.page_size
    if 0 <= row < rows and inside.any():
        pages = group.page_table[row].cpu().numpy().astype(np.int64)
        page = pages[wanted[inside] // group.page_size]
        offset = wanted[inside] % group.page_size
        slots[inside] = np.where(page > 0, page * group.page_size + offset, page)
    if group.full_to_swa is not None:
        known = (slots > PADDING_SLOT) & (slots < group.full_to_swa.numel())
        looked_up = torch.from_numpy(slots[known]).to(group.device)
        slots[known] = group.full_to_swa[looked_up].cpu().numpy().astype(np.int64)
    result: list[int] = slots.tolist()
    return result
