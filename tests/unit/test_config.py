"""Loading: what is accepted, and what every kind of wrong input is told."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvcanary_plugin.checks import CHECKS
from kvcanary_plugin.config import (
    CHECK_NAMES,
    RESERVED_LABELS,
    CanaryConfig,
    ConfigError,
    ConfigProblem,
    iter_settings,
    load_config,
)
from kvcanary_plugin.metrics import METRICS, RANK_LABELS

CONFIGS = Path(__file__).parents[2] / "configs"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "canary.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(path: Path | None, environ: dict[str, str] | None = None) -> list[ConfigProblem]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ or {})
    text = str(caught.value)
    for problem in caught.value.problems:
        assert str(problem) in text
        assert problem.allowed
        assert problem.do
    return list(caught.value.problems)


def only_problem(path: Path | None, environ: dict[str, str] | None = None) -> ConfigProblem:
    problems = problems_of(path, environ)
    assert len(problems) == 1, problems
    return problems[0]


# --- the three files --------------------------------------------------------------------------


def test_production_is_the_default() -> None:
    assert load_config(CONFIGS / "production.yaml", {}) == CanaryConfig()


def test_production_setting_matches_the_design() -> None:
    config = load_config(CONFIGS / "production.yaml", {})
    assert config.mode == "log"
    assert config.verify.real_kv == "none"
    assert config.seal.real_kv == "all"
    assert 0 < config.reverify.sample < 1
    assert config.scrub.percent_of_step_time == 1.0
    assert not config.write_input_assert
    assert not config.report.include_tokens
    assert not config.report.every_row
    assert not config.faults.allowed


def test_ci_setting_matches_the_design() -> None:
    config = load_config(CONFIGS / "ci.yaml", {})
    assert config.mode == "raise"
    assert config.verify.real_kv == config.seal.real_kv == "all"
    assert config.reverify.sample == 1.0
    assert config.scrub.is_off
    assert config.write_input_assert
    assert config.report.every_row
    assert not config.report.include_tokens
    assert all(getattr(config.checks, name) for name in CHECK_NAMES)


def test_debug_setting_matches_the_design() -> None:
    config = load_config(CONFIGS / "debug.yaml", {})
    assert config.mode == "log"
    assert config.verify.real_kv == config.seal.real_kv == "all"
    assert config.reverify.sample == 1.0
    assert config.scrub.percent_of_step_time == 5.0
    assert config.write_input_assert
    assert config.report.every_row
    assert config.report.include_tokens


# --- the model --------------------------------------------------------------------------------


def test_every_setting_is_described_and_has_bounds_in_words() -> None:
    for setting in iter_settings():
        assert setting.description.endswith("."), setting.name
        assert setting.allowed, setting.name
        if "number" in setting.allowed:
            assert " from " in setting.allowed, f"{setting.name} has no bounds"
            assert setting.unit or setting.name == "metrics.port", f"{setting.name} has no unit"


def test_exactly_these_settings_may_change_while_serving() -> None:
    assert {setting.name for setting in iter_settings() if setting.reloadable} == {
        "mode",
        "write_input_assert",
        "reverify.sample",
        "scrub.percent_of_step_time",
        "scrub.bytes_per_second",
        "log.max_reports_per_minute",
    }


def test_there_is_one_switch_per_check() -> None:
    assert sorted(CHECK_NAMES) == sorted(check.label for check in CHECKS)


def test_extra_labels_cannot_take_a_label_that_a_metric_uses() -> None:
    used = {label for metric in METRICS for label in metric.labels} | set(RANK_LABELS)
    assert used <= RESERVED_LABELS


def test_config_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValidationError):
        CanaryConfig().mode = "off"  # type: ignore[misc]


def test_every_setting_survives_a_dump_and_load(tmp_path: Path) -> None:
    config = load_config(CONFIGS / "debug.yaml", {"KVCANARY_REPORT__DIRECTORY": str(tmp_path)})
    assert CanaryConfig.model_validate(config.model_dump(mode="json")) == config


# --- files that load --------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "# nothing\n", "scrub:\n  # percent_of_step_time: 3\n"])
def test_file_without_values_means_the_defaults(tmp_path: Path, text: str) -> None:
    assert load_config(write(tmp_path, text), {}) == CanaryConfig()


def test_bare_off_is_the_mode_off_although_yaml_reads_it_as_false(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "mode: off\n"), {}).mode == "off"


def test_bytes_per_second_replaces_the_default_percentage(tmp_path: Path) -> None:
    scrub = load_config(write(tmp_path, "scrub: {bytes_per_second: 1000000}\n"), {}).scrub
    assert (scrub.percent_of_step_time, scrub.bytes_per_second) == (None, 1_000_000)
    assert not scrub.is_off


def test_path_comes_from_the_variable_when_none_is_given(tmp_path: Path) -> None:
    path = write(tmp_path, "ring: {capacity: 64}\n")
    assert load_config(None, {"KVCANARY_CONFIG": str(path)}).ring.capacity == 64
    other = tmp_path / "other.yaml"
    other.write_text("ring: {capacity: 128}\n")
    assert load_config(other, {"KVCANARY_CONFIG": str(path)}).ring.capacity == 128


# --- variables --------------------------------------------------------------------------------


def test_variable_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "mode: log\nscrub: {percent_of_step_time: 7}\n")
    config = load_config(
        path,
        {
            "KVCANARY_MODE": "raise",
            "KVCANARY_SCRUB__PERCENT_OF_STEP_TIME": "2",
            "KVCANARY_WRITE_INPUT_ASSERT": "true",
            "KVCANARY_METRICS__LABELS__POOL": "blue",
            "HOME": "/root",
        },
    )
    assert config.mode == "raise"
    assert config.scrub.percent_of_step_time == 2.0
    assert config.write_input_assert
    assert config.metrics.labels == {"pool": "blue"}


@pytest.mark.parametrize("text", ["", "null"])
def test_variable_unsets_an_optional_setting(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, "metrics: {port: 9400}\n")
    assert load_config(path, {"KVCANARY_METRICS__PORT": text}).metrics.port is None


def test_none_in_a_variable_stays_the_word_where_it_is_a_value() -> None:
    environ = {"KVCANARY_SEAL__REAL_KV": "none", "KVCANARY_SCRUB__PERCENT_OF_STEP_TIME": "0"}
    assert load_config(None, environ).seal.real_kv == "none"


def test_every_setting_has_a_variable_of_its_own() -> None:
    variables = [setting.variable for setting in iter_settings()]
    assert len(variables) == len(set(variables))
    assert "KVCANARY_CONFIG" not in variables


def test_unknown_variable_is_an_error_that_names_near_matches() -> None:
    problem = only_problem(None, {"KVCANARY_WRITE_INPUT_ASERT": "true"})
    assert problem.field == "KVCANARY_WRITE_INPUT_ASERT"
    assert "KVCANARY_WRITE_INPUT_ASSERT" in problem.do


@pytest.mark.parametrize("variable", ["KVCANARY_SCRUB", "KVCANARY_", "KVCANARY_METRICS__LABELS__"])
def test_variable_that_names_no_leaf_is_an_error(variable: str) -> None:
    assert only_problem(None, {variable: "1"}).field == variable


def test_wrong_value_in_a_variable_is_located_there() -> None:
    problem = only_problem(None, {"KVCANARY_RING__CAPACITY": "many"})
    assert problem.where == "environment variable KVCANARY_RING__CAPACITY"
    assert problem.field == "ring.capacity"
    assert "many" in problem.value


# --- files that do not load -------------------------------------------------------------------


def test_missing_file(tmp_path: Path) -> None:
    problem = only_problem(tmp_path / "none.yaml")
    assert "No such file" in problem.value
    assert str(tmp_path / "none.yaml") in problem.where


def test_directory_in_place_of_a_file(tmp_path: Path) -> None:
    assert "cannot be read" in only_problem(tmp_path).value


def test_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "canary.yaml"
    path.write_bytes(b"mode: \xff\xfe\n")
    assert "UTF-8" in only_problem(path).value


@pytest.mark.parametrize(
    ("text", "line"),
    [("mode: [log\nring: 3\n", 2), ("mode: log\n  ring: 3\n", 2), ("\tmode: log\n", 1)],
)
def test_wrong_yaml_names_the_line(tmp_path: Path, text: str, line: int) -> None:
    problem = only_problem(write(tmp_path, text))
    assert "not valid YAML" in problem.value
    assert problem.where.endswith(f"line {line}")


@pytest.mark.parametrize("text", ["- mode\n- log\n", "log\n", "3\n"])
def test_file_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    assert "mapping" in only_problem(write(tmp_path, text)).allowed


def test_python_objects_are_not_constructed(tmp_path: Path) -> None:
    path = write(tmp_path, "mode: !!python/object/apply:os.getcwd []\n")
    assert "not valid YAML" in only_problem(path).value


def test_name_given_twice(tmp_path: Path) -> None:
    path = write(tmp_path, "scrub:\n  percent_of_step_time: 1\n  percent_of_step_time: 2\n")
    problem = only_problem(path)
    assert problem.field == "scrub.percent_of_step_time"
    assert problem.where.endswith("line 3")
    assert "got a second value in the same section; allowed: each name once" in str(problem)


@pytest.mark.parametrize(
    ("text", "field", "suggested"),
    [
        ("scrubb: {}\n", "scrubb", "scrub"),
        ("log: {max_report_per_minute: 3}\n", "log.max_report_per_minute", "log.max_reports_per"),
        ("percent_of_step_time: 3\n", "percent_of_step_time", "scrub.percent_of_step_time"),
        ("checks: {chains: true}\n", "checks.chains", "checks.chain"),
    ],
)
def test_unknown_name_suggests_the_near_one(
    tmp_path: Path, text: str, field: str, suggested: str
) -> None:
    problem = only_problem(write(tmp_path, text))
    assert problem.field == field
    assert f"did you mean {suggested}" in problem.do
    assert problem.where.endswith("line 1")


def test_unknown_name_without_a_near_one(tmp_path: Path) -> None:
    assert only_problem(write(tmp_path, "zzzzzz: 1\n")).do == "remove it"


@pytest.mark.parametrize(
    ("text", "field", "allowed"),
    [
        ("mode: loud\n", "mode", "off, log, abort, raise"),
        ("mode: true\n", "mode", "off, log, abort, raise"),
        ("mode:\n", "mode", "off, log, abort, raise"),
        ("scrub: {percent_of_step_time: 51}\n", "scrub.percent_of_step_time", "0.0 to 50.0"),
        ("scrub: {percent_of_step_time: -1}\n", "scrub.percent_of_step_time", "0.0 to 50.0"),
        ("scrub: {percent_of_step_time: .nan}\n", "scrub.percent_of_step_time", "0.0 to 50.0"),
        ("reverify: {sample: 1.01}\n", "reverify.sample", "0.0 to 1.0"),
        ("ring: {capacity: 0}\n", "ring.capacity", "64 to 1048576"),
        ("ring: {capacity: 63}\n", "ring.capacity", "64 to 1048576"),
        ("ring: {capacity: 64.5}\n", "ring.capacity", "a whole number"),
        ("drain: {interval_seconds: 0}\n", "drain.interval_seconds", "0.005 to 60.0"),
        ("drain: {interval_seconds: .inf}\n", "drain.interval_seconds", "0.005 to 60.0"),
        ("metrics: {port: 0}\n", "metrics.port", "1 to 65535 or null"),
        ("metrics: {port: 65536}\n", "metrics.port", "1 to 65535 or null"),
        ("metrics: {address: ''}\n", "metrics.address", "text"),
        ("verify: {real_kv: some}\n", "verify.real_kv", "none, partial, all"),
        ("checks: {chain: maybe}\n", "checks.chain", "true or false"),
        ("write_input_assert: 7\n", "write_input_assert", "true or false"),
        ("report: {max_bytes: 1}\n", "report.max_bytes", "65536 to"),
        ("log: {max_reports_per_minute: 0}\n", "log.max_reports_per_minute", "1 to 6000"),
        ("ring: 5\n", "ring", "a section"),
    ],
)
def test_value_that_is_not_allowed(tmp_path: Path, text: str, field: str, allowed: str) -> None:
    problem = only_problem(write(tmp_path, text))
    assert problem.field == field
    assert allowed in problem.allowed
    assert problem.where.endswith("line 1")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("group", "taken"),
        ("engine", "taken"),
        ("le", "taken"),
        ("1st", "not one"),
        ("a-b", "not one"),
        ("__name", "not one"),
        ("näme", "not one"),
        ('"a\\n"', "not one"),
        ("''", "not one"),
    ],
)
def test_extra_label_that_prometheus_or_we_cannot_take(
    tmp_path: Path, name: str, reason: str
) -> None:
    problem = only_problem(write(tmp_path, f"metrics:\n  labels:\n    {name}: x\n"))
    assert problem.field == "metrics.labels"
    assert reason in problem.do


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (
            "scrub: {percent_of_step_time: 1, bytes_per_second: 1000}\n",
            "scrub.bytes_per_second",
        ),
        ("scrub: {percent_of_step_time: null}\n", "scrub.percent_of_step_time"),
        ("verify: {real_kv: partial}\n", "verify.real_kv"),
        ("seal: {real_kv: none}\n", "seal.real_kv"),
        ("checks: {real_kv: false}\n", "checks.real_kv"),
        ("checks: {write_input: false}\nwrite_input_assert: true\n", "write_input_assert"),
        ("faults: {control_file: /tmp/faults}\n", "faults.control_file"),
    ],
)
def test_settings_that_contradict_each_other(tmp_path: Path, text: str, field: str) -> None:
    problem = only_problem(write(tmp_path, text))
    assert problem.field == field
    assert problem.where.endswith(("line 1", "line 2"))


def test_braces_in_a_contradicting_value_are_shown_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path, "faults: {control_file: '/tmp/{0}{name}'}\n")
    assert only_problem(path).value == "/tmp/{0}{name}"


def test_faults_are_allowed_only_by_the_word(tmp_path: Path) -> None:
    path = write(tmp_path, "faults: {allowed: true, control_file: /tmp/faults}\n")
    assert load_config(path, {}).faults.control_file == Path("/tmp/faults")
    assert not CanaryConfig().faults.allowed


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "mode: loud\nring:\n  capacity: 0\nscrubb: 1\n")
    fields = {problem.field for problem in problems_of(path, {"KVCANARY_MOD": "log"})}
    assert fields == {"mode", "ring.capacity", "scrubb", "KVCANARY_MOD"}


_NAMES = st.sampled_from(
    ["mode", "scrub", "metrics", "labels", "port", "percent_of_step_time", "faults", "directory"]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: (
        st.dictionaries(_NAMES | st.text(max_size=4) | st.integers(), inner, max_size=3)
        | st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(_NAMES, _VALUES, max_size=4))
def test_whatever_the_file_holds_the_only_error_is_ours(values: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "canary.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        with contextlib.suppress(ConfigError):
            load_config(path, {})
