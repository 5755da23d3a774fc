"""``kvcanary version``."""

from __future__ import annotations

import argparse

from kvcanary_plugin import __version__
from kvcanary_plugin.commands.parsers import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("version", help="print the version")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    print(__version__)
    return 0
