"""Random pools, plans and page tables, and the comparison of two implementations on them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch

from kvcanary_plugin.kernels import (
    EventKind,
    RealKvHashMode,
    RealKvSource,
    SlotEvent,
    SlotTable,
    TableReads,
    TableSnapshot,
    VerifyOrWriteContext,
    VerifyPlan,
    WritePlan,
    launch_canary_snapshot_kernel_torch_reference,
    launch_canary_write_kernel,
)
from kvcanary_plugin.kernels.reference import fold_slots
from tests.kernels import oracle

CPU = torch.device("cpu")
INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1


def make_context(
    *,
    num_slots: int = 32,
    stride: int = 32,
    ring_capacity: int = 64,
    sources: tuple[RealKvSource, ...] = (),
    mode: RealKvHashMode = RealKvHashMode.NONE,
    slot_table: SlotTable | None = None,
    position_assert: int = 0,
    kernel_kind: int = 1,
    device: torch.device = CPU,
) -> VerifyOrWriteContext:
    """A context over zeroed records with everything at its start."""
    return VerifyOrWriteContext(
        canary_buf=torch.zeros((num_slots, stride), dtype=torch.uint8, device=device),
        kernel_kind=kernel_kind,
        violation_ring=torch.zeros((ring_capacity, 16), dtype=torch.int64, device=device),
        violation_write_index=torch.zeros(1, dtype=torch.int32, device=device),
        slot_run_counter=torch.zeros(1, dtype=torch.int64, device=device),
        kernel_run_counter=torch.zeros(1, dtype=torch.int64, device=device),
        real_kv_sources=sources,
        real_kv_hash_mode=mode,
        enable_chain_position_assert=torch.tensor(
            [position_assert], dtype=torch.int32, device=device
        ),
        slot_table=slot_table,
    )


def with_mode(context: VerifyOrWriteContext, mode: RealKvHashMode) -> VerifyOrWriteContext:
    """The same pool seen by a launch of another mode."""
    return dataclasses.replace(context, real_kv_hash_mode=mode)


def make_write_plan(
    *,
    lengths: list[int],
    seeds: list[int] | None = None,
    uids: list[int] | None = None,
    keys: list[int] | None = None,
    capacity: int | None = None,
    device: torch.device = CPU,
) -> WritePlan:
    """A plan for requests of ``lengths`` entries; what lies behind them is garbage on purpose."""
    count = len(lengths)
    capacity = max(capacity or count, 1)
    plan = WritePlan.allocate(write_req_capacity=capacity, device=device)
    for tensor in tensors(plan).values():
        tensor.fill_(77)
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    assert plan.write_request_uids is not None
    assert plan.write_identity_keys is not None
    for tensor, values in (
        (plan.write_offsets, offsets),
        (plan.write_seed_slot_indices, seeds or [-1] * count),
        (plan.write_request_uids, uids or list(range(100, 100 + count))),
        (plan.write_identity_keys, keys or [0] * count),
    ):
        tensor[: len(values)] = torch.tensor(values, dtype=torch.int64)
    plan.write_num_valid_reqs.fill_(count)
    return plan


def write_sequence(
    context: VerifyOrWriteContext,
    *,
    tokens: list[int],
    slots: list[int],
    start: int = 0,
    seed: int = -1,
    uid: int = 100,
    key: int = 0,
    step: int = 1,
) -> None:
    """Write one request's tokens at consecutive positions through the launch under test."""
    launch_canary_write_kernel(
        context=context,
        plan=make_write_plan(lengths=[len(tokens)], seeds=[seed], uids=[uid], keys=[key]),
        input_ids=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.arange(start, start + len(tokens)),
        out_cache_loc=torch.tensor(slots, dtype=torch.int64),
        enable_write_input_assert=False,
        expected_input_tokens=None,
        expected_input_positions=None,
        step=step,
    )


