"""Starts and stops a real SGLang server, on a CPU or a GPU: every flag it gets stands here."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import ClassVar, Final, Literal, Self

from kvcanary_plugin.drill import http_client
from kvcanary_plugin.drill.dialect import SGLANG, Dialect
from kvcanary_plugin.drill.weights import write_model

MODELS_DIRECTORY: Final = Path(__file__).parent / "models"
VOCABULARY_SIZE: Final = 512  # of every packaged model; a token id beyond it ends the server
CONTEXT_LENGTH: Final = 2048
CHUNKED_PREFILL_SIZE: Final = 64
MAX_RUNNING_REQUESTS: Final = 8
MAX_TOTAL_TOKENS: Final = 2048

MODELS: Final = ("tiny-gemma2", "tiny-llama", "tiny-mla", "tiny-qwen2", "tiny-swa")
# Heads of the usual size, which GPU kernels ask for; of both engines.
CUDA_MODEL: Final = "cuda-llama"
# Models that need code of ours inside the engine.
_EXTERNAL_MODEL_PACKAGES: Final = {
    "tiny-mla": "kvcanary_plugin.drill.models.sglang_mla",
    "tiny-swa": "kvcanary_plugin.drill.models.sglang_swa",
}

Device = Literal["cpu", "cuda"]

_ENGINE_FLAGS: Final = (
    *("--load-format", "safetensors"),
    "--skip-tokenizer-init",
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    *("--max-total-tokens", str(MAX_TOTAL_TOKENS)),
    *("--max-running-requests", str(MAX_RUNNING_REQUESTS)),
    *("--chunked-prefill-size", str(CHUNKED_PREFILL_SIZE)),
    *("--mem-fraction-static", "0.3"),
    "--enable-metrics",
)
_DEVICE_FLAGS: Final[Mapping[Device, tuple[str, ...]]] = MappingProxyType(
    {
        "cpu": (
            *("--device", "cpu"),
            *("--dtype", "float32"),
            *("--attention-backend", "torch_native"),
            "--disable-cuda-graph",
            # An idle scheduler would otherwise keep one core busy.
            "--sleep-on-idle",
            # Waits a second more than the request that shows the server to be ready.
            "--skip-server-warmup",
        ),
        "cuda": (
            *("--device", "cuda"),
            *("--dtype", "bfloat16"),
            *("--attention-backend", "triton"),
            *("--cuda-graph-bs-decode", "1", "2", "4", "8"),
        ),
    }
)
# Engines compile small functions with a C++ compiler at their first use, for half a minute each.
NO_COMPILING: Final = {"TORCHDYNAMO_DISABLE": "1"}
_ENGINE_ENV: Final = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
_DEVICE_ENV: Final[Mapping[Device, Mapping[str, str]]] = MappingProxyType(
    {"cpu": {"SGLANG_USE_CPU_ENGINE": "1", **NO_COMPILING}, "cuda": {}}
)
_PORTS: Final = range(12_000, 22_000)
_RESERVATIONS: Final[list[socket.socket]] = []
# Reads from a pipe that only this process can write to: it ends when this process does, however.
_KILL_GROUP_AT_END_OF_INPUT: Final = 'read -r _; kill -s KILL -- "-$0"'


@dataclass(frozen=True, kw_only=True)
class EngineSpec(ABC):
    """What to start, whatever the engine. Hashable: equal specs may share a server.

    Fields:
        model: one of the engine's packaged models.
        flags: further flags of the server; they win over the common ones.
        env: further environment variables as (name, value) pairs.
        kvcanary_config: file handed over as ``--kvcanary-config``.
        plugin: whether the server loads the kvcanary plugin at all.
        device: what it runs on.
    """

    models: ClassVar[tuple[str, ...]]
    # What keeps the engine from loading any plugin.
    no_plugin_env: ClassVar[Mapping[str, str]]

    model: str
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    kvcanary_config: Path | None = None
    plugin: bool = True
    device: Device = "cpu"

    def __post_init__(self) -> None:
        if self.model not in self.models:
            raise ValueError(
                f"kvcanary: model ... got {self.model!r}; allowed {', '.join(self.models)}; "
                f"do name one of them"
            )
        if self.kvcanary_config is not None and not self.plugin:
            raise ValueError(
                "kvcanary: plugin ... got False with a kvcanary_config; allowed True; "
                "do leave the config out to measure without the plugin"
            )

    def command(self, *, model_path: Path, host: str, port: int) -> list[str]:
        """The command line of the server; ``model_path`` as :func:`write_model` makes it."""
        command = [*self.program(model_path), "--host", host, "--port", str(port)]
        command += self.engine_flags()
        if self.kvcanary_config is not None:
            command += ["--kvcanary-config", str(self.kvcanary_config)]
        return [*command, *self.flags]

    def environment(self) -> dict[str, str]:
        """The environment of the server: this process's own with what the spec adds."""
        environment = dict(os.environ)
        # Another server's metrics directory must not become this one's.
        environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
        environment |= self.engine_environment()
        if not self.plugin:
            environment |= self.no_plugin_env
        return environment | dict(self.env)

    @abstractmethod
    def program(self, model_path: Path) -> list[str]:
        """What is run, with the model."""

    @abstractmethod
    def engine_flags(self) -> Sequence[str]:
        """Flags that every server of the engine gets."""

    @abstractmethod
    def engine_environment(self) -> dict[str, str]:
        """Variables that every server of the engine gets."""


