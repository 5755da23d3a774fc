"""What a violation is: the decoded row, its description in words, and what it does (policy)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvcanary_plugin.checks import CHECKS, KNOWN_BITS, Check, check_named, labels_of
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.forward import DUMMY_UID
from kvcanary_plugin.kernels.consts import (
    U64_MASK,
    UNKNOWN,
    VIOLATION_FIELDS,
    FailReason,
    LaunchTag,
    SlotState,
    ViolationField,
    unpack_kernel_kind,
)
from kvcanary_plugin.ring import Rows

PHASES: Final = tuple(tag.name.lower() for tag in LaunchTag)


class RequestNames:
    """Request ids of the engine by the uid that the kernels carry; bounded, thread-safe, O(1).

    Args:
        capacity: how many of the latest requests are remembered.
    """

    def __init__(self, capacity: int = 131_072) -> None:
        if capacity < 1:
            raise ValueError(f"kvcanary: RequestNames capacity must be positive, got {capacity}")
        self._capacity = capacity
        self._names: OrderedDict[int, str] = OrderedDict()
        self._lock = threading.Lock()

    def remember(self, uid: int, request_id: str) -> None:
        """Ties ``uid`` to the engine's ``request_id``; a uid used again takes the new id."""
        with self._lock:
            self._names[uid] = request_id
            self._names.move_to_end(uid)
            if len(self._names) > self._capacity:
                self._names.popitem(last=False)

    def get(self, uid: int | None) -> str | None:
        """The engine's request id, or None when it is not (or no longer) known."""
        if uid is None:
            return None
        with self._lock:
            return self._names.get(uid)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One decoded row of the violation ring. None stands for "unknown", also for -1 in the row.

    Fields:
        checks: labels of the checks that failed, at least one.
        group: name of the KV cache group.
        phase: launch that saw it, one of ``PHASES``.
        slot, position: where; position as stored (verify) or being written (write).
        expected_position: position at which the slot is read or should be written.
        stored_token, expected_token: token ids, user content.
        stored_hash, expected_hash: chain hash before this token as 0x + 16 hex digits;
            ``expected_hash`` only where the launch had one.
        step: forward that saw it.
        request_uid, request_id: the request that was reading or writing.
        writer_uid, writer_id, writer_step: the request that last wrote the slot, and when; of a
            write, None for the step: the forward has put its own mark there before it writes.
        batch_row: row in the batch.
        slot_state: lifecycle state, lower case.
        slot_before: the slot that a changed page-table row named before, of ``table_changed`` only.
        sequence: number of the violation since the ring exists, from 1, modulo 2^32.
    """

    checks: tuple[str, ...]
    group: str
    phase: str
    slot: int
    position: int
    expected_position: int | None
    stored_token: int
    expected_token: int | None
    stored_hash: str
    expected_hash: str | None
    step: int
    request_uid: int | None
    request_id: str | None
    writer_uid: int | None
    writer_id: str | None
    writer_step: int | None
    batch_row: int | None
    slot_state: str | None
    slot_before: int | None
    sequence: int

    @classmethod
    def from_row(cls, row: Rows, groups: Sequence[str], names: RequestNames) -> Violation:
        """Decodes a row.

        Args:
            row: int64 [16].
            groups: group names by the index that ``kernel_kind`` carries.
            names: request ids by uid.

        Raises:
            ValueError: the row carries a launch, a group or a reason that does not exist.
        """
        if row.shape != (VIOLATION_FIELDS,):
            raise ValueError(
                f"kvcanary: violation row shape got {row.shape}; allowed ({VIOLATION_FIELDS},)"
            )
        value = [int(field) for field in row]
        phase, group = phase_and_group(value[ViolationField.KERNEL_KIND], groups)
        request_uid = _known(value[ViolationField.REQUEST_UID])
        writer_uid = _known(value[ViolationField.WRITER_UID])
        state = _known(value[ViolationField.SLOT_STATE])
        writer_step = _known(value[ViolationField.WRITER_STEP])
        if phase == "write" and writer_step == value[ViolationField.STEP]:
            writer_step = None
        aux = value[ViolationField.EXPECTED_AUX]
        # Of a changed table row it is the slot that stood there before, in a write a position.
        aux_is_slot = bool(value[ViolationField.FAIL_REASON_BITS] & FailReason.TABLE_CHANGED)
        aux_is_hash = phase in ("verify", "reverify") and aux != UNKNOWN and not aux_is_slot
        return cls(
            checks=labels_of(value[ViolationField.FAIL_REASON_BITS]),
            group=group,
            phase=phase,
            slot=value[ViolationField.SLOT],
            position=value[ViolationField.POSITION],
            expected_position=_known(value[ViolationField.EXPECTED_POSITION]),
            stored_token=value[ViolationField.STORED_TOKEN],
            expected_token=_known(value[ViolationField.EXPECTED_TOKEN]),
            stored_hash=_hex(value[ViolationField.STORED_CHAIN_HASH]),
            expected_hash=_hex(aux) if aux_is_hash else None,
            step=value[ViolationField.STEP],
            request_uid=request_uid,
            request_id=names.get(request_uid),
            writer_uid=writer_uid,
            writer_id=names.get(writer_uid),
            writer_step=writer_step,
            batch_row=_known(value[ViolationField.BATCH_ROW]),
            slot_state=None if state is None else _state_name(state & 0xFF),
            slot_before=_known(aux) if aux_is_slot else None,
            sequence=value[ViolationField.SEQUENCE],
        )

    def as_dict(self, *, include_tokens: bool) -> dict[str, Any]:
        """Fields for a report file; token ids, and hashes that tell of them, only when allowed."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        fields["checks"] = list(self.checks)
        if not include_tokens:
            for name in ("stored_token", "expected_token", "stored_hash", "expected_hash"):
                del fields[name]
        return fields