def make_verify_plan(
    entries: list[tuple[int, int, int, int]],
    *,
    capacity: int | None = None,
    uids: list[int] | None = None,
    keys: list[int] | None = None,
) -> VerifyPlan:
    """A plan of (slot, expected token, expected position, predecessor) entries."""
    count = len(entries)
    plan = VerifyPlan.allocate(verify_capacity=max(capacity or count, 1), device=CPU)
    columns = torch.tensor(entries, dtype=torch.int64).reshape(count, 4).T
    for tensor, column in zip(
        (
            plan.verify_slot_indices,
            plan.verify_expected_tokens,
            plan.verify_expected_positions,
            plan.verify_prev_slot_indices,
        ),
        columns,
        strict=True,
    ):
        tensor.fill_(77)
        tensor[:count] = column
    plan.verify_num_valid.fill_(count)
    plan.enable.fill_(1)

    def optional(values: list[int] | None) -> torch.Tensor | None:
        if values is None:
            return None
        tensor = torch.full_like(plan.verify_slot_indices, 77)
        tensor[:count] = torch.tensor(values, dtype=torch.int64)
        return tensor

    return dataclasses.replace(
        plan, verify_request_uids=optional(uids), verify_identity_keys=optional(keys)
    )


def make_reads(table: list[list[int]], prefix_lens: list[int], **fields: Any) -> TableReads:
    """Reads of the rows 0, 1, ... of a page table in which no row is padding unless said."""
    count = len(prefix_lens)
    values: dict[str, Any] = {
        "page_table": torch.tensor(table, dtype=torch.int32),
        "page_size": 1,
        "padding_row": -1,
        "request_rows": torch.arange(count),
        "request_uids": torch.arange(100, 100 + count),
        "prefix_lens": torch.tensor(prefix_lens, dtype=torch.int64),
        "extend_lens": torch.zeros(count, dtype=torch.int64),
        "max_prefix_len": max([0, *prefix_lens]),
    }
    return TableReads(**(values | fields))


def rows(context: VerifyOrWriteContext) -> torch.Tensor:
    """The violation rows that are still in the ring, oldest first."""
    total = int(context.violation_write_index.item())
    capacity = context.violation_ring.shape[0]
    return context.violation_ring[[n % capacity for n in range(max(0, total - capacity), total)]]


# ---- comparing implementations -------------------------------------------------------------------


def copied(value: Any) -> Any:
    """A deep copy of tensors inside tensors, tuples and dataclasses; sources stay shared."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, RealKvSource)):
        return dataclasses.replace(
            value,
            **{
                field.name: copied(getattr(value, field.name))
                for field in dataclasses.fields(value)
                if field.init
            },
        )
    return value


def tensors(value: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor inside a dataclass by its path."""
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found: dict[str, torch.Tensor] = {}
        for field in dataclasses.fields(value):
            if field.init:
                found |= tensors(getattr(value, field.name), f"{prefix}.{field.name}")
        return found
    return {}


def assert_same(first: Any, second: Any) -> None:
    """Both hold the same bytes in every tensor."""
    left, right = tensors(first), tensors(second)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), f"{name}:\n{tensor}\n{right[name]}"


def run_on_copy(launch: Callable[..., None], arguments: dict[str, Any]) -> dict[str, Any]:
    """Run ``launch`` on a deep copy of its arguments and return what became of them."""
    own = {name: copied(value) for name, value in arguments.items()}
    launch(**own)
    return own


# ---- random content ------------------------------------------------------------------------------


class Dice(random.Random):
    """A seeded source of everything random in a scene."""

    def int64(self) -> int:
        """Any int64, with its corners and small numbers well represented."""
        return self.choice(
            (self.randint(INT_MIN, INT_MAX), self.randint(-3, 40), INT_MIN, INT_MAX, 0, -1)
        )

    def integers(self, values: list[int]) -> torch.Tensor:
        """``values`` as int64, or as int32 where they fit and the dice say so."""
        fits = all(-(1 << 31) <= value < 1 << 31 for value in values)
        dtype = torch.int32 if fits and self.random() < 0.5 else torch.int64
        return torch.tensor(values, dtype=dtype)


def random_sources(dice: Dice, num_slots: int, count: int) -> tuple[RealKvSource, ...]:
    """Strips of many shapes: paged, strided, interleaved, odd widths, partly read."""
    return tuple(_random_source(dice, num_slots) for _ in range(count))


