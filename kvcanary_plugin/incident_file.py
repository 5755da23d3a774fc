"""The lines of a report file: their schema, and reading them back.

``docs/incident-file.md`` describes every field for people who read the files without this package.
Token ids, chain hashes and identity keys are replaced by keyed hashes unless
``report.include_tokens`` is on (see :mod:`kvcanary_plugin.veil`): equal values stay equal.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from kvcanary_plugin.checks import check_named

SCHEMA: Final = 1

Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Count = Annotated[int, Field(ge=0)]
CheckLabel = Annotated[str, AfterValidator(lambda label: check_named(label).label)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Place(_Model):
    """Where a check failed: the root of an incident, or one of what followed from it.

    Fields are those of :class:`kvcanary_plugin.violations.Violation`, null for "unknown".
    """

    checks: list[CheckLabel] = Field(min_length=1)
    group: str
    phase: str
    slot: Int64
    position: Int64
    expected_position: Int64 | None
    step: Int64
    request_uid: Int64 | None
    request_id: str | None
    writer_uid: Int64 | None
    writer_id: str | None
    writer_step: Int64 | None
    batch_row: Int64 | None
    slot_state: str | None
    slot_before: Int64 | None
    stored_token: Int64
    expected_token: Int64 | None
    stored_hash: Int64
    expected_hash: Int64 | None

    @property
    def read_position(self) -> int:
        """Position at which the slot was read or should have been written."""
        return self.position if self.expected_position is None else self.expected_position


class Group(_Model):
    """What a KV cache group looks like.

    Fields:
        name, num_slots, page_size, padding_row, swa_window_size, token_offset, tracks_allocation:
            as in ``KVCacheGroup``.
        pool: groups of one pool have their slots in common; null for a pool of its own.
        table_positions: positions that a row of the page table has room for.
        table_rows: rows of the page table.
        is_mapped: whether its slots come through a full-to-SWA lookup table.
    """

    name: str
    num_slots: Annotated[int, Field(gt=0, le=1 << 40)]
    page_size: Annotated[int, Field(gt=0)]
    padding_row: int
    swa_window_size: Count
    token_offset: int
    tracks_allocation: bool
    table_positions: Count
    table_rows: Count
    is_mapped: bool
    pool: str | None


class Settings(_Model):
    """The settings that decide what a check compares."""

    write_input_assert: bool
    token: bool
    prefix_identity: bool
    verify_real_kv: Literal["none", "partial", "all"]
    seal_real_kv: Literal["none", "partial", "all"]


class TableRow(_Model):
    """Slots that a request's row of the page table names, as found; ``slots[i]`` is at first + i.

    What names no slot stands as it is (-1, 0); a position beyond the table is -1.
    """

    group: str
    slots: list[Int64]


class Request(_Model):
    """A request that the incident involves.

    Fields:
        role: ``reader`` (its forward failed the check) or ``writer`` (it wrote the slot last).
        request_row: its row in the page table, in the last forward it was seen in.
        prefix_len, extend_len: of that forward.
        first: first position of the table rows below.
        rows: its row of the page table, per group, when the incident was written.
    """

    role: Literal["reader", "writer"]
    uid: Int64
    id: str | None
    request_row: Int64
    prefix_len: Count
    extend_len: Count
    first: Count
    rows: list[TableRow]


class FoundSlot(NamedTuple):
    """Record and state of one slot: a row of :class:`Slots`."""

    slot: int
    token: int
    position: int
    prev_hash: int
    next_hash: int
    state: str
    owner_uid: int
    writer_uid: int
    writer_step: int


class Slots(_Model):
    """Records and states of some slots of one group, column by column, when it was written.

    Fields:
        slot, token, position, prev_hash: the record.
        next_hash: running chain hash behind the record: what a successor must store.
        state: lifecycle state, lower case; owner_uid, writer_uid, writer_step: -1 unknown.
    """

    group: str
    slot: list[Int64]
    token: list[Int64]
    position: list[Int64]
    prev_hash: list[Int64]
    next_hash: list[Int64]
    state: list[Literal["free", "allocated", "written", "sealed", "external"]]
    owner_uid: list[Int64]
    writer_uid: list[Int64]
    writer_step: list[Int64]

    @model_validator(mode="after")
    def _columns_are_of_one_length(self) -> Self:
        lengths = {len(column) for _, column in self if isinstance(column, list)}
        if len(lengths) > 1:
            raise ValueError(f"columns of group {self.group!r} have lengths {sorted(lengths)}")
        return self

    def rows(self) -> Iterator[FoundSlot]:
        """The same slot by slot."""
        columns = [getattr(self, name) for name in FoundSlot._fields]
        return itertools.starmap(FoundSlot, zip(*columns, strict=True))


class HostPrompt(_Model):
    """The scheduler's own tokens of a request: ``tokens[i]`` is at position first + i."""

    first: Count
    tokens: list[Int64]


class Part(_Model):
    """One request's share of a forward, as far as it concerns the incident.

    Fields:
        uid, request_row, prefix_len, extend_len: of the whole request in this forward.
        identity_key: 0 for none.
        first: index, within the request's new tokens, of the first entry below.
        tokens, positions: what went in, entry by entry.
        slots: per group the slots written, entry by entry.
        seeds: per group the slot whose record the first entry continues, -1 for none.
        prompt: the scheduler's own tokens, when it computed prompt tokens.
    """

    uid: Int64
    request_row: Int64
    prefix_len: Count
    extend_len: Count
    identity_key: Int64
    first: Count
    tokens: list[Int64]
    positions: list[Int64]
    slots: dict[str, list[Int64]]
    seeds: dict[str, Int64]
    prompt: HostPrompt | None

    @model_validator(mode="after")
    def _entries_are_of_one_length(self) -> Self:
        columns = [self.tokens, self.positions, *self.slots.values()]
        if len({len(column) for column in columns}) > 1:
            raise ValueError("tokens, positions and slots have different lengths")
        return self


