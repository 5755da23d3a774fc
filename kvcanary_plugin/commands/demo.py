"""``kvcanary demo``: a real server under the canary, healthy first, then with planted faults."""

from __future__ import annotations

import argparse

from kvcanary_plugin.commands.parsers import Subparsers, add_engine_arguments, chosen_engine


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="start a small server on the CPU, plant faults, show what is reported",
        description="Starts a real server on the CPU with a small random-weight model under"
        " the canary, serves traffic, plants faults and shows what is counted and reported. Exit"
        " status 0 only if the healthy phase was silent and every fault was reported.",
    )
    add_engine_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from kvcanary_plugin.drill.demo import run_demo

    engine = chosen_engine(arguments)
    model = arguments.model or engine.full_model
    return run_demo(engine, model=model, say=lambda line: print(line, flush=True))
