"""The concatenation as tensor operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcanary_plugin.kernels.arguments import check_concatenate


def concatenate_integers_torch_reference(
    *, arrays: Sequence[torch.Tensor], output: torch.Tensor
) -> None:
    """Reference of ``concatenate_integers``: same arguments, bytes and errors."""
    check_concatenate(arrays=arrays, output=output)
    start = 0
    for array in arrays:
        output[start : start + array.numel()] = array
        start += array.numel()
