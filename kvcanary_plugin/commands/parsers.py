"""What several command modules share."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kvcanary_plugin.drill.engines import Engine

# What argparse's add_subparsers returns; it has no public name.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """``--engine`` and ``--model``, for commands that start a server."""
    parser.add_argument(
        "--engine",
        choices=("sglang", "vllm"),
        help="default: the one that is installed beside this command",
    )
    parser.add_argument(
        "--model",
        help="packaged model of the engine, such as tiny-llama and tiny-swa for SGLang,"
        " vllm-llama and vllm-gemma3 for vLLM",
    )


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """``--device``, and flags of the server behind a lone ``--``."""
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="what the server runs on, default cpu; on cuda the packaged model is cuda-llama",
    )
    parser.add_argument(
        "server_flags", nargs="*", help="further flags of the server, behind a lone --"
    )


def chosen_engine(arguments: argparse.Namespace) -> Engine:
    """What ``--engine`` names; ends the command where it is not installed."""
    from kvcanary_plugin.drill.engines import NoEngineError, installed_engine

    try:
        return installed_engine(arguments.engine)
    except NoEngineError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
