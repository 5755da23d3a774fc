"""Slots that another server has filled: prefill/decode disaggregation, the decode side."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvcanary_plugin.hooks.sglang.batch import BatchTranslator
from kvcanary_plugin.hooks.sglang.versions import own_tokens
from kvcanary_plugin.kernels import WritePlan
from kvcanary_plugin.monitor import CanaryMonitor


def adopt_prebuilt(monitor: CanaryMonitor, translator: BatchTranslator, batch: Any) -> None:
    """Adopt what ``batch``, whose prompts have been computed elsewhere, will read from now on.

    The bytes are there, the rows of the page table are filled, and nothing has been shared yet.
    What a request found in this server's own cache has records already.
    """
    prefix = np.array(batch.prefix_lens, dtype=np.int64)
    extend = np.array(batch.extend_lens, dtype=np.int64)
    if not extend.sum():
        return
    translator.requests_arrive()
    spans = list(zip(batch.reqs, prefix.tolist(), extend.tolist(), strict=True))
    tokens = [
        np.frombuffer(own_tokens(request)[start : start + count], dtype=np.int64)
        for request, start, count in spans
    ]
    positions = [np.arange(start, start + count) for _, start, count in spans]
    uids, keys = translator.identities_of(batch.reqs)
    device = batch.out_cache_loc.device

    def on_device(values: Any) -> torch.Tensor:
        array = np.ascontiguousarray(values, dtype=np.int64)
        return torch.from_numpy(array).to(device, non_blocking=True)

    flat_tokens, flat_positions = (
        on_device(np.concatenate(tokens)),
        on_device(np.concatenate(positions)),
    )
    plan = WritePlan(
        write_offsets=on_device(np.concatenate(([0], np.cumsum(extend)))),
        write_seed_slot_indices=on_device(np.full(len(spans), -1)),
        write_num_valid_reqs=torch.full((1,), len(spans), dtype=torch.int32, device=device),
        write_request_uids=on_device(uids),
        write_identity_keys=on_device(keys),
    )
    if prefix.any():
        starts = on_device(prefix)
        for_each = monitor.guards[0].group.page_table[
            batch.req_pool_indices.long(), (starts - 1).clamp(min=0)
        ]
        plan.write_seed_slot_indices.copy_(torch.where(starts > 0, for_each.long(), -1))
    slots = batch.out_cache_loc.long()
    monitor.learn_prompts(translator.prompts_of(batch.reqs))
    for guard in monitor.guards:
        monitor.adopt_sequences(guard.index, plan, slots, flat_tokens, flat_positions)
