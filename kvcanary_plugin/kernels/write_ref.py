"""The write launch as a walk over Python ints: what the kernels must reproduce byte for byte."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvcanary_plugin.kernels.arguments import check_write
from kvcanary_plugin.kernels.consts import (
    PADDING_SLOT,
    UNKNOWN,
    FailReason,
    SlotState,
    ViolationField,
)
from kvcanary_plugin.kernels.context import VerifyOrWriteContext
from kvcanary_plugin.kernels.hashes import chain_start, splitmix64_mix3, to_signed
from kvcanary_plugin.kernels.inputs import WritePlan
from kvcanary_plugin.kernels.packing import packed
from kvcanary_plugin.kernels.reference import (
    STATE_MASK,
    fold_slots,
    num_slots,
    record_fields,
    record_violations,
    violation_rows,
)


@dataclass(slots=True)
class _Request:
    """One request of the plan: its entries [begin, end) and where its chain starts."""

    batch_row: int
    begin: int
    end: int
    seed: int
    uid: int
    identity_key: int
    start_hash: int = 0
    seed_position: int | None = None  # None: no seed, so no position assert
    walked: bool = False


@dataclass(slots=True)
class _Inputs:
    tokens: list[int]
    positions: list[int]
    slots: list[int]
    expected_tokens: list[int] | None
    expected_positions: list[int] | None
    step: int
    prev_hashes: list[int] = field(init=False)  # running hash before each entry

    def __post_init__(self) -> None:
        self.prev_hashes = [0] * len(self.tokens)


def launch_canary_write_kernel_torch_reference(
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
    """Reference of ``launch_canary_write_kernel``: same arguments, bytes, rows and errors.

    ``beside`` or not, it is done when it returns.
    """
    packed(context)
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
    inputs = _Inputs(
        tokens=input_ids.tolist(),
        positions=positions.tolist(),
        slots=out_cache_loc.tolist(),
        expected_tokens=_optional_list(expected_input_tokens),
        expected_positions=_optional_list(expected_input_positions),
        step=step,
    )
    requests = _requests(plan, num_entries=len(inputs.tokens))
    _walk_chains(context, requests, inputs)
    stores = _Stores(context, step)
    for request in requests:
        _store_request(context, request, inputs, stores)
    stores.apply()
    context.slot_run_counter.add_(stores.count)
    context.kernel_run_counter.add_(1)


def _optional_list(tensor: torch.Tensor | None) -> list[int] | None:
    return None if tensor is None else tensor.tolist()


def _requests(plan: WritePlan, *, num_entries: int) -> list[_Request]:
    capacity = plan.write_seed_slot_indices.numel()
    count = max(0, min(int(plan.write_num_valid_reqs.item()), capacity))
    # A broken plan must not make the launch read outside its inputs.
    offsets = plan.write_offsets.clamp(0, num_entries).tolist()
    seeds = plan.write_seed_slot_indices.tolist()
    uids = _optional_list(plan.write_request_uids) or [UNKNOWN] * capacity
    keys = _optional_list(plan.write_identity_keys) or [0] * capacity
    return [
        _Request(
            batch_row=row,
            begin=offsets[row],
            end=offsets[row + 1],
            seed=seeds[row],
            uid=uids[row],
            identity_key=keys[row],
        )
        for row in range(count)
    ]


# ---- the chains ----------------------------------------------------------------------------------


def _walk_chains(context: VerifyOrWriteContext, requests: list[_Request], inputs: _Inputs) -> None:
    """Find where every chain starts and fill ``inputs.prev_hashes``.

    A request whose seed another request writes in this launch waits for that one. What waits in a
    circle (impossible in a sane plan) continues from the stored records.
    """
    writers = {
        inputs.slots[entry]: (request, entry)
        for request in requests
        for entry in range(request.begin, request.end)
    }
    waiting = []
    for request in requests:
        if _seed_is_in_flight(context, request, inputs.step) and request.seed in writers:
            waiting.append(request)
        else:
            _start_from_record(context, request)
            _walk(request, inputs)
    while ready := [request for request in waiting if writers[request.seed][0].walked]:
        for request in ready:
            _, entry = writers[request.seed]
            request.start_hash = splitmix64_mix3(
                inputs.prev_hashes[entry], inputs.tokens[entry], inputs.positions[entry]
            )
            request.seed_position = inputs.positions[entry]
            _walk(request, inputs)
        waiting = [request for request in waiting if not request.walked]
    for request in waiting:
        _start_from_record(context, request)
        _walk(request, inputs)


def _seed_is_in_flight(context: VerifyOrWriteContext, request: _Request, step: int) -> bool:
    table = context.slot_table
    if table is None or step == UNKNOWN or not PADDING_SLOT < request.seed < num_slots(context):
        return False
    return int(table.writer_step[request.seed].item()) == step


def _start_from_record(context: VerifyOrWriteContext, request: _Request) -> None:
    if 0 <= request.seed < num_slots(context):
        token, position, prev_hash, _ = record_fields(context)[request.seed].tolist()
        request.start_hash = splitmix64_mix3(prev_hash, token, position)
        request.seed_position = position
    else:
        request.start_hash = chain_start(request.identity_key)


def _walk(request: _Request, inputs: _Inputs) -> None:
    running = request.start_hash
    for entry in range(request.begin, request.end):
        inputs.prev_hashes[entry] = running
        if inputs.slots[entry] >= 0:
            running = splitmix64_mix3(running, inputs.tokens[entry], inputs.positions[entry])
    request.walked = True


# ---- the records ---------------------------------------------------------------------------------


class _Stores:
    """Records and provenance as they will stand after the launch, and the launch's rows."""

    def __init__(self, context: VerifyOrWriteContext, step: int) -> None:
        self._context = context
        self._step = step
        self._records: dict[int, tuple[int, int, int]] = {}
        self._table: dict[int, dict[str, int]] = {}  # provenance of the slots touched so far
        self.count = 0

    def provenance(self, slot: int) -> dict[str, int]:
        """state word, owner, writer uid and writer step of ``slot`` right now."""
        table = self._context.slot_table
        if table is None or not 0 <= slot < num_slots(self._context):
            return {"state": UNKNOWN, "owner": UNKNOWN, "writer": UNKNOWN, "writer_step": UNKNOWN}
        if slot not in self._table:
            self._table[slot] = {
                "state": int(table.state[slot].item()),
                "owner": int(table.owner_uid[slot].item()),
                "writer": int(table.writer_uid[slot].item()),
                "writer_step": int(table.writer_step[slot].item()),
            }
        return self._table[slot]

    def record(self, slot: int, token: int, position: int, prev_hash: int) -> None:
        self._records[slot] = (token, position, to_signed(prev_hash))
        self.count += 1

    def report(self, slot: int, request: _Request, **fields: int) -> None:
        """One violation row; ``fields`` by the lower-case names of ``ViolationField``."""
        before = self.provenance(slot)
        state = before["state"]
        columns = {
            ViolationField.SLOT: slot,
            ViolationField.REQUEST_UID: request.uid,
            ViolationField.BATCH_ROW: request.batch_row,
            ViolationField.WRITER_UID: before["writer"],
            ViolationField.WRITER_STEP: before["writer_step"],
            ViolationField.SLOT_STATE: state if state == UNKNOWN else state & STATE_MASK,
        }
        columns |= {ViolationField[name.upper()]: value for name, value in fields.items()}
        rows = violation_rows(
            self._context,
            step=self._step,
            columns={
                column: torch.tensor([value], device=self._context.canary_buf.device)
                for column, value in columns.items()
            },
        )
        record_violations(self._context, rows)

    def apply(self) -> None:
        context, table = self._context, self._context.slot_table
        device = context.canary_buf.device
        if self._records:
            slots = torch.tensor(list(self._records), device=device)
            fields = record_fields(context)
            fields[slots, :3] = torch.tensor(list(self._records.values()), device=device)
            fields[slots, 3] = fold_slots(context, slots)
        if table is not None:
            for slot, values in self._table.items():
                table.state[slot] = values["state"]
                table.owner_uid[slot] = values["owner"]
                table.writer_uid[slot] = values["writer"]
                table.writer_step[slot] = values["writer_step"]


