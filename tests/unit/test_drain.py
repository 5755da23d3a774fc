"""The drain: rows and counters become metrics, log lines, files and errors, whatever happens."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvcanary_plugin.config import CanaryConfig, ConfigWatcher, load_config
from kvcanary_plugin.drain import CounterReading, Drain, GroupCounters
from kvcanary_plugin.forward import ForwardKind, ForwardResult
from kvcanary_plugin.incidents import MAX_OPEN, QUIET_SECONDS
from kvcanary_plugin.kernels.consts import FailReason, LaunchTag
from kvcanary_plugin.metrics import CanaryMetrics, RankLabels
from kvcanary_plugin.report_files import ReportFiles
from kvcanary_plugin.reporting import UPDATE_SECONDS, PerMinute
from kvcanary_plugin.ring import RingReader
from kvcanary_plugin.violations import RequestNames, Violation, ViolationPolicy
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
GROUPS = ["full", "swa"]


class Harness:
    """A drain on a ring that the test writes, with counters that the test sets."""

    def __init__(
        self,
        ring_writer: Any,
        registry: CollectorRegistry,
        *,
        environ: dict[str, str] | None = None,
        report_directory: Path | None = None,
        watch: Path | None = None,
    ) -> None:
        variables = {f"KVCANARY_{name}": value for name, value in (environ or {}).items()}
        self.config = load_config(watch, variables)
        self.writer = ring_writer
        self.names = RequestNames()
        self.names.remember(5, "req-A")
        self.names.remember(6, "req-B")
        self.metrics = CanaryMetrics(
            engine="test", ranks=RankLabels(), groups=GROUPS, registry=registry
        )
        self.policy = ViolationPolicy(self.config, self.names)
        self.reading = CounterReading()
        self.now = 1000.0
        self.clock = 0.0
        self.forward_counts: Counter[tuple[ForwardKind, ForwardResult]] = Counter()
        self.configs: list[str] = []
        self.has_no_room = False
        self.watcher = (
            ConfigWatcher(
                watch,
                self.config,
                variables,
                on_result=self.metrics.config_reload,
                check_interval_seconds=0.0,
            )
            if watch is not None
            else None
        )
        self.drain = Drain(
            config=self.config,
            rings=[RingReader(ring_writer.ring)],
            counters=[GroupCounters(group="full", read=lambda: self.reading)],
            groups=GROUPS,
            metrics=self.metrics,
            policy=self.policy,
            names=self.names,
            report_files=(
                ReportFiles(report_directory, max_bytes=self.config.report.max_bytes, name="test")
                if report_directory is not None
                else None
            ),
            forward_counts=self.forward_counts,
            watcher=self.watcher,
            on_config=self.on_config,
            clock=lambda: self.clock,
            wall_clock=lambda: self.now,
        )

    def on_config(self, config: CanaryConfig) -> None:
        if self.has_no_room:
            raise MemoryError("no room")
        self.configs.append(config.mode)


@pytest.fixture
def make_drain(ring_writer: Any, registry: CollectorRegistry) -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def make(**options: Any) -> Harness:
        made.append(Harness(ring_writer, registry, **options))
        return made[-1]

    yield make
    for harness in made:
        harness.drain.stop()


def reports(directory: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(directory.iterdir())
        for line in path.read_text().splitlines()
    ]


# --- counting ---------------------------------------------------------------------------------


def test_rows_are_counted_by_check_group_and_phase(
    make_drain: Callable[..., Harness], sample: Callable[..., float]
) -> None:
    harness = make_drain()
    for _ in range(3):
        harness.writer.put(FailReason.VERIFY_CHAIN_HASH | FailReason.VERIFY_TOKEN)
    harness.writer.put(FailReason.WRITE_POSITION, tag=LaunchTag.WRITE, group_index=1)
    harness.drain.flush()
    harness.drain.flush()
    verify = {"group": "full", "phase": "verify"}
    assert sample("kvcanary_violations_total", check="chain", **verify) == 3
    # The token check is off by default.
    assert sample("kvcanary_violations_total", check="token", **verify) == 0
    write = {"group": "swa", "phase": "write"}
    assert sample("kvcanary_violations_total", check="write_input", **write) == 1


def test_overwritten_rows_are_counted_as_dropped(
    make_drain: Callable[..., Harness], sample: Callable[..., float]
) -> None:
    harness = make_drain()
    for _ in range(100):
        harness.writer.put()
    harness.drain.flush()
    assert sample("kvcanary_ring_dropped_total") == 36
    chain = {"check": "chain", "group": "full", "phase": "verify"}
    assert sample("kvcanary_violations_total", **chain) == 64


def test_slot_counters_follow_the_cumulative_counts(
    make_drain: Callable[..., Harness], sample: Callable[..., float]
) -> None:
    harness = make_drain()
    harness.reading = CounterReading(
        slots_verified=100, slots_written=10, slots_sealed=9, slots_scrubbed=4
    )
    harness.drain.flush()
    harness.reading = CounterReading(
        slots_verified=250, slots_written=20, slots_sealed=18, slots_scrubbed=4
    )
    harness.drain.flush()
    assert sample("kvcanary_slots_verified_total", group="full") == 250
    assert sample("kvcanary_slots_written_total", group="full") == 20
    assert sample("kvcanary_slots_sealed_total", group="full") == 18
    assert sample("kvcanary_slots_scrubbed_total", group="full") == 4
    assert sample("kvcanary_slots_verified_total", group="swa") == 0


def test_count_that_starts_again_never_lowers_the_counter(
    make_drain: Callable[..., Harness], sample: Callable[..., float]
) -> None:
    harness = make_drain()
    for value in (100, 5, 8):
        harness.reading = CounterReading(slots_verified=value)
        harness.drain.flush()
    assert sample("kvcanary_slots_verified_total", group="full") == 108


def test_forwards_are_counted_once(
    make_drain: Callable[..., Harness], sample: Callable[..., float]
) -> None:
    harness = make_drain()
    harness.forward_counts[ForwardKind.DECODE, ForwardResult.CHECKED] += 3
    harness.drain.flush()
    harness.drain.flush()
    harness.forward_counts[ForwardKind.DECODE, ForwardResult.CHECKED] += 1
    harness.drain.flush()
    assert sample("kvcanary_forwards_total", kind="decode", result="checked") == 4


def test_heartbeat_moves_only_when_a_verify_was_seen_complete(
    make_drain: Callable[..., Harness], sample: Callable[..., float]
) -> None:
    harness = make_drain()
    harness.drain.flush()
    assert sample("kvcanary_last_check_timestamp_seconds") == 0
    harness.reading = CounterReading(verify_launches=1)
    harness.drain.flush()
    assert sample("kvcanary_last_check_timestamp_seconds") == 1000.0
    harness.now = 2000.0
    harness.reading = CounterReading(verify_launches=1, slots_written=5)
    harness.drain.flush()
    assert sample("kvcanary_last_check_timestamp_seconds") == 1000.0
    harness.reading = CounterReading(verify_launches=2)
    harness.drain.flush()
    assert sample("kvcanary_last_check_timestamp_seconds") == 2000.0


# --- log --------------------------------------------------------------------------------------


def test_one_log_line_per_incident_says_how_many_rows_go_back_to_it(
    make_drain: Callable[..., Harness],
    caplog: pytest.LogCaptureFixture,
    sample: Callable[..., float],
) -> None:
    harness = make_drain()
    for slot in range(100, 110):
        harness.writer.put(slot=slot, position=slot, expected_position=slot)
    harness.writer.put(slot=500, request_uid=7, writer_uid=8)
    harness.drain.flush()
    texts = sorted(record.message for record in caplog.records)
    assert len(texts) == 2
    about = {text: "slot 100:" in text for text in texts}
    assert sorted(about.values()) == [False, True]
    for text, is_first in about.items():
        assert ("9 more rows go back to it" in text) == is_first
        assert ("slot 500:" in text) != is_first
    assert sample("kvcanary_incidents_total") == 2
    chain = {"check": "chain", "group": "full", "phase": "verify"}
    assert sample("kvcanary_violations_total", **chain) == 11, "counters count rows"


def test_log_is_limited_and_says_how_much_it_left_out(
    make_drain: Callable[..., Harness],
    caplog: pytest.LogCaptureFixture,
    sample: Callable[..., float],
) -> None:
    harness = make_drain(environ={"LOG__MAX_REPORTS_PER_MINUTE": "2"})
    for slot in range(5):
        harness.writer.put(slot=slot, request_uid=100 + slot)
        harness.drain.flush()
    assert len(caplog.records) == 2
    harness.clock = 60.0
    harness.writer.put(slot=9, request_uid=109)
    harness.drain.flush()
    assert "3 incidents before this one were left out" in caplog.text
    assert sample("kvcanary_incidents_total") == 6, "the limit is the log's alone"


def test_incident_that_goes_on_is_summed_up_once_a_minute_and_at_its_end(
    make_drain: Callable[..., Harness], caplog: pytest.LogCaptureFixture
) -> None:
    harness = make_drain()
    for step in range(100):
        harness.writer.put(step=step)
        harness.drain.flush()
    assert len(caplog.records) == 1
    harness.clock = UPDATE_SECONDS
    harness.writer.put(step=200)
    harness.drain.flush()
    assert len(caplog.records) == 2
    assert "goes on: 101 rows in steps 0 to 200, 1 request hit" in caplog.text
    harness.writer.put(step=201)
    harness.drain.flush()
    harness.clock += QUIET_SECONDS
    harness.drain.flush()
    assert len(caplog.records) == 3
    assert "is over: 102 rows" in caplog.text


def test_tokens_are_logged_only_when_allowed(
    make_drain: Callable[..., Harness], caplog: pytest.LogCaptureFixture
) -> None:
    harness = make_drain()
    harness.writer.put()
    harness.drain.flush()
    assert "31337" not in caplog.text


# --- report files -----------------------------------------------------------------------------


def test_report_file_gets_one_line_per_incident_and_one_when_it_ends(
    make_drain: Callable[..., Harness], tmp_path: Path
) -> None:
    harness = make_drain(report_directory=tmp_path)
    for slot in (1, 2, 3):
        harness.writer.put(slot=slot)
    harness.drain.flush()
    harness.writer.put(slot=4, step=1050)
    harness.drain.flush()
    (line,) = reports(tmp_path)
    assert (line["type"], line["schema"], line["time"], line["rows"]) == ("incident", 1, 1000.0, 3)
    root = line["root"]
    assert root["slot"] == 1
    assert (root["request_id"], root["writer_id"]) == ("req-A", "req-B")
    assert "req-A" in line["cause"]
    assert line["tokens_are_hashed"]
    harness.drain.stop()
    incident, end = reports(tmp_path)
    assert (end["type"], end["id"], end["rows"]) == ("incident_end", incident["id"], 4)
    assert (end["first_step"], end["last_step"]) == (1043, 1050)
    assert (end["checks"], end["request_ids"]) == ({"chain": 4}, ["req-A"])


def test_neither_tokens_nor_hashes_that_give_them_away_are_reported(
    make_drain: Callable[..., Harness], tmp_path: Path
) -> None:
    harness = make_drain(report_directory=tmp_path, environ={"REPORT__EVERY_ROW": "true"})
    harness.writer.put(stored_chain_hash=777_000_777, expected_aux=888_000_888)
    harness.drain.stop()
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert '"type": "row"' in text
    for secret in (31337, 42424, 777_000_777, 888_000_888):
        assert str(secret) not in text
        assert f"{secret:x}" not in text


def test_report_file_gets_every_row_and_tokens_when_asked(
    make_drain: Callable[..., Harness], tmp_path: Path
) -> None:
    harness = make_drain(
        report_directory=tmp_path,
        environ={"REPORT__EVERY_ROW": "true", "REPORT__INCLUDE_TOKENS": "true"},
    )
    for slot in (1, 2, 3):
        harness.writer.put(slot=slot)
    harness.drain.flush()
    rows = [report for report in reports(tmp_path) if report["type"] == "row"]
    assert [row["slot"] for row in rows] == [1, 2, 3]
    assert rows[0]["stored_token"] == 31337
    (incident,) = [report for report in reports(tmp_path) if report["type"] == "incident"]
    assert incident["root"]["stored_token"] == 31337


# --- modes ------------------------------------------------------------------------------------


def test_mode_raise_has_the_report_as_its_error(make_drain: Callable[..., Harness]) -> None:
    harness = make_drain(environ={"MODE": "raise"})
    harness.drain.flush()
    assert harness.drain.pending_error() is None
    harness.writer.put(FailReason.VERIFY_REAL_KV_HASH)
    harness.drain.flush()
    error = harness.drain.pending_error()
    assert error is not None
    assert "real_kv violation" in str(error)
    assert "'req-A'" in str(error)


def test_mode_log_never_has_an_error(make_drain: Callable[..., Harness]) -> None:
    harness = make_drain()
    harness.writer.put()
    harness.drain.flush()
    assert harness.drain.pending_error() is None


def test_check_that_is_off_neither_counts_nor_raises(
    make_drain: Callable[..., Harness],
    caplog: pytest.LogCaptureFixture,
    sample: Callable[..., float],
) -> None:
    harness = make_drain(environ={"MODE": "raise", "CHECKS__CHAIN": "false"})
    harness.writer.put(FailReason.VERIFY_CHAIN_HASH)
    harness.drain.flush()
    chain = {"check": "chain", "group": "full", "phase": "verify"}
    assert sample("kvcanary_violations_total", **chain) == 0
    assert harness.drain.pending_error() is None
    assert caplog.records == []


# --- settings that change ---------------------------------------------------------------------


def test_new_settings_reach_policy_log_metrics_and_monitor(
    make_drain: Callable[..., Harness], tmp_path: Path, sample: Callable[..., float]
) -> None:
    path = tmp_path / "canary.yaml"
    path.write_text("mode: log\n")
    harness = make_drain(watch=path)
    path.write_text("mode: raise\nwrite_input_assert: true\nlog: {max_reports_per_minute: 7}\n")
    harness.drain.flush()
    assert harness.policy.stops_the_engine
    assert harness.drain._reporter._log_limit.limit == 7
    assert harness.configs == ["raise"]
    assert sample("kvcanary_mode", mode="raise") == 1
    assert sample("kvcanary_mode", mode="log") == 0
    assert sample("kvcanary_write_input_assert_enabled") == 1
    assert sample("kvcanary_config_reloads_total", result="ok") == 1


def test_bad_file_while_serving_is_counted_and_changes_nothing(
    make_drain: Callable[..., Harness], tmp_path: Path, sample: Callable[..., float]
) -> None:
    path = tmp_path / "canary.yaml"
    path.write_text("mode: log\n")
    harness = make_drain(watch=path)
    path.write_text("mode: loud\n")
    harness.drain.flush()
    harness.drain.flush()
    assert harness.configs == []
    assert sample("kvcanary_mode", mode="log") == 1
    assert sample("kvcanary_config_reloads_total", result="refused") == 1
    assert sample("kvcanary_config_reloads_total", result="ok") == 0


def test_settings_that_the_monitor_cannot_take_over_are_refused_and_in_force_nowhere(
    make_drain: Callable[..., Harness], tmp_path: Path, sample: Callable[..., float]
) -> None:
    path = tmp_path / "canary.yaml"
    path.write_text("mode: log\n")
    harness = make_drain(watch=path)
    harness.has_no_room = True
    path.write_text("mode: raise\nwrite_input_assert: true\n")
    harness.drain.flush()
    assert not harness.policy.stops_the_engine
    assert sample("kvcanary_mode", mode="log") == 1
    assert sample("kvcanary_write_input_assert_enabled") == 0
    assert sample("kvcanary_config_reloads_total", result="ok") == 0
    assert sample("kvcanary_config_reloads_total", result="refused") == 1
    assert sample("kvcanary_internal_errors_total", where="config") == 1
    harness.has_no_room = False
    path.write_text("mode: raise\nwrite_input_assert: true  # there is room now\n")
    harness.drain.flush()
    assert harness.policy.stops_the_engine
    assert sample("kvcanary_config_reloads_total", result="ok") == 1


# --- errors inside ----------------------------------------------------------------------------


def test_row_that_cannot_be_decoded_is_an_internal_error_and_the_others_count(
    make_drain: Callable[..., Harness],
    caplog: pytest.LogCaptureFixture,
    sample: Callable[..., float],
) -> None:
    harness = make_drain(environ={"MODE": "raise"})
    harness.writer.put(kernel_kind=0xFF)
    harness.writer.put(group_index=9)
    harness.writer.put(fail_reason_bits=1 << 30)
    harness.writer.put(slot=4)
    harness.drain.flush()
    assert sample("kvcanary_internal_errors_total", where="decode") == 3
    chain = {"check": "chain", "group": "full", "phase": "verify"}
    assert sample("kvcanary_violations_total", **chain) == 1
    error = harness.drain.pending_error()
    assert error is not None
    assert error.violation.slot == 4
    assert len([r for r in caplog.records if "internal error in decode" in r.message]) == 3


def test_internal_error_is_counted_each_time_and_logged_once(
    make_drain: Callable[..., Harness],
    caplog: pytest.LogCaptureFixture,
    sample: Callable[..., float],
) -> None:
    harness = make_drain()
    del harness.reading
    for _ in range(3):
        harness.drain.flush()
    assert sample("kvcanary_internal_errors_total", where="counters") == 3
    assert len(caplog.records) == 1
    assert "internal error in counters" in caplog.text


def test_full_disk_is_an_internal_error_and_counting_goes_on(
    make_drain: Callable[..., Harness],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sample: Callable[..., float],
) -> None:
    harness = make_drain(report_directory=tmp_path)

    def refuse(self: ReportFiles, reports: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ReportFiles, "append", refuse)
    harness.writer.put()
    harness.drain.flush()
    assert sample("kvcanary_internal_errors_total", where="report") == 1
    chain = {"check": "chain", "group": "full", "phase": "verify"}
    assert sample("kvcanary_violations_total", **chain) == 1


def test_thread_goes_on_after_an_error(
    make_drain: Callable[..., Harness], sample: Callable[..., float]
) -> None:
    harness = make_drain(environ={"DRAIN__INTERVAL_SECONDS": "0.005"})
    del harness.reading
    harness.drain.start()
    wait_until(lambda: sample("kvcanary_internal_errors_total", where="counters") >= 3)
    harness.reading = CounterReading(slots_verified=11)
    wait_until(lambda: sample("kvcanary_slots_verified_total", group="full") == 11)


# --- the thread -------------------------------------------------------------------------------


def test_thread_polls_by_itself(
    make_drain: Callable[..., Harness], sample: Callable[..., float]
) -> None:
    harness = make_drain(environ={"DRAIN__INTERVAL_SECONDS": "0.01"})
    harness.drain.start()
    harness.drain.start()
    assert [thread.name for thread in threading.enumerate()].count("kvcanary-drain") == 1
    harness.writer.put()
    chain = {"check": "chain", "group": "full", "phase": "verify"}
    wait_until(lambda: sample("kvcanary_violations_total", **chain) == 1)


def test_a_poll_is_counted_once_everything_that_it_found_is(
    make_drain: Callable[..., Harness],
    sample: Callable[..., float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = make_drain()
    seen: list[tuple[float, float]] = []
    chain = {"check": "chain", "group": "full", "phase": "verify"}
    count_forwards = harness.drain._poll_forward_counts

    def count_and_look() -> None:
        count_forwards()
        polls = sample("kvcanary_drain_polls_total")
        seen.append((polls, sample("kvcanary_violations_total", **chain)))

    monkeypatch.setattr(harness.drain, "_poll_forward_counts", count_and_look)
    harness.writer.put()
    harness.drain.flush()
    assert seen == [(0, 1)]
    assert sample("kvcanary_drain_polls_total") == 1


def test_stop_under_load_loses_no_count(
    make_drain: Callable[..., Harness], sample: Callable[..., float]
) -> None:
    harness = make_drain(environ={"DRAIN__INTERVAL_SECONDS": "0.005"})
    harness.drain.start()
    finished = threading.Event()

    def write() -> None:
        while not finished.is_set():
            harness.writer.put()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        wait_until(lambda: harness.writer.written > 5000)
        stopper = threading.Thread(target=harness.drain.stop, args=(60.0,), daemon=True)
        stopper.start()
        stopper.join(120)
        assert not stopper.is_alive(), "stop must not wait for the writer"
        assert "kvcanary-drain" not in [thread.name for thread in threading.enumerate()]
    finally:
        finished.set()
        writer.join()
    harness.drain.flush()
    chain = {"check": "chain", "group": "full", "phase": "verify"}
    counted = sample("kvcanary_violations_total", **chain)
    assert counted + sample("kvcanary_ring_dropped_total") == harness.writer.written


def test_stopping_polls_a_last_time_and_is_final(
    make_drain: Callable[..., Harness], sample: Callable[..., float]
) -> None:
    harness = make_drain()
    harness.drain.start()
    harness.drain.stop()
    harness.writer.put()
    harness.drain.stop()
    chain = {"check": "chain", "group": "full", "phase": "verify"}
    assert sample("kvcanary_violations_total", **chain) == 1
    harness.drain.start()
    assert "kvcanary-drain" not in [thread.name for thread in threading.enumerate()]


def test_flush_from_the_engine_while_the_thread_runs_counts_each_row_once(
    make_drain: Callable[..., Harness], sample: Callable[..., float]
) -> None:
    harness = make_drain(environ={"DRAIN__INTERVAL_SECONDS": "0.005"})
    harness.drain.start()
    for _ in range(300):
        harness.writer.put()
        harness.drain.flush()
    chain = {"check": "chain", "group": "full", "phase": "verify"}
    assert sample("kvcanary_violations_total", **chain) == 300


def test_forked_child_neither_counts_nor_hangs(
    make_drain: Callable[..., Harness], tmp_path: Path, sample: Callable[..., float]
) -> None:
    harness = make_drain(report_directory=tmp_path)
    harness.writer.put()
    held, forked = threading.Event(), threading.Event()

    def hold_the_lock() -> None:
        with harness.drain._lock:
            held.set()
            forked.wait()

    poller = threading.Thread(target=hold_the_lock)  # polls at the moment of the fork
    poller.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(120)  # ends a child that hangs
        status = 99
        try:
            harness.drain.start()
            harness.drain.flush()
            harness.drain.stop()
            status = len(threading.enumerate()) - 1 + len(list(tmp_path.iterdir()))
        finally:
            os._exit(status)
    forked.set()
    poller.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    harness.drain.flush()
    chain = {"check": "chain", "group": "full", "phase": "verify"}
    assert sample("kvcanary_violations_total", **chain) == 1


def test_process_that_just_ends_still_writes_its_last_reports(tmp_path: Path) -> None:
    program = f"""
        import sys
        sys.path.insert(0, {str(ROOT / "tests" / "unit")!r})
        from pathlib import Path
        from prometheus_client import CollectorRegistry
        from conftest import RingWriter
        from test_drain import Harness
        harness = Harness(
            RingWriter(64), CollectorRegistry(), report_directory=Path({str(tmp_path)!r}),
            environ={{"DRAIN__INTERVAL_SECONDS": "60"}},
        )
        harness.drain.start()
        harness.writer.put()
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert [report["type"] for report in reports(tmp_path)] == ["incident", "incident_end"]


