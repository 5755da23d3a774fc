"""A Llama whose marked layers use sliding-window attention: the smallest model with a SWA pool."""

from __future__ import annotations

from typing import Any

from sglang.srt.models.llama import LlamaForCausalLM


class TinySWAForCausalLM(LlamaForCausalLM):
    """Layers marked 1 in ``config.hybrid_layer_pattern`` see ``config.sliding_window`` tokens."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        window = self.get_attention_sliding_window_size()
        for is_sliding, layer in zip(config.hybrid_layer_pattern, self.model.layers, strict=True):
            if is_sliding:
                layer.self_attn.attn.sliding_window_size = window

    def get_attention_sliding_window_size(self) -> int:
        # SGLang counts the tokens before the current one.
        return int(self.config.sliding_window) - 1


EntryClass = TinySWAForCausalLM
