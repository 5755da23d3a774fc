"""The settings as a flat list with types and bounds in words: for docs, errors, variables."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kvcanary_plugin.config.model import CanaryConfig

VARIABLE_PREFIX = "KVCANARY_"

_TYPE_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One leaf of the model.

    Fields:
        path: names from the root to the leaf.
        allowed: type and bounds in words.
        optional: whether null is a value.
        unit, description, default, reloadable: as declared in the model.
        section: docstring of the section that holds it.
        is_mapping: whether the setting holds names of the operator's choice (metrics.labels).
    """

    path: tuple[str, ...]
    allowed: str
    optional: bool
    unit: str
    description: str
    default: Any
    reloadable: bool
    section: str
    is_mapping: bool

    @property
    def name(self) -> str:
        """Dotted name, as in error messages and docs."""
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        """Environment variable that overrides it."""
        return VARIABLE_PREFIX + "__".join(self.path).upper()


def iter_settings() -> Iterator[Setting]:
    """Every setting, in the order of the model."""
    yield from _settings_of(CanaryConfig, ())


def section_of(path: tuple[str, ...]) -> type[BaseModel] | None:
    """The section at ``path``, or None if there is none; the empty path is the whole model."""
    section: type[BaseModel] = CanaryConfig
    for name in path:
        field = section.model_fields.get(name)
        inner = None if field is None else _as_section(field)
        if inner is None:
            return None
        section = inner
    return section


def _settings_of(section: type[BaseModel], path: tuple[str, ...]) -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        inner = _as_section(field)
        if inner is not None:
            yield from _settings_of(inner, (*path, name))
            continue
        extra = field.json_schema_extra
        if not isinstance(extra, dict):
            raise TypeError(f"kvcanary: {'.'.join((*path, name))} is not declared with setting()")
        types_, optional = _alternatives(field.annotation)
        yield Setting(
            path=(*path, name),
            allowed=_allowed(field, types_, optional),
            optional=optional,
            unit=str(extra["unit"]),
            description=field.description or "",
            default=None if field.default is PydanticUndefined else field.default,
            reloadable=bool(extra["reloadable"]),
            section=section.__doc__ or "",
            is_mapping=any(typing.get_origin(type_) is dict for type_ in types_),
        )


def _as_section(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _alternatives(annotation: Any) -> tuple[list[Any], bool]:
    """Types of a union without None, and whether None was among them."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = list(typing.get_args(annotation))
    else:
        members = [annotation]
    return [member for member in members if member is not type(None)], type(None) in members


def _allowed(field: FieldInfo, alternatives: list[Any], optional: bool) -> str:
    words = []
    for alternative in alternatives:
        bounds = list(field.metadata)
        if typing.get_origin(alternative) is typing.Annotated:
            alternative, *constraints = typing.get_args(alternative)
            for constraint in constraints:
                bounds += constraint.metadata if isinstance(constraint, FieldInfo) else [constraint]
        words.append(_type_in_words(alternative) + _bounds_in_words(bounds))
    return " or ".join([*words, "null"] if optional else words)


def _type_in_words(type_: Any) -> str:
    if typing.get_origin(type_) is Literal:
        return ", ".join(str(option) for option in typing.get_args(type_))
    if typing.get_origin(type_) is dict:
        return "a mapping of label name to text"
    if typing.get_origin(type_) is tuple:
        return "a list of names"
    return _TYPE_NAMES[type_]


def _bounds_in_words(bounds: list[Any]) -> str:
    low = next((bound.ge for bound in bounds if hasattr(bound, "ge")), None)
    high = next((bound.le for bound in bounds if hasattr(bound, "le")), None)
    return "" if low is None or high is None else f" from {low} to {high}"
