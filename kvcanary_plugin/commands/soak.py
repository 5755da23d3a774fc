"""``kvcanary soak``: a long healthy run, in which a single violation is a failure."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from kvcanary_plugin.commands.parsers import (
    Subparsers,
    add_device_arguments,
    add_engine_arguments,
    chosen_engine,
)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "soak",
        help="serve mixed traffic for many forwards; any violation is a failure",
        description="Starts a small server with every check on and every byte"
        " compared, and sends mixed traffic (shared prefixes, chunked prompts, several turns,"
        " aborts) until so many forwards have run. Exit status 1 at the first violation, and if a"
        " forward was not checked or a request not served.",
    )
    parser.add_argument("--forwards", type=int, default=20000, help="default 20000")
    add_engine_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of the traffic, default 0")
    add_device_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from kvcanary_plugin.drill.drill import write_drill_config
    from kvcanary_plugin.drill.soak import run_soak

    engine, device = chosen_engine(arguments), arguments.device
    on_cpu = device == "cpu"
    with TemporaryDirectory(prefix="kvcanary-soak-") as name:
        directory = Path(name)
        with engine.start(
            arguments.model or (engine.swa_model if on_cpu else engine.default_model(device)),
            config=write_drill_config(directory),
            log_path=directory / "server.log",
            flags=tuple(arguments.server_flags),
            device=device,
        ) as server:
            result = run_soak(
                server,
                forwards=arguments.forwards,
                seed=arguments.seed,
                progress=lambda line: print(line, flush=True),
            )
            if not result.passed:
                reports = [line for line in server.log().splitlines() if "kvcanary:" in line]
                print("\n".join(reports[:20]))
    print(result.as_text())
    return 0 if result.passed else 1
