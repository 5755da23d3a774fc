"""Sources for K/V that does not lie one slot a row: strips in equal steps inside a page."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvcanary_plugin.kernels import RealKvSource


class UnsupportedLayout(ValueError):
    """K/V that lies in memory in a way that no source describes."""


def strip(tensor: torch.Tensor, *, offset: int, page_size: int, elements: int) -> RealKvSource:
    """A source over ``page_size * elements`` elements of each row of ``tensor`` [rows, ...].

    Args:
        offset: elements from the start of a row to the first slot's.
        page_size: slots of a row.
        elements: elements of a slot; the next slot's follow at once.
    """
    view = tensor.as_strided(
        (tensor.shape[0], page_size * elements),
        (tensor.stride(0), 1),
        tensor.storage_offset() + offset,
    )
    num_bytes = elements * tensor.element_size()
    return RealKvSource(
        tensor=view, page_size=page_size, num_bytes_per_token=num_bytes, read_bytes=num_bytes
    )


def head_strips(part: torch.Tensor) -> Iterator[RealKvSource]:
    """Strips of a view [pages, heads, tokens, size], whatever the order in memory.

    Raises:
        UnsupportedLayout: when slots do not follow each other in equal steps.
    """
    if part.ndim != 4:
        raise UnsupportedLayout(f"K/V of shape {list(part.shape)} has no adapter")
    _, heads, tokens, size = part.shape
    _, head_stride, token_stride, inner_stride = part.stride()
    if size > 1 and inner_stride != 1:
        raise UnsupportedLayout(f"K/V with strides {list(part.stride())} has no adapter")
    if heads == 1 or (head_stride == size and token_stride == heads * size):
        # All heads of a token stand side by side.
        if tokens > 1 and token_stride != heads * size:
            raise UnsupportedLayout(f"K/V with strides {list(part.stride())} has no adapter")
        yield strip(part, offset=0, page_size=tokens, elements=heads * size)
    elif token_stride == size:
        for head in range(heads):
            yield strip(part, offset=head * head_stride, page_size=tokens, elements=size)
    else:
        raise UnsupportedLayout(f"K/V with strides {list(part.stride())} has no adapter")
