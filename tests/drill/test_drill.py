"""A drill against a server that is made up: what it asks for, and which rank it looks at."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from kvcanary_plugin.drill import drill as drill_module
from kvcanary_plugin.drill import http_client, matrix
from kvcanary_plugin.drill.dialect import SGLANG, VLLM
from kvcanary_plugin.drill.drill import FULL_CASES, Drill
from kvcanary_plugin.metrics import FORWARDS, VIOLATIONS


class MadeUpServer:
    """Two ranks. A fault that was asked for is planted by the next request, and reported."""

    url = "http://made.up"
    dialect = SGLANG

    def __init__(
        self, directory: Path, *, alarming_ranks: tuple[int, ...], read_step: int | None = None
    ) -> None:
        self._directory = directory
        self._read_step = read_step
        self._alarming = alarming_ranks
        self._counts = {0: 0, 1: 0}
        self._lock = threading.Lock()
        self.asked: list[dict[str, object]] = []

    def serve(self) -> None:
        with self._lock:  # the drill's requests run side by side
            self._plant()

    def _plant(self) -> None:
        request = json.loads((self._directory / "fault.json").read_text())
        if request in self.asked:
            return
        self.asked.append(request)
        planted = {"id": request["id"], "step": 7, "group": "full", "slot": 5}
        with (self._directory / "fault.json.done").open("a") as done:
            done.write(json.dumps(planted) + "\n")
            if self._read_step is not None:
                read = {"id": request["id"], "read_step": self._read_step}
                done.write(json.dumps(read) + "\n")
        if not request["dry_run"]:
            row = {"type": "row", "checks": ["real_kv"], "group": "full", "slot": 5, "step": 8}
            (self._directory / "reports").mkdir(exist_ok=True)
            (self._directory / "reports" / "b.jsonl").write_text(json.dumps(row) + "\n")
            half_a_line = '{"type": "incident", "sch'  # the server is about to write the rest
            (self._directory / "reports" / "a.jsonl").write_text(half_a_line)
            for rank in self._alarming:
                self._counts[rank] += 1

    def metrics(self) -> str:
        lines = []
        for rank, count in self._counts.items():
            labels = f'tp_rank="{rank}"'
            lines.append(f'{VIOLATIONS}{{check="real_kv",{labels}}} {count}')
            lines.append(f'{FORWARDS}{{result="checked",kind="decode",{labels}}} {40 + rank}')
            lines.append(f'{FORWARDS}{{result="error",kind="decode",{labels}}} 3')
        return "\n".join(lines) + "\n"


@pytest.fixture
def made_up_http(monkeypatch):
    def use(server: MadeUpServer) -> None:
        monkeypatch.setattr(drill_module, "generate", lambda *_, **__: server.serve())
        monkeypatch.setattr(http_client, "post", lambda *_, **__: (200, ""))

    return use


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_a_fault_on_one_rank_is_asked_for_there_and_says_which_ranks_counted(
    ranks, tmp_path, made_up_http
):
    server = MadeUpServer(tmp_path, alarming_ranks=ranks)
    made_up_http(server)

    (result,) = Drill(server, tmp_path, tp_rank=1).run(FULL_CASES[:1], with_twins=True)

    assert [request["tp_rank"] for request in server.asked] == [1, 1]
    assert [request["dry_run"] for request in server.asked] == [True, False]
    assert result.detected
    assert result.steps_until_seen == 1
    assert result.false_alarms == 0
    assert result.tp_ranks == ranks
    assert f"(tp_rank {', '.join(map(str, ranks))})" in matrix.as_text([result])


def test_prompts_that_offer_no_place_come_twice_and_make_way_for_others(
    tmp_path, made_up_http, monkeypatch
):
    server = MadeUpServer(tmp_path, alarming_ranks=())
    made_up_http(server)
    rounds: list[frozenset[tuple[int, ...]]] = []

    def traffic(drill: Drill, seed: int) -> None:
        prompts: list[tuple[int, ...]] = []
        monkeypatch.setattr(
            drill_module, "generate", lambda _, prompt, **__: prompts.append(prompt)
        )
        serve_round(drill, seed)
        rounds.append(frozenset(prompts))

    serve_round = Drill._traffic
    monkeypatch.setattr(Drill, "_traffic", traffic)

    (result,) = Drill(server, tmp_path).run(FULL_CASES[:1])

    assert not result.planted
    assert len(rounds) >= 6
    assert rounds[::2] == rounds[1::2]
    assert len(set(rounds)) == len(rounds) // 2


def test_what_an_earlier_server_reported_in_the_same_directory_is_not_taken_for_this_one(
    tmp_path, made_up_http
):
    row = {"type": "row", "checks": ["real_kv"], "group": "full", "slot": 5, "step": 900}
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "a-earlier.jsonl").write_text(json.dumps(row) + "\n")
    server = MadeUpServer(tmp_path, alarming_ranks=(0,))
    made_up_http(server)

    (result,) = Drill(server, tmp_path).run(FULL_CASES[:1])

    assert result.report is not None
    assert result.report["step"] == 8


def test_steps_are_counted_from_the_forward_that_could_see_the_fault_first(tmp_path, made_up_http):
    server = MadeUpServer(tmp_path, alarming_ranks=(0,), read_step=8)
    made_up_http(server)

    (result,) = Drill(server, tmp_path).run(FULL_CASES[:1])

    assert (result.planted["step"], result.steps_until_seen) == (7, 0)


@pytest.mark.parametrize(
    ("dialect", "refusal", "consent"),
    [
        (SGLANG, (400, "requests are running"), (200, "Cache flushed.")),
        (VLLM, (200, '{"success":false}'), (200, '{"success":true}')),
        (VLLM, (503, ""), (200, "")),
    ],
)
def test_a_cache_that_is_not_flushed_is_asked_again(
    dialect, refusal, consent, tmp_path, monkeypatch
):
    server = MadeUpServer(tmp_path, alarming_ranks=())
    server.dialect = dialect
    answers = [refusal, refusal, consent]
    monkeypatch.setattr(http_client, "post", lambda *_, **__: answers.pop(0))

    Drill(server, tmp_path)._flush_cache()

    assert answers == []


def test_forwards_by_rank_counts_those_that_were_checked(tmp_path):
    server = MadeUpServer(tmp_path, alarming_ranks=())

    assert Drill(server, tmp_path).forwards_by_rank() == {0: 40, 1: 41}
