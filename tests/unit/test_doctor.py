from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvcanary_plugin.cli import main
from kvcanary_plugin.commands import doctor
from kvcanary_plugin.commands.doctor import ENGINES, Engine, Finding, examine
from kvcanary_plugin.hooks.sglang import versions
from kvcanary_plugin.kernels import build

ROOT = Path(__file__).resolve().parents[2]
HOOK_TARGETS = (
    *versions.MAIN_PROCESS_TARGETS,
    versions.CONFIGURE_SCHEDULER,
    *versions.SCHEDULER_TARGETS,
)
(SGLANG,) = (engine for engine in ENGINES if engine.name == "sglang")


def install_fake_sglang(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, targets: Sequence[str] = HOOK_TARGETS
) -> None:
    """A distribution `sglang` that has exactly these hook targets, before any real one."""
    classes: dict[str, dict[str, list[str]]] = {}
    for target in targets:
        *module, owner, name = target.split(".")
        if owner[0].islower():
            module, owner = [*module, owner], ""
        classes.setdefault(".".join(module), {}).setdefault(owner, []).append(name)
    for module_name, owners in classes.items():
        path = directory.joinpath(*module_name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for owner, names in owners.items():
            lines += [f"class {owner}:"] if owner else []
            indent = "    " if owner else ""
            lines += [f"{indent}def {name}(*arguments): ..." for name in names]
        path.write_text("\n".join(lines) + "\n")
    (directory / "sglang" / "__init__.py").touch()
    install_distribution(directory, "sglang", "9.9.9")
    show_to_this_process_and_the_probe(directory, monkeypatch)


def install_distribution(directory: Path, name: str, version: str, entry_points: str = "") -> None:
    info = directory / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def show_to_this_process_and_the_probe(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), str(ROOT)]))


@pytest.fixture
def healthy_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine that is there and hookable, looked at without importing a real one."""
    directory = tmp_path / "site"
    entry_points = f"[{SGLANG.entry_points}]\nkvcanary = kvcanary_plugin:register\n"
    install_distribution(directory, "kvcanary_plugin", "9.9.9", entry_points)
    install_fake_sglang(directory, monkeypatch)
    monkeypatch.setattr(doctor, "ENGINES", (SGLANG,))
    monkeypatch.delenv(SGLANG.allow_list, raising=False)
    return directory


@pytest.fixture
def unprobed_engine(healthy_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without the seconds that the probe takes."""
    monkeypatch.setattr(doctor, "ENGINES", (replace(SGLANG, probe="print('{}')"),))


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips what the engine has to do with, for tests of the rest, as seen without a GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(doctor, "_examine_engines", lambda environ: iter(()))


def of_topic(findings: Sequence[Finding], topic: str) -> list[Finding]:
    return [finding for finding in findings if finding.topic == topic]


def findings_for(config: str, tmp_path: Path) -> list[Finding]:
    file = tmp_path / "kvcanary.yaml"
    file.write_text(config)
    file.chmod(0o644)
    return list(examine(file, None, {}))


@pytest.mark.usefixtures("healthy_engine")
def test_a_good_installation_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kvcanary.yaml"
    file.write_text("mode: log\n")
    file.chmod(0o644)
    assert main(["doctor", "--config", str(file)]) == 0
    out = capsys.readouterr().out
    assert "ok    engine         sglang 9.9.9" in out
    assert "ok    sglang hooks   everything that is hooked is there" in out
    assert f"ok    config         {file}: mode log, 12 of 13 checks on" in out
    assert out.endswith("0 failures, 0 warnings\n")


@pytest.mark.usefixtures("unprobed_engine")
def test_json_holds_the_same_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {finding["level"] for finding in findings} == {"ok", "warn"}
    assert [f["topic"] for f in findings][:4] == [
        "plugin", "engine", "sglang plugin", "sglang hooks",
    ]  # fmt: skip


def test_a_hook_target_that_the_engine_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = [target for target in HOOK_TARGETS if target != versions.POOLS_READY]
    install_fake_sglang(tmp_path, monkeypatch, targets=targets)
    monkeypatch.setattr(doctor, "ENGINES", (SGLANG,))
    (hooks,) = of_topic(list(examine(None, None, {})), "sglang hooks")
    assert hooks.level == "fail"
    assert versions.POOLS_READY in hooks.text
    assert versions.FORWARD not in hooks.text
    assert "docs/compatibility.md" in hooks.do


def test_an_engine_that_ends_the_process_at_import_fails(
    healthy_engine: Path,
) -> None:
    (healthy_engine / "sglang" / "__init__.py").write_text("raise SystemExit('no driver')")
    (hooks,) = of_topic(list(examine(None, None, {})), "sglang hooks")
    assert hooks.level == "fail"
    assert "no driver" in hooks.text


def test_no_engine_at_all_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Engine(name="no-such-engine", entry_points="none", allow_list="NONE", probe="")
    monkeypatch.setattr(doctor, "ENGINES", (absent,))
    (engine,) = of_topic(list(examine(None, None, {})), "engine")
    assert engine.level == "fail"
    assert "pip" in engine.do


