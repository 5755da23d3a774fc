"""The file between workers and scheduler, and what the scheduler makes of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvcanary_plugin.hooks.vllm import aborts
from kvcanary_plugin.series_file import DIRECTORY_VARIABLE


@pytest.fixture
def shared(monkeypatch, tmp_path):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    return tmp_path


def test_each_report_is_taken_once_by_every_scheduler(shared):
    first, second = aborts.ReportedRequests(), aborts.ReportedRequests()
    assert first.take() == []
    aborts.report(["a"])
    assert first.take() == ["a"]
    aborts.report(["b", "c"])
    assert first.take() == ["b", "c"]
    assert first.take() == []
    assert second.take() == ["a", "b", "c"]


def test_half_a_line_waits_for_its_other_half(shared):
    reported = aborts.ReportedRequests()
    aborts.report(["a"])
    with open(aborts._path(), "ab") as file:
        file.write(b"b-is-not-all-th")
    assert reported.take() == ["a"]
    with open(aborts._path(), "ab") as file:
        file.write(b"ere\n")
    assert reported.take() == ["b-is-not-all-there"]


def test_without_a_shared_directory_nothing_is_written_or_taken(monkeypatch):
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    aborts.report(["a"])
    assert aborts.ReportedRequests().take() == []


class Scheduler:
    """What is asked of vLLM's, with one running request."""

    def __init__(self) -> None:
        pytest.importorskip("vllm")
        self.running = SimpleNamespace(
            client_index=3, is_finished=lambda: False, get_finished_reason=lambda: None
        )
        self.requests = {"a": self.running}
        self.finished: list[str] = []

    def finish_requests(self, request_id, status) -> None:
        from vllm.v1.request import RequestStatus

        assert status is RequestStatus.FINISHED_ERROR
        self.finished.append(request_id)


def test_a_running_request_is_finished_and_its_client_told():
    scheduler = Scheduler()
    outputs: dict = {}
    aborts._end(scheduler, "a", outputs)
    assert scheduler.finished == ["a"]
    assert [output.request_id for output in outputs[3].outputs] == ["a"]


def test_one_that_is_gone_is_left_alone():
    scheduler = Scheduler()
    outputs: dict = {}
    aborts._end(scheduler, "b", outputs)
    scheduler.running.is_finished = lambda: True
    aborts._end(scheduler, "a", outputs)
    assert (scheduler.finished, outputs) == ([], {})
