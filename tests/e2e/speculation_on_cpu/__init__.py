"""What SGLang needs to speculate on a CPU, for the tests: n-gram drafts, and one step of a model's.

Loaded inside the server as SGLANG_EXTERNAL_MODEL_PACKAGE. SGLang's kernels for this come compiled
for a CPU in a package that no registry has; they stand here in Python. Attention takes a tree of
drafts for a chain: what the model then says is of no use, and where K/V goes is as on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.ops.speculative import cache_locs, eagle, reconstruct_tree, spec_tree
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache import allocation
from sglang.srt.speculative.draft_utils import DraftBackendFactory

Tensor = torch.Tensor


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    count: int,
) -> None:
    tree = tree_mask.flatten()[: batch_size * count * count].view(batch_size, count, count)
    for row in range(batch_size):
        parents = []
        for node in range(count):
            above = [other for other in range(node) if tree[row, node, other]]
            parents.append(max(above, default=-1))
            positions[row * count + node] = len(above) + verified_seq_len[row]
            retrieve_index[row, node] = row * count + node
        for node, parent in enumerate(parents):
            later = range(node + 1, count)
            child = next((n for n in later if parents[n] == node), -1)
            sibling = next((n for n in later if parents[n] == parent >= 0), -1)
            retrieve_next_token[row, node] = child
            retrieve_next_sibling[row, node] = sibling


def verify_tree_greedy(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    for row in range(candidates.shape[0]):
        node = depth = 0
        accept_index[row, 0] = retrive_index[row, 0]
        while True:
            wanted = target_predict[row, node]
            predicts[retrive_index[row, node]] = wanted
            child = int(retrive_next_token[row, node])
            while child >= 0 and candidates[row, child] != wanted:
                child = int(retrive_next_sibling[row, child])
            if child < 0 or depth + 1 == accept_index.shape[1]:
                break
            node, depth = child, depth + 1
            accept_index[row, depth] = retrive_index[row, child]
        accept_token_num[row] = depth


def assign_extend_cache_locs(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, out: Tensor, _width: int
) -> None:
    spans = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    flat = torch.cat([table[row, start:end] for row, start, end in spans])
    out[: flat.numel()] = flat


def fill_accept_out_cache_loc(accept_index: Tensor, out_cache_loc: Tensor, out: Tensor) -> None:
    nodes = accept_index.flatten()
    flat = out_cache_loc[nodes[nodes >= 0].long()]
    out[: flat.numel()] = flat


def assign_req_to_token_pool(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, _width: int
) -> None:
    used = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[used : used + end - start].to(table.dtype)
        used += end - start


class _AsAnExtend:
    """A batch of drafts, as the attention of an extend reads it."""

    def __init__(self, batch: Any) -> None:
        count = batch.spec_info.draft_token_num
        self._batch = batch
        self.extend_prefix_lens = batch.seq_lens
        self.extend_seq_lens = torch.full_like(batch.seq_lens, count)
        self.seq_lens = batch.seq_lens + count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


_forward_extend = TorchNativeAttnBackend.forward_extend


def forward_extend(
    self: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, *args: Any, **kwargs: Any
) -> Tensor:
    if batch.forward_mode.is_target_verify():
        batch = _AsAnExtend(batch)
    output: Tensor = _forward_extend(self, q, k, v, layer, batch, *args, **kwargs)
    return output


def build_tree_of_one_step(
    _parents: Tensor,
    _scores: Tensor,
    seq_lens: Tensor,
    _mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    _topk: int,
    steps: int,
    count: int,
    _mask_mode: int,
) -> None:
    """A root and its children: all that one step of drafting makes."""
    assert steps == 1
    for row, length in enumerate(seq_lens.tolist()):
        first = row * count
        positions[first] = length
        positions[first + 1 : first + count] = length + 1
        retrieve_index[row] = torch.arange(first, first + count)
        retrieve_next_token[row] = -1
        retrieve_next_token[row, 0] = 1
        retrieve_next_sibling[row] = -1
        retrieve_next_sibling[row, 1 : count - 1] = torch.arange(2, count)


def fill_bonus_tokens(accepted: Tensor, lens: Tensor, bonus: Tensor, stride: int) -> None:
    rows = torch.arange(lens.shape[0])
    bonus.copy_(accepted.flatten()[rows * stride + lens.long() - 1])


def assign_draft_cache_locs_contiguous(
    rows: Tensor, table: Tensor, seq_lens: Tensor, out: Tensor, _width: int, topk: int, cols: int
) -> None:
    count = topk * cols
    for index, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        out[index * count : (index + 1) * count] = table[row, length : length + count]


reconstruct_tree.reconstruct_indices_from_tree_mask = reconstruct_indices_from_tree_mask
spec_tree.sgl_verify_tree_greedy_cpu = verify_tree_greedy
cache_locs.assign_extend_cache_locs_cpu = assign_extend_cache_locs
eagle.fill_accept_out_cache_loc_cpu = fill_accept_out_cache_loc
allocation.assign_req_to_token_pool_cpu = assign_req_to_token_pool
TorchNativeAttnBackend.forward_extend = forward_extend
spec_tree.sgl_build_tree_kernel_efficient_cpu = build_tree_of_one_step
eagle.fill_bonus_tokens_cpu = fill_bonus_tokens
cache_locs.assign_draft_cache_locs_contiguous_cpu = assign_draft_cache_locs_contiguous
# The draft model keeps the backend that it has.
DraftBackendFactory.create_draft_extend_backend = lambda _self: None