# --- a burst ----------------------------------------------------------------------------------


def test_full_ring_of_violations_is_counted_without_decoding_each_row(
    make_ring_writer: Callable[[int], Any],
    registry: CollectorRegistry,
    sample: Callable[..., float],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine waits for the interpreter while the drain holds it."""
    writer = make_ring_writer(16384)
    writer.put()
    writer.ring[:] = writer.ring[0]
    writer.ring[:, 15] = 1 + writer.ring.new_tensor(range(16384))
    writer.ring[:, 9] = writer.ring.new_tensor(range(16384))
    writer.ring[:, 1] = writer.ring.new_tensor(range(16384))
    writer.ring[:, 10] = -1
    harness = Harness(writer, registry)
    decoded: list[object] = []
    from_row = Violation.from_row

    def counted_from_row(row: Any, *where: Any) -> Violation:
        decoded.append(row)
        return from_row(row, *where)

    monkeypatch.setattr(Violation, "from_row", counted_from_row)
    with caplog.at_level(logging.ERROR):
        harness.drain.flush()
    monkeypatch.undo()
    harness.drain.stop()
    chain = {"check": "chain", "group": "full", "phase": "verify"}
    assert sample("kvcanary_violations_total", **chain) == 16384
    assert len(caplog.records) == harness.config.log.max_reports_per_minute
    assert sample("kvcanary_incidents_total") == MAX_OPEN
    assert 0 < len(decoded) <= 2 * MAX_OPEN


def test_limit_per_minute_opens_again_after_a_minute() -> None:
    now = [0.0]
    limit = PerMinute(2, clock=lambda: now[0])
    assert [limit.allows_one() for _ in range(4)] == [True, True, False, False]
    now[0] = 59.9
    assert not limit.allows_one()
    now[0] = 60.0
    assert limit.allows_one()
