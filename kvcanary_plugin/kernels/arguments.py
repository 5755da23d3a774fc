"""Argument checks of the launches: each raises a ValueError that names argument, value and allowed.

The C++ bindings check every tensor of a launch themselves (``csrc/checks.h``). These checks serve
the torch references, and say in one voice what was wrong after a binding has refused a call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcanary_plugin.kernels.context import VerifyOrWriteContext
from kvcanary_plugin.kernels.inputs import TableReads, TableSnapshot, VerifyPlan, WritePlan

INTEGERS = (torch.int32, torch.int64)


def refuse(name: str, must: str, got: object) -> ValueError:
    """The one form of an argument error."""
    return ValueError(f"kvcanary: {name} must {must}, got {got}")


def _dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_vector(
    name: str,
    tensor: torch.Tensor,
    *,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    size: int | None = None,
    size_like: str = "",
) -> None:
    """``tensor`` is a contiguous vector on ``device``, ``size`` long if given."""
    if not isinstance(tensor, torch.Tensor):
        raise refuse(name, "be a torch.Tensor", type(tensor).__name__)
    if tensor.device != device:
        raise refuse(name, f"be on the records' device {device}", tensor.device)
    if tensor.dtype not in dtypes:
        raise refuse(name, f"be {_dtype_names(dtypes)}", tensor.dtype)
    if tensor.ndim != 1:
        raise refuse(name, "have one dimension", f"shape {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise refuse(name, "be contiguous; pass tensor.contiguous()", f"stride {tensor.stride(0)}")
    if size is not None and tensor.numel() != size:
        like = f" like {size_like}" if size_like else ""
        raise refuse(name, f"have {size} entries{like}", tensor.numel())


def check_matrix(name: str, tensor: torch.Tensor, *, device: torch.device) -> None:
    """``tensor`` is int32 or int64 [rows, width] with contiguous rows on ``device``."""
    if not isinstance(tensor, torch.Tensor):
        raise refuse(name, "be a torch.Tensor", type(tensor).__name__)
    if tensor.device != device:
        raise refuse(name, f"be on the records' device {device}", tensor.device)
    if tensor.dtype not in INTEGERS:
        raise refuse(name, f"be {_dtype_names(INTEGERS)}", tensor.dtype)
    if tensor.ndim != 2:
        raise refuse(name, "have two dimensions", f"shape {list(tensor.shape)}")
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise refuse(
            name, "have contiguous rows", f"stride {tensor.stride(1)} in the last dimension"
        )


def check_at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise refuse(name, f"be at least {minimum}", value)


def check_together(
    first_name: str, first: torch.Tensor | None, second_name: str, second: torch.Tensor | None
) -> None:
    if (first is None) != (second is None):
        only = second_name if first is None else first_name
        raise refuse(f"{first_name} and {second_name}", "be given together", f"only {only}")


def check_write_plan(plan: WritePlan, *, device: torch.device) -> None:
    check_vector(
        "plan.write_seed_slot_indices",
        plan.write_seed_slot_indices,
        device=device,
        dtypes=(torch.int64,),
    )
    capacity = plan.write_seed_slot_indices.numel()
    check_at_least("plan.write_seed_slot_indices size", capacity, 1)
    check_vector(
        "plan.write_offsets",
        plan.write_offsets,
        device=device,
        dtypes=(torch.int64,),
        size=capacity + 1,
    )
    check_vector(
        "plan.write_num_valid_reqs",
        plan.write_num_valid_reqs,
        device=device,
        dtypes=(torch.int32,),
        size=1,
    )
    for name, tensor in (
        ("plan.write_request_uids", plan.write_request_uids),
        ("plan.write_identity_keys", plan.write_identity_keys),
    ):
        if tensor is not None:
            check_vector(
                name,
                tensor,
                device=device,
                dtypes=(torch.int64,),
                size=capacity,
                size_like="plan.write_seed_slot_indices",
            )


def check_expected_inputs(
    *,
    enable_write_input_assert: bool,
    expected_input_tokens: torch.Tensor | None,
    expected_input_positions: torch.Tensor | None,
) -> None:
    """The oracle's tensors are there exactly when the input assert is on."""
    given = (expected_input_tokens is not None, expected_input_positions is not None)
    if enable_write_input_assert and not all(given):
        raise ValueError(
            "kvcanary: expected_input_tokens and expected_input_positions are required when "
            f"enable_write_input_assert=True, got {_presence(*given)}"
        )
    if not enable_write_input_assert and any(given):
        raise ValueError(
            "kvcanary: expected_input_tokens and expected_input_positions must be None when "
            f"enable_write_input_assert=False, got {_presence(*given)}"
        )


