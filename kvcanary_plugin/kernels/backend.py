"""Which implementation a launch runs on: C++ on CPU, CUDA on a GPU, or the torch reference."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvcanary_plugin.kernels.build import CompilerNotFoundError, load_module_for

logger = logging.getLogger(__name__)

# Device type -> compiled module; None: this process runs the torch reference there.
_loaded: dict[str, Any] = {}
_reference_requested = False


def load_kernels(
    device: torch.device | str,
    *,
    build_cache: Path | None = None,
    prebuilt: Path | None = None,
) -> str:
    """Make the kernels for ``device`` ready, so that no launch has to build them.

    A process holds one module per device type; the first call (or the first launch) decides it.

    Args:
        device: a CPU or CUDA device.
        build_cache: root of the build cache; None: ``~/.cache/kvcanary`` (or XDG_CACHE_HOME).
        prebuilt: directory with libraries built ahead of time.

    Returns ``"cuda"``, ``"cpu"``, or ``"torch reference"`` (CPU without a compiler and without a
    library built ahead of time; one warning says so). On CUDA that is a RuntimeError instead.
    """
    device = torch.device(device)
    kind = device.type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"kvcanary: device must be a CPU or CUDA device, got {device}")
    if kind not in _loaded:
        try:
            _loaded[kind] = load_module_for(device, cache_dir=build_cache, prebuilt_dir=prebuilt)
        except CompilerNotFoundError as error:
            if kind == "cuda":
                raise
            logger.warning("%s Until then the slow torch reference runs in its place.", error)
            _loaded[kind] = None
    return kind if _loaded[kind] is not None else "torch reference"


def kernels_for(device: torch.device | str) -> Any | None:
    """The compiled module for ``device``, or for the current device of a type such as ``"cuda"``.

    None where the torch reference has to run.
    """
    if _reference_requested:
        return None
    kind = device if isinstance(device, str) else device.type
    if kind not in _loaded:
        load_kernels(device)
    return _loaded[kind]


@contextmanager
def use_torch_reference() -> Iterator[None]:
    """Every launch inside the block runs the torch reference, on any device."""
    global _reference_requested
    before = _reference_requested
    _reference_requested = True
    try:
        yield
    finally:
        _reference_requested = before
