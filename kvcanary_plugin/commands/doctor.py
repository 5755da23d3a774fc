"""``kvcanary doctor``: looks at an installation and says what would keep the guard from working."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

from kvcanary_plugin import __version__
from kvcanary_plugin.commands.parsers import Subparsers
from kvcanary_plugin.commands.status import server_status
from kvcanary_plugin.config import (
    CHECK_NAMES,
    CONFIG_PATH_VARIABLE,
    CanaryConfig,
    ConfigError,
    load_config,
)

Level = Literal["ok", "warn", "fail"]

_PROBE_TIMEOUT_SECONDS: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the answer.

    Fields:
        level: ok; warn: works, with less than one may expect; fail: the guard would not work.
        topic: what was looked at.
        text: what was found.
        do: what to do about it; "" when nothing needs doing.
    """

    level: Level
    topic: str
    text: str
    do: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How the plugin hangs on an engine.

    Fields:
        name: name of the distribution.
        entry_points: group in which the engine looks for plugins.
        allow_list: environment variable that names the plugins to load, when it is set.
        probe: Python code that prints a JSON object, what it could not hook to the reason.
    """

    name: str
    entry_points: str
    allow_list: str
    probe: str


# In a process of its own: importing an engine takes long, prints, and may end the process.
_SGLANG_PROBE: Final = """
import json, pkgutil
from kvcanary_plugin.hooks.sglang import versions
missing = {}
for target in (*versions.MAIN_PROCESS_TARGETS, versions.CONFIGURE_SCHEDULER,
               *versions.SCHEDULER_TARGETS):
    try:
        pkgutil.resolve_name(target)
    except Exception as error:
        missing[target] = f"{type(error).__name__}: {error}"
print(json.dumps(missing))
"""
_VLLM_PROBE: Final = """
import json
missing = {}
try:
    from kvcanary_plugin.hooks.vllm.plugin import register
    register()
except Exception as error:
    missing["kvcanary_plugin.hooks.vllm.plugin.register"] = f"{type(error).__name__}: {error}"
print(json.dumps(missing))
"""

ENGINES: Final = (
    Engine(
        name="sglang",
        entry_points="sglang.srt.plugins",
        allow_list="SGLANG_PLUGINS",
        probe=_SGLANG_PROBE,
    ),
    Engine(
        name="vllm",
        entry_points="vllm.general_plugins",
        allow_list="VLLM_PLUGINS",
        probe=_VLLM_PROBE,
    ),
)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check an installation and say what to do",
        description="Looks at the engine, the hooks, the kernels and the configuration of this"
        " Python environment. Starts no server. Exit status 1 when something fails.",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"configuration file (default: the one that {CONFIG_PATH_VARIABLE} names)",
    )
    parser.add_argument("--url", metavar="URL", help="also ask a running server for its metrics")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    findings = []
    for finding in examine(arguments.config, arguments.url, os.environ):
        findings.append(finding)
        if not arguments.json:
            print(_as_text(finding), flush=True)
    failures = sum(finding.level == "fail" for finding in findings)
    warnings = sum(finding.level == "warn" for finding in findings)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(f"\n{_counted(failures, 'failure')}, {_counted(warnings, 'warning')}")
    return 1 if failures else 0


def examine(
    config_file: Path | None, url: str | None, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Everything there is to say, in the order in which one would set things right."""
    yield Finding(
        level="ok",
        topic="plugin",
        text=f"kvcanary_plugin {__version__}, Python {platform.python_version()}"
        f" ({sys.executable})",
    )
    yield from _examine_engines(environ)
    config, findings = _examine_config(config_file, environ)
    yield from findings
    yield from _examine_kernels(config)
    if url is not None:
        yield _examine_server(url)


# ---- engines and hooks ---------------------------------------------------------------------------


