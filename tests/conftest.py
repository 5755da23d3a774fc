"""Settings shared by all tests."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# No deadlines: on two shared cores the time that examples take says nothing.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# In CI the examples are the same at every run: a red build is about the change, not about luck.
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; this machine has none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_unconfigure() -> None:
    """A thread that a failed test has left behind must not keep the run from ending."""
    faulthandler.dump_traceback_later(300, exit=True, file=sys.__stderr__)


@pytest.fixture
def threads_alternate() -> Iterator[None]:
    """Python's threads take turns fifty times as often: they meet more often and wait for less."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    yield
    sys.setswitchinterval(before)
