"""Every Prometheus metric of the canary: one table, and the object that updates them.

``prometheus_client`` decides at its import whether it runs in multiprocess mode, and the engine
sets ``PROMETHEUS_MULTIPROC_DIR`` after plugins are loaded: it is imported inside the constructor.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from kvcanary_plugin.config import CHECK_NAMES, CanaryConfig
from kvcanary_plugin.config.model import Mode
from kvcanary_plugin.forward import ForwardKind, ForwardResult
from kvcanary_plugin.series_file import DIRECTORY_VARIABLE, SeriesCollector, SeriesFile
from kvcanary_plugin.violations import PHASES

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

GroupState = Literal["guarded", "unsupported", "blind"]
# Parts of the canary in which an internal error is counted.
ErrorPlace = Literal[
    "hook", "launch", "lifecycle", "oracle", "scrub", "drain", "decode", "counters", "report",
    "config", "recorder",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric: name, type, help and the labels it has beside engine and ranks."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()


VIOLATIONS: Final = "kvcanary_violations_total"
SLOTS_VERIFIED: Final = "kvcanary_slots_verified_total"
SLOTS_WRITTEN: Final = "kvcanary_slots_written_total"
SLOTS_SEALED: Final = "kvcanary_slots_sealed_total"
SLOTS_SCRUBBED: Final = "kvcanary_slots_scrubbed_total"
SLOTS_REVERIFIED: Final = "kvcanary_slots_reverified_total"
REVERIFY_LEFT_OUT: Final = "kvcanary_reverify_left_out_requests_total"
FORWARDS: Final = "kvcanary_forwards_total"
INCIDENTS: Final = "kvcanary_incidents_total"
RING_DROPPED: Final = "kvcanary_ring_dropped_total"
INTERNAL_ERRORS: Final = "kvcanary_internal_errors_total"
CONFIG_RELOADS: Final = "kvcanary_config_reloads_total"
DRAIN_POLLS: Final = "kvcanary_drain_polls_total"
LAST_CHECK: Final = "kvcanary_last_check_timestamp_seconds"
GROUP_STATE: Final = "kvcanary_group_state"
MODE: Final = "kvcanary_mode"
CHECK_ENABLED: Final = "kvcanary_check_enabled"
CHECK_SUPPORTED: Final = "kvcanary_check_supported"
WRITE_INPUT_ASSERT: Final = "kvcanary_write_input_assert_enabled"
EXTERNAL_SLOTS: Final = "kvcanary_external_slots"
SCRUB_CYCLE: Final = "kvcanary_scrub_cycle_seconds"
SCRUB_OLDEST: Final = "kvcanary_scrub_oldest_unchecked_seconds"
SCRUB_PROGRESS: Final = "kvcanary_scrub_progress_ratio"
BUILD_INFO: Final = "kvcanary_build_info"

RANK_LABELS: Final = ("engine", "tp_rank", "pp_rank", "dp_rank")

METRICS: Final = (
    Metric(
        name=VIOLATIONS,
        kind="counter",
        help="Violations recorded, by failed check; a row with two failed checks counts in both.",
        labels=("check", "group", "phase"),
    ),
    Metric(
        name=SLOTS_VERIFIED,
        kind="counter",
        help="Slots compared with their records before a forward read them.",
        labels=("group",),
    ),
    Metric(
        name=SLOTS_WRITTEN,
        kind="counter",
        help="Records written for new tokens.",
        labels=("group",),
    ),
    Metric(
        name=SLOTS_SEALED,
        kind="counter",
        help="Records that received the fold of their real K/V after the forward.",
        labels=("group",),
    ),
    Metric(
        name=SLOTS_SCRUBBED,
        kind="counter",
        help="Slots whose real K/V the background scrub folded again and compared.",
        labels=("group",),
    ),
    Metric(
        name=SLOTS_REVERIFIED,
        kind="counter",
        help="Slots whose records were looked at again after a sampled forward.",
        labels=("group",),
    ),
    Metric(
        name=REVERIFY_LEFT_OUT,
        kind="counter",
        help="Requests of sampled forwards that did not fit into the snapshot of the re-verify.",
        labels=("group",),
    ),
    Metric(
        name=FORWARDS,
        kind="counter",
        help="Forwards of the engine by kind and by how far they were checked.",
        labels=("kind", "result"),
    ),
    Metric(
        name=INCIDENTS,
        kind="counter",
        help="Incidents: violations grouped by what they go back to.",
    ),
    Metric(
        name=RING_DROPPED,
        kind="counter",
        help="Violation rows overwritten before they were read; in no other counter.",
    ),
    Metric(
        name=INTERNAL_ERRORS,
        kind="counter",
        help="Errors inside the canary itself, by the part in which they happened.",
        labels=("where",),
    ),
    Metric(
        name=CONFIG_RELOADS,
        kind="counter",
        help="Changes of the configuration file while serving, taken over or refused.",
        labels=("result",),
    ),
    Metric(
        name=DRAIN_POLLS,
        kind="counter",
        help="Polls of the drain that are over; while it stands still, nothing is told.",
    ),
    Metric(
        name=LAST_CHECK,
        kind="gauge",
        help="Unix time at which a further check of a forward was last seen complete; 0 never.",
    ),
    Metric(
        name=GROUP_STATE,
        kind="gauge",
        help="1 for the state in which the group is, 0 for the others.",
        labels=("group", "state"),
    ),
    Metric(
        name=MODE,
        kind="gauge",
        help="1 for the mode in force, 0 for the others.",
        labels=("mode",),
    ),
    Metric(
        name=CHECK_ENABLED,
        kind="gauge",
        help="1 for a check that may raise a violation under the settings in force, else 0.",
        labels=("check",),
    ),
    Metric(
        name=CHECK_SUPPORTED,
        kind="gauge",
        help="1 where the engine delivers what a check needs for a group, 0 where it cannot work.",
        labels=("check", "group"),
    ),
    Metric(
        name=WRITE_INPUT_ASSERT,
        kind="gauge",
        help="1 while inputs are compared with the scheduler's values (write_input_assert).",
    ),
    Metric(
        name=EXTERNAL_SLOTS,
        kind="gauge",
        help="Live slots filled by somebody else and adopted as they were found.",
        labels=("group",),
    ),
    Metric(
        name=SCRUB_CYCLE,
        kind="gauge",
        help="Time the scrub took for its last full turn over all live slots; 0 before the first.",
        labels=("group",),
    ),
    Metric(
        name=SCRUB_OLDEST,
        kind="gauge",
        help="Age of the oldest check of real K/V among the live slots.",
        labels=("group",),
    ),
    Metric(
        name=SCRUB_PROGRESS,
        kind="gauge",
        help="Share of the group's slots that the running turn of the scrub has passed.",
        labels=("group",),
    ),
    Metric(
        name=BUILD_INFO,
        kind="gauge",
        help="Always 1; version of the plugin and kernels that run.",
        labels=("version", "backend"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLabels:
    """Which rank of the engine this process is.

    Fields:
        tp_rank, pp_rank, dp_rank: label values.
        process_index: unique among the ranks of one engine, from 0; no label. Rank r serves its own
            endpoint on ``metrics.port`` + r.
    """

    tp_rank: int = 0
    pp_rank: int = 0
    dp_rank: int = 0
    process_index: int = 0


class CanaryMetrics:
    """The metrics of one rank. Every label set exists at zero once this is constructed.

    Thread-safe. Two objects on one registry share the metrics and must have the same extra labels.

    Args:
        engine: name of the engine, for the label.
        ranks: tensor, pipeline and data parallel rank, for the labels.
        groups: names of the KV cache groups.
        extra_labels: constant labels from the configuration.
        version: version of the plugin.
        backend: kernels in use (cuda, cpu, torch).
        registry: where to register; None takes the default one, or, in multiprocess mode, one of
            its own (the values travel through files there). None where the engine's /metrics is
            served by another process (``series_file``): no registry, the values go to a file.
    """

    def __init__(
        self,
        *,
        engine: str,
        ranks: RankLabels,
        groups: Sequence[str],
        extra_labels: Mapping[str, str] | None = None,
        version: str = "",
        backend: str = "",
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._groups = tuple(groups)
        self._constant = {
            **(extra_labels or {}),
            "engine": engine,
            "tp_rank": str(ranks.tp_rank),
            "pp_rank": str(ranks.pp_rank),
            "dp_rank": str(ranks.dp_rank),
        }
        self._server: Any = None
        self._multiprocess = False
        self._registry = registry
        self._series_file: SeriesFile | None = None
        all_series = self._all_series(version, backend)
        directory = os.environ.get(DIRECTORY_VARIABLE)
        self._children: dict[tuple[str, ...], Any] = (
            self._in_file(directory, all_series)
            if registry is None and directory is not None
            else self._in_registry(all_series)
        )
        for metric, labels in all_series:
            if metric.kind == "gauge":  # in multiprocess mode one that was never set is not shown
                self._child(metric.name, *labels).set(0)
        self._child(BUILD_INFO, version, backend).set(1)

    def _all_series(self, version: str, backend: str) -> list[tuple[Metric, tuple[str, ...]]]:
        """Every metric with every combination of its own labels."""
        values = {
            "check": CHECK_NAMES,
            "group": self._groups,
            "phase": PHASES,
            "kind": tuple(ForwardKind),
            "result": tuple(ForwardResult),
            "where": get_args(ErrorPlace),
            "state": get_args(GroupState),
            "mode": get_args(Mode),
            "version": (version,),
            "backend": (backend,),
        }
        reloads = values | {"result": ("ok", "refused")}
        return [
            (metric, labels)
            for metric in METRICS
            for own in (reloads if metric.name == CONFIG_RELOADS else values,)
            for labels in product(*(own[label] for label in metric.labels))
        ]

    def _labels(self, metric: Metric, labels: tuple[str, ...]) -> dict[str, str]:
        return self._constant | dict(zip(metric.labels, labels, strict=True))

    def _in_file(
        self, directory: str, all_series: list[tuple[Metric, tuple[str, ...]]]
    ) -> dict[tuple[str, ...], Any]:
        series = [(metric.name, self._labels(metric, labels)) for metric, labels in all_series]
        self._series_file = SeriesFile(directory, series)
        keys = [(metric.name, *labels) for metric, labels in all_series]
        return dict(zip(keys, self._series_file.values, strict=True))

    def _in_registry(
        self, all_series: list[tuple[Metric, tuple[str, ...]]]
    ) -> dict[tuple[str, ...], Any]:
        import prometheus_client

        self._multiprocess = _values_travel_through_files()
        if self._registry is None:
            self._registry = (
                prometheus_client.CollectorRegistry()
                if self._multiprocess
                else prometheus_client.REGISTRY
            )
        families = _families(self._registry, tuple(self._constant))
        return {
            (metric.name, *labels): families[metric.name].labels(**self._labels(metric, labels))
            for metric, labels in all_series
        }

    def _child(self, name: str, *labels: str) -> Any:
        """The series of metric ``name`` with ``labels`` in the order of the table."""
        return self._children[name, *labels]

    def violations(self, check: str, group: str, phase: str, count: int = 1) -> None:
        """Counts violations."""
        self._child(VIOLATIONS, check, group, phase).inc(count)

    def slots(self, name: str, group: str, count: int) -> None:
        """Adds to one of the slot counters (``SLOTS_VERIFIED``, ...)."""
        self._child(name, group).inc(count)

    def forward(self, kind: ForwardKind, result: ForwardResult, count: int = 1) -> None:
        """Counts forwards."""
        self._child(FORWARDS, kind, result).inc(count)

    def incident(self) -> None:
        """Counts one incident."""
        self._child(INCIDENTS).inc()

    def ring_dropped(self, count: int) -> None:
        """Counts violation rows that were overwritten unread."""
        self._child(RING_DROPPED).inc(count)

    def internal_error(self, where: ErrorPlace) -> None:
        """Counts an error inside the canary."""
        self._child(INTERNAL_ERRORS, where).inc()

    def config_reload(self, result: Literal["ok", "refused"]) -> None:
        """Counts a change of the configuration file."""
        self._child(CONFIG_RELOADS, result).inc()

    def drain_poll(self) -> None:
        """Counts a poll that has told everything that lay there when it began."""
        self._child(DRAIN_POLLS).inc()

    def last_check(self, timestamp: float) -> None:
        """Sets the heartbeat, Unix seconds."""
        self._child(LAST_CHECK).set(timestamp)

    def group_state(self, group: str, state: GroupState) -> None:
        """Shows the state of a group."""
        for name in get_args(GroupState):
            self._child(GROUP_STATE, group, name).set(name == state)

    def settings(self, config: CanaryConfig) -> None:
        """Shows mode, checks and write-input assert in force; in mode off none of them is."""
        for mode in get_args(Mode):
            self._child(MODE, mode).set(mode == config.mode)
        for check in CHECK_NAMES:
            enabled = config.mode != "off" and getattr(config.checks, check)
            self._child(CHECK_ENABLED, check).set(enabled)
        self._child(WRITE_INPUT_ASSERT).set(config.mode != "off" and config.write_input_assert)

    def external_slots(self, group: str, count: int) -> None:
        """Sets how many live slots of the group were adopted."""
        self._child(EXTERNAL_SLOTS, group).set(count)

    def scrub(
        self,
        group: str,
        *,
        cycle_seconds: float,
        oldest_unchecked_seconds: float,
        progress: float = 0.0,
    ) -> None:
        """Sets the gauges of the scrub."""
        self._child(SCRUB_CYCLE, group).set(cycle_seconds)
        self._child(SCRUB_OLDEST, group).set(oldest_unchecked_seconds)
        self._child(SCRUB_PROGRESS, group).set(progress)

    def supported_checks(self, group: str, unsupported: Collection[str]) -> None:
        """Shows which checks can work for a group: all but ``unsupported``."""
        for check in CHECK_NAMES:
            self._child(CHECK_SUPPORTED, check, group).set(check not in unsupported)

    def serve(self, *, port: int, address: str, rank_offset: int = 0) -> int:
        """Starts an own /metrics endpoint and returns its port.

        Args:
            port: ``metrics.port`` of the configuration.
            address: ``metrics.address``.
            rank_offset: global rank of this process; added to the port, so that several ranks of
                one host do not collide.

        Raises:
            RuntimeError: the address cannot be listened on; the text says why and what to do.
        """
        import prometheus_client
        from prometheus_client import multiprocess

        own_port = port + rank_offset
        if own_port > 65535:
            raise RuntimeError(
                f"kvcanary: metrics.port got {port}, and rank {rank_offset} would serve on"
                f" {own_port}; allowed: at most {65535 - rank_offset}; choose a lower port"
            )
        registry = self._registry
        if self._multiprocess:
            registry = prometheus_client.CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        elif self._series_file is not None:
            path = self._series_file.path
            registry = prometheus_client.CollectorRegistry()
            registry.register(SeriesCollector(path.parent, METRICS, path.name))
        assert registry is not None
        try:
            self._server, _ = prometheus_client.start_http_server(
                own_port, addr=address, registry=registry
            )
        except OSError as error:
            raise RuntimeError(
                f"kvcanary: metrics.port got {port}, and {address}:{own_port} cannot be listened on"
                f" ({error.strerror or error}); choose a free port or address, or leave"
                " metrics.port out"
            ) from error
        return own_port

    def close(self) -> None:
        """Stops the own endpoint, if there is one."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def _values_travel_through_files() -> bool:
    """Whether prometheus_client runs in multiprocess mode, which its import decided."""
    from prometheus_client import values

    active = bool(values.ValueClass._multiprocess)
    if not active and "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        logger.warning(
            "kvcanary: prometheus_client was imported before PROMETHEUS_MULTIPROC_DIR was set: the"
            " metrics of this process will be missing on the engine's /metrics. Set metrics.port to"
            " serve them, or import prometheus_client later."
        )
    return active


_FAMILIES_OF: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_FAMILIES_LOCK = threading.Lock()


def _families(registry: CollectorRegistry, constant_labels: tuple[str, ...]) -> dict[str, Any]:
    """The metrics on ``registry``, registered at the first call for it."""
    import prometheus_client

    with _FAMILIES_LOCK:
        families = _FAMILIES_OF.get(registry)
        if families is None:
            families = {}
            for metric in METRICS:
                labels = (*constant_labels, *metric.labels)
                family = (
                    prometheus_client.Counter(metric.name, metric.help, labels, registry=registry)
                    if metric.kind == "counter"
                    else prometheus_client.Gauge(
                        metric.name,
                        metric.help,
                        labels,
                        registry=registry,
                        multiprocess_mode="mostrecent",
                    )
                )
                families[metric.name] = family
            _FAMILIES_OF[registry] = families
        return families
