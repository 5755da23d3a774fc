"""An SGLang that is not installed, as its source says: classes, members, signatures."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


class Source:
    """A folder that holds the package ``sglang``; nothing of it is imported."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, ast.Module | None] = {}

    def function(self, path: str) -> ast.FunctionDef | None:
        """The function or method of a dotted path; inherited methods are found as well."""
        owner, name = path.rsplit(".", 1)
        module = self._module(owner)
        if module is not None:
            return _function(module.body, name)
        for _, definition in self._with_bases(owner):
            found = _function(definition.body, name)
            if found is not None:
                return found
        return None

    def has_class(self, path: str) -> bool:
        return next(self._with_bases(path), None) is not None

    def members(self, path: str) -> set[str]:
        """Methods, fields and attributes that a class or its bases define."""
        return {
            name for _, definition in self._with_bases(path) for name in _members_of(definition)
        }

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            path = self._root.joinpath(*name.split("."))
            files = (path.with_suffix(".py"), path / "__init__.py")
            found = next((file for file in files if file.exists()), None)
            self._modules[name] = ast.parse(found.read_text()) if found else None
        return self._modules[name]

    def _with_bases(self, path: str) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and the bases that can be followed through imports, with their modules."""
        module_name, class_name = path.rsplit(".", 1)
        module = self._module(module_name)
        if module is None:
            return
        for statement in module.body:
            if isinstance(statement, ast.ClassDef) and statement.name == class_name:
                yield module_name, statement
                for base in statement.bases:
                    if isinstance(base, ast.Name):
                        yield from self._with_bases(f"{module_name}.{base.id}")
                return
        for statement in ast.walk(module):
            if isinstance(statement, ast.ImportFrom) and statement.module:
                for alias in statement.names:
                    if (alias.asname or alias.name) == class_name:
                        yield from self._with_bases(f"{statement.module}.{alias.name}")
                        return


def _function(body: list[ast.stmt], name: str) -> ast.FunctionDef | None:
    for statement in body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return statement
    return None


def _members_of(definition: ast.ClassDef) -> Iterator[str]:
    for statement in definition.body:
        if isinstance(statement, ast.FunctionDef):
            yield statement.name
            yield from _assigned_to_self(statement)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id
        elif isinstance(statement, ast.Assign):
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))


def _assigned_to_self(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            for part in parts:
                if (
                    isinstance(part, ast.Attribute)
                    and isinstance(part.value, ast.Name)
                    and part.value.id == "self"
                ):
                    yield part.attr
