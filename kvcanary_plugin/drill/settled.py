"""When the metrics of a server have told everything that has happened to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from kvcanary_plugin.drill.metrics_client import MetricsSnapshot, Sample
from kvcanary_plugin.metrics import DRAIN_POLLS, SLOTS_SCRUBBED

_PAUSE_SECONDS: Final = 0.05
_LONGEST_WAIT_SECONDS: Final = 60.0
# Every poll goes on counting; the scrub goes on working.
_NEVER_STAND_STILL: Final = (DRAIN_POLLS, SLOTS_SCRUBBED)


def settled(
    read: Callable[[], str], *, longest_wait_seconds: float = _LONGEST_WAIT_SECONDS
) -> MetricsSnapshot:
    """The metrics of an idle server once its drains have told everything.

    Each drain has, whatever holds it up, when two more of its polls are over: the second began
    after the first look. Two looks so far apart that show the same counts say that nothing is on
    its way any more. Counts that never stand still are taken as they are, and so are those of a
    server whose drain has ended.

    Args:
        read: the text of /metrics now.
        longest_wait_seconds: when to give up.
    """
    deadline = time.monotonic() + longest_wait_seconds
    before = MetricsSnapshot.parse(read())
    while True:
        time.sleep(_PAUSE_SECONDS)
        now = MetricsSnapshot.parse(read())
        if time.monotonic() > deadline:
            return now
        if not _polled_twice(before, now):
            continue
        if _counts(before) == _counts(now):
            return now
        before = now


def _polled_twice(before: MetricsSnapshot, now: MetricsSnapshot) -> bool:
    polls = {tuple(sorted(s.labels.items())): s.value for s in before.series(DRAIN_POLLS)}
    return all(
        sample.value >= polls.get(tuple(sorted(sample.labels.items())), 0) + 2
        for sample in now.series(DRAIN_POLLS)
    )


def _counts(snapshot: MetricsSnapshot) -> list[Sample]:
    """The canary's own counters; gauges may go on moving, the engine's counters, and the scrub."""
    return [
        sample
        for sample in snapshot.samples
        if sample.name.startswith("kvcanary_")
        and sample.name.endswith("_total")
        and sample.name not in _NEVER_STAND_STILL
    ]
