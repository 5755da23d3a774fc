"""What SGLang's hierarchical cache needs on a CPU, for the tests.

Loaded inside the server as SGLANG_EXTERNAL_MODEL_PACKAGE: the copy that is a CUDA kernel, in
Python, and no registering of host memory with a driver. Once the file HARM_NEXT_LOAD exists, the
next load brings one wrong number.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from sglang.srt.mem_cache.pool_host import common, mha

_HARM = Path(os.environ["HARM_NEXT_LOAD"])


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices.long()] = source[src_indices.long()]
    is_load = len(dst_layers) == 2  # K and V of one layer; a backup takes all of them
    if is_load and _HARM.exists():
        _HARM.unlink()
        dst_layers[1][dst_indices[0]] += 1.0


common._cuda_host_register = lambda *_args, **_kwargs: None
mha.transfer_kv_direct = transfer_kv_direct