def phase_and_group(kernel_kind: int, groups: Sequence[str]) -> tuple[str, str]:
    """Phase and group name of a row's ``kernel_kind``; ValueError when there is no such one."""
    tag, index = unpack_kernel_kind(kernel_kind)
    if not 0 <= index < len(groups):
        raise ValueError(f"kvcanary: violation row of group {index}, there are {len(groups)}")
    return tag.name.lower(), groups[index]


def _known(value: int) -> int | None:
    return None if value == UNKNOWN else value


def _state_name(state: int) -> str:
    """Name of a lifecycle state; the state itself may be among what was overwritten."""
    return SlotState(state).name.lower() if state in list(SlotState) else f"invalid ({state})"


def _hex(value: int) -> str:
    return f"{value & U64_MASK:#018x}"


def describe(violation: Violation, *, include_tokens: bool = False) -> str:
    """The violation in plain words: what failed, where, who wrote last, what likely caused it."""
    v = violation
    first = check_named(v.checks[0])
    where = f"slot {v.slot} of group {v.group}, position {v.position}"
    if v.expected_position not in (None, v.position):
        where += f" (expected {v.expected_position})"
    reader = _request(v.request_uid, v.request_id)
    lines = [
        f"{' + '.join(v.checks)} violation in step {v.step} ({v.phase}): {where}"
        + (f", {reader}" if reader else "")
        + "."
    ]
    lines += [check_named(label).meaning for label in v.checks]
    details = [_last_write(v)]
    if v.slot_state is not None:
        details.append(f"slot state {v.slot_state}")
    if v.batch_row is not None:
        details.append(f"batch row {v.batch_row}")
    if include_tokens:
        if v.expected_hash is not None and v.expected_hash != v.stored_hash:
            details.append(f"chain hash {v.stored_hash}, expected {v.expected_hash}")
        expected = "" if v.expected_token is None else f", expected {v.expected_token}"
        details.append(f"token {v.stored_token}{expected}")
    lines.append(f"Known: {'; '.join(details)}.")
    lines.append(f"Likely: {_likely_cause(v, first)}.")
    lines.append(first.do)
    return " ".join(lines)


def _request(uid: int | None, request_id: str | None) -> str:
    if request_id is not None:
        return f"request {request_id!r}"
    if uid == DUMMY_UID:
        return "a dummy batch"
    return "" if uid is None else f"request with uid {uid}"


