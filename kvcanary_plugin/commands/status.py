"""``kvcanary status``: whether a server is guarded, by what, and how old its last check is."""

from __future__ import annotations

import argparse
import email.utils
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from typing import Final, Literal

from kvcanary_plugin.commands.parsers import Subparsers
from kvcanary_plugin.drill.metrics_client import MetricsSnapshot

Verdict = Literal[
    "guarded", "idle", "violations", "off", "blind", "unguarded", "late", "unreachable"
]

# The worst first: what a server is when its ranks are different things. A rank without traffic
# beside one that is checked is nothing special.
_ORDER: Final[tuple[Verdict, ...]] = (
    "unreachable", "violations", "blind", "off", "unguarded", "late", "guarded", "idle",
)  # fmt: skip
_HEADLINES: Final[Mapping[Verdict, str]] = {
    "guarded": "GUARDED, no violations",
    "idle": "GUARDED, nothing checked yet: there was no traffic",
    "violations": "VIOLATIONS",
    "off": "OFF: nothing is checked",
    "blind": "BLIND: nothing would be reported",
    "unguarded": "NOT GUARDED in full",
    "late": "LATE: requests run, and no check completes",
    "unreachable": "UNREACHABLE",
}
_EXIT_STATUS: Final[Mapping[Verdict, int]] = {"guarded": 0, "idle": 0, "violations": 1}
_BLIND_EXIT_STATUS: Final = 2

# A check that is older while the engine runs requests is late. KVCanaryHeartbeatStale has the same.
LATE_AFTER_SECONDS: Final = 120.0
# One launch publishes the counters of the one before: a few decodes prove nothing.
_DECODES_THAT_PROVE: Final = 10
_RUNNING_REQUESTS: Final = ("sglang:num_running_reqs", "vllm:num_requests_running")
_RANK_LABELS: Final = ("engine", "tp_rank", "pp_rank", "dp_rank")
_TIMEOUT_SECONDS: Final = 10.0
# Servers are asked directly, whatever proxy the environment names.
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class UnreachableError(Exception):
    """No metrics of a canary could be read; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank of the server, as its metrics show it. Counts are since its start.

    Fields:
        rank: engine and rank labels.
        verdict, problems: what it amounts to, and why.
        mode: mode in force.
        groups: state by group.
        last_check_age_seconds: None when there was no check yet.
        forwards: with real requests, by result.
        slots: verified, written, sealed, scrubbed.
        violations: by check, those above zero.
        checks_off: checks that may not raise a violation.
        write_input_assert: whether inputs are compared with the scheduler's values; None if the
            server does not tell.
        checks_unsupported: by group, checks for which the engine does not deliver what they need.
        config_taken_over, config_refused: changes of the configuration file.
    """

    rank: dict[str, str]
    verdict: Verdict
    problems: list[str]
    mode: str
    groups: dict[str, str]
    last_check_age_seconds: float | None
    forwards: dict[str, int]
    slots: dict[str, int]
    violations: dict[str, int]
    checks_off: list[str]
    write_input_assert: bool | None
    checks_unsupported: dict[str, list[str]]
    ring_dropped: int
    internal_errors: dict[str, int]
    config_taken_over: int
    config_refused: int
    version: str
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """All ranks of one server."""

    url: str
    verdict: Verdict
    problems: list[str] = field(default_factory=list)
    ranks: list[RankStatus] = field(default_factory=list)

    @property
    def exit_status(self) -> int:
        """0 guarded and clean, 1 violations, 2 everything in which nothing can be said."""
        return _EXIT_STATUS.get(self.verdict, _BLIND_EXIT_STATUS)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "status",
        help="say whether a server is guarded, by what, and how old its last check is",
        description="Reads a server's /metrics once. Exit status 0: guarded and no violations;"
        " 1: violations; 2: blind, off, not guarded in full, late or unreachable.",
    )
    parser.add_argument("url", metavar="URL", help="HOST:PORT, http://HOST:PORT or the full path")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    status = server_status(arguments.url)
    if arguments.json:
        print(json.dumps({**asdict(status), "exit_status": status.exit_status}, indent=2))
    else:
        print(as_text(status))
    return status.exit_status


