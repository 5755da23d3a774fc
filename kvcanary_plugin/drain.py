"""The drain: ring rows and counters in host memory become metrics, log lines and report files."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvcanary_plugin.checks import labels_of
from kvcanary_plugin.config import CanaryConfig, ConfigWatcher
from kvcanary_plugin.evidence import EvidenceCollector
from kvcanary_plugin.forward import ForwardKind, ForwardResult
from kvcanary_plugin.kernels.consts import ViolationField
from kvcanary_plugin.metrics import (
    REVERIFY_LEFT_OUT,
    SLOTS_REVERIFIED,
    SLOTS_SCRUBBED,
    SLOTS_SEALED,
    SLOTS_VERIFIED,
    SLOTS_WRITTEN,
    CanaryMetrics,
    ErrorPlace,
)
from kvcanary_plugin.report_files import ReportFiles
from kvcanary_plugin.reporting import Reporter
from kvcanary_plugin.ring import RingReader, Rows
from kvcanary_plugin.scrub import ScrubReading
from kvcanary_plugin.violations import (
    KVCanaryViolationError,
    RequestNames,
    Violation,
    ViolationPolicy,
    phase_and_group,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterReading:
    """Cumulative counts of one group, as its launches published them.

    Fields:
        slots_verified, slots_written, slots_sealed, slots_scrubbed, slots_reverified: slots since
            the start.
        reverify_left_out: requests that a re-verify left out since the start.
        verify_launches: verify launches seen complete; what moves the heartbeat.
        external_slots: live slots that somebody else filled.
        scrub: how far the scrub has come; None where it does not walk the group.
    """

    slots_verified: int = 0
    slots_written: int = 0
    slots_sealed: int = 0
    slots_scrubbed: int = 0
    slots_reverified: int = 0
    reverify_left_out: int = 0
    verify_launches: int = 0
    external_slots: int = 0
    scrub: ScrubReading | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounters:
    """Where the counts of one group come from.

    Fields:
        group: name of the group.
        read: returns the counts as they are in host memory now; must not wait for a device.
    """

    group: str
    read: Callable[[], CounterReading]


class Drain:
    """Polls rings and counters on a thread of its own, and whenever ``flush`` is called.

    Nothing that goes wrong in here reaches the engine: it is counted in
    ``kvcanary_internal_errors_total``, logged once per distinct message, and polling goes on.

    Args:
        config: settings in force.
        rings: one reader per violation ring.
        counters: one per guarded group.
        groups: group names by the index in ``kernel_kind``.
        metrics: where to count.
        policy: what a violation does.
        names: request ids by uid.
        report_files: where reports go beside the log, if anywhere.
        evidence: what incident reports are made from, if anything.
        engine: engine and ranks, for the reports.
        watcher: looked at once a poll; None when there is no file to watch.
        forward_counts: cumulative forwards by (kind, result), counted by the monitor.
        on_config: called on the draining thread with new settings, before the drain takes them
            over; what it raises refuses them.
        on_idle: called by the drain's own thread after each poll, and by no other.
        clock: seconds, monotonic.
        wall_clock: Unix seconds, for the heartbeat and the reports.
    """

    def __init__(
        self,
        *,
        config: CanaryConfig,
        rings: Sequence[RingReader],
        counters: Sequence[GroupCounters],
        groups: Sequence[str],
        metrics: CanaryMetrics,
        policy: ViolationPolicy,
        names: RequestNames,
        report_files: ReportFiles | None = None,
        evidence: EvidenceCollector | None = None,
        engine: str = "",
        watcher: ConfigWatcher | None = None,
        forward_counts: Mapping[tuple[ForwardKind, ForwardResult], int] | None = None,
        on_config: Callable[[CanaryConfig], None] | None = None,
        on_idle: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._rings = tuple(rings)
        self._counters = tuple(counters)
        self._groups = tuple(groups)
        self._metrics = metrics
        self._policy = policy
        self._names = names
        self._report_files = report_files
        self._watcher = watcher
        self._forward_counts = forward_counts if forward_counts is not None else {}
        self._forwards_counted: Counter[tuple[ForwardKind, ForwardResult]] = Counter()
        self._on_config = on_config
        self._on_idle = on_idle
        self._wall_clock = wall_clock
        self._interval_seconds = config.drain.interval_seconds
        self._reporter = Reporter(
            config=config,
            groups=groups,
            names=names,
            metrics=metrics,
            counted_errors=self._counted_errors,
            engine=engine,
            evidence=evidence,
            report_files=report_files,
            clock=clock,
            wall_clock=wall_clock,
        )
        self._last_reading = {source.group: CounterReading() for source in self._counters}
        self._known_errors: set[str] = set()
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        metrics.settings(config)
        _ALL_DRAINS.add(self)

    def start(self) -> None:
        """Starts the thread; calling it again is harmless."""
        if not self._is_in_own_process():
            return
        with self._lock:
            if self._thread is None and not self._stopping.is_set():
                self._thread = threading.Thread(
                    target=self._run, name="kvcanary-drain", daemon=True
                )
                self._thread.start()

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Ends the thread, polls a last time and closes the report file. Final."""
        if not self._is_in_own_process():
            return
        self._stopping.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_seconds)
        with self._lock:
            self._thread = None
            self.flush()
            with self._counted_errors("report"):
                self._reporter.sum_up(at_the_end=True)
            if self._report_files is not None:
                self._report_files.close()

    def flush(self) -> None:
        """Polls now, on the calling thread: all that is visible in host memory is accounted for."""
        if not self._is_in_own_process():
            return
        with self._lock:
            with self._counted_errors("config"):
                self._poll_config()
            for ring in self._rings:
                with self._counted_errors("drain"):
                    self._poll_ring(ring)
            with self._counted_errors("report"):
                self._reporter.sum_up()
            with self._counted_errors("counters"):
                self._poll_counters()
                self._poll_forward_counts()
            self._metrics.drain_poll()

    def pending_error(self) -> KVCanaryViolationError | None:
        """In mode ``raise``, the error that the next forward must raise."""
        return self._policy.pending_error()

    def _is_in_own_process(self) -> bool:
        """Whether this is the process that made it, and no forked child.

        A child must not count a second time, and must not touch the lock: the fork may have copied
        it while it was held.
        """
        return self._process == os.getpid()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_seconds):
            self.flush()
            if self._on_idle is not None:
                with self._counted_errors("scrub"):
                    self._on_idle()

    def _poll_config(self) -> None:
        if self._watcher is not None:
            self._watcher.poll(self._take_over)

    def _take_over(self, config: CanaryConfig) -> None:
        if self._on_config is not None:
            self._on_config(config)
        self._policy.apply(config)
        self._reporter.apply(config)
        self._metrics.settings(config)

    def _poll_ring(self, ring: RingReader) -> None:
        batch = ring.read()
        if batch.dropped:
            self._metrics.ring_dropped(batch.dropped)
        rows = self._policy.keep_enabled(batch.rows)
        if len(rows) == 0:
            return
        rows = self._count(rows)
        if len(rows) == 0:
            return
        self._policy.act_on(rows, self._decode)
        self._reporter.report(rows)

    def _count(self, rows: Rows) -> Rows:
        """Counts rows by check, group and phase; returns those that mean something.

        Done on whole arrays, as a burst fills the ring and the engine waits for the interpreter.
        """
        kinds = rows[:, [ViolationField.KERNEL_KIND, ViolationField.FAIL_REASON_BITS]]
        distinct, which, counts = np.unique(kinds, axis=0, return_inverse=True, return_counts=True)
        readable = np.zeros(len(distinct), dtype=bool)
        for index, (kind, bits) in enumerate(distinct.tolist()):
            with self._counted_errors("decode"):
                phase, group = phase_and_group(kind, self._groups)
                for check in labels_of(bits):
                    self._metrics.violations(check, group, phase, int(counts[index]))
                readable[index] = True
        return rows[readable[which.reshape(-1)]]

    def _decode(self, row: Rows) -> Violation:
        return Violation.from_row(row, self._groups, self._names)

    def _poll_counters(self) -> None:
        any_verified = False
        for source in self._counters:
            now, before = source.read(), self._last_reading[source.group]
            self._last_reading[source.group] = now
            for name, value, earlier in (
                (SLOTS_VERIFIED, now.slots_verified, before.slots_verified),
                (SLOTS_WRITTEN, now.slots_written, before.slots_written),
                (SLOTS_SEALED, now.slots_sealed, before.slots_sealed),
                (SLOTS_SCRUBBED, now.slots_scrubbed, before.slots_scrubbed),
                (SLOTS_REVERIFIED, now.slots_reverified, before.slots_reverified),
                (REVERIFY_LEFT_OUT, now.reverify_left_out, before.reverify_left_out),
            ):
                if value != earlier:
                    self._metrics.slots(name, source.group, _grown_by(value, earlier))
            self._metrics.external_slots(source.group, now.external_slots)
            if now.scrub is not None:
                self._metrics.scrub(
                    source.group,
                    cycle_seconds=now.scrub.cycle_seconds,
                    oldest_unchecked_seconds=now.scrub.oldest_unchecked_seconds,
                    progress=now.scrub.progress,
                )
            any_verified |= now.verify_launches != before.verify_launches
        if any_verified:
            self._metrics.last_check(self._wall_clock())

    def _poll_forward_counts(self) -> None:
        for key, count in list(self._forward_counts.items()):
            new = count - self._forwards_counted[key]
            if new:
                self._forwards_counted[key] = count
                self._metrics.forward(*key, count=new)

    @contextmanager
    def _counted_errors(self, where: ErrorPlace) -> Iterator[None]:
        """Keeps an error inside: counted, and logged the first time its text appears."""
        try:
            yield
        except Exception as error:
            self._metrics.internal_error(where)
            text = f"{where}: {type(error).__name__}: {error}"
            if text not in self._known_errors and len(self._known_errors) < 1000:
                self._known_errors.add(text)
                logger.exception("kvcanary: internal error in %s (logged once)", where)


def _grown_by(value: int, earlier: int) -> int:
    """Growth of a cumulative count; one that is lower than before has started again at 0."""
    return value - earlier if value >= earlier else value


_ALL_DRAINS: weakref.WeakSet[Drain] = weakref.WeakSet()


def _stop_all() -> None:
    for drain in list(_ALL_DRAINS):
        drain.stop(timeout_seconds=1.0)


atexit.register(_stop_all)
