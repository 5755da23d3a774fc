"""The flight recorder keeps copies, within bounds; evidence and reports are made from them."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcanary_plugin import evidence as evidence_module
from kvcanary_plugin import step_copy
from kvcanary_plugin.forward import ForwardKind, ForwardStep
from kvcanary_plugin.incident_file import read_incidents
from kvcanary_plugin.kernels import concatenate_integers
from kvcanary_plugin.kernels.consts import EventKind
from kvcanary_plugin.recorder import FlightRecorder
from tests.monitor.incident_world import IncidentWorld
from tests.monitor.world import Part, World, checking_everything

PROMPT = [31311, 31317, 31319, 31321, 31327]
SLOTS = [5, 6, 9, 2, 31]


def step_of(number: int, *, requests: int = 2, tokens: int = 5, dtype=torch.int64) -> ForwardStep:
    """A decode-like step whose arrays hold its number, with three tokens of padding."""

    def full(count: int, value: int) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype)

    return ForwardStep(
        kind=ForwardKind.DECODE,
        step=number,
        request_rows=full(requests, number),
        request_uids=torch.full((requests,), number),
        prefix_lens=full(requests, 7),
        extend_lens=torch.tensor([tokens - requests + 1] + [1] * (requests - 1), dtype=dtype),
        max_prefix_len=7,
        input_ids=full(tokens + 3, 100 + number),
        positions=full(tokens + 3, 200 + number),
        out_cache_loc=(full(tokens + 3, 300 + number), full(tokens + 3, 400 + number)),
        identity_keys=torch.full((requests,), 500 + number),
        host_extend_lens=np.array([tokens - requests + 1] + [1] * (requests - 1)),
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_is_kept_is_what_was_launched_whatever_happens_to_the_buffers(dtype: torch.dtype):
    recorder = FlightRecorder(4)
    step = step_of(3, dtype=dtype)
    recorder.record(step)
    for tensor in (step.input_ids, step.positions, step.request_uids, *step.out_cache_loc):
        tensor.fill_(-9)  # a persistent buffer, filled again for the next forward
    (kept,) = recorder.window(until_step=3)
    assert (kept.step, kept.kind) == (3, ForwardKind.DECODE)
    assert kept.request_rows.tolist() == kept.request_uids.tolist() == [3, 3]
    assert kept.starts.tolist() == [0, 4, 5]
    assert kept.input_ids.tolist() == [103] * 5
    assert kept.positions.tolist() == [203] * 5
    assert [slots.tolist() for slots in kept.slots] == [[303] * 5, [403] * 5]
    assert kept.identity_keys is not None
    assert kept.identity_keys.tolist() == [503, 503]


def test_mixed_dtypes_in_one_step_come_back():
    recorder = FlightRecorder(4)
    step = step_of(3)
    mixed = {"input_ids": step.input_ids.int(), "request_rows": step.request_rows.int()}
    fields = {name: getattr(step, name) for name in step.__slots__} | mixed
    recorder.record(ForwardStep(**fields))
    (kept,) = recorder.window(until_step=3)
    assert kept.input_ids.tolist() == [103] * 5
    assert kept.positions.tolist() == [203] * 5
    assert kept.request_rows.tolist() == [3, 3]


def test_one_launch_a_forward(monkeypatch: pytest.MonkeyPatch):
    recorder, step = FlightRecorder(4), step_of(1)
    launches: list[int] = []

    def concatenate(*, arrays: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        launches.append(len(arrays))
        concatenate_integers(arrays=arrays, output=output)

    monkeypatch.setattr(step_copy, "concatenate_integers", concatenate)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        recorder.record(step)
    computing = {"aten::cat", "aten::copy_", "aten::to", "aten::clone", "aten::fill_", "aten::item"}
    called = [event.key for event in profile.key_averages() if event.key in computing]
    assert called == []
    assert launches == [9]  # arrays, ten of which fit into a launch


def test_the_last_forwards_are_kept_and_later_ones_left_out_of_the_window():
    recorder = FlightRecorder(4)
    for number in range(1, 11):
        recorder.record(step_of(number))
    assert [kept.step for kept in recorder.window(until_step=99)] == [7, 8, 9, 10]
    assert [kept.step for kept in recorder.window(until_step=8)] == [7, 8]


def test_memory_is_bounded_however_large_the_forwards_are():
    recorder = FlightRecorder(1000, max_bytes=100_000)
    for number in range(1, 200):
        recorder.record(step_of(number, tokens=500))
        assert recorder.num_bytes <= 100_000
    assert 2 < len(recorder) < 20
    recorder.record(step_of(200, tokens=50_000))
    assert len(recorder) == 1, "one forward is kept, whatever its size"


def test_a_recorder_that_is_off_keeps_nothing():
    recorder = FlightRecorder(0)
    recorder.record_event(EventKind.FREE, group=0, slots=np.array([1]))
    recorder.record(step_of(1))
    assert (len(recorder), recorder.window(until_step=9)) == (0, [])


def test_events_belong_to_the_forward_behind_them():
    recorder = FlightRecorder(4)
    recorder.record(step_of(1))
    recorder.record_event(EventKind.FREE, group=1, slots=torch.tensor([3, 4]), page_size=2)
    recorder.record_event(
        EventKind.MOVE, group=0, slots=np.array([7]), sources=np.array([8]), uid=5
    )
    recorder.record_event(EventKind.RESET, group=0, slots=None)
    recorder.record(step_of(2))
    first, second = recorder.window(until_step=2)
    assert first.events == ()
    free, move, reset = second.events
    assert (free.kind, free.group) == (EventKind.FREE, 1)
    assert free.slots is not None
    assert free.slots.tolist() == [6, 7, 8, 9]
    assert move.slots is not None
    assert move.sources is not None
    assert (move.slots.tolist(), move.sources.tolist(), move.uid) == ([7], [8], 5)
    assert reset.slots is None


def test_events_without_a_forward_stay_bounded():
    recorder = FlightRecorder(4)
    for number in range(100_000):
        recorder.record_event(EventKind.FREE, group=0, slots=np.array([number]))
    recorder.record(step_of(1))
    (kept,) = recorder.window(until_step=1)
    assert kept.events[-1].slots is not None
    assert kept.events[-1].slots.tolist() == [99_999]
    assert len(kept.events) < 10_000


def test_the_window_can_be_read_while_another_thread_records():
    recorder = FlightRecorder(16)
    finished = threading.Event()

    def record() -> None:
        number = 0
        while not finished.is_set():
            number += 1
            recorder.record(step_of(number))

    thread = threading.Thread(target=record)
    thread.start()
    try:
        for _ in range(200):
            steps = [kept.step for kept in recorder.window(until_step=1 << 60)]
            assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True
            assert len(steps) <= 16
    finally:
        finished.set()
        thread.join()


# --- what is made of it ---------------------------------------------------------------------------


def with_a_fault(tmp_path: Path, **settings: object) -> IncidentWorld:
    world = IncidentWorld(directory=tmp_path, config=checking_everything(**settings))
    world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS, identity_key=424242))
    world.forward(Part(uid=3, row=3, tokens=[41999], slots=[60]))
    world.monitor.guards[0].records[6].view(torch.int64)[0] += 1
    part = Part(uid=1, row=1, tokens=[*PROMPT, 31333], slots=[12], prefix=5, identity_key=424242)
    world.forward(part, kind=ForwardKind.DECODE)
    return world


def test_a_report_holds_the_window_the_requests_and_the_slots(tmp_path: Path):
    world = with_a_fault(tmp_path)
    (incident,) = world.incidents()
    evidence = incident.evidence
    assert evidence is not None
    assert [forward.step for forward in evidence.window] == [1, 2, 3]
    assert [len(forward.parts) for forward in evidence.window] == [1, 0, 1]
    (reader,) = evidence.requests
    assert (reader.role, reader.id, reader.prefix_len, reader.extend_len) == (
        "reader",
        "req-1",
        5,
        1,
    )
    assert reader.rows[0].slots == [*SLOTS, 12]
    (slots,) = evidence.slots
    assert slots.slot == sorted([*SLOTS, 12])
    assert dict(zip(slots.slot, slots.state, strict=True))[6] == "sealed"
    assert 60 not in slots.slot, "a request that is not involved stays out of the report"


def test_reports_hold_no_token_and_nothing_that_gives_one_away_unless_allowed(tmp_path: Path):
    world = with_a_fault(tmp_path)
    world.drain.stop()
    text = "".join(path.read_text() for path in world.reports.iterdir())
    records = world.monitor.guards[0].records.view(torch.int64)[SLOTS]
    secrets = [*PROMPT, 31333, 41999, 31318, 424242]
    secrets += records[:, 2].tolist() + records[:, 3].tolist()
    numbers = set(_numbers(json.loads(line) for line in text.splitlines()))
    assert not numbers & set(secrets)


def test_equal_tokens_stay_equal_and_differ_from_one_process_to_the_next(tmp_path: Path):
    def prompt(number: int) -> list[int]:
        world = IncidentWorld(directory=tmp_path / str(number))
        world.forward(Part(uid=1, row=1, tokens=[7, 8, 7, 7, 9], slots=SLOTS))
        world.bytes_of(world.full_kv[0], 9)[0] ^= 1
        part = Part(uid=1, row=1, tokens=[7, 8, 7, 7, 9, 1], slots=[12], prefix=5)
        world.forward(part, kind=ForwardKind.DECODE)
        (incident,) = world.incidents()
        assert incident.evidence is not None
        return incident.evidence.window[0].parts[0].tokens

    first, second = prompt(1), prompt(2)
    assert first[0] == first[2] == first[3] != first[1]
    assert not set(first) & set(second)


def test_tokens_are_shown_when_allowed(tmp_path: Path):
    world = with_a_fault(tmp_path, report={"include_tokens": True})
    (incident,) = world.incidents()
    assert incident.evidence is not None
    assert not incident.tokens_are_hashed
    assert incident.evidence.window[0].parts[0].tokens == PROMPT
    assert incident.root.stored_token == 31318


def test_a_report_directory_that_is_too_small_costs_the_oldest_forwards_first(tmp_path: Path):
    config = {"report": {"max_bytes": 64 * 1024}}
    world = IncidentWorld(directory=tmp_path, config=checking_everything(**config))
    world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS))
    tokens = list(PROMPT)
    for number in range(40):
        tokens.append(number)
        part = Part(
            uid=1, row=1, tokens=list(tokens), slots=[number % 8 + 50], prefix=len(tokens) - 1
        )
        if number == 39:
            world.bytes_of(world.full_kv[0], 9)[0] ^= 1
        world.forward(part, kind=ForwardKind.DECODE)
    incident = next(i for i in world.incidents() if i.root.slot == 9)
    assert incident.evidence is not None
    assert incident.evidence.left_out > 0
    assert incident.evidence.window[-1].step == incident.root.step
    for path in world.reports.iterdir():
        assert all(len(line) < 8 * 1024 for line in path.read_text().splitlines())


def test_a_flood_of_incidents_gets_evidence_for_some_and_says_so_for_the_rest(tmp_path: Path):
    world = IncidentWorld(directory=tmp_path, slots=256, rows=64, width=16)
    parts = [Part(uid=n, row=n, tokens=[n, 1], slots=[2 * n, 2 * n + 1]) for n in range(1, 30)]
    world.forward(*parts)
    for part in parts:
        world.bytes_of(world.full_kv[0], part.slots[0])[0] ^= 1
    world.forward(
        *(Part(uid=n, row=n, tokens=[n, 1, 2], slots=[100 + n], prefix=2) for n in range(1, 30)),
        kind=ForwardKind.DECODE,
    )
    incidents = world.incidents()
    assert len(incidents) == 29
    with_evidence = [incident for incident in incidents if incident.evidence is not None]
    assert len(with_evidence) == 12
    reasons = {i.no_evidence_because for i in incidents if i.evidence is None}
    assert reasons == {"more than 12 incidents in this minute"}


def test_an_engine_that_has_gone_to_sleep_is_not_asked_for_its_page_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nothing is left behind their addresses: a read of it would be the engine's end."""
    world = IncidentWorld(directory=tmp_path)
    world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS))
    world.bytes_of(world.full_kv[0], 9)[0] ^= 1
    decode = Part(uid=1, row=1, tokens=[*PROMPT, 1], slots=[12], prefix=5)
    World.forward(world, decode, kind=ForwardKind.DECODE)  # the drain has not looked yet
    world.monitor.forget_everything()
    with monkeypatch.context() as asleep:
        asleep.setattr(evidence_module, "_slots_in_table", lambda *_: pytest.fail("read"))
        world.drain.flush()
    (incident,) = world.incidents()
    assert incident.evidence is None
    assert incident.no_evidence_because == "the engine went to sleep before it was collected"

    again = Part(uid=2, row=2, tokens=PROMPT, slots=SLOTS)
    world.forward(again)
    world.bytes_of(world.full_kv[0], 2)[0] ^= 1
    world.forward(Part(uid=2, row=2, tokens=[*PROMPT, 1], slots=[12], prefix=5))
    assert world.incidents()[-1].evidence is not None


