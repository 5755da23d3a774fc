"""What the tests of the vLLM hook share. Only the end-to-end tests need vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcanary_plugin.drill.vllm_server import VLLMServer, VLLMServerSpec
from tests.server_pool import END_SECONDS, START_SECONDS, ServerPool

StartServer = Callable[[VLLMServerSpec], VLLMServer]


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``directories(name)``: one directory a name, so that equal settings have equal paths."""
    return functools.cache(tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """``shared_server(spec)``: a running server that other tests of the same spec use as well.

    One at a time: it has two processes that compute. Tests of one server stand together.
    """
    pool = ServerPool(
        lambda spec, log: VLLMServer(
            spec,
            log_path=log,
            start_timeout_seconds=START_SECONDS,
            stop_timeout_seconds=END_SECONDS,
        ),
        logs=tmp_path_factory.mktemp("servers"),
        most=1,
    )
    yield pool.shared
    pool.close()
