"""Report files stay below their limit and lose only the oldest reports."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvcanary_plugin.report_files import ReportFiles

LIMIT = 64 * 1024


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def reports_in(directory: Path) -> list[int]:
    paths = sorted(directory.iterdir(), key=lambda path: path.name)
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return [json.loads(line)["number"] for line in lines]


def test_each_report_is_one_json_line(tmp_path: Path) -> None:
    files = ReportFiles(tmp_path / "new" / "directory", max_bytes=LIMIT, name="sglang-tp0")
    files.append([{"number": 1, "text": "two\nlines"}, {"number": 2}])
    files.append([{"number": 3}])
    files.close()
    assert reports_in(tmp_path / "new" / "directory") == [1, 2, 3]


def test_files_and_directory_are_for_their_owner_only(tmp_path: Path) -> None:
    directory = tmp_path / "reports"
    files = ReportFiles(directory, max_bytes=LIMIT, name="x")
    files.append([{"number": 1}])
    (path,) = directory.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600


def test_nothing_is_created_before_the_first_report(tmp_path: Path) -> None:
    ReportFiles(tmp_path, max_bytes=LIMIT, name="x").close()
    assert list(tmp_path.iterdir()) == []


def test_limit_holds_and_the_newest_reports_stay(tmp_path: Path) -> None:
    files = ReportFiles(tmp_path, max_bytes=LIMIT, name="x")
    largest = 0
    for number in range(2000):
        files.append([{"number": number, "padding": "x" * 200}])
        largest = max(largest, size_of(tmp_path))
    files.close()
    assert LIMIT // 2 < largest <= LIMIT
    kept = reports_in(tmp_path)
    assert kept == list(range(kept[0], 2000))


def test_limit_is_shared_with_the_files_of_earlier_processes_and_other_ranks(
    tmp_path: Path,
) -> None:
    for number in range(20):
        old = tmp_path / f"kvcanary-other-1-{number:020d}.jsonl"
        old.write_text("x" * 4000)
        os.utime(old, (number, number))
    ReportFiles(tmp_path, max_bytes=LIMIT, name="x").append([{"number": 1}])
    assert size_of(tmp_path) <= LIMIT
    assert not (tmp_path / f"kvcanary-other-1-{0:020d}.jsonl").exists()
    assert (tmp_path / f"kvcanary-other-1-{19:020d}.jsonl").exists()


def test_files_of_others_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "core.dump"
    other.write_text("x" * 2 * LIMIT)
    files = ReportFiles(tmp_path, max_bytes=LIMIT, name="x")
    for number in range(1000):
        files.append([{"number": number, "padding": "x" * 200}])
    assert other.exists()


def test_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ValueError, match=r"report\.directory got .*file"):
        ReportFiles(path, max_bytes=LIMIT, name="x")


def test_directory_that_cannot_be_created_is_refused() -> None:
    with pytest.raises(ValueError, match=r"report\.directory got /proc/kvcanary"):
        ReportFiles(Path("/proc/kvcanary"), max_bytes=LIMIT, name="x")


def test_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ValueError, match="can be written to"):
        ReportFiles(tmp_path, max_bytes=LIMIT, name="x")
