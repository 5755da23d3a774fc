"""Servers for the end-to-end tests, started once for each configuration that tests ask for."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcanary_plugin.drill.drill import write_drill_config
from kvcanary_plugin.drill.server import ServerSpec, SGLangServer
from tests.server_pool import END_SECONDS, START_SECONDS, ServerPool

# A guarded server beside one without the plugin.
MOST_SERVERS = 2

StartServer = Callable[[ServerSpec], SGLangServer]


@pytest.fixture(scope="session", autouse=True)
def _require_sglang() -> None:
    if importlib.util.find_spec("sglang") is not None:
        return
    reason = "sglang is not installed; `make venv` builds an environment that has it"
    if os.environ.get("REQUIRE_ENGINE"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def server_pool(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerPool[ServerSpec, SGLangServer]]:
    pool = ServerPool(
        lambda spec, log: SGLangServer(
            spec,
            log_path=log,
            start_timeout_seconds=START_SECONDS,
            stop_timeout_seconds=END_SECONDS,
        ),
        logs=tmp_path_factory.mktemp("servers"),
        most=MOST_SERVERS,
    )
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def shared_server(server_pool: ServerPool[ServerSpec, SGLangServer]) -> StartServer:
    """``shared_server(spec)``: a running server that other tests of the same spec use as well."""
    return server_pool.shared


@pytest.fixture
def own_server(server_pool: ServerPool[ServerSpec, SGLangServer]) -> Iterator[StartServer]:
    """``own_server(spec)``: a server for this test alone, started; the test may break it."""
    with server_pool.own() as start:
        yield start


@pytest.fixture(scope="class")
def server_of_class(server_pool: ServerPool[ServerSpec, SGLangServer]) -> Iterator[StartServer]:
    """The same for the tests of a class, of which the last one may break the server."""
    with server_pool.own() as start:
        yield start


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``directories(name)``: one directory a name, so that equal settings have equal paths."""

    @functools.cache
    def directory(name: str) -> Path:
        made = tmp_path_factory.mktemp(name)
        write_drill_config(made)
        return made

    return directory
