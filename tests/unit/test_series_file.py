"""Values that one process counts and another reads from its file."""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvcanary_plugin.drill.server import free_port
from kvcanary_plugin.metrics import (
    GROUP_STATE,
    METRICS,
    SLOTS_VERIFIED,
    VIOLATIONS,
    CanaryMetrics,
    RankLabels,
)
from kvcanary_plugin.series_file import (
    DIRECTORY_VARIABLE,
    SeriesCollector,
    SeriesFile,
    read_series,
)


def scraped(directory: Path) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    registry = CollectorRegistry()
    registry.register(SeriesCollector(directory, METRICS))
    text = generate_latest(registry).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value_of(directory: Path, name: str, **labels: str) -> float:
    (value,) = (
        value
        for (series, pairs), value in scraped(directory).items()
        if series == name and labels.items() <= dict(pairs).items()
    )
    return value


def worker_metrics(*, tp_rank: int = 0) -> CanaryMetrics:
    return CanaryMetrics(engine="vllm", ranks=RankLabels(tp_rank=tp_rank), groups=["full"])


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    return tmp_path


def test_a_value_is_seen_as_soon_as_it_is_counted(directory):
    metrics = worker_metrics()
    assert value_of(directory, VIOLATIONS, check="chain", phase="verify") == 0
    metrics.violations("chain", "full", "verify", 3)
    metrics.group_state("full", "blind")
    assert value_of(directory, VIOLATIONS, check="chain", phase="verify") == 3
    assert value_of(directory, GROUP_STATE, state="blind") == 1


def test_every_series_is_there_at_zero_before_anything_happens(directory):
    worker_metrics()
    by_metric = {name for name, _ in scraped(directory)}
    assert by_metric == {metric.name for metric in METRICS}


def test_ranks_stand_side_by_side(directory):
    for rank in (0, 1):
        worker_metrics(tp_rank=rank).slots(SLOTS_VERIFIED, "full", 10 + rank)
    assert value_of(directory, SLOTS_VERIFIED, tp_rank="0") == 10
    assert value_of(directory, SLOTS_VERIFIED, tp_rank="1") == 11


def test_a_rank_that_started_again_replaces_its_older_file(directory):
    worker_metrics().slots(SLOTS_VERIFIED, "full", 500)
    worker_metrics().slots(SLOTS_VERIFIED, "full", 7)
    assert len(list(directory.iterdir())) == 2
    assert value_of(directory, SLOTS_VERIFIED) == 7


def test_the_values_of_a_process_that_died_stay_readable(directory):
    script = (
        "import os, signal\n"
        "from kvcanary_plugin.metrics import CanaryMetrics, RankLabels, SLOTS_VERIFIED\n"
        "metrics = CanaryMetrics(engine='vllm', ranks=RankLabels(), groups=['full'])\n"
        "metrics.slots(SLOTS_VERIFIED, 'full', 42)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    died = subprocess.run([sys.executable, "-c", script], check=False)
    assert died.returncode == -9
    assert value_of(directory, SLOTS_VERIFIED) == 42


def test_a_worker_with_its_own_endpoint_serves_its_file(directory):
    metrics = worker_metrics()
    metrics.slots(SLOTS_VERIFIED, "full", 5)
    port = metrics.serve(port=free_port(), address="127.0.0.1")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
    finally:
        metrics.close()
    assert f'{SLOTS_VERIFIED}{{dp_rank="0",engine="vllm",group="full"' in text
    assert " 5.0" in text


def test_threads_lose_no_increment(tmp_path):
    (value,) = (file := SeriesFile(tmp_path, [("a", {})])).values
    threads = [
        threading.Thread(target=lambda: [value.inc() for _ in range(5000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [number for _, _, number in read_series(file.path)] == [20000]


def test_a_broken_file_is_left_out_and_logged(directory, caplog):
    worker_metrics().slots(SLOTS_VERIFIED, "full", 9)
    (directory / "broken.series").write_bytes(b"[[")
    assert value_of(directory, SLOTS_VERIFIED) == 9
    assert "broken.series cannot be read" in caplog.text


def test_labels_survive_any_text(tmp_path):
    labels = {"pool": 'quote " newline \n backslash \\ umlaut ü'}
    file = SeriesFile(tmp_path, [("a", labels), ("b", {})])
    file.values[1].set(-2.5)
    assert list(read_series(file.path)) == [("a", labels, 0.0), ("b", {}, -2.5)]
