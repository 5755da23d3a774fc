"""Work of a thread beside the engine's: on a stream of its own, without a trace elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvcanary_plugin.kernels.backend import kernels_for

_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal


@contextmanager
def beside_the_engine(stream: torch.cuda.Stream) -> Iterator[None]:
    """Inside, the calling thread works on ``stream`` and its device.

    A thread starts on device 0. With the stream of another device alone, torch would set device 0
    again at the end, and CUDA would make a context there: half a gigabyte for every rank.
    """
    device = stream.device
    with torch.cuda.device(device), _ignoring_captures(device), torch.cuda.stream(stream):
        yield


@contextmanager
def _ignoring_captures(device: torch.device) -> Iterator[None]:
    """Engines capture CUDA graphs again while they serve. As CUDA does it by default, a capture is
    lost when another thread asks an event or allocates."""
    kernels = kernels_for(device)
    if kernels is None:
        yield
        return
    before = kernels.canary_exchange_capture_mode(_THREAD_LOCAL)
    try:
        yield
    finally:
        kernels.canary_exchange_capture_mode(before)
