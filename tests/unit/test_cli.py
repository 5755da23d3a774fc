"""The command line: what each command prints and with which status it ends."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvcanary_plugin import __version__
from kvcanary_plugin.checks import CHECKS, Check
from kvcanary_plugin.cli import COMMANDS, main
from kvcanary_plugin.config import CanaryConfig, iter_settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in iter_settings():
        monkeypatch.delenv(setting.variable, raising=False)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("name", ["production", "ci", "debug"])
def test_check_config_prints_settings_that_load_again(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "configs" / f"{name}.yaml"
    assert main(["check-config", str(path)]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    given = yaml.safe_load(path.read_text())
    assert CanaryConfig.model_validate(printed).mode == given["mode"]
    assert printed["verify"] == given["verify"]
    assert printed["ring"]["capacity"] == CanaryConfig().ring.capacity, "defaults are shown"


def test_check_config_applies_the_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCANARY_MODE", "off")
    assert main(["check-config", str(ROOT / "configs" / "ci.yaml")]) == 0
    assert "mode: 'off'\n" in capsys.readouterr().out


def test_check_config_prints_every_error_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("mode: loud\nring: {capacity: 0}\n")
    assert main(["check-config", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{path}, line 1: mode got 'loud'" in captured.err
    assert f"{path}, line 2: ring.capacity got 0" in captured.err
    assert "Traceback" not in captured.err


def test_check_config_of_a_missing_file_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-config", str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_configure_page_is_the_one_that_the_model_makes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config-docs"]) == 0
    page = (ROOT / "docs" / "configure.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == page, "run `kvcanary config-docs > docs/configure.md`"


def test_configure_page_has_a_row_for_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config-docs"])
    page = capsys.readouterr().out
    for setting in iter_settings():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{setting.name}` |")]
        assert row.replace(r"\|", "").count("|") == 6
        assert setting.description in row


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.label)
def test_explain_says_meaning_causes_and_what_to_do(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", check.label]) == 0
    words = " ".join(capsys.readouterr().out.split())
    for text in (check.label, check.meaning, check.do, *check.causes):
        assert text in words
    assert f'kvcanary_violations_total{{check="{check.label}"}}' in words


def test_explain_of_an_unknown_check_names_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", "chains"])
    assert ended.value.code == 2
    assert "prefix_identity" in capsys.readouterr().err


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "usage: kvcanary" in capsys.readouterr().err


def test_build_makes_a_library_for_images_without_a_compiler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcanary_plugin.kernels import build

    made: list[tuple[str, object]] = []
    monkeypatch.setattr(build, "build_cpu", lambda *, output: made.append(("cpu", output)) or "c")
    monkeypatch.setattr(
        build, "build_cuda", lambda *, arches, output: made.append(("cuda", arches)) or "g"
    )
    arguments = ["build", "--arch", "9.0", "--arch", "10.0", "--output", str(tmp_path)]
    assert main(arguments) == 0
    assert made == [("cpu", tmp_path), ("cuda", ["9.0", "10.0"])]
    assert capsys.readouterr().out == "c\ng\n"


def test_build_with_a_malformed_architecture_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcanary_plugin.kernels import build

    monkeypatch.setattr(build, "build_cpu", lambda *, output: "c")
    assert main(["build", "--arch", "hopper", "--output", str(tmp_path)]) == 2
    assert "'hopper'" in capsys.readouterr().err


def test_every_command_explains_itself_without_loading_torch() -> None:
    """A command that is heavy imports what it needs when it runs."""
    program = f"""
import sys
from kvcanary_plugin.cli import main
for arguments in {[["--help"]] + [[name] for name in ("check-config", "build", "explain")]}:
    try:
        main([*arguments, "--help"])
    except SystemExit as ended:
        assert ended.code == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, stdout=subprocess.PIPE)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for command in COMMANDS:
        name = command.__name__.rsplit(".", 1)[1].replace("_", "-")
        assert re.search(rf"^    {name}\s", text, re.MULTILINE), name


def test_a_server_of_an_engine_that_is_not_there_ends_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcanary_plugin.drill import engines

    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    for command in ("demo", "drill", "soak"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--engine", "vllm"])
        assert ended.value.code == 2
        assert "make venv-vllm" in capsys.readouterr().err


def test_without_a_name_the_engine_that_is_installed_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvcanary_plugin.drill import engines

    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: name == "vllm" or None)
    assert engines.installed_engine(None) is engines.VLLM
    with pytest.raises(engines.NoEngineError, match="SGLang"):
        engines.installed_engine("sglang")