def _last_write(v: Violation) -> str:
    writer = _request(v.writer_uid, v.writer_id)
    if not writer:
        return "last writer unknown"
    when = "" if v.writer_step is None else f" at step {v.writer_step}"
    return f"last written by {writer}{when}"


def _likely_cause(v: Violation, check: Check) -> str:
    """Names both requests where the row shows that two were involved, else the usual cause."""
    both_known = v.writer_uid is not None and v.request_uid is not None
    other_writer = both_known and v.writer_uid != v.request_uid
    reader, writer = _request(v.request_uid, v.request_id), _request(v.writer_uid, v.writer_id)
    if "write_owned" in v.checks and other_writer:
        return f"{reader} wrote slot {v.slot}, which {writer} still owned"
    if other_writer and {"chain", "token", "position"} & set(v.checks):
        return (
            f"slot {v.slot} was written by {writer} at step {v.writer_step}"
            f" while {reader} still reads it, or {reader} was given a prefix that is not its own"
        )
    return check.causes[0]


class KVCanaryViolationError(RuntimeError):
    """Raised at the next forward in mode ``raise``; the text is the report.

    Attributes:
        violation: the first violation seen.
    """

    def __init__(self, violation: Violation, report: str) -> None:
        super().__init__(f"kvcanary: {report}")
        self.violation = violation


class ViolationPolicy:
    """What a violation does beside being counted: nothing, end its request, or stop the engine.

    Follows the settings in force; thread-safe (the drain thread adds, the engine thread asks).
    """

    def __init__(self, config: CanaryConfig, names: RequestNames) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._pending_error: KVCanaryViolationError | None = None
        self._requests_to_abort: set[int] = set()
        self.apply(config)

    def apply(self, config: CanaryConfig) -> None:
        """Takes over new settings; what an earlier mode had pending is dropped."""
        with self._lock:
            self._mode = config.mode
            self.include_tokens = config.report.include_tokens
            # In mode off records are still kept, and launches that write them look at some things.
            enabled = (
                check
                for check in CHECKS
                if config.mode != "off" and getattr(config.checks, check.label)
            )
            self._enabled_bits = sum(int(check.reasons) for check in enabled)
            if config.mode != "raise":
                self._pending_error = None
            if config.mode != "abort":
                self._requests_to_abort.clear()

    def keep_enabled(self, rows: Rows) -> Rows:
        """Rows int64 [n, 16] with only the bits of checks that are on, and without empty rows."""
        rows = rows.copy()
        # Bits that no check knows stay, so that decoding reports them instead of losing them.
        rows[:, ViolationField.FAIL_REASON_BITS] &= self._enabled_bits | ~KNOWN_BITS
        kept: Rows = rows[rows[:, ViolationField.FAIL_REASON_BITS] != 0]
        return kept

    def act_on(self, rows: Rows, decode: Callable[[Rows], Violation]) -> None:
        """Notes what rows int64 [n, 16], n >= 1, ask for in the mode in force."""
        with self._lock:
            if self._mode == "raise" and self._pending_error is None:
                violation = decode(rows[0])
                report = describe(violation, include_tokens=self.include_tokens)
                self._pending_error = KVCanaryViolationError(violation, report)
            elif self._mode == "abort":
                uids = np.unique(rows[:, ViolationField.REQUEST_UID]).tolist()
                self._requests_to_abort.update(uid for uid in uids if uid != UNKNOWN)

    @property
    def stops_the_engine(self) -> bool:
        """Whether the mode in force is ``raise``."""
        return self._mode == "raise"

    @property
    def ends_requests(self) -> bool:
        """Whether the mode in force is ``abort``."""
        return self._mode == "abort"

    def pending_error(self) -> KVCanaryViolationError | None:
        """In mode ``raise``, the error that every forward from now on must raise."""
        return self._pending_error

    def take_requests_to_abort(self) -> tuple[int, ...]:
        """In mode ``abort``, uids of requests hit since the last call."""
        if not self._requests_to_abort:
            return ()
        with self._lock:
            uids = tuple(sorted(self._requests_to_abort))
            self._requests_to_abort.clear()
        return uids