@dataclass(frozen=True, kw_only=True)
class ServerSpec(EngineSpec):
    """An SGLang server to start; ``model`` is one of :data:`MODELS`, or :data:`CUDA_MODEL`."""

    models: ClassVar[tuple[str, ...]] = (*MODELS, CUDA_MODEL)
    # SGLang loads only the plugins named here; this name is nobody's.
    no_plugin_env: ClassVar[Mapping[str, str]] = MappingProxyType({"SGLANG_PLUGINS": "none"})

    model: str = "tiny-llama"

    def program(self, model_path: Path) -> list[str]:
        return [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_path)]

    def engine_flags(self) -> Sequence[str]:
        return (*_ENGINE_FLAGS, *_DEVICE_FLAGS[self.device])

    def engine_environment(self) -> dict[str, str]:
        environment = {**_ENGINE_ENV, **_DEVICE_ENV[self.device]}
        if self.model in _EXTERNAL_MODEL_PACKAGES:
            environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] = _EXTERNAL_MODEL_PACKAGES[self.model]
        return environment


# Configurations that are known to run on a CPU.
PRESETS: Final[Mapping[str, ServerSpec]] = MappingProxyType(
    {
        "llama": ServerSpec(model="tiny-llama"),
        "no-overlap": ServerSpec(model="tiny-llama", flags=("--disable-overlap-schedule",)),
        "page16": ServerSpec(model="tiny-llama", flags=("--page-size", "16")),
        "dp2": ServerSpec(
            model="tiny-llama",
            flags=("--dp-size", "2"),
            # On a machine with one NUMA node SGLang wants to be told a core for each rank.
            env=(("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),),
        ),
        "swa": ServerSpec(model="tiny-swa"),
        "gemma2": ServerSpec(model="tiny-gemma2"),
        "qwen2": ServerSpec(model="tiny-qwen2"),
        "mla": ServerSpec(model="tiny-mla"),
    }
)


class ServerError(RuntimeError):
    """The server did not do what was asked; the message ends with the tail of its log."""


class EngineServer:
    """A running server: ``with SGLangServer(spec, log_path=path) as server: server.url``.

    Entering waits until the server has answered a generate request; leaving ends it and every
    process it started, and so does the end of this process, be it killed. The log file stays.
    """

    dialect: Dialect
    # Answers 200 when the server serves.
    ready_path: str

    def __init__(
        self,
        spec: EngineSpec,
        *,
        log_path: Path,
        start_timeout_seconds: float = 300.0,
        stop_timeout_seconds: float = 20.0,
    ) -> None:
        self.spec = spec
        self.log_path = log_path
        self._start_timeout_seconds = start_timeout_seconds
        self._stop_timeout_seconds = stop_timeout_seconds
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._model_path: tempfile.TemporaryDirectory[str] | None = None
        self.startup_seconds = 0.0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """``http://127.0.0.1:PORT``."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def exit_status(self) -> int | None:
        """Exit status as ``subprocess`` gives it (-9: killed by signal 9); None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start the server and wait until it generates. Raises ServerError if it does not."""
        if self._process is not None:
            raise ServerError("kvcanary: the server was started before; make a new one")
        self._port = free_port()
        begin = time.monotonic()
        self._model_path = tempfile.TemporaryDirectory(prefix="kvcanary-model-")
        model_path = Path(self._model_path.name)
        write_model(MODELS_DIRECTORY / self.spec.model, model_path)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.spec.command(model_path=model_path, host="127.0.0.1", port=self._port),
                env=self.spec.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A process group of its own: nothing that belongs to the server outlives stop().
                start_new_session=True,
            )
        self._watchdog = subprocess.Popen(
            ["sh", "-c", _KILL_GROUP_AT_END_OF_INPUT, str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._wait_until_ready(deadline=begin + self._start_timeout_seconds)
        except BaseException:
            self.stop()
            raise
        self.startup_seconds = time.monotonic() - begin

    def stop(self) -> None:
        """End the server and all its processes. Harmless when it has ended by itself."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            # To the main process alone: it ends its children. A scheduler that ends before it looks
            # like a crash to it, with exit status -9 and seconds of diagnostics.
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(self._stop_timeout_seconds)
        self.kill()

    def kill(self) -> None:
        """End the server and all its processes at once: none of them cleans up. Harmless twice."""
        if self._process is None:
            return
        self._kill_process_group()
        self._process.wait()
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.communicate()
        if self._model_path is not None:
            self._model_path.cleanup()

    def wait_for_exit(self, timeout_seconds: float) -> int:
        """Exit status of a server that is expected to end by itself; ServerError if it does not."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise ServerError(
                self._with_log(f"the server still runs after {timeout_seconds:.0f} s")
            ) from None

    def metrics(self) -> str:
        """The text of the server's own ``/metrics``."""
        status, text = http_client.get(self.url, "/metrics/", timeout=60.0)
        if status != 200:
            raise ServerError(f"kvcanary: GET {self.url}/metrics answered {status}: {text[:500]}")
        return text

    def log(self) -> str:
        """Everything the server has written so far."""
        return self.log_path.read_text(errors="replace")

    def _wait_until_ready(self, *, deadline: float) -> None:
        answer = "no answer"
        while time.monotonic() < deadline:
            if self.exit_status is not None:
                raise ServerError(
                    self._with_log(f"the server ended with status {self.exit_status} at start-up")
                )
            try:
                status, _ = http_client.get(self.url, self.ready_path, timeout=30.0)
            except (OSError, HTTPException) as error:
                answer = repr(error)
            else:
                if status == 200:
                    return
                answer = f"status {status}"
            time.sleep(0.2)
        raise ServerError(
            self._with_log(
                f"the server was not ready after {self._start_timeout_seconds:.0f} s "
                f"({self.ready_path}: {answer})"
            )
        )

    def _with_log(self, message: str) -> str:
        tail = "\n".join(self.log().splitlines()[-40:])
        return f"kvcanary: {message}; end of {self.log_path}:\n{tail}"

    def _kill_process_group(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._stop_timeout_seconds
        while members := _live_group_members(self._process.pid):
            if time.monotonic() > deadline:
                raise ServerError(f"kvcanary: processes {members} of the server survive SIGKILL")
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            time.sleep(0.05)


class SGLangServer(EngineServer):
    """A running SGLang server."""

    dialect = SGLANG
    # Runs a real one-token generation; 503 until the engine is up.
    ready_path = "/health_generate"


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel gives to whoever asks for any.

    The server takes it seconds later: until this process ends, no other that asks here gets it.
    """
    while True:
        port = secrets.choice(_PORTS)
        if not _reserve(port):
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def _reserve(port: int) -> bool:
    """Whether no process has reserved it. Such a name is no file: it ends with its owner."""
    reservation = socket.socket(socket.AF_UNIX)
    try:
        reservation.bind(f"\0kvcanary-port-{port}")
    except OSError:
        reservation.close()
        return False
    _RESERVATIONS.append(reservation)
    return True


def _live_group_members(group: int) -> list[int]:
    """Processes of a process group. Zombies do not count: where nobody reaps them they stay."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:  # ended meanwhile
            continue
        # After the parenthesised name: state, parent, process group.
        state, _, process_group = stat.rpartition(")")[2].split()[:3]
        if int(process_group) == group and state not in "ZX":
            members.append(int(entry.name))
    return members
