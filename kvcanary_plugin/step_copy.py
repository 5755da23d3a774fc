"""The arrays of a step in a buffer of their own, which no engine touches.

Engines keep a step's arrays in persistent buffers that the next forward overwrites, and change some
while the forward runs: token ids of images are clamped in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcanary_plugin.forward import ForwardStep
from kvcanary_plugin.kernels import concatenate_integers


@dataclass(frozen=True, slots=True, eq=False)
class StepCopy:
    """Copies of the arrays of one step, with padding, on the same device.

    Fields:
        integers: int64, the arrays one behind the other.
        sizes: of each of them, in the order in which :func:`copy_of` takes them.
        has_keys: whether the identity keys are among them, as the last.
    """

    integers: torch.Tensor
    sizes: tuple[int, ...]
    has_keys: bool

    def by_token(self) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """(token ids, positions, slots of each group), int64 [n] each: views."""
        arrays = list(torch.split(self.integers, list(self.sizes)))
        if self.has_keys:
            arrays.pop()
        _rows, _uids, _prefix_lens, _extend_lens, input_ids, positions, *slots = arrays
        return input_ids, positions, tuple(slots)


def copy_of(step: ForwardStep) -> StepCopy:
    """Copies what ``step`` holds on the device: one launch on the current stream."""
    keys = () if step.identity_keys is None else (step.identity_keys,)
    arrays = (
        step.request_rows,
        step.request_uids,
        step.prefix_lens,
        step.extend_lens,
        step.input_ids,
        step.positions,
        *step.out_cache_loc,
        *keys,
    )
    sizes = tuple([array.shape[0] for array in arrays])
    integers = torch.empty(sum(sizes), dtype=torch.int64, device=step.request_rows.device)
    concatenate_integers(arrays=arrays, output=integers)
    return StepCopy(integers, sizes, has_keys=bool(keys))
