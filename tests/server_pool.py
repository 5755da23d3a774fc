"""Real servers for tests, started once for each configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from kvcanary_plugin.drill.server import EngineServer, EngineSpec

Spec = TypeVar("Spec", bound=EngineSpec)
Server = TypeVar("Server", bound=EngineServer)

# A server takes a quarter of a minute to start and ten seconds to end; many times that where the
# processor belongs to others as well. No test may take more than ten minutes (pyproject.toml).
START_SECONDS = 500.0
END_SECONDS = 200.0


class ServerPool(Generic[Spec, Server]):
    """Running servers by specification; the one that was asked for longest ago makes room.

    They are killed: a server takes ten seconds to end, and how it ends has tests of its own.

    Args:
        make: a server of a specification, not started, that logs to a path.
        logs: directory that receives the logs.
        most: how many run at once for all tests; a server takes 1.6 GB.
    """

    def __init__(self, make: Callable[[Spec, Path], Server], *, logs: Path, most: int) -> None:
        self._make = make
        self._logs = logs
        self._most = most
        self._servers: dict[Spec, Server] = {}
        self._metrics_at_start: dict[Spec, str] = {}
        self._started = 0

    def shared(self, spec: Spec) -> Server:
        """A running server that other tests of the same specification use as well.

        Its counters go on from test to test: compare differences, and leave it as it was found. A
        test that ends it is fine: who asks next gets a new one. Specifications are equal when their
        fields are, so a config file has to have the same path to be shared.
        """
        server = self._servers.pop(spec, None)
        if server is not None and server.exit_status is not None:
            server.kill()
            server = None
        if server is None:
            while len(self._servers) >= self._most:
                self._servers.pop(next(iter(self._servers))).kill()
            server = self._start(spec)
            self._metrics_at_start[spec] = server.metrics()
        self._servers[spec] = server
        return server

    def metrics_at_start(self, spec: Spec) -> str:
        """What /metrics of the shared server showed before its first test."""
        self.shared(spec)
        return self._metrics_at_start[spec]

    @contextmanager
    def own(self) -> Iterator[Callable[[Spec], Server]]:
        """Starts servers that are nobody else's; leaving the block ends them."""
        servers: list[Server] = []

        def start(spec: Spec) -> Server:
            server = self._start(spec)
            servers.append(server)
            return server

        yield start
        for server in servers:
            server.kill()

    def close(self) -> None:
        """End all servers."""
        for server in self._servers.values():
            server.kill()

    def _start(self, spec: Spec) -> Server:
        self._started += 1
        server = self._make(spec, self._logs / f"server-{self._started}.log")
        server.start()
        return server
