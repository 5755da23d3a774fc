"""How settings reach the workers. vLLM itself is not needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcanary_plugin.hooks.vllm import flag
from kvcanary_plugin.series_file import DIRECTORY_VARIABLE


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(flag, "_INHERITED", None)
    monkeypatch.setattr(flag, "show_workers_metrics", lambda: None)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "series"))
    (tmp_path / "series").mkdir()
    # Set and removed so that what a test exports is taken back.
    monkeypatch.setenv(flag.ENVIRONMENT, "")
    monkeypatch.delenv(flag.ENVIRONMENT)


def settings_file(directory: Path, text: str = "mode: log\n") -> Path:
    path = directory / "kvcanary.yaml"
    path.write_text(text)
    return path


def test_a_file_is_found_by_every_process_of_the_engine(tmp_path, monkeypatch):
    path = settings_file(tmp_path, "mode: raise\n")
    monkeypatch.chdir(tmp_path)
    flag.export_settings({flag.ADDITIONAL_CONFIG_KEY: path.name})
    assert os.environ[flag.ENVIRONMENT] == str(path)
    found = flag.config_of_worker({})
    assert found is not None
    config, config_path = found
    assert (config.mode, config_path) == ("raise", str(path))


def test_settings_in_the_additional_config_become_a_file():
    flag.export_settings({"kvcanary": {"mode": "raise", "checks": {"token": True}}})
    found = flag.config_of_worker({})
    assert found is not None
    assert found[0].checks.token
    assert Path(found[1]).is_file()


def test_a_worker_on_another_host_reads_the_settings_it_was_sent():
    found = flag.config_of_worker({"kvcanary": {"mode": "raise"}})
    assert found is not None
    assert found[0].mode == "raise"


def test_an_engine_that_did_not_ask_inherits_nothing_from_one_that_did(tmp_path):
    flag.export_settings({"kvcanary": str(settings_file(tmp_path))})
    flag.export_settings({})
    assert flag.config_of_worker({}) is None


def test_the_operators_own_variable_holds_when_no_flag_is_given(tmp_path, monkeypatch):
    path = str(settings_file(tmp_path))
    monkeypatch.setattr(flag, "_INHERITED", path)
    flag.export_settings({})
    assert os.environ[flag.ENVIRONMENT] == path


@pytest.mark.parametrize(
    ("additional_config", "message"),
    [
        ({"kvcanary": {"mode": "loud"}}, "mode"),
        ({"kvcanary": "/does/not/exist.yaml"}, "exist.yaml"),
        ({"kvcanary": 7}, "additional_config.kvcanary"),
    ],
)
def test_broken_settings_end_the_process_that_configures_the_engine(additional_config, message):
    with pytest.raises(SystemExit, match=message) as ended:
        flag.export_settings(additional_config)
    assert str(ended.value).count("kvcanary: ") == 1
