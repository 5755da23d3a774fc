"""``kvcanary drill``: would the canary have spoken?"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from kvcanary_plugin.commands.parsers import Subparsers, add_engine_arguments, chosen_engine


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "drill",
        help="plant every fault in a server that it starts; print what was seen and when",
        description="Starts a small server on the CPU, runs the drill's traffic without a"
        " fault (which must be silent), then one fault after the other, each behind a twin that"
        " goes to the same place and does nothing there. Prints the detection matrix: fault,"
        " detected, steps until then, false alarms in the twin, violations by check. Exit status 1"
        " if a fault went unseen, or a twin alarmed.",
    )
    add_engine_arguments(parser)
    parser.add_argument(
        "--markdown", action="store_true", help="print the matrix as a Markdown table, for docs"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from kvcanary_plugin.drill import matrix
    from kvcanary_plugin.drill.drill import Drill, write_drill_config

    engine = chosen_engine(arguments)
    model = arguments.model or engine.full_model
    with TemporaryDirectory(prefix="kvcanary-drill-") as name:
        directory = Path(name)
        config = write_drill_config(directory)
        with engine.start(model, config=config, log_path=directory / "server.log") as server:
            drill = Drill(server, directory)
            silent = drill.run_silent()
            results = list(drill.run(engine.every_case(model), with_twins=True))
    print((matrix.as_markdown if arguments.markdown else matrix.as_text)(results))
    print(f"\nSame traffic without a fault: {silent.violations} violations.")
    uncovered = ", ".join(matrix.uncovered_checks(results))
    print(f"Checks without a fault here: {uncovered or 'none'}.")
    alarms = silent.violations + sum(result.false_alarms or 0 for result in results)
    return 0 if alarms == 0 and all(result.detected for result in results) else 1