def server_status(url: str) -> ServerStatus:
    """Reads the metrics at ``url`` once; never raises for what the server does or is."""
    try:
        address = metrics_url(url)
        text, now = _fetch(address)
        snapshot = _parse(text, address)
    except UnreachableError as error:
        return ServerStatus(url=url, verdict="unreachable", problems=[str(error)])
    ranks = [_rank_status(snapshot, rank, now) for rank in _ranks(snapshot)]
    return ServerStatus(
        url=address,
        verdict=min((rank.verdict for rank in ranks), key=_ORDER.index),
        problems=[f"{_rank_name(r.rank)}: {text}" for r in ranks for text in r.problems],
        ranks=ranks,
    )


def metrics_url(url: str) -> str:
    """The address of the metrics. UnreachableError when ``url`` is none."""
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UnreachableError(
            f"URL got {url!r}; allowed HOST:PORT or http://HOST:PORT; give the server's own address"
        )
    return parts._replace(path=parts.path if parts.path.strip("/") else "/metrics").geturl()


def _fetch(address: str) -> tuple[str, float]:
    """The exposition, and the server's own clock where it tells, in Unix seconds."""
    try:
        with _OPENER.open(address, timeout=_TIMEOUT_SECONDS) as answer:
            text = answer.read().decode(errors="replace")
            date = answer.headers.get("Date")
    except urllib.error.HTTPError as error:
        raise UnreachableError(
            f"{address} answered {error.code}: is it the server's /metrics, and are metrics on"
            " (SGLang: --enable-metrics)?"
        ) from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UnreachableError(f"{address} does not answer: {reason}") from error
    return text, _unix_time(date)


def _unix_time(date: str | None) -> float:
    try:
        return email.utils.parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return time.time()


def _parse(text: str, address: str) -> MetricsSnapshot:
    from kvcanary_plugin.metrics import GROUP_STATE

    try:
        snapshot = MetricsSnapshot.parse(text)
    except ValueError as error:
        raise UnreachableError(f"{address} is no Prometheus exposition: {error}") from error
    if not snapshot.series(GROUP_STATE):
        raise UnreachableError(
            f"{address} shows no kvcanary metric: the server runs without the guard; start it with"
            " --kvcanary-config FILE, and see `kvcanary doctor`"
        )
    return snapshot


def _ranks(snapshot: MetricsSnapshot) -> list[dict[str, str]]:
    from kvcanary_plugin.metrics import GROUP_STATE

    found = {
        tuple(sample.labels.get(name, "") for name in _RANK_LABELS)
        for sample in snapshot.series(GROUP_STATE)
    }
    return [dict(zip(_RANK_LABELS, values, strict=True)) for values in sorted(found)]


