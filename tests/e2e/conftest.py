"""Servers for the end-to-end tests, started once for each configuration that tests ask for."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcanary_plugin.drill.server import ServerSpec, SGLangServer

# Two at a time: a server takes 1.6 GB, and the tests run on two cores.
MOST_SERVERS = 2

StartServer = Callable[[ServerSpec], SGLangServer]


class ServerPool:
    """Running servers by specification; the one that was asked for longest ago makes room."""

    def __init__(self, log_directory: Path) -> None:
        self._log_directory = log_directory
        self._servers: dict[ServerSpec, SGLangServer] = {}
        self._started = 0

    def get(self, spec: ServerSpec) -> SGLangServer:
        """A healthy server of this specification, running already or started now."""
        server = self._servers.pop(spec, None)
        if server is not None and server.exit_status is not None:
            server.stop()
            server = None
        if server is None:
            while len(self._servers) >= MOST_SERVERS:
                self._servers.pop(next(iter(self._servers))).stop()
            server = self.new(spec)
            server.start()
        self._servers[spec] = server
        return server

    def new(self, spec: ServerSpec) -> SGLangServer:
        """A server of its own, not started and not shared."""
        self._started += 1
        return SGLangServer(spec, log_path=self._log_directory / f"server-{self._started}.log")

    def stop_all(self) -> None:
        for server in self._servers.values():
            server.stop()


@pytest.fixture(scope="session", autouse=True)
def _require_sglang() -> None:
    if importlib.util.find_spec("sglang") is not None:
        return
    reason = "sglang is not installed; `make venv` builds an environment that has it"
    if os.environ.get("REQUIRE_ENGINE"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def server_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.stop_all()


@pytest.fixture(scope="session")
def shared_server(server_pool: ServerPool) -> StartServer:
    """``shared_server(spec)``: a running server that other tests of the same spec use as well.

    Its counters go on from test to test: compare differences, and leave it as it was found. Specs
    are equal when their fields are, so a config file has to have the same path to be shared.
    """
    return server_pool.get


@pytest.fixture
def own_server(server_pool: ServerPool) -> Iterator[StartServer]:
    """``own_server(spec)``: a server for this test alone, started; the test may break it."""
    servers: list[SGLangServer] = []

    def start(spec: ServerSpec) -> SGLangServer:
        server = server_pool.new(spec)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()
