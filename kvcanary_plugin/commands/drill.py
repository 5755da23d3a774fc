"""``kvcanary drill``: would the canary have spoken?"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kvcanary_plugin.commands.parsers import (
    Subparsers,
    add_device_arguments,
    add_engine_arguments,
    chosen_engine,
)

if TYPE_CHECKING:
    from kvcanary_plugin.drill.drill import DrillResult


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "drill",
        help="plant every fault in a server that it starts; print what was seen and when",
        description="Starts a small server, runs the drill's traffic without a"
        " fault (which must be silent), then one fault after the other, each behind a twin that"
        " goes to the same place and does nothing there. Prints the detection matrix: fault,"
        " detected, steps until then, false alarms in the twin, violations by check. Exit status 1"
        " if a fault went unseen, if the traffic without one or a twin alarmed, or if another rank"
        " did than the one asked for.",
    )
    add_engine_arguments(parser)
    add_device_arguments(parser)
    parser.add_argument(
        "--forwards",
        type=int,
        default=0,
        help="serve the soak's traffic for so many forwards first, default 0",
    )
    parser.add_argument(
        "--tp-rank", type=int, help="plant on this tensor-parallel rank alone, default all"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="keep the server's log and the reports there, default: nothing is kept",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the matrix as a Markdown table, for docs"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from kvcanary_plugin.drill import matrix
    from kvcanary_plugin.drill.drill import Drill, write_drill_config
    from kvcanary_plugin.drill.soak import run_soak

    engine = chosen_engine(arguments)
    model = arguments.model or engine.default_model(arguments.device)
    with _directory(arguments.directory) as name:
        directory = Path(name)
        with engine.start(
            model,
            config=write_drill_config(directory),
            log_path=directory / "server.log",
            flags=tuple(arguments.server_flags),
            device=arguments.device,
        ) as server:
            print(f"Server up after {server.startup_seconds:.0f} s.", flush=True)
            drill = Drill(server, directory, tp_rank=arguments.tp_rank)
            silent = drill.run_silent()
            alarms = silent.violations
            if arguments.forwards:
                soak = run_soak(server, forwards=arguments.forwards, conversations=24)
                print(f"Mixed traffic: {soak.as_text()}", flush=True)
                alarms += 0 if soak.passed else 1
            by_rank = drill.forwards_by_rank()
            print(f"Forwards checked so far, by tp_rank: {by_rank}", flush=True)
            results = list(_shown(drill.run(engine.every_case(model), with_twins=True)))
    print((matrix.as_markdown if arguments.markdown else matrix.as_text)(results))
    print(f"\nSame traffic without a fault: {silent.violations} violations.")
    uncovered = ", ".join(matrix.uncovered_checks(results))
    print(f"Checks without a fault here: {uncovered or 'none'}.")
    alarms += sum(result.false_alarms or 0 for result in results)
    if arguments.tp_rank is not None:
        alarms += sum(set(result.tp_ranks) != {arguments.tp_rank} for result in results)
    return 0 if alarms == 0 and all(result.detected for result in results) else 1


def _directory(kept: Path | None) -> TemporaryDirectory[str] | nullcontext[str]:
    if kept is None:
        return TemporaryDirectory(prefix="kvcanary-drill-")
    kept.mkdir(parents=True, exist_ok=True)
    return nullcontext(str(kept.absolute()))


def _shown(results: Iterable[DrillResult]) -> Iterable[DrillResult]:
    """Says of each fault as soon as it is known: a drill takes a minute or more."""
    for result in results:
        print(f"{'seen' if result.detected else 'NOT SEEN'}: {result.case.title}", flush=True)
        yield result
