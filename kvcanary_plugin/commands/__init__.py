"""The subcommands of ``kvcanary``, one module each.

A module has ``add_parser(subparsers)``, which adds its parser and sets ``run`` on it, a function
from the parsed arguments to the exit status. What is heavy (torch, an engine) is imported inside
``run``, so that ``kvcanary --help`` is quick and works without it.
"""
