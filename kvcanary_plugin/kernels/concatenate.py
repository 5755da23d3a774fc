"""Integer arrays behind one another in a single buffer, whatever their widths: one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from kvcanary_plugin.kernels.arguments import check_concatenate
from kvcanary_plugin.kernels.backend import kernels_for
from kvcanary_plugin.kernels.concatenate_ref import concatenate_integers_torch_reference

# Arrays that one launch takes.
ARRAYS_PER_LAUNCH: Final = 10


def concatenate_integers(*, arrays: Sequence[torch.Tensor], output: torch.Tensor) -> None:
    """Copy ``arrays`` one behind the other into ``output``, widened to int64.

    One launch for every ten arrays, on the current stream; nothing is allocated, nothing
    synchronises. A concatenation by torch takes a launch for each dtype and a view of each array.

    Args:
        arrays: int32 or int64 [n_i] each, contiguous, on the device of ``output``.
        output: int64 [sum of all n_i], contiguous.

    ValueError for a wrong shape, dtype or device.
    """
    kernels = kernels_for(output.device.type)
    if kernels is None:
        concatenate_integers_torch_reference(arrays=arrays, output=output)
        return
    try:
        start = 0
        for first in range(0, len(arrays), ARRAYS_PER_LAUNCH):
            some = arrays[first : first + ARRAYS_PER_LAUNCH]
            missing = (None,) * (ARRAYS_PER_LAUNCH - len(some))
            start = kernels.canary_concatenate(output, start, *some, *missing)
        if start != output.shape[0]:
            check_concatenate(arrays=arrays, output=output)
    except Exception:
        check_concatenate(arrays=arrays, output=output)
        raise