def _examine_engines(environ: Mapping[str, str]) -> Iterator[Finding]:
    installed = {engine.name: _version_of(engine.name) for engine in ENGINES}
    if not any(installed.values()):
        names = " nor ".join(installed)
        yield Finding(
            level="fail",
            topic="engine",
            text=f"neither {names} is installed for {sys.executable}",
            do="install the plugin into the engine's own environment, with that environment's pip",
        )
    for engine in ENGINES:
        version = installed[engine.name]
        if version is not None:
            yield Finding(level="ok", topic="engine", text=f"{engine.name} {version}")
            yield _examine_entry_point(engine, environ)
            yield _examine_hooks(engine)


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _examine_entry_point(engine: Engine, environ: Mapping[str, str]) -> Finding:
    topic = f"{engine.name} plugin"
    found = metadata.entry_points(group=engine.entry_points, name="kvcanary")
    if not found:
        return Finding(
            level="fail",
            topic=topic,
            text=f"no entry point kvcanary in group {engine.entry_points}: the engine cannot see"
            " the plugin",
            do=f"in a checkout of kvcanary_plugin: {sys.executable} -m pip install .",
        )
    allowed = environ.get(engine.allow_list)
    if allowed and "kvcanary" not in [name.strip() for name in allowed.split(",")]:
        return Finding(
            level="fail",
            topic=topic,
            text=f"{engine.allow_list}={allowed} keeps the engine from loading the plugin",
            do=f"add kvcanary to {engine.allow_list}, or unset it",
        )
    return Finding(level="ok", topic=topic, text=f"entry point in {engine.entry_points}")


