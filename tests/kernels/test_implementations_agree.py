"""The compiled kernels and the torch references leave the same bytes behind, whatever comes in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcanary_plugin.kernels as kernels
from tests.kernels import scenes

SEEDS = st.integers(0, 2**32 - 1)

LAUNCHES: list[tuple[str, Callable[[scenes.Dice], dict[str, Any]]]] = [
    ("launch_canary_write_kernel", scenes.random_write),
    ("launch_canary_verify_kernel", scenes.random_verify),
    ("launch_canary_table_verify_kernel", scenes.random_table_verify),
    ("launch_canary_plan_kernels", scenes.random_plan),
    ("launch_canary_prepare_kernel", scenes.random_prepare),
    ("launch_canary_seal_kernel", scenes.random_seal),
    ("launch_canary_scrub_kernel", scenes.random_scrub),
    ("launch_canary_scrub_range_kernel", scenes.random_scrub_range),
    ("launch_canary_snapshot_kernel", scenes.random_snapshot),
    ("launch_canary_compare_tables_kernel", scenes.random_compare_tables),
    ("translate_out_cache_loc", scenes.random_translate),
    ("concatenate_integers", scenes.random_concatenate),
]


@pytest.mark.parametrize(("name", "arguments_of"), LAUNCHES, ids=[name for name, _ in LAUNCHES])
@given(seed=SEEDS)
def test_compiled_kernel_equals_torch_reference(
    name: str, arguments_of: Callable[[scenes.Dice], dict[str, Any]], seed: int
) -> None:
    arguments = arguments_of(scenes.Dice(seed))
    compiled = scenes.run_on_copy(getattr(kernels, name), arguments)
    reference = scenes.run_on_copy(getattr(kernels, f"{name}_torch_reference"), arguments)
    for argument in arguments:
        scenes.assert_same(compiled[argument], reference[argument])