@pytest.mark.usefixtures("healthy_engine")
def test_an_engine_that_cannot_see_the_plugin_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    blind = Engine(name="sglang", entry_points="none", allow_list="NONE", probe="print('{}')")
    monkeypatch.setattr(doctor, "ENGINES", (blind,))
    (plugin,) = of_topic(list(examine(None, None, {})), "sglang plugin")
    assert plugin.level == "fail"
    assert "pip install ." in plugin.do


@pytest.mark.usefixtures("unprobed_engine")
@pytest.mark.parametrize(
    ("allowed", "level"), [("other", "fail"), ("other, kvcanary", "ok"), ("", "ok")]
)
def test_an_allow_list_without_the_plugin_fails(allowed: str, level: str) -> None:
    findings = list(examine(None, None, {"SGLANG_PLUGINS": allowed}))
    assert of_topic(findings, "sglang plugin")[0].level == level


@pytest.mark.usefixtures("no_engine")
def test_every_error_of_the_configuration_is_a_failure_of_its_own(tmp_path: Path) -> None:
    findings = of_topic(findings_for("mode: loud\nscrib: 1\n", tmp_path), "config")
    assert [finding.level for finding in findings] == ["fail", "fail"]
    assert "mode got 'loud'" in findings[0].text
    assert "scrib" in findings[1].text


@pytest.mark.usefixtures("no_engine")
def test_without_a_file_it_says_that_nothing_is_guarded() -> None:
    (finding,) = of_topic(list(examine(None, None, {})), "config")
    assert finding.level == "warn"
    assert "--kvcanary-config FILE" in finding.do


@pytest.mark.usefixtures("no_engine")
def test_the_file_of_the_environment_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "kvcanary.yaml"
    file.write_text("mode: raise\n")
    file.chmod(0o644)
    (finding,) = of_topic(list(examine(None, None, {"KVCANARY_CONFIG": str(file)})), "config")
    assert "mode raise" in finding.text


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("mode: off\n", "mode is off"),
        ("faults: {allowed: true}\n", "faults.allowed is true"),
        ("metrics: {port: 9400, address: 0.0.0.0}\n", "read from outside"),
    ],
)
def test_a_setting_that_deserves_a_second_look_warns(
    config: str, words: str, tmp_path: Path
) -> None:
    warnings = [f for f in findings_for(config, tmp_path) if f.level == "warn"]
    assert [words in warning.text for warning in warnings] == [True]


@pytest.mark.usefixtures("no_engine")
def test_a_configuration_that_others_can_write_warns(tmp_path: Path) -> None:
    file = tmp_path / "kvcanary.yaml"
    file.write_text("mode: log\n")
    file.chmod(0o666)
    warnings = [f for f in examine(file, None, {}) if f.level == "warn"]
    assert [warning.do for warning in warnings] == [f"chmod go-w {file}"]


@pytest.mark.usefixtures("no_engine")
def test_the_report_directory_is_looked_at(tmp_path: Path) -> None:
    def level(directory: Path) -> str:
        findings = findings_for(f"report: {{directory: {directory}}}\n", tmp_path)
        return of_topic(findings, "reports")[0].level

    private, open_to_all = tmp_path / "private", tmp_path / "open"
    private.mkdir(mode=0o700)
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    (tmp_path / "file").touch()
    assert level(private) == "ok"
    assert level(private / "created-later") == "ok"
    assert level(open_to_all) == "warn"
    assert level(tmp_path / "file" / "below-a-file") == "fail"


@pytest.mark.usefixtures("no_engine")
def test_kernels_built_ahead_of_time_are_found(tmp_path: Path) -> None:
    directory = tmp_path / "kernels"
    config = f"build: {{prebuilt_directory: {directory}}}\n"
    missing = of_topic(findings_for(config, tmp_path), "kernels")
    assert missing[0].level == "fail"
    assert missing[0].do == f"kvcanary build --output {directory}"

    directory.mkdir()
    library = directory / build._cpu_name()
    library.touch()
    (found,) = of_topic(findings_for(config, tmp_path), "kernels")
    assert (found.level, found.text) == ("ok", f"built ahead of time: {library}")


@pytest.mark.usefixtures("no_engine")
def test_a_compiler_stands_in_for_kernels_and_neither_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PREBUILT_DIR", tmp_path / "none")
    compilers = tmp_path / "bin"
    compilers.mkdir()
    monkeypatch.setenv("PATH", str(compilers))
    (kernels,) = of_topic(list(examine(None, None, {})), "kernels")
    assert kernels.level == "warn"
    assert "g++" in kernels.do

    compiler = compilers / "c++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    (kernels,) = of_topic(list(examine(None, None, {})), "kernels")
    assert kernels.level == "ok"
    assert str(compiler) in kernels.text


@pytest.mark.usefixtures("no_engine")
def test_a_server_that_does_not_answer_fails() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{probe.getsockname()[1]}"
    (metrics,) = of_topic(list(examine(None, url, {})), "metrics")
    assert metrics.level == "fail"


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_installed_sglang_can_be_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PROBE_TIMEOUT_SECONDS", 540.0)  # others have the processor too
    assert doctor._examine_hooks(SGLANG).level == "ok"
