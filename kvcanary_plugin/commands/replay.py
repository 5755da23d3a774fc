"""``kvcanary replay``: an incident once more, on the CPU, from its report."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

from kvcanary_plugin.commands.parsers import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="run the forwards that an incident recorded, and see whether it happens again",
        description="Rebuilds slots, page table and the recorded forwards of an incident on the"
        " CPU, runs them through the canary, and says whether the same violation comes out, and"
        " whether the recorded events explain it. FILE is a report file, one of its lines in a"
        " file of its own, or report.directory. Exit status 0 if every incident came out the same,"
        " 1 if one did not, else 2 if one cannot be replayed, or the file cannot be read.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="report file or report.directory")
    parser.add_argument("--incident", metavar="ID", help="replay this incident only")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from kvcanary_plugin.incident_file import IncidentFileError, read_incidents
    from kvcanary_plugin.replay import replay, story

    try:
        incidents, _ = read_incidents(arguments.file)
        chosen = [i for i in incidents if arguments.incident in (None, i.id)]
        if not chosen:
            what = "no incident" if arguments.incident is None else "no such incident"
            raise IncidentFileError(
                f"kvcanary: {arguments.file} holds {what}; it holds"
                f" {', '.join(incident.id for incident in incidents) or 'none'}"
            )
    except IncidentFileError as error:
        print(error, file=sys.stderr)
        return 2
    status = 0
    for incident in chosen:
        try:
            result = replay(incident)
        except IncidentFileError as error:
            print(error, file=sys.stderr)
            status = status or 2
            continue
        for paragraph in story(incident, result):
            print(textwrap.fill(paragraph, 96, subsequent_indent="  "))
        print()
        if not result.reproduced:
            status = 1
    return status
