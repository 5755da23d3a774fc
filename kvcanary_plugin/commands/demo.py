"""``kvcanary demo``: a real server under the canary, healthy first, then with planted faults."""

from __future__ import annotations

import argparse

from kvcanary_plugin.commands.parsers import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="start a small SGLang server on the CPU, plant faults, show what is reported",
        description="Starts a real SGLang server on the CPU with a small random-weight model under"
        " the canary, serves traffic, plants faults and shows what is counted and reported. Exit"
        " status 0 only if the healthy phase was silent and every fault was reported.",
    )
    parser.add_argument(
        "--model", default="tiny-llama", help="packaged model: tiny-llama (default) or tiny-swa"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from kvcanary_plugin.drill.demo import run_demo

    return run_demo(model=arguments.model, say=lambda line: print(line, flush=True))
