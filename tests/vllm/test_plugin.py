"""A vLLM that lacks something the plugin patches. vLLM itself is not needed."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvcanary_plugin.canary import UnsupportedEngineError
from kvcanary_plugin.hooks.vllm import aborts, attach, flag, plugin, transfers

EXTENSIONS = (
    (aborts, "extend_scheduler"),
    (attach, "extend_scheduler_output"),
    (transfers, "extend_scheduler_connector"),
    (attach, "extend_worker"),
    (flag, "extend_engine_arguments"),
)


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    """What was patched, with which arguments; nothing really is."""
    called: dict[str, tuple[Any, ...]] = {}
    for module, name in EXTENSIONS:
        monkeypatch.setattr(module, name, lambda *args, name=name: called.update({name: args}))
    monkeypatch.setattr(flag, "show_workers_metrics", lambda: None)
    return called


def lacks(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    def fails(*_args: Any) -> None:
        raise AttributeError(f"no {name}")

    monkeypatch.setattr(module, name, fails)


def register() -> None:
    plugin.register.__wrapped__()  # it runs once a process


def test_a_known_version_is_patched_whole(extended):
    register()
    assert set(extended) == {name for _, name in EXTENSIONS}
    assert extended["extend_worker"] == (None,)


@pytest.mark.parametrize(("module", "name"), EXTENSIONS[:3])
def test_without_a_target_of_the_scheduler_the_workers_show_why(
    module, name, extended, monkeypatch
):
    lacks(monkeypatch, module, name)
    register()
    (reason,) = extended["extend_worker"]
    assert f"no {name}" in reason
    assert "extend_engine_arguments" in extended


@pytest.mark.parametrize(("module", "name"), EXTENSIONS[3:])
def test_without_a_way_to_show_it_the_engine_serves_on_and_knows_no_flag(
    module, name, extended, monkeypatch, caplog
):
    lacks(monkeypatch, module, name)
    with caplog.at_level(logging.ERROR, "kvcanary_plugin"):
        register()
    assert "extend_engine_arguments" not in extended
    assert f"this vLLM cannot be guarded: no {name}" in caplog.text


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_a_worker_that_was_asked_to_guard_shows_the_reason_or_refuses(mode, monkeypatch):
    shown = []

    def canary(**options: Any) -> None:
        (group,) = options["unguarded"]
        if options["config"].mode == "raise":
            raise UnsupportedEngineError(group.reason)
        shown.append(group.reason)

    monkeypatch.setattr(attach, "Canary", canary)
    monkeypatch.setattr(
        flag, "config_of_worker", lambda _config: (SimpleNamespace(mode=mode), "kvcanary.yaml")
    )
    vllm_config = SimpleNamespace(additional_config={})
    if mode == "raise":
        with pytest.raises(UnsupportedEngineError, match="lacks a class"):
            attach._attach(object(), vllm_config, "it lacks a class")
    else:
        attach._attach(object(), vllm_config, "it lacks a class")
        assert shown == ["it lacks a class"]
