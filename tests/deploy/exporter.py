"""A stand-in for a guarded server: two ranks of our own CanaryMetrics behind a real /metrics.

``python -m tests.deploy.exporter PORT`` serves until its standard input closes. Lines on standard
input are commands: ``violation CHECK [COUNT]``, ``stop-traffic``, ``start-traffic``, ``blind``.
Each is answered by one line on standard output once it has taken effect.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Self

from kvcanary_plugin.checks import check_named
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.forward import ForwardKind, ForwardResult
from kvcanary_plugin.metrics import (
    SLOTS_SCRUBBED,
    SLOTS_SEALED,
    SLOTS_VERIFIED,
    SLOTS_WRITTEN,
    CanaryMetrics,
    RankLabels,
)
from tests.deploy.paths import ROOT

# Slots that a step reads, by group.
GROUPS = {"full": 800, "swa": 300}


def main(port: int) -> None:
    ranks = [make_rank(dp_rank) for dp_rank in (0, 1)]
    ranks[0].serve(port=port, address="127.0.0.1")
    has_traffic = threading.Event()
    has_traffic.set()
    threading.Thread(target=run_traffic, args=(ranks, has_traffic), daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        match command:
            case "violation":
                count = int(words[1]) if len(words) > 1 else 1
                ranks[0].violations(check_named(words[0]).label, "full", "verify", count)
                ranks[0].incident()
            case "stop-traffic":
                has_traffic.clear()
            case "start-traffic":
                has_traffic.set()
            case "blind":
                ranks[1].internal_error("launch")
                ranks[1].group_state("full", "blind")
            case _:
                raise ValueError(f"unknown command {line!r}")
        print("done", flush=True)


def make_rank(dp_rank: int) -> CanaryMetrics:
    metrics = CanaryMetrics(
        engine="sglang",
        ranks=RankLabels(dp_rank=dp_rank),
        groups=tuple(GROUPS),
        extra_labels={"pool": "blue"},
        version="0",
        backend="cpu",
    )
    metrics.settings(CanaryConfig())
    for group in GROUPS:
        metrics.group_state(group, "guarded")
        metrics.external_slots(group, 3)
        metrics.scrub(group, cycle_seconds=42.0, oldest_unchecked_seconds=50.0)
    return metrics


def run_traffic(ranks: list[CanaryMetrics], has_traffic: threading.Event) -> None:
    """Ten steps a second: one prefill for nine decodes."""
    step = 0
    while True:
        has_traffic.wait()
        for rank in ranks:
            rank.forward(
                ForwardKind.PREFILL if step % 10 == 0 else ForwardKind.DECODE, ForwardResult.CHECKED
            )
            for group, reads in GROUPS.items():
                rank.slots(SLOTS_VERIFIED, group, reads)
                rank.slots(SLOTS_WRITTEN, group, 16)
                rank.slots(SLOTS_SEALED, group, 16)
                rank.slots(SLOTS_SCRUBBED, group, 5)
            rank.last_check(time.time())
            rank.drain_poll()
        step += 1
        time.sleep(0.1)


class Exporter:
    """The exporter in a process of its own."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/metrics"
        self._port = port

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.deploy.exporter", str(self._port)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._expect("ready")
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._process.communicate(timeout=120.0)
        finally:
            self._process.kill()

    def send(self, command: str) -> None:
        """Runs a command and waits until it has taken effect."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        self._expect("done")

    def _expect(self, answer: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if line != answer:
            raise AssertionError(f"the exporter answered {line!r}, not {answer!r}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