def _rank_status(snapshot: MetricsSnapshot, rank: dict[str, str], now: float) -> RankStatus:
    from kvcanary_plugin import metrics

    def by(name: str, label: str, **labels: str) -> dict[str, int]:
        """Sums by one label; a name without series, as of an older plugin, is empty."""
        sums: dict[str, int] = {}
        for sample in snapshot.series(name, **rank, **labels):
            key = sample.labels.get(label, "")
            sums[key] = sums.get(key, 0) + int(sample.value)
        return sums

    def total(name: str, **labels: str) -> int:
        return sum(by(name, "", **labels).values())

    states = [s.labels for s in snapshot.series(metrics.GROUP_STATE, **rank) if s.value]
    groups = {labels["group"]: labels["state"] for labels in states}
    results = [s for s in snapshot.series(metrics.FORWARDS, **rank) if s.labels["kind"] != "dummy"]
    forwards: dict[str, int] = {}
    for sample in results:
        result = sample.labels["result"]
        forwards[result] = forwards.get(result, 0) + int(sample.value)
    mode = next((s.labels["mode"] for s in snapshot.series(metrics.MODE, **rank) if s.value), "")
    last_check = max((s.value for s in snapshot.series(metrics.LAST_CHECK, **rank)), default=0.0)
    build = next((s.labels for s in snapshot.series(metrics.BUILD_INFO, **rank)), {})
    violations = {k: v for k, v in by(metrics.VIOLATIONS, "check").items() if v}
    ring_dropped = total(metrics.RING_DROPPED)
    age = max(now - last_check, 0.0) if last_check else None
    verdict, problems = _judge(
        mode=mode,
        groups=groups,
        violations=violations,
        ring_dropped=ring_dropped,
        forwards=sum(forwards.values()),
        decodes=total(metrics.FORWARDS, kind="decode"),
        verified=by(metrics.SLOTS_VERIFIED, "group"),
        age=age,
        has_running_requests=any(s.value for n in _RUNNING_REQUESTS for s in snapshot.series(n)),
    )
    return RankStatus(
        rank=rank,
        verdict=verdict,
        problems=problems,
        mode=mode,
        groups=groups,
        last_check_age_seconds=age,
        forwards=forwards,
        slots={
            "verified": total(metrics.SLOTS_VERIFIED),
            "written": total(metrics.SLOTS_WRITTEN),
            "sealed": total(metrics.SLOTS_SEALED),
            "scrubbed": total(metrics.SLOTS_SCRUBBED),
            "reverified": total(metrics.SLOTS_REVERIFIED),
        },
        violations=violations,
        checks_off=sorted(k for k, v in by(metrics.CHECK_ENABLED, "check").items() if not v),
        write_input_assert=next(
            (bool(s.value) for s in snapshot.series(metrics.WRITE_INPUT_ASSERT, **rank)), None
        ),
        checks_unsupported=_unsupported(snapshot, rank, groups),
        ring_dropped=ring_dropped,
        internal_errors={k: v for k, v in by(metrics.INTERNAL_ERRORS, "where").items() if v},
        config_taken_over=total(metrics.CONFIG_RELOADS, result="ok"),
        config_refused=total(metrics.CONFIG_RELOADS, result="refused"),
        version=build.get("version", ""),
        backend=build.get("backend", ""),
    )


def _unsupported(
    snapshot: MetricsSnapshot, rank: dict[str, str], groups: Mapping[str, str]
) -> dict[str, list[str]]:
    """Checks that cannot work, of the groups that are guarded at all."""
    from kvcanary_plugin.metrics import CHECK_SUPPORTED

    found: dict[str, list[str]] = {}
    for sample in snapshot.series(CHECK_SUPPORTED, **rank):
        group = sample.labels["group"]
        if not sample.value and groups.get(group) == "guarded":
            found.setdefault(group, []).append(sample.labels["check"])
    return {group: sorted(checks) for group, checks in sorted(found.items())}


def _judge(
    *,
    mode: str,
    groups: Mapping[str, str],
    violations: Mapping[str, int],
    ring_dropped: int,
    forwards: int,
    decodes: int,
    verified: Mapping[str, int],
    age: float | None,
    has_running_requests: bool,
) -> tuple[Verdict, list[str]]:
    """What a rank amounts to, the worst of all that is found, and everything that was found."""
    found: list[tuple[Verdict, str]] = []
    if violations:
        counts = ", ".join(f"{check} {count}" for check, count in sorted(violations.items()))
        found.append(("violations", f"violations since the start: {counts}"))
    if ring_dropped:
        found.append(("violations", f"{ring_dropped} violation rows were lost, in no other count"))
    if mode == "off":
        found.append(("off", "mode is off"))
    for group, state in sorted(groups.items()):
        if state == "blind":
            found.append(("blind", f"group {group} is blind after an error of the canary's own"))
        elif state == "off":
            found.append(("off", f"group {group} is off"))
        elif state == "unsupported":
            found.append(("unguarded", f"group {group} has no adapter and is not guarded"))
        elif decodes > _DECODES_THAT_PROVE and _stands_still(group, verified) and mode != "off":
            found.append(("blind", f"{decodes} decodes, and no slot of group {group} was verified"))
    if mode != "off":
        if forwards > _DECODES_THAT_PROVE and age is None:
            found.append(("blind", f"{forwards} forwards, and no check has ever completed"))
        if has_running_requests and age is not None and age > LATE_AFTER_SECONDS:
            found.append(("late", f"requests are running, and the last check is {age:.0f} s old"))
    if not found:
        return ("guarded" if age is not None else "idle"), []
    return min((verdict for verdict, _ in found), key=_ORDER.index), [text for _, text in found]


