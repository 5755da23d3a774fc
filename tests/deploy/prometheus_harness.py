"""A real Prometheus with this repository's rules, scraping whatever a test points it at.

    with Prometheus(["http://127.0.0.1:30000/metrics"], directory=tmp_path) as prometheus:
        prometheus.wait_for_targets()
        prometheus.wait_for_alert("KVCanaryViolation", check="chain")

Scrapes and evaluates every second whatever intervals the rules state; ``for`` is kept. On a busy
machine scrapes are late or fail, and a query then has no data for a while: ``wait_for_data``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import yaml

from kvcanary_plugin.drill.server import free_port
from tests.deploy.paths import RULES

SKIP_REASON = "prometheus is not installed (apt-get install prometheus)"
WAIT_SECONDS = 120.0
T = TypeVar("T")
# Prometheus listens on this machine only; no proxy stands in between.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def is_installed() -> bool:
    return shutil.which("prometheus") is not None


@dataclass(frozen=True)
class Point:
    """One series of an instant query."""

    labels: dict[str, str]
    value: float


class Prometheus:
    """A running Prometheus; leaving the ``with`` block ends it.

    Args:
        urls: what to scrape, each with its path.
        directory: receives configuration, rules, data and log.
        job: label ``job`` of all targets.
        rules: rule files.
    """

    def __init__(
        self,
        urls: Iterable[str],
        *,
        directory: Path,
        job: str = "sglang",
        rules: Iterable[Path] = (RULES,),
    ) -> None:
        self._urls = tuple(urls)
        self._directory = directory
        self._job = job
        self._rules = tuple(rules)
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        config = self._directory / "prometheus.yaml"
        config.write_text(yaml.safe_dump(self._config()))
        self._port = free_port()
        with (self._directory / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={self._directory / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self.wait_until(self._is_ready, "Prometheus is ready")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the process; harmless when it has ended."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(60.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def query(self, expression: str) -> list[Point]:
        """The series of an instant query, now. A scalar has no labels."""
        data = self._get("/api/v1/query", query=expression)
        if data["resultType"] == "scalar":
            return [Point({}, float(data["result"][1]))]
        return [Point(entry["metric"], float(entry["value"][1])) for entry in data["result"]]

    def query_range(
        self, expression: str, *, seconds: float, step: float = 1.0
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """(labels, [(time, value)]) of each series over the last ``seconds``."""
        now = time.time()
        data = self._get(
            "/api/v1/query_range", query=expression, start=now - seconds, end=now, step=step
        )
        return [
            (entry["metric"], [(float(t), float(v)) for t, v in entry["values"]])
            for entry in data["result"]
        ]

    def firing_alerts(self) -> list[dict[str, str]]:
        """Labels of every alert that fires now."""
        alerts = self._get("/api/v1/alerts")["alerts"]
        return [alert["labels"] for alert in alerts if alert["state"] == "firing"]

    def wait_for_alert(self, name: str, **labels: str) -> None:
        """Waits until the alert fires with these labels."""
        wanted = {"alertname": name, **labels}
        self.wait_until(
            lambda: any(wanted.items() <= found.items() for found in self.firing_alerts()),
            f"{wanted} fires",
        )

    def wait_for_targets(self) -> None:
        """Waits until every target has been scraped, and the rules were evaluated after that."""
        self.wait_until(
            lambda: sum(point.value for point in self.query("up")) == len(self._urls),
            "all targets are up",
        )
        scraped = time.time()
        self.wait_until(lambda: self.last_evaluation() > scraped, "the rules are evaluated")

    def wait_for_data(self, expression: str) -> list[Point]:
        """The series of an instant query, as soon as there are any."""
        return self.wait_until(lambda: self.query(expression), f"data for {expression}")

    def last_evaluation(self) -> float:
        """Unix time of the oldest last evaluation among the rule groups."""
        groups = self._get("/api/v1/rules")["groups"]
        stamps = [datetime.fromisoformat(group["lastEvaluation"]) for group in groups]
        return min(stamp.timestamp() for stamp in stamps)

    def wait_until(self, condition: Callable[[], T], what: str) -> T:
        """The first true value of ``condition``, while Prometheus runs."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (value := condition()):
            if self._process is not None and self._process.poll() is not None:
                raise AssertionError(f"Prometheus ended; its log:\n{self._log()}")
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"not within {WAIT_SECONDS:.0f} s: {what}; firing: {self.firing_alerts()}"
                )
            time.sleep(0.2)
        return value

    def _config(self) -> dict[str, Any]:
        return {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(self._copy_at_global_interval(path)) for path in self._rules],
            "scrape_configs": [
                self._scrape_config(index, url) for index, url in enumerate(self._urls)
            ],
        }

    def _scrape_config(self, index: int, url: str) -> dict[str, Any]:
        parts = urllib.parse.urlsplit(url)
        return {
            "job_name": f"{self._job}-{index}",
            "metrics_path": parts.path or "/metrics",
            "scheme": parts.scheme,
            "static_configs": [{"targets": [parts.netloc], "labels": {"job": self._job}}],
        }

    def _copy_at_global_interval(self, path: Path) -> Path:
        content = yaml.safe_load(path.read_text())
        for group in content["groups"]:
            group.pop("interval", None)
        copy = self._directory / path.name
        copy.write_text(yaml.safe_dump(content, sort_keys=False))
        return copy

    def _is_ready(self) -> bool:
        try:
            with _OPENER.open(f"{self.url}/-/ready", timeout=5.0) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _get(self, path: str, **parameters: object) -> Any:
        url = f"{self.url}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with _OPENER.open(url, timeout=60.0) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def _log(self) -> str:
        return (self._directory / "prometheus.log").read_text(errors="replace")[-4000:]