def _random_source(dice: Dice, num_slots: int) -> RealKvSource:
    page_size = dice.choice((1, 1, 7, 16))
    num_bytes = dice.choice((1, 8, 13, 16, 24, 132, 584))
    rows_needed = -(-num_slots // page_size)
    slack = dice.choice((0, 5, 64))  # bytes of a row that belong to nobody
    width = page_size * num_bytes + slack
    every = dice.choice((1, 2))  # a view of every second row
    content = bytes(dice.getrandbits(8) for _ in range(64)) + dice.randbytes(
        rows_needed * every * width
    )
    flat = torch.frombuffer(bytearray(content[64:]), dtype=torch.uint8)
    tensor = flat.reshape(rows_needed * every, width)[::every]
    return RealKvSource(
        tensor=tensor,
        page_size=page_size,
        num_bytes_per_token=num_bytes,
        read_bytes=dice.choice((num_bytes, dice.randint(1, num_bytes))),
    )


def random_slot_table(dice: Dice, num_slots: int) -> SlotTable | None:
    """No table, or one in which states, owners, uids and steps are mixed; steps are 0 .. 6."""
    if dice.random() < 0.3:
        return None

    def column(values: Callable[[], int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([values() for _ in range(num_slots)], dtype=dtype)

    return SlotTable(
        state=column(lambda: dice.randint(0, 4) | dice.randint(-3, 3) << 8, torch.int32),
        owner_uid=column(lambda: dice.choice((-1, -1, 100, 101, 102)), torch.int64),
        writer_uid=column(lambda: dice.choice((-1, 100, 101, 7)), torch.int64),
        writer_step=column(lambda: dice.randint(-1, 6), torch.int64),
        tracks_allocation=dice.random() < 0.5,
    )


def random_context(dice: Dice) -> VerifyOrWriteContext:
    """A pool in any state: random or well-chained records, any table, sources, mode and ring."""
    num_slots = dice.choice((1, 2, 17, 40))
    stride = dice.choice((32, 48, 64))
    sources = random_sources(dice, num_slots, dice.choice((0, 1, 3)))
    context = make_context(
        num_slots=num_slots,
        stride=stride,
        ring_capacity=dice.choice((1, 3, 200)),
        sources=sources,
        mode=dice.choice(list(RealKvHashMode)),
        slot_table=random_slot_table(dice, num_slots),
        position_assert=dice.choice((0, 1, 2)),
        kernel_kind=dice.randint(0, 600),
    )
    context.canary_buf.copy_(
        torch.frombuffer(bytearray(dice.randbytes(num_slots * stride)), dtype=torch.uint8).reshape(
            num_slots, stride
        )
    )
    if dice.random() < 0.7:
        _chain_records(dice, context)
    context.violation_write_index.fill_(dice.choice((0, 5, (1 << 31) - 1, -2)))
    context.slot_run_counter.fill_(dice.randint(0, 9))
    context.kernel_run_counter.fill_(dice.randint(0, 9))
    return context


def _chain_records(dice: Dice, context: VerifyOrWriteContext) -> None:
    """Slots 1, 2, ... hold one sequence from position 0 on; now and then a record is wrong."""
    fields = context.canary_buf.view(torch.int64)
    running = oracle.splitmix64(oracle.ANCHOR)
    for slot in range(1, fields.shape[0]):
        record = [dice.randint(0, 9), slot - 1, oracle.signed(running), 0]
        running = oracle.mix3(running, record[0], record[1])
        if dice.random() < 0.1:
            record[dice.randint(0, 2)] = dice.int64()
        fields[slot, :4] = torch.tensor(record)
    slots = torch.arange(fields.shape[0])
    fields[:, 3] = torch.where(slots % 5 == 3, fields[:, 3], fold_slots(context, slots))


def random_slot(dice: Dice, num_slots: int) -> int:
    """Mostly inside the pool; now and then skipped, padding, or far outside."""
    return dice.choice(
        (
            *(dice.randint(0, num_slots - 1) for _ in range(8)),
            0,
            -1,
            num_slots,
            num_slots + 3,
            dice.randint(-(1 << 31), (1 << 31) - 1),
        )
    )


def random_write(dice: Dice) -> dict[str, Any]:
    """Arguments of a write launch: sane and broken plans, seeds inside the plan, any dtypes."""
    context = random_context(dice)
    num_slots = context.canary_buf.shape[0]
    lengths = [dice.choice((0, 1, 2, 5, 40)) for _ in range(dice.choice((0, 1, 2, 5, 9)))]
    entries = sum(lengths) + dice.choice((0, 0, 3))
    slots = [random_slot(dice, num_slots) for _ in range(entries)]
    seeds = [
        dice.choice((-1, random_slot(dice, num_slots), *(slots[:1] or [-1]), *slots[-1:]))
        for _ in lengths
    ]
    plan = make_write_plan(
        lengths=lengths,
        seeds=seeds,
        uids=[dice.choice((-1, 100, 101, 102)) for _ in lengths],
        keys=[dice.int64() for _ in lengths],
        capacity=len(lengths) + dice.choice((0, 2)),
    )
    if dice.random() < 0.15:  # offsets that leave the inputs, and a count that leaves the plan
        plan.write_offsets.copy_(
            torch.tensor(sorted(dice.randint(-4, entries + 4) for _ in plan.write_offsets))
        )
        plan.write_num_valid_reqs.fill_(dice.choice((-1, 0, 1, 1 << 30)))
    if dice.random() < 0.3:
        plan = dataclasses.replace(plan, write_request_uids=None, write_identity_keys=None)
    tokens = [dice.choice((dice.randint(0, 9), dice.int64())) for _ in range(entries)]
    positions = [dice.choice((index, dice.int64())) for index in range(entries)]
    asserts = dice.random() < 0.5
    differing = [dice.random() < 0.2 for _ in range(2 * entries)]
    return {
        "context": context,
        "plan": plan,
        "input_ids": dice.integers(tokens),
        "positions": dice.integers(positions),
        "out_cache_loc": dice.integers(slots),
        "enable_write_input_assert": asserts,
        "expected_input_tokens": dice.integers(
            [token ^ other for token, other in zip(tokens, differing[:entries], strict=True)]
        )
        if asserts
        else None,
        "expected_input_positions": dice.integers(
            [place ^ other for place, other in zip(positions, differing[entries:], strict=True)]
        )
        if asserts
        else None,
        "step": dice.randint(-1, 5),
    }


def random_verify(dice: Dice) -> dict[str, Any]:
    """Arguments of a verify launch over a plan, most of its entries plausible."""
    context = random_context(dice)
    num_slots = context.canary_buf.shape[0]
    fields = context.canary_buf.view(torch.int64)
    entries = []
    for _ in range(dice.choice((0, 1, 5, 60))):
        slot = random_slot(dice, num_slots)
        inside = 0 <= slot < num_slots
        token = int(fields[slot, 0]) if inside else 3
        position = int(fields[slot, 1]) if inside else 4
        entries.append(
            (
                slot,
                dice.choice((token, token, -1, dice.int64())),
                dice.choice((position, position, dice.int64())),
                dice.choice((slot - 1, slot - 1, -1, -2, random_slot(dice, num_slots))),
            )
        )
    plan = make_verify_plan(
        entries,
        capacity=len(entries) + dice.choice((0, 2)),
        uids=[dice.int64() for _ in entries] if dice.random() < 0.5 else None,
        keys=[dice.int64() for _ in entries] if dice.random() < 0.5 else None,
    )
    if dice.random() < 0.5:
        batch_rows = torch.arange(plan.verify_slot_indices.numel())
        plan = dataclasses.replace(plan, verify_batch_rows=batch_rows)
    if dice.random() < 0.2:
        plan.enable.fill_(dice.choice((0, 2)))
    if dice.random() < 0.1:
        plan.verify_num_valid.fill_(dice.choice((-5, 0)))
    return {
        "context": context,
        "plan": plan,
        "check_verify_expected_token": dice.random() < 0.7,
        "step": dice.randint(-1, 6),
    }


def random_reads(dice: Dice, num_slots: int) -> TableReads:
    """A page table with holes, shared pages, bad rows, windows, lookup tables and prefix hashes."""
    page_size = dice.choice((1, 1, 7, 16))
    width = dice.randint(1, 6) if page_size > 1 else dice.randint(1, 40)
    rows_in_table = dice.randint(1, 5)
    last_page = max(1, (num_slots - 1) // page_size)
    pages = [
        [
            dice.choice((*[1 + column % last_page] * 9, dice.randint(0, last_page + 1), -1))
            for column in range(width)
        ]
        for _ in range(rows_in_table)
    ]
    page_table = dice.integers([page for row in pages for page in row]).reshape(
        rows_in_table, width
    )
    if dice.random() < 0.5:  # rows of a wider buffer
        page_table = torch.cat([page_table, page_table], dim=1)[:, :width]
    count = dice.choice((0, 1, 2, 6))
    full_to_swa = None
    if dice.random() < 0.4:
        size = dice.choice((1, num_slots, 3 * num_slots))
        full_to_swa = dice.integers([dice.randint(-1, num_slots) for _ in range(size)])
    has_history = dice.random() < 0.6
    history_width = dice.randint(1, 40)
    has_hashes = dice.random() < 0.6
    return TableReads(
        page_table=page_table,
        page_size=page_size,
        padding_row=dice.choice((-1, 0)),
        request_rows=dice.integers([dice.randint(-1, rows_in_table) for _ in range(count)]),
        request_uids=torch.tensor([dice.int64() for _ in range(count)], dtype=torch.int64),
        prefix_lens=dice.integers(
            [
                dice.choice((0, 1, width * page_size, width * page_size + 3, dice.randint(-1, 20)))
                for _ in range(count)
            ]
        ),
        extend_lens=dice.integers([dice.randint(-1, 6) for _ in range(count)]),
        max_prefix_len=dice.randint(0, width * page_size + 3),
        full_to_swa_index_mapping=full_to_swa,
        swa_window_size=dice.choice((0, 0, 1, 5, 100)),
        identity_keys=torch.tensor([dice.int64() for _ in range(count)], dtype=torch.int64)
        if dice.random() < 0.5
        else None,
        expected_tokens=dice.integers(
            [dice.randint(-1, 9) for _ in range(rows_in_table * history_width)]
        ).reshape(rows_in_table, history_width)
        if has_history
        else None,
        expected_valid_lens=dice.integers([dice.randint(-1, 45) for _ in range(count)])
        if has_history
        else None,
        token_offset=dice.choice((0, 1, -1)),
        prefix_hashes=torch.tensor([dice.int64() for _ in range(count)], dtype=torch.int64)
        if has_hashes
        else None,
        prefix_hash_valid=torch.tensor(
            [dice.choice((0, 1, 5)) for _ in range(count)], dtype=torch.int32
        )
        if has_hashes
        else None,
    )


def random_table_verify(dice: Dice) -> dict[str, Any]:
    """Arguments of a table verify launch."""
    context = random_context(dice)
    reads = random_reads(dice, context.canary_buf.shape[0])
    return {"context": context, "reads": reads, "step": dice.randint(-1, 6)}


def random_plan(dice: Dice) -> dict[str, Any]:
    """Arguments of a plan launch, both outputs filled with a pattern that must survive."""
    reads = random_reads(dice, dice.choice((1, 17, 40)))
    requests = reads.request_rows.numel()
    capacity = dice.choice((1, 30, 400))
    verify_plan = VerifyPlan.allocate(verify_capacity=capacity, device=CPU)
    for tensor in tensors(verify_plan).values():
        tensor.fill_(77)
    return {
        "verify_plan_out": verify_plan,
        "write_plan_out": make_write_plan(lengths=[], capacity=requests + dice.choice((0, 3)) or 1),
        "req_pool_indices": reads.request_rows,
        "prefix_lens": reads.prefix_lens,
        "extend_seq_lens": reads.extend_lens,
        "req_to_token": reads.page_table,
        "swa_window_size": reads.swa_window_size,
        "full_to_swa_index_mapping": reads.full_to_swa_index_mapping,
        "verify_capacity": capacity,
        "req_to_verify_expected_tokens": reads.expected_tokens,
        "req_to_verify_expected_tokens_valid_lens": reads.expected_valid_lens,
        "kv_token_id_vs_position_offset": reads.token_offset,
        "page_size": reads.page_size,
        "padding_row": reads.padding_row,
    }


def random_prepare(dice: Dice) -> dict[str, Any]:
    """Arguments of a prepare launch."""
    context = random_context(dice)
    num_slots = context.canary_buf.shape[0]
    reads = random_reads(dice, num_slots)
    plan = make_write_plan(
        lengths=[], capacity=reads.request_rows.numel() + dice.choice((0, 2)) or 1
    )
    if dice.random() < 0.3:
        plan = dataclasses.replace(plan, write_request_uids=None, write_identity_keys=None)
    slots = [random_slot(dice, num_slots) for _ in range(dice.choice((0, 4, 40)))]
    return {
        "context": context,
        "reads": reads,
        "write_plan_out": plan,
        "out_cache_loc": dice.integers(slots),
        "step": dice.randint(0, 6),
        "events": tuple(
            random_event(dice, num_slots) for _ in range(dice.choice((0, 0, 1, 3, 30)))
        ),
    }


def random_event(dice: Dice, num_slots: int) -> SlotEvent:
    """A lifecycle event; entries of one event are distinct where the order would matter."""
    kind = dice.choice((EventKind.ALLOC, EventKind.FREE, EventKind.MOVE, EventKind.RESET))
    if kind == EventKind.RESET:
        return SlotEvent(kind=kind)
    page_size = dice.choice((1, 1, 3)) if kind != EventKind.MOVE else 1
    places = [-1, 0, num_slots, *range(1, num_slots // page_size)]
    entries = dice.sample(places, min(len(places), dice.choice((0, 1, 5, 40))))
    if kind != EventKind.MOVE:
        return SlotEvent(kind=kind, slots=dice.integers(entries), page_size=page_size)
    slots = dice.integers(entries)
    destinations = torch.tensor(dice.sample(places, len(entries)), dtype=slots.dtype)
    return SlotEvent(kind=kind, slots=slots, destinations=destinations)


def random_seal(dice: Dice) -> dict[str, Any]:
    """Arguments of a seal launch."""
    write = random_write(dice)
    return {name: write[name] for name in ("context", "plan", "out_cache_loc", "step")}


def random_scrub(dice: Dice) -> dict[str, Any]:
    """Arguments of a scrub launch over records that are partly right."""
    context = random_context(dice)
    num_slots = context.canary_buf.shape[0]
    slots = [random_slot(dice, num_slots) for _ in range(dice.choice((0, 4, 40)))]
    return {
        "context": context,
        "slots": torch.tensor(slots, dtype=torch.int64),
        "num_valid": torch.tensor([dice.choice((-1, 0, 3, 1000))], dtype=torch.int32),
        "step": dice.randint(0, 6),
    }


def random_scrub_range(dice: Dice) -> dict[str, Any]:
    """Arguments of a scrub launch over a range that may leave the pool."""
    context = random_context(dice)
    num_slots = context.canary_buf.shape[0]
    return {
        "context": context,
        "first_slot": dice.choice((0, 1, dice.randint(0, num_slots), num_slots + 5, INT_MAX)),
        "num_slots": dice.choice((0, 1, 7, num_slots, INT_MAX)),
        "step": dice.randint(0, 6),
    }


def random_snapshot(dice: Dice) -> dict[str, Any]:
    """Arguments of a snapshot launch into a snapshot filled with a pattern that must survive."""
    reads = random_reads(dice, dice.choice((1, 17, 40)))
    requests = reads.request_rows.numel()
    positions = reads.page_table.shape[1] * reads.page_size
    width = dice.choice((1, dice.randint(1, positions), positions))
    return {
        "reads": reads,
        "first_request": dice.choice((0, 0, 1, requests)),
        "snapshot_out": TableSnapshot(
            entries=torch.full(
                (dice.choice((0, 1, max(requests, 1))), width),
                77,
                dtype=dice.choice((torch.int32, torch.int64)),
            ),
            rows=torch.full((requests,), 77),
            table_rows=torch.full((requests,), 77),
            prefix_lens=torch.full((requests,), 77),
        ),
    }


def random_compare_tables(dice: Dice) -> dict[str, Any]:
    """Arguments of a compare launch after a snapshot; now and then an entry changes in between."""
    arguments = random_snapshot(dice)
    launch_canary_snapshot_kernel_torch_reference(**arguments)
    reads = arguments["reads"]
    tables = [reads.page_table]
    if reads.full_to_swa_index_mapping is not None:
        tables.append(reads.full_to_swa_index_mapping[None])
    for _ in range(dice.choice((0, 1, 1, 4))):
        table = dice.choice(tables)
        row, column = dice.randrange(table.shape[0]), dice.randrange(table.shape[1])
        table[row, column] = dice.randint(-1, 40)
    return {
        "context": random_context(dice),
        "reads": reads,
        "snapshot": arguments["snapshot_out"],
        "step": dice.randint(-1, 6),
    }


def random_concatenate(dice: Dice) -> dict[str, Any]:
    """Arguments of a concatenation: up to more arrays than one launch takes, some of them empty."""
    sizes = [dice.choice((0, 1, 5, 200)) for _ in range(dice.choice((0, 1, 7, 10, 11, 21)))]
    arrays = [dice.integers([dice.randint(-9, 9) for _ in range(size)]) for size in sizes]
    return {"arrays": tuple(arrays), "output": torch.full((sum(sizes),), 77)}


def random_translate(dice: Dice) -> dict[str, Any]:
    """Arguments of a translation."""
    size = dice.choice((1, 9, 30))
    slots = [random_slot(dice, size) for _ in range(dice.choice((0, 1, 50)))]
    return {
        "out_cache_loc": dice.integers(slots),
        "full_to_swa_index_mapping": dice.integers([dice.randint(-2, 9) for _ in range(size)]),
        "output": dice.integers([77] * len(slots)),
    }
