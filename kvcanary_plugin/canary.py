"""Everything of one engine rank put together: monitor, drain, metrics, faults.

Hooks construct one :class:`Canary` per model runner and wrap each forward in
:meth:`Canary.around_forward`; they know nothing else of what lies below.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from kvcanary_plugin import __version__
from kvcanary_plugin.cache import KVCacheGroup
from kvcanary_plugin.config import CanaryConfig, ConfigWatcher
from kvcanary_plugin.drain import CounterReading, Drain, GroupCounters
from kvcanary_plugin.evidence import EvidenceCollector
from kvcanary_plugin.faults import FaultInjector
from kvcanary_plugin.forward import ForwardStep
from kvcanary_plugin.guard import GroupGuard
from kvcanary_plugin.kernels import LaunchTag, load_kernels
from kvcanary_plugin.metrics import CanaryMetrics, ErrorPlace, RankLabels
from kvcanary_plugin.monitor import CanaryMonitor
from kvcanary_plugin.report_files import ReportFiles
from kvcanary_plugin.ring import RingReader
from kvcanary_plugin.violations import RequestNames, ViolationPolicy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnguardedGroup:
    """A part of the KV cache that stays unguarded, and why."""

    name: str
    reason: str


class UnsupportedEngineError(SystemExit):
    """The engine cannot be guarded and the mode forbids serving without a guard.

    A SystemExit, because plugin frameworks swallow every other exception.
    """


class Canary:
    """The guard of one engine rank."""

    def __init__(
        self,
        *,
        config: CanaryConfig,
        config_path: str | None,
        engine: str,
        ranks: RankLabels,
        groups: Sequence[KVCacheGroup],
        unguarded: Sequence[UnguardedGroup],
        max_requests: int,
    ) -> None:
        """
        Args:
            config: the settings to start with.
            config_path: the file they came from, watched for changes; None watches nothing.
            engine: label ``engine`` of the metrics.
            ranks: rank labels of this process.
            groups: what is guarded.
            unguarded: what is not; shown as ``unsupported``, refused in mode raise, unless the
                setting ``allow_unguarded`` names it and other groups are guarded.
            max_requests: requests that a forward may hold.

        Raises:
            UnsupportedEngineError: in mode raise, when something stays unguarded.
        """
        refused = [g for g in unguarded if not groups or g.name not in config.allow_unguarded]
        if refused and config.mode == "raise":
            text = "; ".join(f"group {group.name}: {group.reason}" for group in refused)
            names = ", ".join(group.name for group in refused)
            advice = f"; to start all the same: allow_unguarded: [{names}]" if groups else ""
            raise UnsupportedEngineError(
                f"kvcanary: not guarded, and mode is raise: {text}{advice}"
            )
        backend = _load_kernels(config, groups[0].device) if groups else "none"
        self.names = RequestNames()
        self.metrics = CanaryMetrics(
            engine=engine,
            ranks=ranks,
            groups=[*(g.name for g in groups), *(g.name for g in unguarded)],
            extra_labels=config.metrics.labels,
            version=__version__,
            backend=backend,
        )
        self.metrics.settings(config)
        for group in unguarded:
            logger.warning("kvcanary: group %s is not guarded: %s", group.name, group.reason)
            self.metrics.group_state(group.name, "unsupported")
        self._policy = ViolationPolicy(config, self.names)
        self.monitor: CanaryMonitor | None = None
        self._injector: FaultInjector | None = None
        if groups:
            self.monitor = CanaryMonitor(
                config=config,
                groups=groups,
                max_requests=max_requests,
                raise_pending=self._raise_pending,
                on_error=self._on_error,
            )
            for guard in self.monitor.guards:
                self.metrics.group_state(guard.group.name, "guarded")
                self.metrics.supported_checks(guard.group.name, guard.group.unsupported_checks)
            if config.faults.allowed and config.faults.control_file is not None:
                self._injector = FaultInjector(
                    control_file=config.faults.control_file,
                    guards=self.monitor.guards,
                    ranks=ranks,
                )
        self.drain = self._make_drain(config, config_path, engine, ranks)
        if config.metrics.port is not None:
            port = self.metrics.serve(
                port=config.metrics.port,
                address=config.metrics.address,
                rank_offset=ranks.process_index,
            )
            logger.info("kvcanary: metrics on http://%s:%d/metrics", config.metrics.address, port)
        self.drain.start()
        if groups:
            logger.info(
                "kvcanary: guarding %s in mode %s with %s kernels",
                ", ".join(f"group {group.name} ({group.num_slots} slots)" for group in groups),
                config.mode,
                backend,
            )

    @contextmanager
    def around_forward(
        self,
        translate: Callable[[], ForwardStep],
        *,
        arrays_stay: bool = False,
        longest_extend: Callable[[], int] = lambda: 1,
    ) -> Iterator[None]:
        """Runs the canary's steps around the engine's forward in the ``with`` block.

        A forward that fails is looked at no more, and counts as unchecked.

        Args:
            translate: makes the step from the engine's batch; if it fails, so that this forward's
                writes go unseen, the canary goes blind.
            arrays_stay: whether the engine leaves what ``translate`` reads, and the step's arrays,
                as they are until the forward has ended on the device. Then they may be looked at
                when the forward is launched: the host's work costs it nothing.
            longest_extend: says how many new tokens a request has at most, where arrays stay.
        """
        monitor, injector = self.monitor, self._injector
        if monitor is None:
            yield
            return
        step: ForwardStep | None = None
        looks_later = False
        with monitor.guard_errors("hook"):
            looks_later = monitor.forward_begins(arrays_stay=arrays_stay)
            if injector is not None or not looks_later:
                step = translate()
            if injector is not None and step is not None:
                injector.before_forward(step)
            if looks_later:
                monitor.forward_follows(longest_extend=longest_extend())
            elif step is not None:
                self._look_at(step)
        try:
            yield
        except BaseException:
            monitor.forward_failed()
            raise
        if looks_later and monitor.blind_because is None:
            with monitor.guard_errors("hook"), monitor.forward_is_launched():
                self._look_at(step if step is not None else translate())
        monitor.after_forward()
        if injector is not None:
            injector.after_forward()

    def _look_at(self, step: ForwardStep) -> None:
        assert self.monitor is not None
        self.monitor.look_at(step)
        if self._injector is not None:
            self._injector.under_forward()

    def requests_to_abort(self) -> tuple[int, ...]:
        """In mode abort, uids of the requests hit since the last call; for the engine to end."""
        if not self._policy.ends_requests:
            return ()
        self.drain.flush()
        return self._policy.take_requests_to_abort()

    def close(self) -> None:
        """Stops the drain after a last poll, and the own metrics endpoint."""
        self.drain.stop()
        self.metrics.close()

    def _make_drain(
        self, config: CanaryConfig, config_path: str | None, engine: str, ranks: RankLabels
    ) -> Drain:
        counters = _counters_of(self.monitor) if self.monitor is not None else []
        guards = self.monitor.guards if self.monitor is not None else ()
        rank_name = f"{engine}-dp{ranks.dp_rank}-pp{ranks.pp_rank}-tp{ranks.tp_rank}"
        return Drain(
            config=config,
            rings=[RingReader(self.monitor.sink.ring)] if self.monitor is not None else [],
            counters=counters,
            groups=[guard.group.name for guard in guards],
            metrics=self.metrics,
            policy=self._policy,
            names=self.names,
            evidence=(
                EvidenceCollector(
                    guards=guards,
                    recorder=self.monitor.recorder,
                    config=lambda monitor=self.monitor: monitor.config,  # type: ignore[misc]
                    names=self.names,
                    page_tables=self.monitor.page_tables,
                )
                if self.monitor is not None
                else None
            ),
            engine=rank_name,
            report_files=(
                ReportFiles(
                    config.report.directory, max_bytes=config.report.max_bytes, name=rank_name
                )
                if config.report.directory is not None
                else None
            ),
            watcher=(
                ConfigWatcher(config_path, config, os.environ, on_result=self.metrics.config_reload)
                if config_path is not None
                else None
            ),
            on_config=self.monitor.reconfigure if self.monitor is not None else None,
            on_idle=self.monitor.on_idle if self.monitor is not None else None,
            forward_counts=self.monitor.forward_counts if self.monitor is not None else {},
        )

    def _raise_pending(self) -> None:
        """In mode raise, look at the ring now: the next forward must not run past a violation."""
        if self._policy.stops_the_engine:
            self.drain.flush()
            error = self.drain.pending_error()
            if error is not None:
                raise error

    def _on_error(self, where: ErrorPlace, error: BaseException) -> None:
        self.metrics.internal_error(where)
        assert self.monitor is not None
        if self.monitor.blind_because is None:
            logger.error("kvcanary: %s failed, the checks go on", where, exc_info=error)
            return
        logger.error("kvcanary: blind from now on: %s failed", where, exc_info=error)
        for guard in self.monitor.guards:
            self.metrics.group_state(guard.group.name, "blind")


def _load_kernels(config: CanaryConfig, device: torch.device) -> str:
    """The kernels for ``device``, and those for the host, which hash prefixes there."""
    cache, prebuilt = config.build.cache_directory, config.build.prebuilt_directory
    # Now: the first request with a cached prefix would wait for a compiler otherwise.
    load_kernels("cpu", build_cache=cache, prebuilt=prebuilt)
    return load_kernels(device, build_cache=cache, prebuilt=prebuilt)


def _counters_of(monitor: CanaryMonitor) -> list[GroupCounters]:
    def read(guard: GroupGuard) -> CounterReading:
        name = guard.group.name
        return CounterReading(
            slots_verified=guard.slots_run(LaunchTag.VERIFY),
            slots_written=guard.slots_run(LaunchTag.WRITE),
            slots_sealed=guard.slots_run(LaunchTag.SEAL),
            slots_scrubbed=guard.slots_run(LaunchTag.SCRUB),
            slots_reverified=guard.slots_run(LaunchTag.REVERIFY),
            reverify_left_out=monitor.reverifier.requests_left_out[name],
            verify_launches=guard.launches_run(LaunchTag.VERIFY),
            external_slots=monitor.external_slots[guard.index].count,
            scrub=monitor.scrubber.readings().get(name),
        )

    return [
        GroupCounters(group=guard.group.name, read=partial(read, guard)) for guard in monitor.guards
    ]
