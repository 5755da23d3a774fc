"""How settings reach SGLang. No server is started."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from kvcanary_plugin.hooks.sglang import flag


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set and removed so that what a test exports is taken back.
    monkeypatch.setenv(flag.ENVIRONMENT, "")
    monkeypatch.delenv(flag.ENVIRONMENT)


def read_arguments(path: Path | None) -> Any:
    """What the engine goes on with; it is not reached when the settings are broken."""
    arguments = argparse.Namespace(kvcanary_config=path and str(path))
    return flag.around_from_cli_args(lambda _cls, _arguments: "engine", None, arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mode: [", "YAML"),
        ("surprise: 1", "surprise"),
        ("mode: loud", "loud"),
        ("scrub: {percent_of_step_time: 80}", "80"),
        ("ring: {capacity: 0}", "capacity"),
        (None, "no such file"),
    ],
)
def test_broken_settings_end_the_process_that_reads_the_arguments(tmp_path, text, expected):
    path = tmp_path / "kvcanary.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=f"(?i){expected}") as ended:
        read_arguments(path)
    assert str(ended.value).count("kvcanary: ") == 1


def test_a_file_is_found_by_every_process_of_the_engine(tmp_path, monkeypatch):
    (tmp_path / "kvcanary.yaml").write_text("mode: raise\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert read_arguments(Path("kvcanary.yaml")) == "engine"
    assert os.environ[flag.ENVIRONMENT] == str(tmp_path / "kvcanary.yaml")
    config = flag.config_of_this_process()
    assert config is not None
    assert config.mode == "raise"


def test_without_the_flag_nothing_is_asked_for():
    assert read_arguments(None) == "engine"
    assert flag.config_of_this_process() is None