def test_page_tables_stay_while_somebody_reads_them():
    monitor = World().monitor
    with monitor.page_tables() as are_there:
        sleep = threading.Thread(target=monitor.forget_everything)
        sleep.start()
        sleep.join(0.02)
        assert are_there
        assert sleep.is_alive()
    sleep.join()
    with monitor.page_tables() as are_there:
        assert not are_there


def test_a_recorder_that_fails_costs_reports_and_no_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    world = IncidentWorld(directory=tmp_path)
    world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS))

    def refuse(_: ForwardStep) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(world.monitor.recorder, "record", refuse)
    world.bytes_of(world.full_kv[0], 9)[0] ^= 1
    world.step += 1
    step = world._step_of(
        [Part(uid=1, row=1, tokens=[*PROMPT, 1], slots=[12], prefix=5)], ForwardKind.DECODE
    )
    world.monitor.before_forward(step)
    world.monitor.after_forward()
    ((where, _),) = world.errors
    assert where == "recorder"
    assert world.monitor.blind_because is None
    assert not world.monitor.recorder.is_on
    assert [v.checks for v in world.violations()] == [("real_kv",)]


def test_a_process_that_is_killed_leaves_whole_lines_behind(tmp_path: Path):
    world = with_a_fault(tmp_path)
    (path,) = world.reports.iterdir()
    path.write_text(path.read_text() + '{"type": "incident", "schema": 1, "id": "abc')
    incidents, ends = read_incidents(world.reports)
    assert len(incidents) == 1
    assert ends == {}


def _numbers(value: object) -> list[int]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, int):
        return [value]
    if isinstance(value, list) or not isinstance(value, str | float | None | bool):
        return [number for item in value for number in _numbers(item)]  # type: ignore[attr-defined]
    return []
