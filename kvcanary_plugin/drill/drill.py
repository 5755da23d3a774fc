"""Plant every fault in a running server and look for it on the server's own /metrics and reports.

A drill answers the question that a silent dashboard leaves open: would the canary have spoken? Each
fault runs between two looks at the metrics, and the report is compared with what was really planted
(slot, position, request, step). Before the faults the same traffic runs without one, which must be
silent; on request each fault also gets a twin of its own: the same traffic up to the same place,
and nothing done there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import yaml

from kvcanary_plugin.drill import http_client
from kvcanary_plugin.drill.dialect import Dialect, Tokens
from kvcanary_plugin.drill.metrics_client import MetricsSnapshot
from kvcanary_plugin.drill.settled import settled
from kvcanary_plugin.drill.traffic import TrafficSpec, conversation, generate
from kvcanary_plugin.metrics import FORWARDS, SLOTS_SEALED, SLOTS_VERIFIED, VIOLATIONS

_OUTPUT_TOKENS: Final = 24
_REQUESTS: Final = 3
_DRAIN_INTERVAL_SECONDS: Final = 0.05
# The first round of each prompts offers a place for almost every fault, the second one prefixes out
# of the cache; prompts that are too short for either make way for others.
_MOST_ROUNDS: Final = 20
_FLUSH_TIMEOUT_SECONDS: Final = 60.0
_REPORT_TIMEOUT_SECONDS: Final = 60.0
_HTTP_TIMEOUT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCase:
    """One fault and the check that has to see it.

    Fields:
        title: what is done, for the table.
        fault: kind that the injector knows.
        checks: metric labels of which one must fire at the planted place. More than one where it
            depends on what the slot held before.
        group: group it is planted in.
        source: strip of real K/V, for byte flips (0: K of the first layer, -1: V of the last).
    """

    title: str
    fault: str
    checks: tuple[str, ...]
    group: str = "full"
    source: int = -1


FULL_CASES: Final = (
    FaultCase(
        title="flip a byte of K, first layer", fault="flip_kv", checks=("real_kv",), source=0
    ),
    FaultCase(
        title="flip a byte of V, last layer", fault="flip_kv", checks=("real_kv",), source=-1
    ),
    FaultCase(title="exchange two page-table entries", fault="swap_table", checks=("position",)),
    FaultCase(title="rewrite a record", fault="rewrite_record", checks=("token",)),
    FaultCase(title="shift a chunk's positions", fault="shift_positions", checks=("write_input",)),
    FaultCase(
        title="rotate a chunk's input tokens", fault="rotate_inputs", checks=("write_input",)
    ),
    FaultCase(
        title="drop the write of a token",
        fault="drop_write",
        checks=("unwritten", "position", "token", "chain"),
    ),
)

SWA_CASES: Final = (
    FaultCase(
        title="flip a byte of K, first sliding layer",
        fault="flip_kv",
        checks=("real_kv",),
        group="swa",
        source=0,
    ),
    FaultCase(
        title="flip a byte of V, last sliding layer",
        fault="flip_kv",
        checks=("real_kv",),
        group="swa",
        source=-1,
    ),
    FaultCase(
        title="rewrite a sliding-window record",
        fault="rewrite_record",
        checks=("token",),
        group="swa",
    ),
)


# What takes allocator events, identities and tables to plant: the checks that FULL_CASES leave out.
GUARD_CASES: Final = (
    FaultCase(title="continue another sequence", fault="break_chain", checks=("chain",)),
    FaultCase(title="free a slot in use", fault="free_in_use", checks=("freed_read",)),
    FaultCase(title="free a slot twice", fault="free_twice", checks=("double_free",)),
    FaultCase(title="hand out a slot in use", fault="hand_out_in_use", checks=("double_alloc",)),
    FaultCase(
        title="write into another request's slot",
        fault="write_into_owned",
        checks=("write_owned",),
    ),
    FaultCase(title="read a slot that nobody filled", fault="unfilled_slot", checks=("unwritten",)),
    FaultCase(title="read through an empty entry", fault="null_entry", checks=("out_of_pool",)),
    FaultCase(
        title="give a prefix to another tenant",
        fault="other_identity",
        checks=("prefix_identity",),
    ),
)

# Of these, what an engine shows that delivers no allocator events and keeps its table still (vLLM).
TABLE_CASES: Final = (
    *(
        case
        for case in GUARD_CASES
        if case.fault in ("break_chain", "null_entry", "other_identity")
    ),
    FaultCase(
        title="change the table under the forward",
        fault="change_table",
        checks=("table_changed",),
    ),
)

SWA_GUARD_CASES: Final = (
    FaultCase(
        title="free a sliding-window slot in use",
        fault="free_in_use",
        checks=("freed_read",),
        group="swa",
    ),
    FaultCase(
        title="clear a lookup entry inside the window",
        fault="null_entry",
        checks=("out_of_pool",),
        group="swa",
    ),
    FaultCase(
        title="read a sliding-window slot that nobody filled",
        fault="unfilled_slot",
        checks=("unwritten",),
        group="swa",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillResult:
    """What became of one fault.

    Fields:
        case: the fault.
        planted: what the injector says it did; empty if it found no target.
        counted: violations that the metrics gained, by check.
        steps_until_seen: forwards from the first that could see it to the report; None if never
            reported.
        report: the first report line of the expected check at the planted slot and position.
        false_alarms: violations in the fault's silent twin; None if none was run.
        tp_ranks: tensor-parallel ranks that counted any violation.
    """

    case: FaultCase
    planted: dict[str, Any]
    counted: dict[str, int]
    steps_until_seen: int | None
    report: dict[str, Any] | None
    false_alarms: int | None = None
    tp_ranks: tuple[int, ...] = ()

    @property
    def detected(self) -> bool:
        """Whether the expected check counted it and reported it at the right place."""
        counted = any(self.counted.get(check, 0) > 0 for check in self.case.checks)
        return counted and self.report is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentResult:
    """What the same traffic came to without a fault."""

    violations: int
    slots_verified: int
    slots_sealed: int
    forwards: int


class DrillServer(Protocol):
    """What a drill needs of a server."""

    @property
    def dialect(self) -> Dialect:
        """How to talk to it."""

    @property
    def url(self) -> str:
        """Base URL."""

    def metrics(self) -> str:
        """Text of its /metrics."""


def write_drill_config(directory: Path, **overrides: Any) -> Path:
    """Settings for a drill in ``directory``: all checks on, all rows reported, faults allowed."""
    settings: dict[str, Any] = {
        "mode": "log",
        "write_input_assert": True,
        "checks": {"token": True},
        "verify": {"real_kv": "all"},
        "seal": {"real_kv": "all"},
        "reverify": {"sample": 1.0},
        "scrub": {"percent_of_step_time": 0},
        "drain": {"interval_seconds": _DRAIN_INTERVAL_SECONDS},
        "report": {"directory": str(directory / "reports"), "every_row": True},
        "faults": {"allowed": True, "control_file": str(directory / "fault.json")},
        **overrides,
    }
    path = directory / "kvcanary.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return path


class Drill:
    """Runs faults against a server that was started with :func:`write_drill_config`'s file.

    Args:
        server: runs.
        directory: of the settings file.
        tp_rank: tensor-parallel rank to plant on; None: all.
        report_timeout_seconds: how long to wait for the report of a fault that was planted.
    """

    def __init__(
        self,
        server: DrillServer,
        directory: Path,
        *,
        tp_rank: int | None = None,
        report_timeout_seconds: float = _REPORT_TIMEOUT_SECONDS,
    ) -> None:
        self._server = server
        self._tp_rank = tp_rank
        self._report_timeout_seconds = report_timeout_seconds
        self._control_file = directory / "fault.json"
        self._done_file = directory / "fault.json.done"
        self._reports = directory / "reports"
        # Lines of each report file from before the fault: an earlier server counted steps as well.
        self._old_lines: dict[Path, int] = {}
        # Another drill may have run in this directory: its faults lie in the file already.
        self._next_id = 1 + max((entry["id"] for entry in self._done()), default=0)

    def run_silent(self) -> SilentResult:
        """The drill's traffic without a fault, with a shared prefix and its reuse."""
        before = self._snapshot()
        for seed in range(2):
            self._traffic(seed)
        after = self._settled()
        return SilentResult(
            violations=_gained(before, after, VIOLATIONS),
            slots_verified=_gained(before, after, SLOTS_VERIFIED),
            slots_sealed=_gained(before, after, SLOTS_SEALED),
            forwards=_gained(before, after, FORWARDS),
        )

    def forwards_by_rank(self) -> dict[int, int]:
        """Forwards that each tensor-parallel rank has checked, by its label on /metrics."""
        snapshot = self._snapshot()
        ranks = sorted({int(series.labels["tp_rank"]) for series in snapshot.series(FORWARDS)})
        return {
            rank: int(snapshot.total(FORWARDS, tp_rank=str(rank), result="checked"))
            for rank in ranks
        }

    def run(self, cases: Sequence[FaultCase], *, with_twins: bool = False) -> Iterator[DrillResult]:
        """Plant one fault after the other; the cache is flushed before each.

        With ``with_twins`` each runs twice: first up to its place without doing anything there.
        """
        for case in cases:
            false_alarms = self._run_twin(case) if with_twins else None
            yield replace(self._run_case(case), false_alarms=false_alarms)

    def _run_twin(self, case: FaultCase) -> int:
        """Violations of the same traffic, up to the place and past it, without the fault."""
        self._flush_cache()
        before = self._settled()
        self._serve_until_planted(case, dry_run=True)
        return _gained(before, self._settled(), VIOLATIONS)

    def _serve_until_planted(
        self, case: FaultCase, *, dry_run: bool = False
    ) -> dict[str, Any] | None:
        fault_id = self._ask_for(case, dry_run=dry_run)
        for number in range(_MOST_ROUNDS):
            self._traffic(100 + fault_id + 1000 * (number // 2))
            planted = self._planted(fault_id)
            if planted is not None:
                return planted
        return None

    def _run_case(self, case: FaultCase) -> DrillResult:
        self._flush_cache()
        before = self._settled()
        self._old_lines = {path: len(_whole_lines(path)) for path in self._report_files()}
        planted = self._serve_until_planted(case)
        report = self._wait_for_report(case, planted) if planted else None
        after = self._snapshot()
        self._flush_cache()
        return DrillResult(
            case=case,
            planted=planted or {},
            counted={
                check: gained
                for check in sorted({s.labels["check"] for s in after.series(VIOLATIONS)})
                if (gained := _gained(before, after, VIOLATIONS, check=check))
            },
            steps_until_seen=report["step"] - self._first_chance(planted)
            if report and planted
            else None,
            report=report,
            tp_ranks=tuple(
                rank
                for rank in sorted({int(s.labels["tp_rank"]) for s in after.series(VIOLATIONS)})
                if _gained(before, after, VIOLATIONS, tp_rank=str(rank))
            ),
        )

    def _traffic(self, seed: int) -> None:
        """Requests side by side that share a beginning, longer than a chunk, then decode."""
        spec = TrafficSpec(seed=seed, system_prompts=1, multi_turn_share=0.0, abort_share=0.0)
        prompts = [conversation(spec, index)[0].new_tokens for index in range(_REQUESTS)]

        def serve(prompt: Tokens) -> None:
            generate(
                self._server.url,
                prompt,
                max_new_tokens=_OUTPUT_TOKENS,
                dialect=self._server.dialect,
            )

        with ThreadPoolExecutor(_REQUESTS) as pool:
            list(pool.map(serve, prompts))

    def _ask_for(self, case: FaultCase, *, dry_run: bool = False) -> int:
        fault_id = self._next_id
        self._next_id += 1
        request = {
            "id": fault_id,
            "fault": case.fault,
            "group": case.group,
            "source": case.source,
            "tp_rank": self._tp_rank,
            "dry_run": dry_run,
        }
        # Renamed into place: the injector never reads half a file.
        partial = self._control_file.with_suffix(".partial")
        partial.write_text(json.dumps(request), encoding="utf-8")
        partial.replace(self._control_file)
        return fault_id

    def _planted(self, fault_id: int) -> dict[str, Any] | None:
        return next((entry for entry in self._done() if entry["id"] == fault_id), None)

    def _first_chance(self, planted: dict[str, Any]) -> int:
        """The first forward that could see the fault: the one it is planted in, for most."""
        reads = (entry for entry in self._done() if "read_step" in entry)
        read = next((entry for entry in reads if entry["id"] == planted["id"]), None)
        return int(read["read_step"] if read else planted["step"])

    def _done(self) -> list[dict[str, Any]]:
        """What the injector says it did, in its order."""
        if not self._done_file.exists():
            return []
        return [json.loads(line) for line in _whole_lines(self._done_file)]

    def _wait_for_report(self, case: FaultCase, planted: dict[str, Any]) -> dict[str, Any] | None:
        deadline = time.monotonic() + self._report_timeout_seconds
        while time.monotonic() < deadline:
            for report in self._read_reports():
                if _is_about(report, case, planted):
                    return report
            time.sleep(_DRAIN_INTERVAL_SECONDS)
        return None

    def _read_reports(self) -> Iterator[dict[str, Any]]:
        for path in self._report_files():
            for line in _whole_lines(path)[self._old_lines.get(path, 0) :]:
                report = json.loads(line)
                if report["type"] == "row":
                    yield report

    def _report_files(self) -> list[Path]:
        return sorted(self._reports.glob("*.jsonl"))

    def _flush_cache(self) -> None:
        """Forget every cached prefix, corrupted ones included; refused while requests run."""
        path = self._server.dialect.flush_path
        deadline = time.monotonic() + _FLUSH_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            answer = http_client.post(self._server.url, path, {}, timeout=_HTTP_TIMEOUT_SECONDS)
            if self._server.dialect.has_flushed(*answer):
                return
            time.sleep(0.1)
        raise TimeoutError(f"kvcanary: {self._server.url}{path} was refused for a minute")

    def _snapshot(self) -> MetricsSnapshot:
        return MetricsSnapshot.parse(self._server.metrics())

    def _settled(self) -> MetricsSnapshot:
        return settled(self._server.metrics)


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file that the server writes; of the last one it may have written a part."""
    return path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()


def _is_about(report: dict[str, Any], case: FaultCase, planted: dict[str, Any]) -> bool:
    return (
        bool(set(case.checks) & set(report["checks"]))
        and report["group"] == planted["group"]
        and report["slot"] == planted["slot"]
        and report["step"] >= planted["step"]
    )


def _gained(before: MetricsSnapshot, after: MetricsSnapshot, name: str, **labels: str) -> int:
    return int(after.total(name, **labels) - before.total(name, **labels))


def as_table(results: Sequence[DrillResult]) -> str:
    """The results as a Markdown table."""
    rows = [
        "| fault | group | expected check | seen | steps until seen | counted |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        counted = ", ".join(f"{check} {count}" for check, count in result.counted.items())
        steps = "-" if result.steps_until_seen is None else str(result.steps_until_seen)
        rows.append(
            f"| {result.case.title} | {result.case.group} | {' or '.join(result.case.checks)}"
            f" | {'yes' if result.detected else 'NO'} | {steps} | {counted or 'nothing'} |"
        )
    return "\n".join(rows)
