"""SGLang's own classes without a server; skipped where SGLang is not installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcanary_plugin.hooks.sglang.flag import ENVIRONMENT
from kvcanary_plugin.series_file import DIRECTORY_VARIABLE

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
pytest.importorskip("sglang", reason="sglang is not installed; `make venv` brings it")


@pytest.fixture
def sglang_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a session finds in a scheduler process: settings file, metrics directory, ranks."""
    from sglang.srt.runtime_context import get_parallel

    settings = tmp_path / "kvcanary.yaml"
    settings.write_text("mode: log\n")
    monkeypatch.setenv(ENVIRONMENT, str(settings))
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    with get_parallel().override(tp_rank=0, pp_rank=0, dp_rank=None, tp_size=1, pp_size=1):
        yield
