"""From a YAML file and KVCANARY_* variables to a CanaryConfig, or to every problem in them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kvcanary_plugin.config.model import CONTRADICTION, CanaryConfig
from kvcanary_plugin.config.problems import ConfigError, ConfigProblem
from kvcanary_plugin.config.settings import VARIABLE_PREFIX, Setting, iter_settings, section_of

CONFIG_PATH_VARIABLE = "KVCANARY_CONFIG"

Place = dict[tuple[str, ...], str]


def load_config(path: str | Path | None, environ: Mapping[str, str]) -> CanaryConfig:
    """The settings of ``path`` overridden by the ``KVCANARY_*`` variables of ``environ``.

    Args:
        path: YAML file; None takes the one that ``KVCANARY_CONFIG`` names, or the defaults.
        environ: usually ``os.environ``.

    Raises:
        ConfigError: with every problem found, each with field, value, what is allowed and where.
    """
    problems: list[ConfigProblem] = []
    places: Place = {}
    values: dict[str, Any] = {}
    file = path if path is not None else environ.get(CONFIG_PATH_VARIABLE) or None
    if file is not None:
        values = _read_file(Path(file), places, problems)
    _apply_variables(values, environ, places, problems)
    try:
        config = CanaryConfig.model_validate(values)
    except ValidationError as error:
        problems += _validation_problems(error, places)
    if problems:
        raise ConfigError(problems)
    return config


def _read_file(file: Path, places: Place, problems: list[ConfigProblem]) -> dict[str, Any]:
    """Values of a YAML file; the line of each goes to ``places``, what is wrong to ``problems``."""

    def add(value: str, allowed: str, do: str, where: str = str(file), field: str = "") -> None:
        problems.append(
            ConfigProblem(field=field, value=value, allowed=allowed, do=do, where=where)
        )

    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        add(f"cannot be read ({reason})", "a readable YAML file", "correct the path or the file")
        return {}
    except UnicodeDecodeError as error:
        add(f"is not UTF-8 text ({error.reason})", "a YAML file", "save it as UTF-8")
        return {}
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return {}
        for name, line in _mark_lines(root, (), str(file), places):
            add(
                "a second value in the same section",
                "each name once",
                "remove one of the two",
                f"{file}, line {line}",
                name,
            )
        values = loader.construct_document(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = str(file) if mark is None else f"{file}, line {mark.line + 1}"
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        add(f"is not valid YAML ({reason})", "YAML", "correct that line", where)
        return {}
    if not isinstance(values, dict):
        add(
            f"holds {_shown(values)} at the top",
            "a mapping of setting names to values",
            "write `name: value` lines",
        )
        return {}
    return _without_empty_sections(values)


def _mark_lines(
    node: yaml.Node, path: tuple[str, ...], file: str, places: Place
) -> list[tuple[str, int]]:
    """Notes the line of every value below ``node``; returns (name, line) of repeated names."""
    if not isinstance(node, yaml.MappingNode):
        return []
    repeated = []
    seen = set()
    for key, value in node.value:
        here = (*path, str(key.value))
        line = key.start_mark.line + 1
        if here in seen:
            repeated.append((".".join(here), line))
        seen.add(here)
        places[here] = f"{file}, line {line}"
        repeated += _mark_lines(value, here, file, places)
    return repeated


def _without_empty_sections(values: dict[Any, Any]) -> dict[str, Any]:
    """A section whose lines are all commented out reads as null in YAML: it means the defaults."""
    return {
        str(key): value
        for key, value in values.items()
        if value is not None or section_of((str(key),)) is None
    }


def _apply_variables(
    values: dict[str, Any],
    environ: Mapping[str, str],
    places: Place,
    problems: list[ConfigProblem],
) -> None:
    settings = {setting.variable: setting for setting in iter_settings()}
    for variable in sorted(environ):
        if not variable.startswith(VARIABLE_PREFIX) or variable == CONFIG_PATH_VARIABLE:
            continue
        text = environ[variable]
        setting, path = _setting_of_variable(variable, settings)
        if setting is None:
            near = difflib.get_close_matches(variable, [*settings, CONFIG_PATH_VARIABLE], n=3)
            problems.append(
                ConfigProblem(
                    field=variable,
                    value=repr(text),
                    allowed="variables that name a setting",
                    do=_did_you_mean(near) or "remove it",
                    where="environment",
                )
            )
            continue
        places[path] = f"environment variable {variable}"
        _put(values, path, None if setting.optional and text in ("", "null") else text)


def _setting_of_variable(
    variable: str, settings: Mapping[str, Setting]
) -> tuple[Setting | None, tuple[str, ...]]:
    """The setting that ``variable`` overrides, and the path of the value in it."""
    exact = settings.get(variable)
    if exact is not None and not exact.is_mapping:
        return exact, exact.path
    for setting in settings.values():
        prefix = f"{setting.variable}__"
        if setting.is_mapping and variable.startswith(prefix) and variable != prefix:
            return setting, (*setting.path, variable.removeprefix(prefix).lower())
    return None, ()


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Sets the value at ``path``; a section that is no mapping is left for the model to refuse."""
    *sections, name = path
    for section in sections:
        inner = values.get(section)
        if inner is None:
            inner = values[section] = {}
        if not isinstance(inner, dict):
            return
        values = inner
    values[name] = value


