"""The ``kvcanary`` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from kvcanary_plugin.commands import (
    build,
    check_config,
    config_docs,
    demo,
    doctor,
    drill,
    explain,
    replay,
    report,
    soak,
    status,
    version,
)

# A further command is a module in kvcanary_plugin/commands and its name in this list.
COMMANDS: Final = (
    build,
    check_config,
    config_docs,
    demo,
    doctor,
    drill,
    explain,
    replay,
    report,
    soak,
    status,
    version,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status; 2 for wrong usage or wrong input."""
    parser = argparse.ArgumentParser(
        prog="kvcanary", description="Runtime integrity checks for the KV cache of an engine."
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    parsed = parser.parse_args(arguments)
    exit_status: int = parsed.run(parsed)
    return exit_status
