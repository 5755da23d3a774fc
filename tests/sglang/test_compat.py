"""What the hook uses of SGLang exists: in the installed version here, in the others by command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvcanary_plugin.hooks.sglang import versions
from kvcanary_plugin.hooks.sglang.layouts import LAYOUTS
from kvcanary_plugin.hooks.sglang.pools import COMPOSITES
from tests.sglang import compat, support_tables
from tests.sglang.compat import Hook, problem_of_hook, problem_of_members
from tests.sglang.doc_blocks import block
from tests.sglang.engine_source import Source

sglang = pytest.importorskip("sglang")

# Where `python -m tests.sglang.compat DIRECTORY` has put the versions.
SOURCES = "SGLANG_SOURCES"


def column_of(version: str) -> dict[str, str]:
    """The verdicts on a version as they stand in the docs."""
    header, _, *rows = (line.strip("| ").split(" | ") for line in block(compat.BLOCK).splitlines())
    index = [cell.strip() for cell in header].index(version)
    return {row[0].strip(): row[index].strip() for row in rows}


def test_the_installed_version_has_everything_and_stands_so_in_the_docs():
    source = Source(Path(sglang.__file__).parents[1])
    found = dict(compat.check(source, compat.hooks()))
    assert set(found.values()) == {"yes"}
    again = "python -m tests.sglang.compat DIRECTORY"
    assert column_of(sglang.__version__) == found, f"run {again}"


@pytest.mark.parametrize("version", compat.VERSIONS)
def test_another_version_stands_in_the_docs_as_its_source_says(version: str):
    directory = os.environ.get(SOURCES)
    if directory is None:
        pytest.skip(f"needs the unpacked wheels: {SOURCES}; see docs/develop.md")
    found = dict(compat.check(Source(Path(directory) / version), compat.hooks()))
    assert column_of(version) == found
    assert compat.problems(found) == []


def test_everything_that_is_hooked_is_checked():
    named = {
        value
        for name, value in vars(versions).items()
        if name.isupper() and isinstance(value, str) and value.startswith("sglang.")
    } - {versions._UPDATER}
    assert {hook.target for hook in compat.hooks()} == named


def test_every_pool_with_an_adapter_is_checked():
    checked = {path.rsplit(".", 1)[1] for path in compat.POOLS}
    alone = {name for name, layout in LAYOUTS.items() if layout.group is not None}
    assert checked == alone | set(COMPOSITES)


ENGINE = """
from sglang.base import Base

class Runner(Base):
    field: int = 0

    def __init__(self):
        self.pool, self.table = 1, 2

    def forward(self, batch, skip=None, *, fast=False): ...

def load(batch, index): ...
"""


@pytest.fixture
def source(tmp_path: Path) -> Source:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "runner.py").write_text(ENGINE)
    (package / "base.py").write_text("class Base:\n    def sample(self, logits): ...\n")
    return Source(tmp_path)


def test_members_are_fields_attributes_methods_and_inherited_ones(source: Source):
    path = "sglang.runner.Runner"
    everything = ("field", "pool", "table", "forward", "sample", frozenset({"old", "table"}))
    assert problem_of_members(source, path, everything) is None
    missing = problem_of_members(source, path, ("pool", "gone", frozenset({"old", "older"})))
    assert missing == "no gone, old or older"
    assert source.has_class(path)
    assert not source.has_class("sglang.runner.Other")
    assert not source.has_class("sglang.nothing.Runner")


def around(original: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> None: ...
def exactly_two(original: Any, batch: Any, index: Any) -> None: ...
def three(original: Any, batch: Any, index: Any, more: Any) -> None: ...
def none_by_name(original: Any, runner: Any, batch: Any, skip: Any) -> None: ...


@pytest.mark.parametrize(
    ("target", "function", "problem"),
    [
        ("sglang.runner.Runner.forward", around, None),
        ("sglang.runner.Runner.sample", around, None),
        ("sglang.runner.load", exactly_two, None),
        ("sglang.runner.gone", around, "missing"),
        ("sglang.gone.Runner.forward", around, "missing"),
        ("sglang.runner.load", three, "takes 2 arguments, the hook expects 3"),
        ("sglang.runner.Runner.forward", exactly_two, "takes 3 arguments, the hook passes 2"),
        (
            "sglang.runner.Runner.forward",
            none_by_name,
            "takes fast= by name, the hook does not pass it",
        ),
    ],
)
def test_a_hook_needs_a_target_that_takes_what_it_passes(
    source: Source, target: str, function: Any, problem: str | None
):
    assert problem_of_hook(source, Hook(target, function, added=1)) == problem


# ---- the tables of pools and features ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "made"),
    [
        (support_tables.POOLS, support_tables.pools_table),
        (support_tables.FEATURES_BY_POOL, support_tables.features_table),
    ],
)
def test_the_tables_in_the_docs_are_what_the_code_says(name: str, made: Any):
    assert block(name) == made(), "run `python -m tests.sglang.support_tables`"
