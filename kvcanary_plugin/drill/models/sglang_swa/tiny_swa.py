"""A Llama whose marked layers use sliding-window attention: the smallest model with a SWA pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.layers.radix_attention import get_attn_backend
from sglang.srt.models.llama import LlamaForCausalLM


class TinySWAForCausalLM(LlamaForCausalLM):
    """Layers marked 1 in ``config.hybrid_layer_pattern`` see ``config.sliding_window`` tokens."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        window = self.get_attention_sliding_window_size()
        for is_sliding, layer in zip(config.hybrid_layer_pattern, self.model.layers, strict=True):
            if is_sliding:
                attention = layer.self_attn.attn
                attention.sliding_window_size = window
                attention.forward = _reading_swa_slots(attention.forward)

    def get_attention_sliding_window_size(self) -> int:
        # SGLang counts the tokens before the current one.
        return int(self.config.sliding_window) - 1


def _reading_swa_slots(forward: Any) -> Any:
    """``forward`` of a sliding layer, with a request table that holds slots of the SWA pool.

    SGLang 0.5.23's ``torch_native`` backend translates the slots that it writes and not those that
    it reads: outputs would hang on what the pools held before, and a slot beyond the smaller SWA
    pool would end the scheduler.
    """

    def translated(*args: Any, **kwargs: Any) -> Any:
        backend = get_attn_backend()
        request_table = backend.req_to_token_pool
        swa_slots = backend.token_to_kv_pool.translate_loc_from_full_to_swa(
            request_table.req_to_token
        )
        backend.req_to_token_pool = SimpleNamespace(req_to_token=swa_slots)
        try:
            return forward(*args, **kwargs)
        finally:
            backend.req_to_token_pool = request_table

    return translated


EntryClass = TinySWAForCausalLM
