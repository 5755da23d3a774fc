from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from kvcanary_plugin.cli import main
from kvcanary_plugin.commands.status import metrics_url
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.drill.server import free_port
from kvcanary_plugin.forward import ForwardKind, ForwardResult
from kvcanary_plugin.metrics import SLOTS_VERIFIED, SLOTS_WRITTEN, CanaryMetrics, RankLabels


class Server:
    """A real /metrics with the ranks of a test behind it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._serving: CanaryMetrics | None = None
        self.url = ""

    def rank(
        self, dp_rank: int = 0, *, groups: tuple[str, ...] = ("full",), mode: str = "log"
    ) -> CanaryMetrics:
        metrics = CanaryMetrics(
            engine="sglang",
            ranks=RankLabels(dp_rank=dp_rank),
            groups=groups,
            version="1.2.3",
            backend="cpu",
            registry=self.registry,
        )
        metrics.settings(CanaryConfig.model_validate({"mode": mode}))
        for group in groups:
            metrics.group_state(group, "guarded")
            metrics.supported_checks(group, ())
        if self._serving is None:
            port = metrics.serve(port=free_port(), address="127.0.0.1")
            self._serving, self.url = metrics, f"127.0.0.1:{port}"
        return metrics

    def close(self) -> None:
        if self._serving is not None:
            self._serving.close()


def work(metrics: CanaryMetrics, *, decodes: int = 50, group: str = "full") -> None:
    metrics.forward(ForwardKind.PREFILL, ForwardResult.CHECKED)
    metrics.forward(ForwardKind.DECODE, ForwardResult.CHECKED, decodes)
    metrics.slots(SLOTS_VERIFIED, group, 700)
    metrics.slots(SLOTS_WRITTEN, group, 60)
    metrics.last_check(time.time())


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def ask(server: Server, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main(["status", "--json", server.url])
    return status, json.loads(capsys.readouterr().out)


def test_a_server_that_is_checked_is_guarded(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = time.time()
    work(server.rank())
    status, answer = ask(server, capsys)
    (rank,) = answer["ranks"]
    assert 0 <= rank["last_check_age_seconds"] <= time.time() - begin
    assert (status, answer["verdict"], answer["problems"]) == (0, "guarded", [])
    assert rank["slots"] == {
        "verified": 700,
        "written": 60,
        "sealed": 0,
        "scrubbed": 0,
        "reverified": 0,
    }
    assert rank["forwards"] == {"checked": 51, "error": 0, "partial": 0, "unchecked": 0}
    assert rank["groups"] == {"full": "guarded"}
    assert rank["checks_off"] == ["token"]
    assert rank["write_input_assert"] is False
    assert (rank["mode"], rank["version"], rank["backend"]) == ("log", "1.2.3", "cpu")


def test_the_text_has_a_line_for_each_rank_and_the_totals(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    work(server.rank(0))
    work(server.rank(1))
    assert main(["status", server.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"http://{server.url}/metrics"
    assert lines[1] == "GUARDED, no violations"
    assert re.fullmatch(
        r"sglang tp0 pp0 dp0 +log +\d+ s ago +51 of 51 +700 +0 +full guarded", lines[4]
    )
    assert lines[5].startswith("sglang tp0 pp0 dp1")
    assert lines[7] == "slots          1400 verified, 120 written"
    assert len(lines) <= 24


def test_the_write_input_assert_is_shown_once_it_is_on(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [server.rank(0), server.rank(1)]
    for switched, shown in (((), "off"), (ranks[:1], "off, on"), (ranks, "on")):
        for rank in switched:
            rank.settings(CanaryConfig(write_input_assert=True))
        main(["status", server.url])
        assert f"input assert   {shown}\n" in capsys.readouterr().out
    assert all(rank["write_input_assert"] for rank in ask(server, capsys)[1]["ranks"])


def test_a_server_without_traffic_is_guarded_and_says_so(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.rank()
    status, answer = ask(server, capsys)
    assert (status, answer["verdict"]) == (0, "idle")


def test_a_rank_without_traffic_beside_a_busy_one_is_fine(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    work(server.rank(0))
    server.rank(1)
    status, answer = ask(server, capsys)
    assert (status, answer["verdict"]) == (0, "guarded")


def test_violations_are_listed_by_check_with_the_command_that_explains_them(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    work(server.rank(0))
    second = server.rank(1)
    work(second)
    second.violations("chain", "full", "verify", 3)
    second.violations("real_kv", "full", "scrub")
    status, answer = ask(server, capsys)
    assert (status, answer["verdict"]) == (1, "violations")
    assert answer["problems"] == [
        "sglang tp0 pp0 dp1: violations since the start: chain 3, real_kv 1"
    ]
    assert main(["status", server.url]) == 1
    assert capsys.readouterr().out.endswith("\nkvcanary explain chain\nkvcanary explain real_kv\n")


def test_checks_that_cannot_work_for_a_guarded_group_are_listed(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = server.rank(groups=("full", "mla"))
    work(metrics)
    metrics.supported_checks("full", {"freed_read", "double_free"})
    metrics.group_state("mla", "unsupported")
    metrics.supported_checks("mla", {"chain"})
    (rank,) = ask(server, capsys)[1]["ranks"]
    assert rank["checks_unsupported"] == {"full": ["double_free", "freed_read"]}
    main(["status", server.url])
    assert "\nnot supported  full: double_free, freed_read\n" in capsys.readouterr().out


def test_dropped_rows_are_violations(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = server.rank()
    work(metrics)
    metrics.ring_dropped(5)
    status, answer = ask(server, capsys)
    assert (status, answer["verdict"], answer["ranks"][0]["ring_dropped"]) == (1, "violations", 5)


def test_changes_of_the_configuration_are_counted(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = server.rank()
    work(metrics)
    metrics.config_reload("ok")
    metrics.config_reload("ok")
    metrics.config_reload("refused")
    (rank,) = ask(server, capsys)[1]["ranks"]
    assert (rank["config_taken_over"], rank["config_refused"]) == (2, 1)
    main(["status", server.url])
    assert "\nconfig changes 2 taken over, 1 refused\n" in capsys.readouterr().out


def test_mode_off_is_off(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = server.rank(mode="off")
    metrics.forward(ForwardKind.DECODE, ForwardResult.UNCHECKED, 500)
    status, answer = ask(server, capsys)
    assert (status, answer["verdict"]) == (2, "off")
    assert answer["problems"] == ["sglang tp0 pp0 dp0: mode is off"]


@pytest.mark.parametrize(("state", "verdict"), [("blind", "blind"), ("unsupported", "unguarded")])
def test_a_group_that_is_not_guarded_shows(
    server: Server, capsys: pytest.CaptureFixture[str], state: Any, verdict: str
) -> None:
    metrics = server.rank(groups=("full", "swa"))
    work(metrics)
    metrics.slots(SLOTS_VERIFIED, "swa", 1)
    metrics.group_state("swa", state)
    status, answer = ask(server, capsys)
    assert (status, answer["verdict"]) == (2, verdict)
    assert "group swa" in answer["problems"][0]


def test_decodes_without_a_verified_slot_are_blind(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    work(server.rank(groups=("full", "swa")))
    status, answer = ask(server, capsys)
    assert (status, answer["verdict"]) == (2, "blind")
    assert "no slot of group swa was verified" in answer["problems"][0]


def test_a_draft_group_is_not_expected_to_follow_the_decodes(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    work(server.rank(groups=("full", "draft")))
    assert ask(server, capsys)[0] == 0


def test_forwards_without_any_check_are_blind(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.rank().forward(ForwardKind.PREFILL, ForwardResult.UNCHECKED, 50)
    status, answer = ask(server, capsys)
    assert (status, answer["verdict"]) == (2, "blind")


@pytest.mark.parametrize(("running", "verdict"), [(3, "late"), (0, "guarded")])
def test_an_old_check_is_late_only_while_requests_run(
    server: Server, capsys: pytest.CaptureFixture[str], running: int, verdict: str
) -> None:
    metrics = server.rank()
    work(metrics)
    metrics.last_check(time.time() - 600)
    Gauge("sglang:num_running_reqs", "", registry=server.registry).set(running)
    assert ask(server, capsys)[1]["verdict"] == verdict


def test_violations_weigh_more_than_a_blind_rank(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    first = server.rank(0)
    work(first)
    first.violations("chain", "full", "verify")
    server.rank(1).group_state("full", "blind")
    status, answer = ask(server, capsys)
    assert (status, answer["verdict"], len(answer["problems"])) == (1, "violations", 2)


def test_no_answer_is_unreachable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", f"127.0.0.1:{free_port()}"]) == 2
    assert "UNREACHABLE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "body", "words"),
    [
        (404, b"", "answered 404"),
        (200, b"<html>", "no Prometheus exposition"),
        (200, b"# TYPE up gauge\nup 1\n", "no kvcanary metric"),
    ],
)
def test_an_answer_that_is_no_canary_says_what_it_is(
    capsys: pytest.CaptureFixture[str], code: int, body: bytes, words: str
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.handle_request, daemon=True)
        thread.start()
        assert main(["status", f"127.0.0.1:{http.server_address[1]}"]) == 2
        thread.join()
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("node-1:30000", "http://node-1:30000/metrics"),
        ("http://node-1:30000", "http://node-1:30000/metrics"),
        ("http://node-1:30000/", "http://node-1:30000/metrics"),
        ("https://node-1/engine/metrics", "https://node-1/engine/metrics"),
    ],
)
def test_the_address_is_completed(given: str, expected: str) -> None:
    assert metrics_url(given) == expected


@pytest.mark.parametrize("url", ["ftp://node-1/metrics", "http://"])
def test_an_address_that_is_none_is_unreachable(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", url]) == 2
    assert "allowed HOST:PORT" in capsys.readouterr().out