def _stands_still(group: str, verified: Mapping[str, int]) -> bool:
    """Whether no slot was verified; a draft group has forwards of its own kind."""
    return not verified.get(group) and not group.startswith("draft")


# ---- text ----------------------------------------------------------------------------------------


def as_text(status: ServerStatus) -> str:
    """The one screen."""
    lines = [status.url, _HEADLINES[status.verdict]]
    lines += [f"  - {problem}" for problem in status.problems]
    if not status.ranks:
        return "\n".join(lines)
    lines += ["", *_table(_HEADER, [_row(rank) for rank in status.ranks]), ""]
    lines += [f"{name:<15}{text}" for name, text in _totals(status.ranks)]
    if status.verdict == "violations":
        checks = sorted({check for rank in status.ranks for check in rank.violations})
        lines += ["", *(f"kvcanary explain {check}" for check in checks)]
    return "\n".join(lines)


_HEADER: Final = (
    "RANK",
    "MODE",
    "LAST CHECK",
    "FORWARDS CHECKED",
    "SLOTS VERIFIED",
    "VIOLATIONS",
    "GROUPS",
)


def _row(rank: RankStatus) -> tuple[str, ...]:
    age = rank.last_check_age_seconds
    checked = rank.forwards.get("checked", 0) + rank.forwards.get("partial", 0)
    return (
        _rank_name(rank.rank),
        rank.mode,
        "never" if age is None else f"{age:.0f} s ago",
        f"{checked} of {sum(rank.forwards.values())}",
        str(rank.slots["verified"]),
        str(sum(rank.violations.values())),
        ", ".join(f"{group} {state}" for group, state in sorted(rank.groups.items())),
    )


def _totals(ranks: Sequence[RankStatus]) -> list[tuple[str, str]]:
    def summed(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
        return {
            key: sum(p.get(key, 0) for p in parts) for key in sorted({k for p in parts for k in p})
        }

    def listed(counts: Mapping[str, int], none: str) -> str:
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or none

    off = sorted({check for rank in ranks for check in rank.checks_off})
    taken_over = sum(rank.config_taken_over for rank in ranks)
    refused = sum(rank.config_refused for rank in ranks)
    versions = sorted({f"kvcanary {rank.version}, {rank.backend} kernels" for rank in ranks})
    return [
        ("slots", listed(summed([rank.slots for rank in ranks]), "none yet")),
        ("forwards", listed(summed([rank.forwards for rank in ranks]), "none yet")),
        ("violations", listed(summed([rank.violations for rank in ranks]), "none")),
        ("checks off", ", ".join(off) or "none"),
        ("input assert", _input_assert_as_text(ranks)),
        ("not supported", _unsupported_as_text(ranks)),
        ("rows dropped", str(sum(rank.ring_dropped for rank in ranks))),
        ("own errors", listed(summed([rank.internal_errors for rank in ranks]), "none")),
        ("config changes", f"{taken_over} taken over, {refused} refused"),
        ("version", "; ".join(versions)),
    ]


def _input_assert_as_text(ranks: Sequence[RankStatus]) -> str:
    shown = {True: "on", False: "off", None: "not shown"}
    return ", ".join(sorted({shown[rank.write_input_assert] for rank in ranks}))


def _unsupported_as_text(ranks: Sequence[RankStatus]) -> str:
    lines = {
        f"{group}: {', '.join(checks)}"
        for rank in ranks
        for group, checks in rank.checks_unsupported.items()
    }
    return "; ".join(sorted(lines)) or "none"


def _rank_name(rank: Mapping[str, str]) -> str:
    return f"{rank['engine']} tp{rank['tp_rank']} pp{rank['pp_rank']} dp{rank['dp_rank']}"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
