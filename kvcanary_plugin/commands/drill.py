"""``kvcanary drill``: would the canary have spoken?"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from kvcanary_plugin.commands.parsers import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "drill",
        help="plant every fault in a server that it starts; print what was seen and when",
        description="Starts a small SGLang server on the CPU, runs the drill's traffic without a"
        " fault (which must be silent), then plants one fault after the other and prints a table:"
        " fault, expected check, seen, steps until seen. Exit status 1 if one went unseen.",
    )
    parser.add_argument(
        "--model", default="tiny-llama", help="packaged model: tiny-llama (default) or tiny-swa"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from kvcanary_plugin.drill.drill import Drill, as_table, cases_for, write_drill_config
    from kvcanary_plugin.drill.server import ServerSpec, SGLangServer

    with TemporaryDirectory(prefix="kvcanary-drill-") as name:
        directory = Path(name)
        spec = ServerSpec(model=arguments.model, kvcanary_config=write_drill_config(directory))
        with SGLangServer(spec, log_path=directory / "server.log") as server:
            drill = Drill(server, directory)
            silent = drill.run_silent()
            results = list(drill.run(cases_for(arguments.model)))
    print(as_table(results))
    print(f"\nSame traffic without a fault: {silent.violations} violations.")
    return 0 if silent.violations == 0 and all(result.detected for result in results) else 1
