"""Lines of the canary come with vLLM's own. vLLM itself is not needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvcanary_plugin.hooks.vllm.plugin import _log_where_the_engine_logs

OWN = logging.getLogger("kvcanary_plugin")
ENGINE = logging.getLogger("vllm")


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def engine_lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    """What the engine's handler gets, set up as vLLM does, on a root logger without handlers.

    No fixture: pytest gives the root logger its own handlers behind them.
    """
    handler = Lines()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(ENGINE, "handlers", [handler])
    monkeypatch.setattr(ENGINE, "level", logging.INFO)
    monkeypatch.setattr(ENGINE, "propagate", False)
    monkeypatch.setattr(OWN, "parent", OWN.parent)
    forget_levels()
    return handler


def forget_levels() -> None:
    """A logger remembers what it found enabled."""
    OWN.setLevel(OWN.level)


@pytest.fixture(autouse=True)
def _forget_levels() -> Iterator[None]:
    yield
    forget_levels()


def test_a_line_of_the_canary_goes_where_the_engine_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = engine_lines(monkeypatch)
    _log_where_the_engine_logs()
    logging.getLogger("kvcanary_plugin.canary").info("kvcanary: guarding group full")
    assert lines.lines == ["kvcanary: guarding group full"]


def test_handlers_that_somebody_set_up_for_the_canary_stay_the_only_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = engine_lines(monkeypatch)
    own = Lines()
    monkeypatch.setattr(OWN, "handlers", [own])
    _log_where_the_engine_logs()
    logging.getLogger("kvcanary_plugin.canary").warning("kvcanary: a warning")
    assert own.lines == ["kvcanary: a warning"]
    assert OWN.parent is logging.getLogger()
    assert lines.lines == []
