"""The world of the scenarios with a drain behind it, so that what happens ends in a report file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from kvcanary_plugin.drain import Drain
from kvcanary_plugin.evidence import EvidenceCollector
from kvcanary_plugin.faults import FaultInjector
from kvcanary_plugin.forward import ForwardKind, ForwardStep
from kvcanary_plugin.incident_file import Incident, read_incidents
from kvcanary_plugin.metrics import CanaryMetrics, RankLabels
from kvcanary_plugin.report_files import ReportFiles
from kvcanary_plugin.ring import RingReader
from kvcanary_plugin.violations import ViolationPolicy
from tests.monitor.world import Part, World


@dataclass
class IncidentWorld(World):
    """A world whose violations are drained into ``directory`` after each forward."""

    directory: Path = field(kw_only=True)
    request_ids: dict[int, str] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.directory.mkdir(exist_ok=True)
        groups = [group.name for group in self.groups]
        self.registry = CollectorRegistry()
        self.reports = self.directory / "reports"
        self.control_file = self.directory / "fault.json"
        self.clock = 0.0
        self.injector = FaultInjector(
            control_file=self.control_file, guards=self.monitor.guards, ranks=RankLabels()
        )
        self.drain = Drain(
            config=self.config,
            rings=[RingReader(self.monitor.sink.ring)],
            counters=[],
            groups=groups,
            metrics=CanaryMetrics(
                engine="test", ranks=RankLabels(), groups=groups, registry=self.registry
            ),
            policy=ViolationPolicy(self.config, self.names),
            names=self.names,
            report_files=ReportFiles(
                self.reports, max_bytes=self.config.report.max_bytes, name="test"
            ),
            evidence=EvidenceCollector(
                guards=self.monitor.guards,
                recorder=self.monitor.recorder,
                config=lambda: self.config,
                names=self.names,
                page_tables=self.monitor.page_tables,
            ),
            engine="test",
            clock=lambda: self.clock,
        )

    def _step_of(self, parts: Any, kind: ForwardKind) -> ForwardStep:
        for part in parts:
            if part.uid > 0:
                self.names.remember(part.uid, self.request_ids.get(part.uid, f"req-{part.uid}"))
        step = super()._step_of(parts, kind)
        self.injector.before_forward(step)
        return step

    def forward(self, *parts: Part, **options: Any) -> list:
        violations = super().forward(*parts, **options)
        self.drain.flush()
        return violations

    def ask_for(self, fault: str, **options: Any) -> None:
        """Plant ``fault`` in the next forward that offers a target."""
        self.control_file.write_text(json.dumps({"id": 1, "fault": fault, **options}))

    def planted(self) -> dict[str, Any] | None:
        """What the injector did."""
        done = Path(f"{self.control_file}.done")
        return json.loads(done.read_text().splitlines()[0]) if done.exists() else None

    def incidents(self) -> list[Incident]:
        """The incidents reported so far."""
        if not self.reports.is_dir():
            return []
        return read_incidents(self.reports)[0]
