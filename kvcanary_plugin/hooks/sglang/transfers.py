"""Slots that another server has filled: prefill/decode disaggregation, the decode side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvcanary_plugin.hooks.sglang.batch import BatchTranslator
from kvcanary_plugin.hooks.sglang.versions import own_tokens
from kvcanary_plugin.kernels import WritePlan
from kvcanary_plugin.kernels.consts import UNKNOWN
from kvcanary_plugin.monitor import CanaryMonitor


def adopt_prebuilt(monitor: CanaryMonitor, translator: BatchTranslator, batch: Any) -> None:
    """Adopt what ``batch``, whose prompts have been computed elsewhere, will read from now on.

    The bytes are there, the rows of the page table are filled, and nothing has been shared yet.
    What a request found in this server's own cache has records already.
    """
    prefix = np.array(batch.prefix_lens, dtype=np.int64)
    extend = np.array(batch.extend_lens, dtype=np.int64)
    translator.requests_arrive()
    monitor.learn_prompts(translator.prompts_of(batch.reqs))
    if not extend.sum():
        return
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
    offsets = on_device(np.concatenate(([0], np.cumsum(extend))))
    plan = WritePlan(
        write_offsets=offsets,
        write_seed_slot_indices=on_device(np.full(len(spans), UNKNOWN)),
        write_num_valid_reqs=torch.full((1,), len(spans), dtype=torch.int32, device=device),
        write_request_uids=on_device(uids),
        write_identity_keys=on_device(keys),
    )
    if prefix.any():
        starts = on_device(prefix)
        before = monitor.guards[0].group.page_table[
            batch.req_pool_indices.long(), (starts - 1).clamp(min=0)
        ]
        seeds = torch.where(starts > 0, before.long(), UNKNOWN)
        plan = replace(plan, write_seed_slot_indices=seeds)
    slots = batch.out_cache_loc.long()
    for guard in monitor.guards:
        own_plan, own_slots = plan, slots
        if guard.group.full_to_swa is not None:
            own_plan, own_slots = _in_the_window(plan, slots, guard.group.full_to_swa)
        monitor.adopt_sequences(guard.index, own_plan, own_slots, flat_tokens, flat_positions)


def _in_the_window(
    plan: WritePlan, slots: torch.Tensor, lookup: torch.Tensor
) -> tuple[WritePlan, torch.Tensor]:
    """The same in the numbering of a sliding window's pool, where the end of a sequence may be all
    that was sent: what lies before it has no slots, and nothing there is continued."""
    own = _translated(slots, lookup)
    seeds = _translated(plan.write_seed_slot_indices, lookup)
    firsts = plan.write_offsets[:-1].clamp(max=own.shape[0] - 1)
    seeds = torch.where(own[firsts] > 0, seeds, UNKNOWN)
    return replace(plan, write_seed_slot_indices=seeds), own


def _translated(slots: torch.Tensor, lookup: torch.Tensor) -> torch.Tensor:
    own = lookup[slots.clamp(min=0)].long()
    return torch.where((slots > 0) & (own > 0), own, UNKNOWN)