def _presence(tokens: bool, positions: bool) -> str:
    words = {True: "a tensor", False: "None"}
    return f"{words[tokens]} and {words[positions]}"


def check_write(
    *,
    context: VerifyOrWriteContext,
    plan: WritePlan,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    enable_write_input_assert: bool,
    expected_input_tokens: torch.Tensor | None,
    expected_input_positions: torch.Tensor | None,
) -> None:
    device = context.canary_buf.device
    check_expected_inputs(
        enable_write_input_assert=enable_write_input_assert,
        expected_input_tokens=expected_input_tokens,
        expected_input_positions=expected_input_positions,
    )
    check_write_plan(plan, device=device)
    check_vector("input_ids", input_ids, device=device, dtypes=INTEGERS)
    for name, tensor in (
        ("positions", positions),
        ("out_cache_loc", out_cache_loc),
        ("expected_input_tokens", expected_input_tokens),
        ("expected_input_positions", expected_input_positions),
    ):
        if tensor is not None:
            check_vector(
                name,
                tensor,
                device=device,
                dtypes=INTEGERS,
                size=input_ids.numel(),
                size_like="input_ids",
            )


def check_verify_plan(plan: VerifyPlan, *, device: torch.device) -> None:
    check_vector(
        "plan.verify_slot_indices", plan.verify_slot_indices, device=device, dtypes=(torch.int64,)
    )
    capacity = plan.verify_slot_indices.numel()
    check_at_least("plan.verify_slot_indices size", capacity, 1)
    for name, tensor in (
        ("plan.verify_expected_tokens", plan.verify_expected_tokens),
        ("plan.verify_expected_positions", plan.verify_expected_positions),
        ("plan.verify_prev_slot_indices", plan.verify_prev_slot_indices),
        ("plan.verify_request_uids", plan.verify_request_uids),
        ("plan.verify_batch_rows", plan.verify_batch_rows),
        ("plan.verify_identity_keys", plan.verify_identity_keys),
    ):
        if tensor is not None:
            check_vector(
                name,
                tensor,
                device=device,
                dtypes=(torch.int64,),
                size=capacity,
                size_like="plan.verify_slot_indices",
            )
    for name, tensor in (
        ("plan.verify_num_valid", plan.verify_num_valid),
        ("plan.enable", plan.enable),
    ):
        check_vector(name, tensor, device=device, dtypes=(torch.int32,), size=1)


def check_verify(*, context: VerifyOrWriteContext, plan: VerifyPlan) -> None:
    check_verify_plan(plan, device=context.canary_buf.device)


def check_table(
    *,
    prefix: str,
    page_table: torch.Tensor,
    page_size: int,
    swa_window_size: int,
    full_to_swa_index_mapping: torch.Tensor | None,
    device: torch.device,
) -> None:
    check_matrix(f"{prefix}", page_table, device=device)
    check_at_least("page_size", page_size, 1)
    check_at_least("swa_window_size", swa_window_size, 0)
    if full_to_swa_index_mapping is not None:
        check_vector(
            "full_to_swa_index_mapping",
            full_to_swa_index_mapping,
            device=device,
            dtypes=INTEGERS,
        )
        check_at_least("full_to_swa_index_mapping size", full_to_swa_index_mapping.numel(), 1)


