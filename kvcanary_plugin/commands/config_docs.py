"""``kvcanary config-docs``: the settings as a Markdown page, made from the model."""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

from kvcanary_plugin.commands.parsers import Subparsers
from kvcanary_plugin.config import CONFIG_PATH_VARIABLE, Setting, iter_settings

_INTRODUCTION = f"""\
# Configure

<!-- Made by `kvcanary config-docs` from kvcanary_plugin/config/model.py. Do not edit. -->

The canary reads one YAML file. It is named by the engine's `--kvcanary-config FILE` flag or by the
environment variable `{CONFIG_PATH_VARIABLE}`. Without a file the engine is not guarded. What the
file leaves out has the default below; the defaults are the production setting. `configs/` has three
files to start from:

| file | for |
| --- | --- |
| `configs/production.yaml` | serving: everything is checked, all bytes within a small budget |
| `configs/ci.yaml` | tests: every byte in every forward, the first violation stops the engine |
| `configs/debug.yaml` | looking for a fault: as in tests, but reports go on, with token ids |

`kvcanary check-config FILE` prints the effective settings, or everything that is wrong with the
file. An unknown name, a value out of bounds or two settings that contradict each other is an error
before the engine serves.

**Variables.** Every setting has an environment variable, which wins over the file:
`KVCANARY_` and the name in upper case, with two underscores between section and name
(`KVCANARY_SCRUB__PERCENT_OF_STEP_TIME=2`, `KVCANARY_METRICS__LABELS__POOL=blue`). `null`
or an empty text unsets a setting that may be unset. A `KVCANARY_` variable that names no setting is
an error.

**While the engine serves** the file is looked at once a second. Settings marked *yes* under
"while serving" are taken over when it changes. A file that does not load, that changes any other
setting, or for whose settings the device has no room, is refused as a whole: the reason is logged,
`kvcanary_config_reloads_total{{result="refused"}}` counts it, and the settings in force stay.
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "config-docs",
        help="print the documentation of all settings as Markdown",
        description="Prints the documentation of all settings, made from the model.",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    print(config_markdown(), end="")
    return 0


def config_markdown() -> str:
    """The page, as it stands in docs/configure.md."""
    parts = [_INTRODUCTION]
    for section, settings in groupby(iter_settings(), key=lambda setting: setting.path[:-1]):
        parts.append(_section(".".join(section), list(settings)))
    return "\n".join(parts)


def _section(name: str, settings: list[Setting]) -> str:
    title = f"`{name}`" if name else "Top level"
    lines = [f"## {title}", "", settings[0].section, ""]
    lines += ["| setting | allowed | default | while serving | meaning |", "|" + " --- |" * 5]
    lines += [_row(setting) for setting in settings]
    return "\n".join(lines) + "\n"


def _row(setting: Setting) -> str:
    allowed = f"{setting.allowed} ({setting.unit})" if setting.unit else setting.allowed
    cells = [
        f"`{setting.name}`",
        allowed,
        f"`{_as_yaml(setting.default)}`",
        "yes" if setting.reloadable else "no",
        setting.description,
    ]
    return f"| {' | '.join(cells)} |"


def _as_yaml(value: Any) -> str:
    """A default as one would write it in the file."""
    if isinstance(value, str | Path):
        return str(value)
    return json.dumps(value)
