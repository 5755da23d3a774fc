"""``kvcanary build``: compiles the kernels ahead of time, for images without a compiler."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvcanary_plugin.commands.parsers import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "build",
        help="compile the kernels into a directory, ahead of time",
        description="Compiles the CPU kernels and, for the given architectures, the CUDA kernels"
        " into DIR. Name DIR as build.prebuilt_directory in the configuration. Needs no GPU.",
    )
    parser.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="X.Y",
        help="compute capability to build CUDA kernels for, such as 9.0; may be repeated",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="directory for the libraries"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from kvcanary_plugin.kernels import build

    try:
        print(build.build_cpu(output=arguments.output))
        if arguments.arch:
            print(build.build_cuda(arches=arguments.arch, output=arguments.output))
    except (ValueError, build.KernelBuildError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