def _validation_problems(error: ValidationError, places: Place) -> list[ConfigProblem]:
    problems = []
    for detail in error.errors(include_url=False):
        if detail["type"] == CONTRADICTION:
            for problem in detail["ctx"]["all"]:
                where = _place(tuple(problem.field.split(".")), places)
                problems.append(
                    ConfigProblem(
                        field=problem.field,
                        value=problem.value,
                        allowed=problem.allowed,
                        do=problem.do,
                        where=where,
                    )
                )
            continue
        path = tuple(str(part) for part in detail["loc"])
        setting = _setting_at(path)
        if detail["type"] == "extra_forbidden":
            value, allowed, do = _unknown_name(path, detail["input"])
        elif setting is not None:
            value, allowed = _shown(detail["input"]), setting.allowed
            own_words = detail["ctx"]["error"] if detail["type"] == "value_error" else None
            do = str(own_words) if own_words else "set it to a value that is allowed"
        else:
            value = _shown(detail["input"])
            allowed = "a section: names and values below it"
            do = "indent the section's settings under its name"
        problems.append(
            ConfigProblem(
                field=".".join(path),
                value=value,
                allowed=allowed,
                do=do,
                where=_place(path, places),
            )
        )
    return problems


def _setting_at(path: tuple[str, ...]) -> Setting | None:
    """The setting that ``path`` names or lies in."""
    return next(
        (setting for setting in iter_settings() if setting.path == path[: len(setting.path)]), None
    )


def _unknown_name(path: tuple[str, ...], given: Any) -> tuple[str, str, str]:
    """Value, allowed and advice for a name that the model does not know."""
    section = section_of(path[:-1])
    known = [] if section is None else list(section.model_fields)
    names = [setting.name for setting in iter_settings()]
    near = [".".join((*path[:-1], name)) for name in difflib.get_close_matches(path[-1], known)]
    near += [name for name in names if name.endswith(f".{path[-1]}")]
    near += difflib.get_close_matches(".".join(path), names)
    advice = _did_you_mean(list(dict.fromkeys(near))[:3]) or "remove it"
    return f"{_shown(given)} (unknown name)", ", ".join(known), advice


def _did_you_mean(names: list[str]) -> str:
    return f"did you mean {' or '.join(names)}?" if names else ""


def _place(path: tuple[str, ...], places: Place) -> str:
    """Where the value at ``path`` came from; for a value inside it, where the nearest one did."""
    for length in range(len(path), 0, -1):
        if path[:length] in places:
            return places[path[:length]]
    return ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
