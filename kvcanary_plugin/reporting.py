"""Violation rows become incidents, and incidents become log lines and report lines."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

from kvcanary_plugin import __version__
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.evidence import EvidenceCollector
from kvcanary_plugin.incident_file import Evidence, IncidentEnd, Place
from kvcanary_plugin.incident_file import Incident as IncidentLine
from kvcanary_plugin.incidents import Incident, IncidentTracker, cause_of
from kvcanary_plugin.metrics import CanaryMetrics, ErrorPlace
from kvcanary_plugin.report_files import ReportFiles
from kvcanary_plugin.ring import Rows
from kvcanary_plugin.veil import Veil
from kvcanary_plugin.violations import RequestNames, Violation, describe

logger = logging.getLogger(__name__)

# Incidents a minute for which evidence is collected: each reads the device and writes much.
EVIDENCE_PER_MINUTE: Final = 12
# An incident that goes on is summed up in the log this often.
UPDATE_SECONDS: Final = 60.0
_MAX_REQUESTS_LISTED: Final = 100

CountedErrors = Callable[[ErrorPlace], AbstractContextManager[None]]


class PerMinute:
    """Allows so many of something a minute, in windows of one minute.

    Args:
        limit: how many a window.
        clock: seconds, monotonic.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._window_end = clock() + 60.0
        self._used = 0

    def allows_one(self) -> bool:
        """Whether one more may happen now; counts it if so."""
        now = self._clock()
        if now >= self._window_end:
            self._window_end = now + 60.0
            self._used = 0
        if self._used >= self.limit:
            return False
        self._used += 1
        return True


