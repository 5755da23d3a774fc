"""The docs: commands run, links and numbers hold, names and files exist."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvcanary_plugin.checks import CHECKS
from kvcanary_plugin.config import iter_settings
from kvcanary_plugin.hooks.vllm import pools
from kvcanary_plugin.metrics import METRICS, CanaryMetrics, RankLabels
from tests.deploy.paths import DOCS, ROOT, alert_names, load_rules

PAGES = ("operate.md", "runbook.md", "limits.md", "security.md", "compatibility.md")
EVERY_PAGE = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md")))
FOLDERS = ("benchmarks", "configs", "deploy", "docs", "kvcanary_plugin", "requirements", "tests")
# Where the paths that a page names begin.
ROOTS_OF_PATHS = (ROOT, ROOT / "kvcanary_plugin", ROOT / "kvcanary_plugin" / "kernels")
every_page = pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)

# Commands that take a server or a network: where else they are run.
RUN_ELSEWHERE = {
    "python -m pip install .": "tests/deploy/test_docker.py",
    "python -m sglang.launch_server": "tests/e2e/test_guard.py",
    "vllm serve": "kvcanary_plugin/drill/vllm_server.py",
    "kvcanary status": "tests/unit/test_status.py",
    "kvcanary doctor": "tests/unit/test_doctor.py",
}


def commands() -> list[str]:
    """Every command that a page shows, each once."""
    found = [
        command
        for page in PAGES
        for block in re.findall(r"```console\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
        for command in re.findall(r"^\s*\$ (.+)$", block, re.MULTILINE)
    ]
    return list(dict.fromkeys(found))


def elsewhere(command: str) -> str | None:
    return next((file for name, file in RUN_ELSEWHERE.items() if command.startswith(name)), None)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the commands read and write, with `kvcanary` and `python` on PATH."""
    directory = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "deploy", "docs"):
        shutil.copytree(ROOT / name, directory / name)
    (directory / "server.log").write_text("kvcanary: guarding group full\n")
    tools = directory / "bin"
    tools.mkdir()
    (tools / "kvcanary").write_text(
        f"#!{sys.executable}\nfrom kvcanary_plugin.cli import main\nraise SystemExit(main())\n"
    )
    (tools / "kvcanary").chmod(0o755)
    (tools / "python").symlink_to(sys.executable)
    return directory


@pytest.mark.parametrize("command", [c for c in commands() if elsewhere(c) is None])
def test_the_command_runs(command: str, checkout: Path) -> None:
    tool = command.split()[0]
    if tool in ("kubectl", "promtool") and shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    if command.startswith("kvcanary build") and shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    path = os.pathsep.join([str(checkout / "bin"), os.environ["PATH"]])
    result = subprocess.run(
        command,
        shell=True,
        cwd=checkout,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_command_that_is_not_run_here_is_run_somewhere() -> None:
    for command in commands():
        file = elsewhere(command)
        if file is not None:
            assert (ROOT / file).exists(), command
    assert all(any(c.startswith(name) for c in commands()) for name in RUN_ELSEWHERE)


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        file, _, anchor = target.partition("#")
        if file.startswith("https:"):
            continue
        linked = (page.parent / file) if file else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            assert anchor in [h.lower().replace(" ", "-") for h in headings], target


@every_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    paths = rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)"
    # X stands for any name.
    files = r"`((?:\w+/)*(?!X)\w+\.(?:py|h|cuh|cc|cu|yaml))`"
    names = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")}
    for named in {*re.findall(paths, text), *re.findall(files, text)}:
        is_there = any((root / named).exists() for root in ROOTS_OF_PATHS)
        assert is_there or named in names, named


@every_page
def test_metrics_that_a_page_names_exist(page: Path) -> None:
    known = {metric.name for metric in METRICS} | {"kvcanary_plugin", "kvcanary_config"}
    records = {rule["record"] for rule in load_rules() if "record" in rule}
    text = page.read_text()
    assert set(re.findall(r"\bkvcanary_[a-z_]+[a-z]", text)) <= known
    assert set(re.findall(r"\bkvcanary:[a-z_]+:[a-z0-9_]+", text)) <= records


@every_page
def test_settings_that_a_page_names_exist(page: Path) -> None:
    known = {setting.name for setting in iter_settings()}
    sections = {name.partition(".")[0] for name in known if "." in name}
    named = re.findall(r"`([a-z_]+\.[a-z_]+)(?:: [^`]*)?`", page.read_text())
    files = {name for name in named if name.endswith((".py", ".cu", ".cc"))}
    assert {n for n in named if n.partition(".")[0] in sections} - files <= known


def test_the_table_of_metrics_has_their_labels_and_their_own_words() -> None:
    text = (DOCS / "operate.md").read_text()
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
        row = f"| `{metric.name}` | {labels} | {metric.help} |"
        assert row in text, row


def test_the_table_of_violations_has_every_check() -> None:
    text = (DOCS / "violations.md").read_text()
    in_table = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
    assert {name for cell in in_table for name in re.findall(r"`(\w+)`", cell)} == {
        check.label for check in CHECKS
    }


def test_imports_run_the_way_that_the_layers_say() -> None:
    text = (DOCS / "how-it-works.md").read_text().partition("## Layers")[2].split("```")[1]
    rows = [re.split(r"  +", line)[0].split(", ") for line in text.strip().splitlines()]
    layer = {name: index for index, names in enumerate(rows) for name in names}
    package = ROOT / "kvcanary_plugin"
    for path in package.rglob("*.py"):
        importer = _part(path.relative_to(package).with_suffix("").parts, layer)
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if importer and module and module.startswith("kvcanary_plugin."):
                imported = _part(tuple(module.split(".")[1:]), layer)
                assert imported is None or layer[importer] <= layer[imported], (path, module)


def _part(path: tuple[str, ...], layer: dict[str, int]) -> str | None:
    """The entry of the layers that a module belongs to."""
    return next((name for name in ("/".join(path[:2]), path[0]) if name in layer), None)


def test_the_table_of_severities_is_that_of_the_rules() -> None:
    text = (DOCS / "operate.md").read_text()
    for severity in ("page", "ticket"):
        (row,) = re.findall(rf"^\| `{severity}` \| (.+) \|$", text, re.MULTILINE)
        of_rules = {
            rule["alert"]
            for rule in load_rules()
            if rule.get("labels", {}).get("severity") == severity
        }
        assert set(re.findall(r"`(\w+)`", row)) == of_rules
    assert {name for name in alert_names() if f"`{name}`" in text} == set(alert_names())


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_number_of_series_of_a_rank_is_the_one_in_the_table(groups: int) -> None:
    registry = CollectorRegistry()
    names = [f"group-{index}" for index in range(groups)]
    CanaryMetrics(engine="sglang", ranks=RankLabels(), groups=names, registry=registry)
    lines = [line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]
    own = sum("_created{" not in line for line in lines)
    assert f"| {groups} | {own} | {len(lines)} |" in (DOCS / "operate.md").read_text()


def test_the_table_of_pools_names_every_adapter() -> None:
    text = (DOCS / "compatibility.md").read_text()
    for name in pools._KINDS:
        assert f"`{name}`" in text, name


def test_the_tested_sglang_is_the_pinned_one() -> None:
    pins = (ROOT / "requirements" / "sglang-cpu.txt").read_text()
    (pinned,) = re.findall(r"^sglang==(.+)$", pins, re.MULTILINE)
    assert f"| {pinned}, on the CPU |" in (DOCS / "compatibility.md").read_text()
