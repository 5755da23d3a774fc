"""Reads a Prometheus exposition the way an assertion wants it: a name and labels to a number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


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
