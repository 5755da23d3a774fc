"""The one type that all command modules share."""

from __future__ import annotations

import argparse
from typing import TypeAlias

# What argparse's add_subparsers returns; it has no public name.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
