"""Metric values in a file that another process reads while they are being counted.

An engine whose workers are processes of their own serves ``/metrics`` from the process that talks
to the clients. There is one file per writing process, and no request between the two: the reader
neither waits for a worker that hangs nor loses the last values of one that has died.

File: one line of JSON, ``[[name, {label: value}], ...]``, filled up with blanks to a multiple of 8
bytes, then one float64 per series, in the same order.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from prometheus_client import Metric

logger = logging.getLogger(__name__)

# Names the directory of the files; inherited by the processes of one engine. Not a setting.
DIRECTORY_VARIABLE = "_KVCANARY_SERIES_DIRECTORY"
_SUFFIX = ".series"
_VALUE_BYTES = 8

Series = tuple[str, Mapping[str, str]]


class SeriesValue:
    """One series: what a Prometheus counter or gauge offers to whoever counts."""

    def __init__(self, values: npt.NDArray[np.float64], index: int, lock: threading.Lock) -> None:
        self._values = values
        self._index = index
        self._lock = lock

    def inc(self, amount: float = 1.0) -> None:
        """Add ``amount``."""
        with self._lock:
            self._values[self._index] += amount

    def set(self, value: float) -> None:
        """Replace the value."""
        with self._lock:
            self._values[self._index] = value


class SeriesFile:
    """The series of one process, all at zero at first.

    Args:
        directory: where readers look.
        series: (metric name, labels) of every series.
    """

    def __init__(self, directory: str | os.PathLike[str], series: Sequence[Series]) -> None:
        header = json.dumps([[name, dict(labels)] for name, labels in series]).encode()
        header += b" " * (-(len(header) + 1) % _VALUE_BYTES) + b"\n"
        # A name that sorts by the time of its start: the values' own writes touch the file's times.
        name = f"{time.time_ns():020d}-{os.getpid()}{_SUFFIX}"
        self.path = Path(directory) / name
        unfinished = self.path.with_name(f".{name}")
        with unfinished.open("wb+") as file:
            file.write(header + bytes(_VALUE_BYTES * len(series)))
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0)
        unfinished.rename(self.path)
        values = np.frombuffer(mapped, dtype=np.float64, offset=len(header))
        lock = threading.Lock()
        self.values = [SeriesValue(values, index, lock) for index in range(len(series))]


def read_series(path: Path) -> Iterator[tuple[str, dict[str, str], float]]:
    """(metric name, labels, value) of every series of a file, as they are now."""
    header, _, values = path.read_bytes().partition(b"\n")
    series = json.loads(header)
    numbers = np.frombuffer(values, dtype=np.float64, count=len(series))
    for (name, labels), value in zip(series, numbers.tolist(), strict=True):
        yield name, labels, value


class MetricKind(Protocol):
    """What the text exposition says about a metric beside its series."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def help(self) -> str: ...


class SeriesCollector:
    """Prometheus collector over all files of a directory.

    Of two files with the same series (a rank that was started again) the newer one counts.

    Args:
        directory: where the files are.
        metrics: what may stand in them.
        pattern: which of them to read; all by default.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        metrics: Sequence[MetricKind],
        pattern: str = f"[!.]*{_SUFFIX}",
    ) -> None:
        self._directory = Path(directory)
        self._metrics = metrics
        self._pattern = pattern

    def describe(self) -> list[Metric]:
        """Nothing: what there is follows from the files, and may appear later."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Every kvcanary metric that some process has written."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for path in sorted(self._directory.glob(self._pattern)):
            try:
                for name, labels, value in read_series(path):
                    found.setdefault(name, {})[tuple(labels.items())] = value
            except (OSError, ValueError):
                logger.exception("kvcanary: %s cannot be read", path)
        for metric in self._metrics:
            series = found.get(metric.name)
            if not series:
                continue
            label_names = [name for name, _ in next(iter(series))]
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            samples = family(metric.name, metric.help, labels=label_names)
            for label_pairs, value in series.items():
                samples.add_metric([label for _, label in label_pairs], value)
            yield samples
