"""Report files are read back, and what is wrong with one is said."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcanary_plugin.cli import main
from kvcanary_plugin.forward import ForwardKind
from kvcanary_plugin.incident_file import Incident, IncidentFileError, read_incidents
from kvcanary_plugin.replay import replay
from tests.monitor.incident_world import IncidentWorld
from tests.monitor.world import Part


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report directory with two incidents: a foreign write, a flipped byte."""
    world = IncidentWorld(directory=tmp_path_factory.mktemp("world"))
    prompt = [11, 7, 7, 300, 0]
    world.forward(Part(uid=1, row=1, tokens=prompt, slots=[5, 6, 9, 2, 31]))
    world.forward(Part(uid=2, row=2, tokens=[50, 51, 52], slots=[20, 9, 22]))
    world.forward(Part(uid=3, row=3, tokens=[60, 61], slots=[40, 41]))
    world.bytes_of(world.full_kv[0], 40)[0] ^= 1
    world.forward(
        Part(uid=1, row=1, tokens=[*prompt, 1], slots=[12], prefix=5, host_knows_tokens=False),
        Part(uid=3, row=3, tokens=[60, 61, 1], slots=[42], prefix=2, host_knows_tokens=False),
        kind=ForwardKind.DECODE,
    )
    world.drain.stop()
    return world.reports


@pytest.fixture
def lines(reports: Path) -> list[dict[str, Any]]:
    (path,) = reports.iterdir()
    all_lines = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(all_lines, key=lambda line: line.get("root", {}).get("slot", 99))


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# --- reading --------------------------------------------------------------------------------------


def test_incidents_and_their_ends_are_read_from_a_directory(reports: Path):
    incidents, ends = read_incidents(reports)
    assert sorted(incident.root.slot for incident in incidents) == [9, 40]
    assert set(ends) == {incident.id for incident in incidents}
    assert all(incident.evidence is not None for incident in incidents)


def test_a_line_that_was_cut_out_of_a_file_is_read(lines: list[dict[str, Any]], tmp_path: Path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps(lines[0]))
    assert len(read_incidents(path)[0]) == 1


def test_row_lines_are_passed_over(lines: list[dict[str, Any]], tmp_path: Path):
    path = write(tmp_path / "a.jsonl", {"type": "row", "slot": 3}, lines[0])
    assert len(read_incidents(path)[0]) == 1


def test_what_is_read_is_what_was_written(lines: list[dict[str, Any]]):
    for line in lines:
        if line["type"] == "incident":
            assert Incident.model_validate_json(json.dumps(line)).as_line() == line


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{]\n", "is not JSON"),
        ("[1, 2]\n", "type got None"),
        ('{"type": "secret"}\n', "type got 'secret'; allowed row, incident, incident_end"),
        ('{"type": "incident", "schema": 2}\n', "schema got 2; allowed 1"),
        ('{"type": "incident", "schema": 1}\n', "Field required"),
        ("[" * 100_000 + "\n", "is not JSON"),
    ],
)
def test_a_malformed_line_is_named_and_why(content: str, says: str, tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(IncidentFileError, match=r"bad\.jsonl:1") as caught:
        read_incidents(path)
    assert says in str(caught.value)


def test_a_path_that_does_not_exist_and_bytes_that_are_no_text_are_refused(tmp_path: Path):
    with pytest.raises(IncidentFileError, match="does not exist"):
        read_incidents(tmp_path / "nothing")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(IncidentFileError, match="cannot be read"):
        read_incidents(tmp_path)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("root", "checks"), []),
        (("root", "checks"), ["no such check"]),
        (("root", "slot"), 1 << 63),
        (("root", "slot"), "9"),
        (("evidence", "slots", 0, "token"), [1]),
        (("evidence", "window", 0, "parts", 0, "positions"), [1]),
        (("evidence", "groups", 0, "num_slots"), 0),
        (("evidence", "settings", "verify_real_kv"), "some"),
        (("more",), 1),
    ],
)
def test_a_field_that_is_wrong_is_refused(
    path: tuple[Any, ...], value: object, lines: list[dict[str, Any]], tmp_path: Path
):
    line = copy.deepcopy(lines[0])
    _put(line, path, value)
    with pytest.raises(IncidentFileError):
        read_incidents(write(tmp_path / "a.jsonl", line))


