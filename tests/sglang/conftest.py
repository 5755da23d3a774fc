"""SGLang's own classes without a server; skipped where SGLang is not installed."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
pytest.importorskip("sglang", reason="sglang is not installed; `make venv` brings it")