def check_reads(reads: TableReads, *, device: torch.device) -> None:
    check_table(
        prefix="page_table",
        page_table=reads.page_table,
        page_size=reads.page_size,
        swa_window_size=reads.swa_window_size,
        full_to_swa_index_mapping=reads.full_to_swa_index_mapping,
        device=device,
    )
    check_vector("request_rows", reads.request_rows, device=device, dtypes=INTEGERS)
    for name, tensor, dtypes in (
        ("request_uids", reads.request_uids, (torch.int64,)),
        ("prefix_lens", reads.prefix_lens, INTEGERS),
        ("extend_lens", reads.extend_lens, INTEGERS),
        ("identity_keys", reads.identity_keys, (torch.int64,)),
        ("expected_valid_lens", reads.expected_valid_lens, INTEGERS),
        ("prefix_hashes", reads.prefix_hashes, (torch.int64,)),
        ("prefix_hash_valid", reads.prefix_hash_valid, (torch.int32,)),
    ):
        if tensor is not None:
            check_vector(
                name,
                tensor,
                device=device,
                dtypes=dtypes,
                size=reads.request_rows.numel(),
                size_like="request_rows",
            )
    check_at_least("max_prefix_len", reads.max_prefix_len, 0)
    check_together(
        "expected_tokens", reads.expected_tokens, "expected_valid_lens", reads.expected_valid_lens
    )
    check_together(
        "prefix_hashes", reads.prefix_hashes, "prefix_hash_valid", reads.prefix_hash_valid
    )
    if reads.expected_tokens is not None:
        check_matrix("expected_tokens", reads.expected_tokens, device=device)


def check_table_verify(*, context: VerifyOrWriteContext, reads: TableReads) -> None:
    check_reads(reads, device=context.canary_buf.device)


def check_plan(
    *,
    verify_plan_out: VerifyPlan,
    write_plan_out: WritePlan,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    swa_window_size: int,
    full_to_swa_index_mapping: torch.Tensor | None,
    verify_capacity: int,
    req_to_verify_expected_tokens: torch.Tensor | None,
    req_to_verify_expected_tokens_valid_lens: torch.Tensor | None,
    page_size: int,
) -> None:
    device = req_to_token.device
    check_verify_plan(verify_plan_out, device=device)
    check_write_plan(write_plan_out, device=device)
    check_verify_capacity(verify_capacity, verify_plan_out)
    check_table(
        prefix="req_to_token",
        page_table=req_to_token,
        page_size=page_size,
        swa_window_size=swa_window_size,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        device=device,
    )
    check_vector("req_pool_indices", req_pool_indices, device=device, dtypes=INTEGERS)
    for name, tensor in (
        ("prefix_lens", prefix_lens),
        ("extend_seq_lens", extend_seq_lens),
        ("req_to_verify_expected_tokens_valid_lens", req_to_verify_expected_tokens_valid_lens),
    ):
        if tensor is not None:
            check_vector(
                name,
                tensor,
                device=device,
                dtypes=INTEGERS,
                size=req_pool_indices.numel(),
                size_like="req_pool_indices",
            )
    check_together(
        "req_to_verify_expected_tokens",
        req_to_verify_expected_tokens,
        "req_to_verify_expected_tokens_valid_lens",
        req_to_verify_expected_tokens_valid_lens,
    )
    if req_to_verify_expected_tokens is not None:
        check_matrix("req_to_verify_expected_tokens", req_to_verify_expected_tokens, device=device)
    check_requests_fit(req_pool_indices.numel(), write_plan_out)


def check_verify_capacity(verify_capacity: int, plan: VerifyPlan) -> None:
    capacity = plan.verify_slot_indices.numel()
    if verify_capacity != capacity:
        raise refuse("verify_capacity", f"equal the plan's capacity {capacity}", verify_capacity)