class Event(_Model):
    """What happened to slots before a forward; ``slots`` null for all of the pool."""

    kind: Literal["alloc", "free", "move", "load", "adopt", "reset"]
    group: str
    slots: list[Int64] | None
    sources: list[Int64] | None
    uid: Int64


class Forward(_Model):
    """One forward of the window; ``requests`` and ``tokens`` count all of it, ``parts`` do not."""

    step: Int64
    kind: str
    requests: Count
    tokens: Count
    parts: list[Part]
    events: list[Event]


class Evidence(_Model):
    """What the incident's place looked like, and how it came to that.

    Fields:
        groups: every guarded group.
        settings: what was compared.
        requests: the requests involved, the reader first.
        slots: per group, every slot that the window or the requests' rows name.
        chain_heads: identity key -> the hash that a first token stores, as (key, hash) pairs.
        window: the last forwards up to the root's step, oldest first.
        left_out: forwards at the beginning of the window that the size limit cost.
    """

    groups: list[Group]
    settings: Settings
    requests: list[Request]
    slots: list[Slots]
    chain_heads: list[tuple[Int64, Int64]]
    window: list[Forward]
    left_out: Count = 0


class Incident(_Model):
    """One line of type ``incident``: written when the incident opens.

    Fields:
        id: unique.
        time: Unix seconds.
        engine: engine and ranks, as in the file's name.
        version: of the plugin.
        tokens_are_hashed: whether tokens, hashes and keys are keyed hashes.
        cause: what happened, in one plain sentence.
        root: the row that everything else follows from.
        rows: rows that it stood for when it was written.
        followed: the first of the other rows.
        evidence: null where there is none; ``no_evidence_because`` says why then.
    """

    type: Literal["incident"] = "incident"
    schema_version: Literal[1] = Field(SCHEMA, alias="schema")
    id: str
    time: float
    engine: str
    version: str
    tokens_are_hashed: bool
    cause: str
    root: Place
    rows: Annotated[int, Field(gt=0)]
    followed: list[Place]
    evidence: Evidence | None
    no_evidence_because: str | None = None

    def as_line(self) -> dict[str, Any]:
        """The object of its line in a report file."""
        return self.model_dump(mode="json", by_alias=True)


class IncidentEnd(_Model):
    """One line of type ``incident_end``: what the incident came to, once it is quiet.

    Fields:
        id: of the incident.
        time: Unix seconds.
        rows: rows that it stood for altogether.
        first_step, last_step: steps that saw them.
        checks: rows by check.
        request_ids: requests that were hit, at most 100 of them; uids where no id is known.
        requests: how many were hit.
    """

    type: Literal["incident_end"] = "incident_end"
    schema_version: Literal[1] = Field(SCHEMA, alias="schema")
    id: str
    time: float
    rows: Count
    first_step: Int64
    last_step: Int64
    checks: dict[str, Count]
    request_ids: list[str]
    requests: Count

    def as_line(self) -> dict[str, Any]:
        """The object of its line in a report file."""
        return self.model_dump(mode="json", by_alias=True)


class IncidentFileError(ValueError):
    """A file that holds no incident, or one that cannot be read; the text says where and why."""


def read_incidents(path: Path) -> tuple[list[Incident], dict[str, IncidentEnd]]:
    """Incidents of a file or of all ``*.jsonl`` files of a directory, oldest first; ends by id.

    Lines of other types are passed over, and so is a last line that was not written to its end.

    Raises:
        IncidentFileError: the path does not exist, or a line is malformed.
    """
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
    elif path.is_file():
        files = [path]
    else:
        raise IncidentFileError(
            f"kvcanary: {path} does not exist; allowed: a report file or a report.directory"
        )
    incidents: list[Incident] = []
    ends: dict[str, IncidentEnd] = {}
    for file in files:
        for line in _lines(file):
            if isinstance(line, Incident):
                incidents.append(line)
            else:
                ends[line.id] = line
    return sorted(incidents, key=lambda incident: incident.time), ends


def _lines(path: Path) -> Iterator[Incident | IncidentEnd]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise IncidentFileError(f"kvcanary: {path} cannot be read: {error}") from error
    whole, _, unfinished = text.rpartition("\n")
    if not whole and unfinished:
        whole = unfinished  # one object without a newline: somebody cut it out of a report file
    for number, content in enumerate(whole.split("\n"), start=1):
        if content.strip():
            line = _parse(content, f"{path}:{number}")
            if line is not None:
                yield line


def _parse(content: str, where: str) -> Incident | IncidentEnd | None:
    try:
        data = json.loads(content)
    except (json.JSONDecodeError, RecursionError) as error:
        raise IncidentFileError(f"kvcanary: {where} is not JSON: {error}") from error
    kind = data.get("type") if isinstance(data, dict) else None
    if kind == "row":
        return None
    if kind not in ("incident", "incident_end"):
        raise IncidentFileError(
            f"kvcanary: {where}: type got {kind!r}; allowed row, incident, incident_end; give a"
            " file that the canary wrote"
        )
    if data.get("schema") != SCHEMA:
        raise IncidentFileError(
            f"kvcanary: {where}: schema got {data.get('schema')!r}; allowed {SCHEMA}; read it with"
            " the version of kvcanary that wrote it"
        )
    try:
        return (Incident if kind == "incident" else IncidentEnd).model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise IncidentFileError(f"kvcanary: {where}: {field}: {first['msg']}") from error
