"""How the operator's settings reach the workers, and the workers' counts the server's ``/metrics``.

``--kvcanary-config FILE``, ``kvcanary_config=`` of ``vllm.LLM`` and the ``kvcanary`` key of
``--additional-config`` (a file name, or the settings themselves) all end as the environment
variable KVCANARY_CONFIG, which the engine's processes inherit. The settings are read and checked
where the engine is configured, so that broken ones stop the server before it loads a model.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvcanary_plugin.config import CanaryConfig, ConfigError, load_config
from kvcanary_plugin.metrics import METRICS
from kvcanary_plugin.series_file import DIRECTORY_VARIABLE, SeriesCollector

FLAG = "--kvcanary-config"
ENVIRONMENT = "KVCANARY_CONFIG"
ADDITIONAL_CONFIG_KEY = "kvcanary"
_DESTINATION = "kvcanary_config"
_INHERITED = os.environ.get(ENVIRONMENT)


def extend_engine_arguments() -> None:
    """Teach vLLM's argument classes the flag, and to check the settings. Once per process.

    All of it or nothing: ImportError or AttributeError where one of them is another class than it
    was.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    add, take = EngineArgs.add_cli_args, EngineArgs.from_cli_args.__func__
    configure = EngineArgs.create_engine_config
    EngineArgs.add_cli_args = staticmethod(_with_flag(add))
    EngineArgs.from_cli_args = classmethod(_taking_flag(take))
    EngineArgs.create_engine_config = _checking_settings(configure)
    for arguments_class in (EngineArgs, AsyncEngineArgs):
        arguments_class.__init__ = _taking_keyword(arguments_class.__init__)


def config_of_worker(additional_config: Any) -> tuple[CanaryConfig, str] | None:
    """The settings of this worker and their file; None if the operator did not ask for a guard.

    Exits on broken settings.
    """
    path = os.environ.get(ENVIRONMENT) or _asked_for(additional_config)
    if not path:
        return None
    if not isinstance(path, str):
        # A worker on another host than the process that was configured.
        path = _write_settings(path)
    return _load(path), path


def export_settings(additional_config: Any) -> None:
    """In the process that configures an engine: what its processes will inherit."""
    asked_for = _asked_for(additional_config)
    if isinstance(asked_for, dict):
        os.environ[ENVIRONMENT] = _write_settings(asked_for)
    elif asked_for:
        os.environ[ENVIRONMENT] = os.path.abspath(asked_for)
    elif _INHERITED:
        os.environ[ENVIRONMENT] = _INHERITED
    else:
        os.environ.pop(ENVIRONMENT, None)
        return
    _load(os.environ[ENVIRONMENT])
    _series_directory()
    show_workers_metrics()


@functools.cache
def show_workers_metrics() -> None:
    """Let this process's ``/metrics`` show the series that workers write to files.

    With one API server ``/metrics`` is the default registry, with several it is a registry of its
    own with a ``MultiProcessCollector``.
    """
    import prometheus_client
    from prometheus_client import multiprocess

    collector: Any = SeriesCollector(_series_directory(), METRICS)
    prometheus_client.REGISTRY.register(collector)
    collector_class: Any = multiprocess.MultiProcessCollector
    original = collector_class.collect

    @functools.wraps(original)
    def collect(self: Any) -> Iterator[Any]:
        yield from original(self)
        yield from collector.collect()

    collector_class.collect = collect


def _series_directory() -> str:
    """Where the workers of this engine write; made by the first process that asks."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory is None or not os.path.isdir(directory):
        directory = os.environ[DIRECTORY_VARIABLE] = tempfile.mkdtemp(prefix="kvcanary-")
        atexit.register(_remove_directory, directory, os.getpid())
    return directory


def _remove_directory(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(directory, ignore_errors=True)


def _asked_for(additional_config: Any) -> Any:
    if not isinstance(additional_config, dict):
        return None
    value = additional_config.get(ADDITIONAL_CONFIG_KEY)
    if value is not None and not isinstance(value, (str, dict)):
        raise SystemExit(
            f"kvcanary: additional_config.{ADDITIONAL_CONFIG_KEY} ... got {value!r}; allowed: the"
            f" name of a settings file, or a mapping of settings; do give one of the two"
        )
    return value


def _write_settings(settings: dict[str, Any]) -> str:
    path = Path(_series_directory()) / "settings.yaml"  # JSON is YAML
    path.write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return str(path)


def _load(path: str) -> CanaryConfig:
    try:
        return load_config(path, os.environ)
    except ConfigError as error:
        raise SystemExit(str(error)) from error


def _with_flag(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_cli_args(parser: argparse.ArgumentParser) -> Any:
        parser = original(parser)
        parser.add_argument_group("kvcanary").add_argument(
            FLAG,
            dest=_DESTINATION,
            metavar="FILE",
            default=None,
            help="guard the KV cache with kvcanary, with the settings of this YAML file",
        )
        return parser

    return add_cli_args


def _taking_flag(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_cli_args(cls: Any, args: argparse.Namespace) -> Any:
        engine_args = original(cls, args)
        path = getattr(args, _DESTINATION, None)
        if path is not None:
            engine_args.additional_config = _naming(path, engine_args.additional_config)
        return engine_args

    return from_cli_args


def _taking_keyword(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        path = kwargs.pop(_DESTINATION, None)
        original(self, *args, **kwargs)
        if path is not None:
            self.additional_config = _naming(path, self.additional_config)

    return init


def _naming(path: str, additional_config: dict[str, Any] | None) -> dict[str, Any]:
    return {**(additional_config or {}), ADDITIONAL_CONFIG_KEY: os.path.abspath(path)}


def _checking_settings(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        export_settings(self.additional_config)
        return original(self, *args, **kwargs)

    return create_engine_config