# --- files that somebody has changed --------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("root", "group"), "other", "groups .* are not among"),
        (("evidence", "window", 0, "kind"), "sideways", "has kind"),
        (("evidence", "window", 0, "step"), 99, "do not increase"),
        (("evidence", "window", 0, "parts", 0, "slots"), {}, "slots of every group"),
        (("evidence", "requests", 0, "first"), 1 << 40, "more positions than"),
    ],
)
def test_evidence_that_contradicts_itself_is_refused(
    path: tuple[Any, ...],
    value: object,
    says: str,
    lines: list[dict[str, Any]],
    tmp_path: Path,
):
    line = copy.deepcopy(lines[0])
    _put(line, path, value)
    if path[-1] == "slots":
        line["evidence"]["window"][0]["parts"][0].update(tokens=[], positions=[])
    (incident,), _ = read_incidents(write(tmp_path / "a.jsonl", line))
    with pytest.raises(IncidentFileError, match=says):
        replay(incident)


def test_evidence_with_two_groups_of_one_name_is_refused(
    lines: list[dict[str, Any]], tmp_path: Path
):
    line = copy.deepcopy(lines[0])
    line["evidence"]["groups"] *= 2
    (incident,), _ = read_incidents(write(tmp_path / "a.jsonl", line))
    with pytest.raises(IncidentFileError, match="one name"):
        replay(incident)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_file_with_any_number_changed_is_replayed_or_refused(
    data: st.DataObject, lines: list[dict[str, Any]]
):
    line = copy.deepcopy(lines[0])
    places = list(_integers(line["evidence"], ("evidence",))) + list(
        _integers(line["root"], ("root",))
    )
    place = data.draw(st.sampled_from(places))
    value = data.draw(
        st.one_of(
            st.integers(-3, 70), st.sampled_from([-(1 << 63), (1 << 63) - 1, 1 << 31, 1 << 40])
        )
    )
    _put(line, place, value)
    try:
        incident = Incident.model_validate_json(json.dumps(line))
    except ValueError:
        return
    try:
        result = replay(incident)
    except IncidentFileError:
        return
    assert result.explanation


# --- kvcanary replay ------------------------------------------------------------------------------


def test_the_command_tells_what_happened_and_that_it_happened_again(
    reports: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["replay", str(reports)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("REPRODUCED") == 2
    assert "step 2 (prefill): request req-2 wrote position 1 to it" in text
    assert "Explained by the recorded events: in step 2 request req-2 wrote position 1" in text
    assert "Not explained by recorded events: the K/V bytes of slot 40 were changed" in text


def test_one_incident_of_several_can_be_chosen(reports: Path, capsys: pytest.CaptureFixture[str]):
    incidents, _ = read_incidents(reports)
    assert main(["replay", str(reports), "--incident", incidents[1].id]) == 0
    assert capsys.readouterr().out.count("REPRODUCED") == 1
    assert main(["replay", str(reports), "--incident", "nobody"]) == 2
    assert f"it holds {incidents[0].id}, {incidents[1].id}" in capsys.readouterr().err


def test_an_incident_that_does_not_come_again_is_status_1(
    lines: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    line = copy.deepcopy(lines[0])
    line["root"]["checks"] = ["double_alloc"]
    assert main(["replay", str(write(tmp_path / "a.jsonl", line))]) == 1
    assert "NOT REPRODUCED: double_alloc at slot 9" in capsys.readouterr().out


def test_a_file_that_cannot_be_replayed_is_status_2(
    lines: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["replay", str(tmp_path / "nothing")]) == 2
    line = copy.deepcopy(lines[0]) | {"evidence": None, "no_evidence_because": "no room"}
    assert main(["replay", str(write(tmp_path / "a.jsonl", line))]) == 2
    assert "holds no evidence (no room)" in capsys.readouterr().err
    assert main(["replay", str(write(tmp_path / "b.jsonl", {"type": "row"}))]) == 2


def _put(line: Any, path: tuple[Any, ...], value: object) -> None:
    for part in path[:-1]:
        line = line[part]
    line[path[-1]] = value


def _integers(value: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    if isinstance(value, bool):
        return []
    if isinstance(value, int):
        return [path]
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [place for key, item in items for place in _integers(item, (*path, key))]


def test_an_incident_without_evidence_is_named_and_the_others_are_replayed(
    lines: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    bare = {**lines[0], "id": "bare", "evidence": None, "no_evidence_because": "too many"}
    path = write(tmp_path / "a.jsonl", bare)
    path.write_text(path.read_text() + json.dumps(lines[1]) + "\n")
    assert main(["replay", str(path)]) == 2
    told = capsys.readouterr()
    assert told.out.count("REPRODUCED") == 1
    assert "incident bare holds no evidence (too many)" in told.err
