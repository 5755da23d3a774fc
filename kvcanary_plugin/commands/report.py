"""``kvcanary report``: incidents as one HTML page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvcanary_plugin.commands.parsers import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "report",
        help="make one HTML page of the incidents in a report directory",
        description="Makes one self-contained HTML page (no network, no scripts) of the incidents"
        " in DIR: what happened, its time line, the slots around it, the requests, what to do.",
    )
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="report.directory, or one report file"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write (default: stdout)",
    )
    parser.add_argument(
        "--runbook",
        default="runbook.md",
        metavar="URL",
        help="where the links to the runbook lead (default: runbook.md beside the page)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from kvcanary_plugin.incident_file import IncidentFileError, read_incidents
    from kvcanary_plugin.report_page import render_page

    try:
        incidents, ends = read_incidents(arguments.directory)
    except IncidentFileError as error:
        print(error, file=sys.stderr)
        return 2
    page = render_page(incidents, ends, source=str(arguments.directory), runbook=arguments.runbook)
    if arguments.output is None:
        print(page, end="")
        return 0
    try:
        arguments.output.write_text(page, encoding="utf-8")
    except OSError as error:
        print(f"kvcanary: {arguments.output} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    noun = "incident" if len(incidents) == 1 else "incidents"
    print(f"{arguments.output}: {len(incidents)} {noun}")
    return 0
