"""Lets SGLang's own DeepSeek-V2 run on a CPU.

For an attention backend that it does not know, SGLang 0.5.23 computes a prefill from expanded K and
V while ``torch_native`` reads the compressed ones back from the pool: the shapes do not fit. In the
absorbed form both sides are compressed.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)


def _always_absorbed(attention: Any, forward_batch: Any) -> Any:
    return AttnForwardMethod.MLA


AttentionBackendRegistry.register("torch_native", _always_absorbed)