class Reporter:
    """Reports incidents of one engine rank. For one thread at a time.

    Args:
        config: settings in force.
        groups: group names by the index in ``kernel_kind``.
        names: request ids by uid.
        metrics: where incidents are counted.
        counted_errors: keeps an error inside and counts it.
        engine: engine and ranks, for the reports.
        evidence: what an incident's report is made from; None reports the rows alone.
        report_files: where reports go beside the log, if anywhere.
        clock: seconds, monotonic.
        wall_clock: Unix seconds.
    """

    def __init__(
        self,
        *,
        config: CanaryConfig,
        groups: Sequence[str],
        names: RequestNames,
        metrics: CanaryMetrics,
        counted_errors: CountedErrors,
        engine: str = "",
        evidence: EvidenceCollector | None = None,
        report_files: ReportFiles | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._groups = tuple(groups)
        self._names = names
        self._metrics = metrics
        self._counted_errors = counted_errors
        self._engine = engine
        self._evidence = evidence
        self._report_files = report_files
        self._clock = clock
        self._wall_clock = wall_clock
        self._every_row = config.report.every_row
        self._veil = Veil(transparent=config.report.include_tokens)
        self._tracker = IncidentTracker(clock=clock)
        self._log_limit = PerMinute(config.log.max_reports_per_minute, clock)
        self._evidence_limit = PerMinute(EVIDENCE_PER_MINUTE, clock)
        self._not_logged = 0

    def apply(self, config: CanaryConfig) -> None:
        """Takes over new settings."""
        self._log_limit.limit = config.log.max_reports_per_minute

    def report(self, rows: Rows) -> None:
        """Takes decodable rows int64 [n, 16] of one poll."""
        opened = self._tracker.add(rows)
        for _ in opened:
            self._metrics.incident()
        if self._every_row and self._report_files is not None:
            with self._counted_errors("report"):
                self._report_files.append(self._row_line(row) for row in rows)
        for incident in opened:
            self._open(incident)

    def sum_up(self, *, at_the_end: bool = False) -> None:
        """Ends incidents that are quiet (or all) and mentions the ones that go on."""
        for incident in self._tracker.close_quiet(everything=at_the_end):
            self._end(incident)
        now = self._clock()
        for incident in self._tracker.open_incidents:
            if now - incident.reported_at >= UPDATE_SECONDS:
                self._update(incident, now, "goes on")

    # --- one incident ---------------------------------------------------------------------------

    def _open(self, incident: Incident) -> None:
        root = self._decode(incident.root)
        evidence, reason = self._collect(root)
        cause = cause_of(root, reader_wrote_it_at=_earlier_write(root, evidence))
        if self._log_limit.allows_one():
            self._log(incident, root, cause)
            incident.reported_rows = incident.rows
        else:
            self._not_logged += 1
        if self._report_files is None:
            return
        with self._counted_errors("report"):
            line = IncidentLine(
                schema=1,
                id=incident.id,
                time=self._wall_clock(),
                engine=self._engine,
                version=__version__,
                tokens_are_hashed=not self._veil.is_transparent,
                cause=cause,
                root=self._place(incident.root),
                rows=incident.rows,
                followed=[self._place(row) for row in incident.followed],
                evidence=evidence,
                no_evidence_because=reason,
            )
            self._report_files.append([_fitted(line, self._report_files.max_line_bytes).as_line()])

    def _collect(self, root: Violation) -> tuple[Evidence | None, str | None]:
        if self._evidence is None:
            return None, "nothing is guarded"
        if not self._evidence_limit.allows_one():
            return None, f"more than {EVIDENCE_PER_MINUTE} incidents in this minute"
        collected = []
        with self._counted_errors("recorder"):
            collected.append(self._evidence.collect(root, self._veil))
        if not collected:
            return None, "collecting it failed; the engine's log says why"
        if collected[0] is None:
            return None, "the engine went to sleep before it was collected"
        return collected[0], None

    def _end(self, incident: Incident) -> None:
        now = self._clock()
        if incident.rows > incident.reported_rows > 0:
            self._update(incident, now, "is over")
        if self._report_files is None:
            return
        with self._counted_errors("report"):
            uids = sorted(incident.requests)[:_MAX_REQUESTS_LISTED]
            end = IncidentEnd(
                schema=1,
                id=incident.id,
                time=self._wall_clock(),
                rows=incident.rows,
                first_step=incident.first_step,
                last_step=incident.last_step,
                checks=dict(sorted(incident.rows_by_check.items())),
                request_ids=[self._names.get(uid) or f"#{uid}" for uid in uids],
                requests=len(incident.requests),
            )
            self._report_files.append([end.as_line()])

    def _log(self, incident: Incident, root: Violation, cause: str) -> None:
        text = f"incident {incident.id}: {cause}."
        text += f" {describe(root, include_tokens=self._veil.is_transparent)}"
        if incident.rows > 1:
            more = incident.rows - 1
            text += f" {more} more {'row goes' if more == 1 else 'rows go'} back to it so far."
        if self._not_logged:
            text += f" {self._not_logged} incidents before this one were left out of the log."
            self._not_logged = 0
        logger.error("kvcanary: %s", text)

    def _update(self, incident: Incident, now: float, what: str) -> None:
        incident.reported_at = now
        if incident.rows == incident.reported_rows or not self._log_limit.allows_one():
            return
        incident.reported_rows = incident.rows
        logger.error(
            "kvcanary: incident %s %s: %d rows in steps %d to %d, %d request%s hit",
            incident.id,
            what,
            incident.rows,
            incident.first_step,
            incident.last_step,
            len(incident.requests),
            "" if len(incident.requests) == 1 else "s",
        )

    # --- rows -----------------------------------------------------------------------------------

    def _decode(self, row: Rows) -> Violation:
        return Violation.from_row(row, self._groups, self._names)

    def _row_line(self, row: Rows) -> dict[str, object]:
        fields = self._decode(row).as_dict(include_tokens=self._veil.is_transparent)
        return {"type": "row", "time": self._wall_clock(), **fields}

    def _place(self, row: Rows) -> Place:
        v, veil = self._decode(row), self._veil
        fields = v.as_dict(include_tokens=True)
        del fields["sequence"]
        fields["stored_token"] = veil.token(v.stored_token)
        if v.expected_token is not None:
            fields["expected_token"] = veil.token(v.expected_token)
        fields["stored_hash"] = veil.chain(_signed(v.stored_hash))
        if v.expected_hash is not None:
            fields["expected_hash"] = veil.chain(_signed(v.expected_hash))
        return Place.model_validate(fields)


def _signed(text: str) -> int:
    """The int64 behind a hash as violations show it."""
    value = int(text, 16)
    return value - (1 << 64) if value >> 63 else value


def _earlier_write(root: Violation, evidence: Evidence | None) -> int | None:
    """Step at which the reader wrote the root's slot, before somebody else did; None unknown."""
    if evidence is None or root.writer_step is None:
        return None
    steps = [
        forward.step
        for forward in evidence.window
        if forward.step < root.writer_step
        for part in forward.parts
        if part.uid == root.request_uid and root.slot in part.slots[root.group]
    ]
    return max(steps, default=None)


def _fitted(line: IncidentLine, max_bytes: int) -> IncidentLine:
    """The line, without the beginning of its window as far as it would be too long."""
    while line.evidence is not None and len(json.dumps(line.as_line())) >= max_bytes:
        window = line.evidence.window
        if not window:
            return line.model_copy(
                update={
                    "evidence": None,
                    "no_evidence_because": "it would not fit into report.max_bytes",
                }
            )
        fewer = window[(len(window) + 1) // 2 :]
        left_out = line.evidence.left_out + len(window) - len(fewer)
        smaller = line.evidence.model_copy(update={"window": fewer, "left_out": left_out})
        line = line.model_copy(update={"evidence": smaller})
    return line
