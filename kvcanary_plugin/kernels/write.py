"""The write launch: one record per token of this forward."""

from __future__ import annotations

import torch

from kvcanary_plugin.kernels.arguments import check_expected_inputs, check_write
from kvcanary_plugin.kernels.backend import kernels_for
from kvcanary_plugin.kernels.context import VerifyOrWriteContext
from kvcanary_plugin.kernels.inputs import WritePlan
from kvcanary_plugin.kernels.packing import packed
from kvcanary_plugin.kernels.write_ref import launch_canary_write_kernel_torch_reference

__all__ = ["WritePlan", "join_writes", "launch_canary_write_kernel"]


def launch_canary_write_kernel(
    *,
    context: VerifyOrWriteContext,
    plan: WritePlan,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    enable_write_input_assert: bool,
    expected_input_tokens: torch.Tensor | None,
    expected_input_positions: torch.Tensor | None,
    step: int = -1,
    beside: bool = False,
) -> None:
    """Store (token, position, running chain hash, real-KV hash) for every entry of the plan.

    Per request: the chain continues from the seed slot's record, or starts at the anchor (mixed
    with the request's identity key). Entries whose slot is below 0 are skipped, and the chain does
    not advance over them. With ``enable_write_input_assert`` a token or position that differs from
    its expectation is a violation; the record and the chain follow the actual values. Seeds are
    read before the first record is stored; a seed slot that another request of this plan writes in
    this step (a prefix hit within one batch) is followed to that request's chain instead, whatever
    the order of the two.

    With a slot table the launch also checks and claims owners and records who wrote when.

    Everything runs on the current stream; nothing is allocated on the device, nothing synchronises,
    and a violation never raises.

    Args:
        context: records, sink, counters, sources; the launch's tag. Its mode NONE stores 0 as
            real-KV hash.
        plan: which entries belong to which request.
        input_ids: int32 or int64 [n]; tokens being written. Entries behind the plan are padding.
        positions: int32 or int64 [n]; their sequence positions.
        out_cache_loc: int32 or int64 [n]; their slots in the records, -1 to skip (SWA groups:
            translated by ``translate_out_cache_loc``).
        enable_write_input_assert: whether to compare with the two expected tensors.
        expected_input_tokens: int32 or int64 [n] with the assert, None without.
        expected_input_positions: int32 or int64 [n] with the assert, None without.
        step: number of this forward, for provenance and violation rows; -1 unknown.
        beside: whether what is launched on the current stream from here on need not wait for the
            write, which follows what was launched before. Until :func:`join_writes` nobody may
            change what it reads, nor read what it writes. On a CPU it is done at once.

    ValueError when an argument is missing, or has a wrong shape, dtype or device, or is not
    contiguous.
    """
    is_absent = not enable_write_input_assert
    if (expected_input_tokens is None) != is_absent or (
        expected_input_positions is None
    ) != is_absent:
        check_expected_inputs(
            enable_write_input_assert=enable_write_input_assert,
            expected_input_tokens=expected_input_tokens,
            expected_input_positions=expected_input_positions,
        )
    words = packed(context)
    kernels = kernels_for(words.device_type)
    if kernels is None:
        launch_canary_write_kernel_torch_reference(
            context=context,
            plan=plan,
            input_ids=input_ids,
            positions=positions,
            out_cache_loc=out_cache_loc,
            enable_write_input_assert=enable_write_input_assert,
            expected_input_tokens=expected_input_tokens,
            expected_input_positions=expected_input_positions,
            step=step,
            beside=beside,
        )
        return
    try:
        kernels.canary_write(
            words.launch,
            plan.write_offsets,
            plan.write_seed_slot_indices,
            plan.write_num_valid_reqs,
            plan.write_request_uids,
            plan.write_identity_keys,
            input_ids,
            positions,
            out_cache_loc,
            expected_input_tokens,
            expected_input_positions,
            step,
            beside,
        )
    except Exception:
        check_write(
            context=context,
            plan=plan,
            input_ids=input_ids,
            positions=positions,
            out_cache_loc=out_cache_loc,
            enable_write_input_assert=enable_write_input_assert,
            expected_input_tokens=expected_input_tokens,
            expected_input_positions=expected_input_positions,
        )
        raise


def join_writes(marker: torch.Tensor) -> None:
    """The current stream waits for all writes launched beside a stream of the same device.

    Args:
        marker: any tensor on the device; its contents are not looked at.
    """
    if marker.is_cuda:
        kernels = kernels_for(marker.device)
        if kernels is not None:
            kernels.canary_join_writes(marker)
