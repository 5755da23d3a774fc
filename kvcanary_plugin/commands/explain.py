"""``kvcanary explain``: what a check says when it fails, and what to do then."""

from __future__ import annotations

import argparse
import textwrap

from kvcanary_plugin.commands.parsers import Subparsers
from kvcanary_plugin.config import CHECK_NAMES


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="say what a violation of a check means, what causes it and what to do",
        description="Says what a violation of CHECK means, what usually causes it and what to do.",
    )
    parser.add_argument(
        "check", choices=CHECK_NAMES, metavar="CHECK", help=f"one of {', '.join(CHECK_NAMES)}"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from kvcanary_plugin.checks import check_named

    check = check_named(arguments.check)
    print(check.label)
    print(textwrap.fill(check.meaning, 88, initial_indent="  ", subsequent_indent="  "))
    print("\nUsual causes, the most likely first")
    for cause in check.causes:
        print(textwrap.fill(cause, 88, initial_indent="  - ", subsequent_indent="    "))
    print("\nWhat to do")
    print(textwrap.fill(check.do, 88, initial_indent="  ", subsequent_indent="  "))
    print(f'\nMetric   kvcanary_violations_total{{check="{check.label}"}}')
    print(f"Setting  checks.{check.label}")
    return 0
