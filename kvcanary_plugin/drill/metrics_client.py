"""Reads a Prometheus exposition the way an assertion wants it: a name and labels to a number."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Self

_LONGEST_WAIT_SECONDS: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One series at one moment."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class MetricsSnapshot:
    """All series of one scrape."""

    samples: tuple[Sample, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """From the text exposition format. Raises ValueError when it is not that."""
        # At import, prometheus_client decides for the whole process where its own metrics live.
        from prometheus_client.parser import text_string_to_metric_families

        return cls(
            tuple(
                Sample(name=sample.name, labels=sample.labels, value=sample.value)
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            )
        )

    def series(self, name: str, **labels: str) -> tuple[Sample, ...]:
        """The series called ``name`` (with ``_total`` for a counter) that carry these labels."""
        return tuple(
            sample
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def total(self, name: str, **labels: str) -> float:
        """Sum over the matching series.

        Raises LookupError when there is none: a series that is missing is not a zero.
        """
        matching = self.series(name, **labels)
        if not matching:
            present = [dict(sample.labels) for sample in self.series(name)]
            raise LookupError(
                f"kvcanary: metric ... got {name} {labels}; no such series; "
                f"label sets of {name}: {present or 'none'}"
            )
        return sum(sample.value for sample in matching)


def settled(read: Callable[[], str], *, pause_seconds: float) -> MetricsSnapshot:
    """The metrics of an idle server once its drains have told everything.

    They have when two looks in a row show the same counts: a drain may be held up for longer than
    a pause when the machine is busy. Counts that never stand still are taken as they are.

    Args:
        read: the text of /metrics now.
        pause_seconds: time before each look, several polls of a drain.
    """
    deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
    snapshot: MetricsSnapshot | None = None
    while True:
        time.sleep(pause_seconds)
        before, snapshot = snapshot, MetricsSnapshot.parse(read())
        is_settled = before is not None and _counts(before) == _counts(snapshot)
        if is_settled or time.monotonic() > deadline:
            return snapshot


def _counts(snapshot: MetricsSnapshot) -> list[Sample]:
    """The canary's own counters; gauges may go on moving, and the engine's counters as well."""
    return [
        sample
        for sample in snapshot.samples
        if sample.name.startswith("kvcanary_") and sample.name.endswith("_total")
    ]
