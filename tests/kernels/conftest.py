"""Runs a test once per implementation of the launches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcanary_plugin.kernels import load_kernels, use_torch_reference


@pytest.fixture(params=["compiled", "torch_reference"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which implementation the launches of this test run on (CPU)."""
    if request.param == "compiled":
        assert load_kernels("cpu") == "cpu", "these tests need a C++ compiler"
        yield request.param
    else:
        with use_torch_reference():
            yield request.param
