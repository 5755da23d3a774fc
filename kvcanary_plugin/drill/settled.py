"""When the metrics of a server have told everything that has happened to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from kvcanary_plugin.drill.metrics_client import MetricsSnapshot, Sample
from kvcanary_plugin.metrics import SLOTS_SCRUBBED

_LONGEST_WAIT_SECONDS: Final = 60.0


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
    """The canary's own counters; gauges may go on moving, the engine's counters, and the scrub."""
    return [
        sample
        for sample in snapshot.samples
        if sample.name.startswith("kvcanary_")
        and sample.name.endswith("_total")
        and sample.name != SLOTS_SCRUBBED
    ]
