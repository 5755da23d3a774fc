"""``kvcanary check-config``: the effective settings, or everything that is wrong with them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import yaml

from kvcanary_plugin.commands.parsers import Subparsers
from kvcanary_plugin.config import ConfigError, load_config


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "check-config",
        help="print the effective settings of a configuration file, or every error in it",
        description="Loads FILE and the KVCANARY_* variables exactly as the engine would, and"
        " prints the effective settings as YAML. Exit status 2 when something is wrong.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML configuration file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        config = load_config(arguments.file, os.environ)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")
    return 0
