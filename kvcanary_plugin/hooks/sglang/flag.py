"""How the operator's settings reach the scheduler processes.

``--kvcanary-config FILE`` on the command line and ``kvcanary_config=`` of ``sglang.Engine`` both
end as the environment variable KVCANARY_CONFIG, which spawned processes inherit. The file is read
and checked in the main process too, so that a broken one stops the server before it loads a model.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from kvcanary_plugin.config import CanaryConfig, ConfigError, load_config

FLAG = "--kvcanary-config"
ENVIRONMENT = "KVCANARY_CONFIG"
_DESTINATION = "kvcanary_config"


def after_add_cli_args(_result: Any, parser: argparse.ArgumentParser) -> None:
    """AFTER ``ServerArgs.add_cli_args``: the server's own parser learns the flag."""
    parser.add_argument(
        FLAG,
        dest=_DESTINATION,
        metavar="FILE",
        default=None,
        help="guard the KV cache with kvcanary, with the settings of this YAML file",
    )


def around_from_cli_args(
    original: Callable[..., Any], cls: Any, arguments: argparse.Namespace
) -> Any:
    """AROUND ``ServerArgs.from_cli_args``: take the value that the parser found."""
    path = getattr(arguments, _DESTINATION, None)
    if path is not None:
        os.environ[ENVIRONMENT] = os.path.abspath(path)
    config_of_this_process()
    return original(cls, arguments)


def extend_engine_arguments() -> None:
    """Let ``sglang.Engine(kvcanary_config=...)`` work; without it the environment's value holds."""
    from sglang.srt.entrypoints.engine import Engine

    original = Engine.server_args_class
    inherited = os.environ.get(ENVIRONMENT)

    def server_args(**kwargs: Any) -> Any:
        path = kwargs.pop(_DESTINATION, None)
        if path is not None:
            os.environ[ENVIRONMENT] = os.path.abspath(path)
        elif inherited is not None:
            os.environ[ENVIRONMENT] = inherited
        else:
            os.environ.pop(ENVIRONMENT, None)
        config_of_this_process()
        return original(**kwargs)

    Engine.server_args_class = staticmethod(server_args)


def config_path() -> str:
    """Path of the settings file that this process was given."""
    return os.environ[ENVIRONMENT]


def config_of_this_process() -> CanaryConfig | None:
    """The settings, or None if the operator did not ask for a guard. Exits on a broken file."""
    path = os.environ.get(ENVIRONMENT)
    if not path:
        return None
    try:
        return load_config(path, os.environ)
    except ConfigError as error:
        raise SystemExit(str(error)) from error