def _examine_hooks(engine: Engine) -> Finding:
    topic = f"{engine.name} hooks"
    try:
        result = subprocess.run(
            [sys.executable, "-c", engine.probe],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(
            level="fail",
            topic=topic,
            text=f"importing {engine.name} takes more than {_PROBE_TIMEOUT_SECONDS:.0f} s",
            do=f"see whether `{sys.executable} -c 'import {engine.name}'` returns",
        )
    lines = result.stdout.strip().splitlines()
    if result.returncode != 0 or not lines:
        said = (result.stderr.strip().splitlines() or ["nothing"])[-1]
        return Finding(
            level="fail",
            topic=topic,
            text=f"{engine.name} cannot be imported: exit status {result.returncode}, {said}",
            do=f"see what `{sys.executable} -c 'import {engine.name}'` says",
        )
    missing: dict[str, str] = json.loads(lines[-1])
    if missing:
        reasons = "; ".join(f"{target} ({reason})" for target, reason in missing.items())
        return Finding(
            level="fail",
            topic=topic,
            text=f"this version of {engine.name} cannot be hooked: {reasons}",
            do="take a version of the engine that docs/compatibility.md lists, or a newer plugin",
        )
    return Finding(level="ok", topic=topic, text="everything that is hooked is there")


# ---- configuration -------------------------------------------------------------------------------


def _examine_config(
    file: Path | None, environ: Mapping[str, str]
) -> tuple[CanaryConfig, list[Finding]]:
    """The settings (the defaults when they cannot be loaded), and what is to be said of them."""
    named = file if file is not None else environ.get(CONFIG_PATH_VARIABLE) or None
    try:
        config = load_config(named, environ)
    except ConfigError as error:
        findings = [
            Finding(level="fail", topic="config", text=str(problem), do=problem.do)
            for problem in error.problems
        ]
        return CanaryConfig(), findings
    findings = []

    def warn(text: str, do: str) -> None:
        findings.append(Finding(level="warn", topic="config", text=text, do=do))

    checks = sum(getattr(config.checks, name) for name in CHECK_NAMES)
    if named is None:
        warn(
            "no file is named: an engine that is started like this is not guarded",
            "start the server with --kvcanary-config FILE, and check FILE with"
            " kvcanary doctor --config FILE",
        )
    else:
        text = f"{named}: mode {config.mode}, {checks} of {len(CHECK_NAMES)} checks on"
        findings.append(Finding(level="ok", topic="config", text=text))
        if Path(named).stat().st_mode & 0o022:
            warn(
                f"{named} can be written by others: whoever does may switch the guard off",
                f"chmod go-w {named}",
            )
    if config.mode == "off":
        warn("mode is off: nothing is checked", "set mode: log")
    if config.faults.allowed:
        warn(
            "faults.allowed is true: faults may be planted, which corrupt requests",
            "set faults.allowed: false on a server that serves anybody",
        )
    if config.metrics.port is not None and config.metrics.address not in ("127.0.0.1", "::1"):
        warn(
            f"metrics.address is {config.metrics.address}: the metrics can be read from outside"
            " this host, without a password",
            "set metrics.address: 127.0.0.1, or see that a firewall lets only Prometheus in",
        )
    findings += _examine_report_directory(config.report.directory)
    return config, findings


def _examine_report_directory(directory: Path | None) -> list[Finding]:
    if directory is None:
        return []
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return [
            Finding(
                level="fail",
                topic="reports",
                text=f"report.directory {directory} cannot be written by this user ({nearest})",
                do="choose another directory, or correct its mode; run this as the engine's user",
            )
        ]
    if directory.exists() and directory.stat().st_mode & 0o007:
        return [
            Finding(
                level="warn",
                topic="reports",
                text=f"report.directory {directory} is open to every user of this host",
                do=f"chmod o-rwx {directory}: reports hold request ids",
            )
        ]
    return [Finding(level="ok", topic="reports", text=f"report.directory {directory} is writable")]


# ---- kernels -------------------------------------------------------------------------------------


def _examine_kernels(config: CanaryConfig) -> Iterator[Finding]:
    try:
        import torch

        from kvcanary_plugin.kernels import build
    except (ImportError, OSError) as error:
        yield Finding(
            level="fail",
            topic="kernels",
            text=f"torch and tvm_ffi cannot be imported: {error}",
            do="install the plugin with pip, which brings what it needs",
        )
        return
    yield _examine_gpu()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    directory = config.build.prebuilt_directory
    if directory is not None and not directory.is_dir():
        yield Finding(
            level="fail",
            topic="kernels",
            text=f"build.prebuilt_directory {directory} is no directory",
            do=f"kvcanary build --output {directory}",
        )
    library = build.find_prebuilt(device, prebuilt_dir=directory)
    compiler = build.find_compiler(device.type)
    if library is not None:
        yield Finding(level="ok", topic="kernels", text=f"built ahead of time: {library}")
    elif compiler is not None:
        yield Finding(
            level="ok",
            topic="kernels",
            text=f"none built ahead of time for {device.type}; {compiler} builds them at the first"
            f" start, into {config.build.cache_directory or build.default_cache_dir()}",
        )
    elif device.type == "cuda":
        yield Finding(
            level="fail",
            topic="kernels",
            text="none built ahead of time fits this GPU, and there is no nvcc",
            do="install the CUDA toolkit, or run `kvcanary build --arch X.Y --output DIR` where"
            " there is one and name DIR as build.prebuilt_directory",
        )
    else:
        yield Finding(
            level="warn",
            topic="kernels",
            text="none built ahead of time, and no C++ compiler: the slow torch reference runs",
            do="install g++, or run `kvcanary build --output DIR` where there is one and name DIR"
            " as build.prebuilt_directory",
        )


def _examine_gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        devices = [
            f"{properties.name} ({properties.major}.{properties.minor})"
            for properties in map(
                torch.cuda.get_device_properties, range(torch.cuda.device_count())
            )
        ]
        return Finding(level="ok", topic="gpu", text=", ".join(devices))
    if torch.version.cuda is None:
        return Finding(level="ok", topic="gpu", text="torch is a CPU build: the CPU kernels run")
    return Finding(
        level="warn",
        topic="gpu",
        text=f"torch is built for CUDA {torch.version.cuda} and sees no GPU",
        do="see what nvidia-smi says; in a container, whether it was given the GPUs",
    )


def _examine_server(url: str) -> Finding:
    status = server_status(url)
    text = f"{status.url} shows a canary: {status.verdict}"
    if status.verdict == "unreachable":
        return Finding(
            level="fail",
            topic="metrics",
            text=status.problems[0],
            do="correct the address, start the server, or switch its metrics on",
        )
    if status.exit_status != 0:
        return Finding(level="warn", topic="metrics", text=text, do=f"kvcanary status {url}")
    return Finding(level="ok", topic="metrics", text=text)


# ---- text ----------------------------------------------------------------------------------------


def _as_text(finding: Finding) -> str:
    line = f"{finding.level:<6}{finding.topic:<15}{finding.text}"
    return f"{line}\n{'':<21}-> {finding.do}" if finding.do else line


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
