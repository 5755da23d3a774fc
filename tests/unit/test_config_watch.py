"""Settings that change while the engine serves."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from kvcanary_plugin.config import CanaryConfig, ConfigWatcher, load_config


class Watched:
    """A watcher on a file, with a clock that the test moves and the results it reported."""

    def __init__(self, path: Path, environ: dict[str, str] | None = None) -> None:
        self.path = path
        self.now = 100.0
        self.results: list[str] = []
        self.watcher = ConfigWatcher(
            path,
            load_config(path, environ or {}),
            environ or {},
            on_result=self.results.append,
            clock=lambda: self.now,
        )

    def change_to(self, text: str) -> CanaryConfig | None:
        self.path.write_text(text)
        return self.poll_later()

    def poll_later(self) -> CanaryConfig | None:
        self.now += 1.0
        return self.poll()

    def poll(self) -> CanaryConfig | None:
        """The settings that were handed over, if any were."""
        taken_over: list[CanaryConfig] = []
        self.watcher.poll(taken_over.append)
        return taken_over[0] if taken_over else None


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    path = tmp_path / "canary.yaml"
    path.write_text("mode: log\n")
    watched = Watched(path)
    assert watched.poll() is None
    return watched


def test_unchanged_file_is_not_read_again(watched: Watched) -> None:
    assert watched.poll_later() is None
    assert watched.results == []


def test_reloadable_change_is_taken_over(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        config = watched.change_to(
            "mode: raise\nwrite_input_assert: true\nscrub: {bytes_per_second: 5}\n"
            "reverify: {sample: 1}\nlog: {max_reports_per_minute: 5}\n"
        )
    (message,) = caplog.messages
    assert message == (
        f"kvcanary: {watched.path} was taken over: mode log -> raise,"
        " write_input_assert false -> true, reverify.sample 0.05 -> 1.0,"
        " scrub.percent_of_step_time 1.0 -> null, scrub.bytes_per_second null -> 5,"
        " log.max_reports_per_minute 60 -> 5"
    )
    assert config is not None
    assert config is watched.watcher.current
    assert (config.mode, config.write_input_assert) == ("raise", True)
    assert watched.results == ["ok"]
    assert watched.poll_later() is None
    assert watched.results == ["ok"]


def test_file_is_looked_at_no_more_than_once_a_second(watched: Watched) -> None:
    watched.poll_later()
    watched.path.write_text("mode: raise\n")  # another size: file times may be coarse
    watched.now += 0.9
    assert watched.poll() is None
    watched.now += 0.1
    assert watched.poll() is not None


@pytest.mark.parametrize(
    "text",
    ["mode: loud\nlogg: {}\n", "mode: [", "unknown: 1\n", "scrub: {percent_of_step_time: 90}\n"],
)
def test_bad_file_is_refused_once_and_the_old_settings_stay(
    watched: Watched, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = watched.watcher.current
    with caplog.at_level(logging.ERROR):
        assert watched.change_to(text) is None
        assert watched.poll_later() is None
    assert watched.watcher.current is before
    assert watched.results == ["refused"]
    assert len(caplog.records) == 1
    assert str(watched.path) in caplog.text
    assert "settings in force stay" in caplog.text
    assert caplog.messages[0].startswith("kvcanary: ")
    assert "\n" not in caplog.messages[0]


def test_change_that_needs_a_restart_is_refused_as_a_whole(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    assert watched.change_to("mode: raise\nring: {capacity: 128}\n") is None
    assert watched.watcher.current.mode == "log"
    assert watched.results == ["refused"]
    assert "ring.capacity got 128; allowed: 16384 until the next start" in caplog.text


def test_what_cannot_be_taken_over_is_refused_and_the_old_settings_stay(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(_config: CanaryConfig) -> None:
        raise MemoryError("no room\nfor it")

    watched.path.write_text("write_input_assert: true\n")
    watched.now += 1.0
    with pytest.raises(MemoryError):
        watched.watcher.poll(no_room)
    assert watched.poll_later() is None, "once per state of the file"
    assert not watched.watcher.current.write_input_assert
    assert watched.results == ["refused"]
    (message,) = caplog.messages
    assert message == (
        f"kvcanary: {watched.path} was not taken over, the settings in force stay:"
        " write_input_assert false -> true: MemoryError: no room for it"
    )
    assert watched.change_to("write_input_assert: true  # again\n") is not None
    assert watched.results == ["refused", "ok"]


def test_good_file_after_a_bad_one_is_taken_over(watched: Watched) -> None:
    watched.change_to("mode: loud\n")
    config = watched.change_to("mode: abort\n")
    assert config is not None
    assert watched.results == ["refused", "ok"]


def test_removed_file_is_refused_once_and_taken_over_when_it_is_back(watched: Watched) -> None:
    watched.path.unlink()
    assert watched.poll_later() is None
    assert watched.poll_later() is None
    assert watched.results == ["refused"]
    assert watched.change_to("mode: off\n") is not None
    assert watched.results == ["refused", "ok"]


def test_file_replaced_by_rename_with_the_same_size_and_time_is_seen(watched: Watched) -> None:
    """As Kubernetes does with a mounted ConfigMap."""
    status = watched.path.stat()
    other = watched.path.with_name("other.yaml")
    other.write_text("mode: off\n")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert other.stat().st_size == status.st_size
    other.replace(watched.path)
    config = watched.poll_later()
    assert config is not None
    assert config.mode == "off"


def test_same_content_again_changes_nothing(watched: Watched) -> None:
    assert watched.change_to("mode:   log\n") is None
    assert watched.results == ["ok"]


def test_variables_still_win_after_a_reload(tmp_path: Path) -> None:
    path = tmp_path / "canary.yaml"
    path.write_text("mode: log\n")
    watched = Watched(path, {"KVCANARY_MODE": "raise"})
    assert watched.change_to("mode: off\nwrite_input_assert: true\n") is not None
    assert watched.watcher.current.mode == "raise"
    assert watched.watcher.current.write_input_assert
