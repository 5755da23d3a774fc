"""What the tests of the vLLM hook share. Only the end-to-end tests need vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvcanary_plugin.drill.vllm_server import VLLMServer, VLLMServerSpec

StartServer = Callable[[VLLMServerSpec], VLLMServer]


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``directories(name)``: one directory a name, so that equal settings have equal paths."""
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
        return made[name]

    return directory


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """``shared_server(spec)``: a running server; the one before is stopped if it is another.

    One at a time: a server takes 1.6 GB and two processes that compute.
    """
    logs = tmp_path_factory.mktemp("servers")
    running: list[VLLMServer] = []
    started = 0

    def get(spec: VLLMServerSpec) -> VLLMServer:
        nonlocal started
        if running and (running[0].spec != spec or running[0].exit_status is not None):
            running.pop().stop()
        if not running:
            started += 1
            server = VLLMServer(
                replace(spec), log_path=logs / f"server-{started}.log", start_timeout_seconds=300
            )
            server.start()
            running.append(server)
        return running[0]

    yield get
    for server in running:
        server.stop()