def check_requests_fit(requests: int, plan: WritePlan) -> None:
    capacity = plan.write_seed_slot_indices.numel()
    if requests > capacity:
        raise ValueError(
            f"kvcanary: a batch of {requests} requests does not fit into a write plan for "
            f"{capacity}; allocate it with write_req_capacity >= {requests}"
        )


def check_prepare(
    *,
    context: VerifyOrWriteContext,
    reads: TableReads,
    write_plan_out: WritePlan,
    out_cache_loc: torch.Tensor,
) -> None:
    device = context.canary_buf.device
    check_reads(reads, device=device)
    check_write_plan(write_plan_out, device=device)
    check_vector("out_cache_loc", out_cache_loc, device=device, dtypes=INTEGERS)
    check_requests_fit(reads.request_rows.numel(), write_plan_out)


def check_seal(
    *, context: VerifyOrWriteContext, plan: WritePlan, out_cache_loc: torch.Tensor
) -> None:
    device = context.canary_buf.device
    check_write_plan(plan, device=device)
    check_vector("out_cache_loc", out_cache_loc, device=device, dtypes=INTEGERS)


def check_scrub(
    *, context: VerifyOrWriteContext, slots: torch.Tensor, num_valid: torch.Tensor
) -> None:
    device = context.canary_buf.device
    check_vector("slots", slots, device=device, dtypes=(torch.int64,))
    check_vector("num_valid", num_valid, device=device, dtypes=(torch.int32,), size=1)


def check_scrub_range(*, first_slot: int, num_slots: int) -> None:
    check_at_least("first_slot", first_slot, 0)
    check_at_least("num_slots", num_slots, 0)


def _check_table_snapshot(snapshot: TableSnapshot, *, reads: TableReads) -> None:
    device = reads.page_table.device
    check_matrix("snapshot.entries", snapshot.entries, device=device)
    for name, tensor in (
        ("snapshot.rows", snapshot.rows),
        ("snapshot.table_rows", snapshot.table_rows),
        ("snapshot.prefix_lens", snapshot.prefix_lens),
    ):
        check_vector(
            name,
            tensor,
            device=device,
            dtypes=(torch.int64,),
            size=reads.request_rows.numel(),
            size_like="request_rows",
        )


def check_snapshot(*, reads: TableReads, first_request: int, snapshot_out: TableSnapshot) -> None:
    check_reads(reads, device=reads.page_table.device)
    check_at_least("first_request", first_request, 0)
    _check_table_snapshot(snapshot_out, reads=reads)


def check_compare_tables(
    *, context: VerifyOrWriteContext, reads: TableReads, snapshot: TableSnapshot
) -> None:
    check_reads(reads, device=context.canary_buf.device)
    _check_table_snapshot(snapshot, reads=reads)


def check_concatenate(*, arrays: Sequence[torch.Tensor], output: torch.Tensor) -> None:
    device = output.device
    total = 0
    for index, array in enumerate(arrays):
        check_vector(f"arrays[{index}]", array, device=device, dtypes=INTEGERS)
        total += array.numel()
    check_vector(
        "output",
        output,
        device=device,
        dtypes=(torch.int64,),
        size=total,
        size_like="all arrays together",
    )


def check_translate(
    *,
    out_cache_loc: torch.Tensor,
    full_to_swa_index_mapping: torch.Tensor,
    output: torch.Tensor,
) -> None:
    device = output.device
    check_vector("output", output, device=device, dtypes=INTEGERS)
    check_vector(
        "full_to_swa_index_mapping", full_to_swa_index_mapping, device=device, dtypes=INTEGERS
    )
    check_vector(
        "out_cache_loc",
        out_cache_loc,
        device=device,
        dtypes=INTEGERS,
        size=output.numel(),
        size_like="output",
    )