def _store_request(
    context: VerifyOrWriteContext, request: _Request, inputs: _Inputs, stores: _Stores
) -> None:
    if request.seed >= num_slots(context) and request.begin < request.end:
        stores.report(request.seed, request, fail_reason_bits=FailReason.OUT_OF_POOL)

    previous_position = request.seed_position
    asserts_positions = int(context.enable_chain_position_assert.item()) == 1
    for entry in range(request.begin, request.end):
        slot, token, position = inputs.slots[entry], inputs.tokens[entry], inputs.positions[entry]
        if slot < 0:
            continue
        running = to_signed(inputs.prev_hashes[entry])
        written = {"position": position, "stored_token": token, "stored_chain_hash": running}

        expected: dict[str, int] = {}
        if inputs.expected_tokens is not None and inputs.expected_positions is not None:
            expected_position = inputs.expected_positions[entry]
            expected = _expectation(inputs.expected_tokens[entry], expected_position)
            bits = FailReason(0)
            if token != inputs.expected_tokens[entry]:
                bits |= FailReason.WRITE_TOKEN
            if position != expected_position:
                bits |= FailReason.WRITE_POSITION
            if bits:
                stores.report(slot, request, fail_reason_bits=bits, **written, **expected)

        if asserts_positions and previous_position is not None:
            following = to_signed(previous_position + 1)
            if position != following:
                stores.report(
                    slot,
                    request,
                    fail_reason_bits=FailReason.WRITE_POSITION,
                    **written,
                    **_expectation(token, following),
                )
        if previous_position is not None:
            previous_position = position

        if slot >= num_slots(context):
            bits = FailReason.OUT_OF_POOL
            stores.report(slot, request, fail_reason_bits=bits, **written, **expected)
            continue
        if _owned_by_another(context, stores.provenance(slot)["owner"], slot, request.uid):
            bits = FailReason.WRITE_OWNED
            stores.report(slot, request, fail_reason_bits=bits, **written, **expected)
        stores.record(slot, token, position, inputs.prev_hashes[entry])
        if context.slot_table is not None and slot != PADDING_SLOT:
            _claim(
                stores.provenance(slot),
                request.uid,
                inputs.step,
                tracks_allocation=context.slot_table.tracks_allocation,
            )


def _expectation(token: int, position: int) -> dict[str, int]:
    return {"expected_token": token, "expected_aux": position, "expected_position": position}


def _owned_by_another(context: VerifyOrWriteContext, owner: int, slot: int, uid: int) -> bool:
    table = context.slot_table
    if table is None or not table.tracks_allocation or slot == PADDING_SLOT:
        return False
    return uid != UNKNOWN and owner not in (UNKNOWN, uid)


def _claim(provenance: dict[str, int], uid: int, step: int, *, tracks_allocation: bool) -> None:
    """Owner, writer and state of a slot that was just written."""
    if provenance["owner"] == UNKNOWN:
        provenance["owner"] = uid
    provenance["writer"] = uid
    provenance["writer_step"] = step
    word = provenance["state"]
    if not (tracks_allocation and word & STATE_MASK == SlotState.FREE):
        provenance["state"] = (word & ~STATE_MASK) | SlotState.WRITTEN
