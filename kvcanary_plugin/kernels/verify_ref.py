"""The verify launches over whole tensors: what the kernels must reproduce byte for byte."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from kvcanary_plugin.kernels.arguments import check_table_verify, check_verify
from kvcanary_plugin.kernels.consts import (
    CHAIN_HEAD,
    PADDING_SLOT,
    UNKNOWN,
    FailReason,
    SlotState,
    ViolationField,
)
from kvcanary_plugin.kernels.context import VerifyOrWriteContext
from kvcanary_plugin.kernels.hashes import chain_start_tensor
from kvcanary_plugin.kernels.inputs import TableReads, VerifyPlan
from kvcanary_plugin.kernels.packing import folds_real_kv, packed
from kvcanary_plugin.kernels.reference import (
    clamped,
    fold_slots,
    has_sealed_bytes,
    in_flight,
    in_pool,
    read_records,
    record_violations,
    states,
    violation_rows,
)
from kvcanary_plugin.kernels.table_ref import PageTable, expected_tokens_at, window_start


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entries:
    """Slots to verify, in order: int64 [n] each, readable and prefix_hash_valid bool [n]."""

    slot: torch.Tensor
    readable: torch.Tensor  # False: slot is only a value to report, whatever the pool's size
    expected_position: torch.Tensor
    prev_slot: torch.Tensor
    expected_token: torch.Tensor
    identity_key: torch.Tensor
    request_uid: torch.Tensor
    batch_row: torch.Tensor
    prefix_hash: torch.Tensor
    prefix_hash_valid: torch.Tensor

    def __getitem__(self, index: torch.Tensor) -> _Entries:
        columns = {column.name: getattr(self, column.name)[index] for column in fields(self)}
        return _Entries(**columns)


def launch_canary_verify_kernel_torch_reference(
    *,
    context: VerifyOrWriteContext,
    plan: VerifyPlan,
    check_verify_expected_token: bool,
    step: int = -1,
) -> None:
    """Reference of ``launch_canary_verify_kernel``: same arguments, bytes, rows and errors."""
    packed(context)
    check_verify(context=context, plan=plan)
    context.kernel_run_counter.add_(1)
    if int(plan.enable.item()) == 0:
        return
    capacity = plan.verify_slot_indices.numel()
    count = max(0, min(int(plan.verify_num_valid.item()), capacity))

    def column(tensor: torch.Tensor | None, default: int) -> torch.Tensor:
        if tensor is None:
            return torch.full_like(plan.verify_slot_indices[:count], default)
        return tensor[:count]

    tokens = plan.verify_expected_tokens if check_verify_expected_token else None
    entries = _Entries(
        slot=plan.verify_slot_indices[:count],
        readable=column(None, 1).bool(),
        expected_position=plan.verify_expected_positions[:count],
        prev_slot=plan.verify_prev_slot_indices[:count],
        expected_token=column(tokens, UNKNOWN),
        identity_key=column(plan.verify_identity_keys, 0),
        request_uid=column(plan.verify_request_uids, UNKNOWN),
        batch_row=column(plan.verify_batch_rows, UNKNOWN),
        prefix_hash=column(None, 0),
        prefix_hash_valid=column(None, 0).bool(),
    )
    padding = entries.slot == PADDING_SLOT
    context.slot_run_counter.add_(int(padding.sum()))
    _verify(context, entries[~padding], step)


def launch_canary_table_verify_kernel_torch_reference(
    *, context: VerifyOrWriteContext, reads: TableReads, step: int
) -> None:
    """Reference of ``launch_canary_table_verify_kernel``: same arguments, bytes, rows, errors."""
    packed(context)
    check_table_verify(context=context, reads=reads)
    context.kernel_run_counter.add_(1)
    rows = reads.request_rows.tolist()
    prefix_lens = reads.prefix_lens.tolist()
    for index, (row, prefix_len) in enumerate(zip(rows, prefix_lens, strict=True)):
        if row != reads.padding_row and prefix_len > 0:
            _verify(context, _table_entries(reads, index, row, prefix_len), step)


def _table_entries(reads: TableReads, index: int, row: int, prefix_len: int) -> _Entries:
    """What request ``index`` reads. Slots <= 0 stay as they are: :func:`_verify` reports them."""
    device = reads.page_table.device
    table = PageTable(
        reads.page_table, reads.page_size, reads.full_to_swa_index_mapping, reads.swa_window_size
    )
    start = window_start(prefix_len, reads.swa_window_size)
    if 0 <= row < table.rows:
        # One entry stands for everything beyond the table's width.
        end = min(prefix_len, max(start, table.positions) + 1)
    else:
        start, end = 0, 1
    position = torch.arange(start, end, dtype=torch.int64, device=device)
    slot, readable = table.live_slots(row, position)

    def request_column(tensor: torch.Tensor | None, default: int) -> torch.Tensor:
        value = default if tensor is None else int(tensor[index].item())
        return torch.full_like(position, value)

    return _Entries(
        slot=slot,
        readable=readable,
        expected_position=position,
        prev_slot=table.predecessors(row, position, start),
        expected_token=expected_tokens_at(
            reads.expected_tokens,
            reads.expected_valid_lens,
            index=index,
            row=row,
            position=position + reads.token_offset,
        ),
        identity_key=request_column(reads.identity_keys, 0),
        request_uid=request_column(reads.request_uids, UNKNOWN),
        batch_row=torch.full_like(position, index),
        prefix_hash=request_column(reads.prefix_hashes, 0),
        prefix_hash_valid=(position == prefix_len - 1)
        & (request_column(reads.prefix_hash_valid, 0) != 0),
    )


def _verify(context: VerifyOrWriteContext, entries: _Entries, step: int) -> None:
    """Judge the entries (none of them the padding slot of a plan) and record the bad ones."""
    reachable = entries.readable & in_pool(context, entries.slot) & (entries.slot != PADDING_SLOT)
    slot = clamped(context, entries.slot)
    left_out = reachable & in_flight(context, slot, step)
    context.slot_run_counter.add_(int((~left_out).sum()))

    stored = read_records(context, slot)
    state = states(context, slot)
    bits = torch.zeros_like(slot)

    # The chain: the anchor at the head, the record before elsewhere, nothing where that one is
    # unreachable (slot 0) or being written in this forward.
    head = entries.prev_slot == CHAIN_HEAD
    predecessor = clamped(context, entries.prev_slot)
    prev_outside = ~head & ~in_pool(context, entries.prev_slot)
    prev_known = (
        in_pool(context, entries.prev_slot)
        & (entries.prev_slot != PADDING_SLOT)
        & ~in_flight(context, predecessor, step)
    )
    expected_chain = torch.where(
        head, chain_start_tensor(entries.identity_key), read_records(context, predecessor).chain()
    )
    expected_chain = torch.where(head | prev_known, expected_chain, stored.prev_hash)
    bits |= FailReason.VERIFY_CHAIN_HASH * (stored.prev_hash != expected_chain)
    bits |= FailReason.OUT_OF_POOL * prev_outside

    token_known = entries.expected_token != UNKNOWN
    bits |= FailReason.VERIFY_TOKEN * (token_known & (stored.token != entries.expected_token))
    bits |= FailReason.VERIFY_POSITION * (stored.position != entries.expected_position)
    wrong_prefix = entries.prefix_hash_valid & (stored.chain() != entries.prefix_hash)
    bits |= FailReason.PREFIX_IDENTITY * wrong_prefix
    bits |= FailReason.FREED_READ * (state == SlotState.FREE)
    if folds_real_kv(context):
        sealed = reachable & has_sealed_bytes(context, slot)
        differs = torch.zeros_like(sealed)
        differs[sealed] = fold_slots(context, slot[sealed]) != stored.real_kv_hash[sealed]
        bits |= FailReason.VERIFY_REAL_KV_HASH * differs

    def instead(
        where: torch.Tensor, value: int | torch.Tensor, other: torch.Tensor
    ) -> torch.Tensor:
        return torch.where(
            where, torch.as_tensor(value, dtype=other.dtype, device=slot.device), other
        )

    # Nobody wrote the slot: what else differs says nothing. Outside the pool there is no record.
    bits = instead(state == SlotState.ALLOCATED, int(FailReason.UNWRITTEN_READ), bits)
    bits = instead(~reachable, int(FailReason.OUT_OF_POOL), bits)
    rows = violation_rows(
        context,
        step=step,
        columns={
            ViolationField.SLOT: entries.slot,
            ViolationField.POSITION: instead(~reachable, UNKNOWN, stored.position),
            ViolationField.STORED_TOKEN: instead(~reachable, UNKNOWN, stored.token),
            ViolationField.EXPECTED_TOKEN: entries.expected_token,
            ViolationField.STORED_CHAIN_HASH: instead(~reachable, UNKNOWN, stored.prev_hash),
            ViolationField.EXPECTED_AUX: instead(~reachable, UNKNOWN, expected_chain),
            ViolationField.FAIL_REASON_BITS: bits,
            ViolationField.REQUEST_UID: entries.request_uid,
            ViolationField.BATCH_ROW: entries.batch_row,
            ViolationField.EXPECTED_POSITION: entries.expected_position,
        },
    )
    record_violations(context, rows[(bits != 0) & ~left_out])
