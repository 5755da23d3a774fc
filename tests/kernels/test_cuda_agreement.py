"""The CUDA kernels leave the bytes of the torch references behind, whatever comes in.

Small random scenes that reach every branch; the sizes at which kernels change their ways are in
``test_cuda_shapes.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels import scenes
from tests.kernels.cuda_support import assert_agreement, on_every_device
from tests.kernels.test_implementations_agree import LAUNCHES


@on_every_device
@pytest.mark.parametrize(("name", "scene"), LAUNCHES, ids=[name for name, _ in LAUNCHES])
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1))
def test_cuda_kernel_equals_torch_reference(
    name: str, scene: Callable[[scenes.Dice], dict[str, Any]], device: str, seed: int
) -> None:
    assert_agreement(name, scene(scenes.Dice(seed)), device)
