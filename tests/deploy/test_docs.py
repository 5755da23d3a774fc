"""The operator's pages: commands run, links and numbers hold, names exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvcanary_plugin.config import iter_settings
from kvcanary_plugin.hooks.vllm import pools
from kvcanary_plugin.metrics import METRICS, CanaryMetrics, RankLabels
from tests.deploy.paths import DOCS, ROOT, alert_names, load_rules

PAGES = ("operate.md", "runbook.md", "limits.md", "security.md", "compatibility.md")

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


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = (DOCS / page).read_text()
        for target in re.findall(r"\]\(([^)]+)\)", text):
            file, _, anchor = target.partition("#")
            if file.startswith("https:"):
                continue
            linked = (DOCS / file) if file else DOCS / page
            assert linked.exists(), (page, target)
            if anchor:
                headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
                assert anchor in [h.lower().replace(" ", "-") for h in headings], (page, target)


def test_metrics_that_the_pages_name_exist() -> None:
    known = {metric.name for metric in METRICS} | {"kvcanary_plugin", "kvcanary_config"}
    records = {rule["record"] for rule in load_rules() if "record" in rule}
    for page in PAGES:
        text = (DOCS / page).read_text()
        assert set(re.findall(r"\bkvcanary_[a-z_]+[a-z]", text)) <= known, page
        assert set(re.findall(r"\bkvcanary:[a-z_]+:[a-z0-9_]+", text)) <= records, page


def test_settings_that_the_pages_name_exist() -> None:
    known = {setting.name for setting in iter_settings()}
    sections = {name.partition(".")[0] for name in known if "." in name}
    for page in PAGES:
        named = re.findall(r"`([a-z_]+\.[a-z_]+)(?:: [^`]*)?`", (DOCS / page).read_text())
        assert {n for n in named if n.partition(".")[0] in sections} <= known, page


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
