"""Both implementations against the oracle, which shares no code with either."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcanary_plugin.kernels import (
    RealKvHashMode,
    TableReads,
    VerifyOrWriteContext,
    WritePlan,
    launch_canary_scrub_kernel,
    launch_canary_scrub_kernel_torch_reference,
    launch_canary_seal_kernel,
    launch_canary_seal_kernel_torch_reference,
    launch_canary_table_verify_kernel,
    launch_canary_table_verify_kernel_torch_reference,
    launch_canary_verify_kernel,
    launch_canary_verify_kernel_torch_reference,
    launch_canary_write_kernel,
    launch_canary_write_kernel_torch_reference,
)
from tests.kernels import oracle, scenes

SEEDS = st.integers(0, 2**32 - 1)


def strips_of(context: VerifyOrWriteContext, slot: int) -> list[bytes]:
    """The bytes of a slot that a launch with this context folds, read without torch arithmetic."""
    strips = []
    if context.real_kv_hash_mode == RealKvHashMode.NONE:
        return strips
    for source in context.real_kv_sources:
        row = bytes(source.tensor[slot // source.page_size].tolist())
        first = slot % source.page_size * source.num_bytes_per_token
        length = source.read_bytes
        if context.real_kv_hash_mode == RealKvHashMode.PARTIAL:
            length = min(16, length)
        strips.append(row[first : first + length])
    return strips


def world_of(context: VerifyOrWriteContext, step: int) -> oracle.World:
    table = context.slot_table
    slots = []
    for index, record in enumerate(context.canary_buf.view(torch.int64).tolist()):
        slot = oracle.Slot(*record[:4], strips=strips_of(context, index))
        if table is not None:
            word = int(table.state[index])
            slot.state, slot.generation = word & 0xFF, word >> 8
            slot.owner = int(table.owner_uid[index])
            slot.writer = int(table.writer_uid[index])
            slot.writer_step = int(table.writer_step[index])
        slots.append(slot)
    return oracle.World(
        slots=slots,
        has_table=table is not None,
        tracks_allocation=table is not None and table.tracks_allocation,
        asserts_positions=int(context.enable_chain_position_assert) == 1,
        kernel_kind=context.kernel_kind,
        step=step,
    )


def assert_left_behind(
    world: oracle.World, before: VerifyOrWriteContext, after: VerifyOrWriteContext
) -> None:
    """Records, slot table, ring and counters of ``after`` are those of the oracle's world."""
    expected_records = before.canary_buf.view(torch.int64).tolist()
    for index, slot in enumerate(world.slots):
        expected_records[index][:4] = [
            slot.token,
            slot.position,
            slot.prev_hash,
            slot.real_kv_hash,
        ]
    assert after.canary_buf.view(torch.int64).tolist() == expected_records

    if after.slot_table is not None:
        table = after.slot_table
        assert [word & 0xFF for word in table.state.tolist()] == [s.state for s in world.slots]
        assert [word >> 8 for word in table.state.tolist()] == [s.generation for s in world.slots]
        assert table.owner_uid.tolist() == [s.owner for s in world.slots]
        assert table.writer_uid.tolist() == [s.writer for s in world.slots]
        assert table.writer_step.tolist() == [s.writer_step for s in world.slots]

    first = int(before.violation_write_index) % 2**32
    ring = before.violation_ring.tolist()
    for number, row in enumerate(world.rows, start=first):
        number %= 2**32
        ring[number % len(ring)] = [*row, number + 1]
    assert after.violation_ring.tolist() == ring
    assert int(after.violation_write_index) % 2**32 == (first + len(world.rows)) % 2**32

    assert int(after.slot_run_counter) == int(before.slot_run_counter) + world.counted
    assert int(after.kernel_run_counter) == int(before.kernel_run_counter) + 1


def optional_list(tensor: torch.Tensor | None, size: int, default: int) -> list[int]:
    return [default] * size if tensor is None else tensor.tolist()


def requests_of(plan: WritePlan, entries: int) -> list[oracle.Request]:
    capacity = plan.write_seed_slot_indices.numel()
    offsets = [min(max(offset, 0), entries) for offset in plan.write_offsets.tolist()]
    seeds = plan.write_seed_slot_indices.tolist()
    uids = optional_list(plan.write_request_uids, capacity, -1)
    keys = optional_list(plan.write_identity_keys, capacity, 0)
    count = min(max(int(plan.write_num_valid_reqs), 0), capacity)
    return [
        oracle.Request(offsets[r], offsets[r + 1], seeds[r], uids[r], keys[r]) for r in range(count)
    ]


@pytest.mark.parametrize(
    "launch", [launch_canary_write_kernel, launch_canary_write_kernel_torch_reference]
)
@given(seed=SEEDS)
def test_write_equals_oracle(launch: Any, seed: int) -> None:
    arguments = scenes.random_write(scenes.Dice(seed))
    after = scenes.run_on_copy(launch, arguments)["context"]

    world = world_of(arguments["context"], arguments["step"])
    expected = None
    if arguments["enable_write_input_assert"]:
        expected = list(
            zip(
                arguments["expected_input_tokens"].tolist(),
                arguments["expected_input_positions"].tolist(),
                strict=True,
            )
        )
    oracle.write(
        world,
        requests_of(arguments["plan"], arguments["input_ids"].numel()),
        arguments["input_ids"].tolist(),
        arguments["positions"].tolist(),
        arguments["out_cache_loc"].tolist(),
        expected,
    )
    assert_left_behind(world, arguments["context"], after)


@pytest.mark.parametrize(
    "launch", [launch_canary_verify_kernel, launch_canary_verify_kernel_torch_reference]
)
@given(seed=SEEDS)
def test_verify_equals_oracle(launch: Any, seed: int) -> None:
    arguments = scenes.random_verify(scenes.Dice(seed))
    after = scenes.run_on_copy(launch, arguments)["context"]

    world = world_of(arguments["context"], arguments["step"])
    plan = arguments["plan"]
    capacity = plan.verify_slot_indices.numel()
    slots = plan.verify_slot_indices.tolist()
    checks_tokens = arguments["check_verify_expected_token"]
    entries = []
    for index in range(max(0, int(plan.verify_num_valid)) if int(plan.enable) else 0):
        if slots[index] == 0:
            world.counted += 1
            continue
        entries.append(
            oracle.Entry(
                slot=slots[index],
                position=int(plan.verify_expected_positions[index]),
                prev_slot=int(plan.verify_prev_slot_indices[index]),
                token=int(plan.verify_expected_tokens[index]) if checks_tokens else -1,
                key=optional_list(plan.verify_identity_keys, capacity, 0)[index],
                uid=optional_list(plan.verify_request_uids, capacity, -1)[index],
                batch_row=optional_list(plan.verify_batch_rows, capacity, -1)[index],
            )
        )
    oracle.verify(world, entries)
    assert_left_behind(world, arguments["context"], after)


def table_entries_of(reads: TableReads) -> list[oracle.Entry]:
    table = oracle.Table(
        pages=reads.page_table.tolist(),
        page_size=reads.page_size,
        window=reads.swa_window_size,
        lookup=None
        if reads.full_to_swa_index_mapping is None
        else reads.full_to_swa_index_mapping.tolist(),
    )
    entries = []
    for index, row in enumerate(reads.request_rows.tolist()):
        if row == reads.padding_row:
            continue
        history: list[int] = []
        if reads.expected_tokens is not None and 0 <= row < reads.expected_tokens.shape[0]:
            assert reads.expected_valid_lens is not None
            known = max(0, int(reads.expected_valid_lens[index]))
            history = reads.expected_tokens[row].tolist()[:known]
        prefix_hash = None
        if reads.prefix_hashes is not None and reads.prefix_hash_valid is not None:
            valid = int(reads.prefix_hash_valid[index]) != 0
            prefix_hash = int(reads.prefix_hashes[index]) if valid else None
        entries += oracle.table_entries(
            table,
            batch_row=index,
            row=row,
            prefix=int(reads.prefix_lens[index]),
            uid=int(reads.request_uids[index]),
            key=0 if reads.identity_keys is None else int(reads.identity_keys[index]),
            history=history,
            token_offset=reads.token_offset,
            prefix_hash=prefix_hash,
        )
    return entries


@pytest.mark.parametrize(
    "launch",
    [launch_canary_table_verify_kernel, launch_canary_table_verify_kernel_torch_reference],
)
@given(seed=SEEDS)
def test_table_verify_equals_oracle(launch: Any, seed: int) -> None:
    arguments = scenes.random_table_verify(scenes.Dice(seed))
    after = scenes.run_on_copy(launch, arguments)["context"]

    world = world_of(arguments["context"], arguments["step"])
    oracle.verify(world, table_entries_of(arguments["reads"]))
    assert_left_behind(world, arguments["context"], after)


@pytest.mark.parametrize(
    "launch", [launch_canary_seal_kernel, launch_canary_seal_kernel_torch_reference]
)
@given(seed=SEEDS)
def test_seal_equals_oracle(launch: Any, seed: int) -> None:
    arguments = scenes.random_seal(scenes.Dice(seed))
    after = scenes.run_on_copy(launch, arguments)["context"]

    world = world_of(arguments["context"], arguments["step"])
    plan = arguments["plan"]
    capacity = plan.write_seed_slot_indices.numel()
    requests = min(max(int(plan.write_num_valid_reqs), 0), capacity)
    entries = max(0, int(plan.write_offsets[requests]))
    oracle.seal(world, arguments["out_cache_loc"].tolist()[:entries])
    assert_left_behind(world, arguments["context"], after)


@pytest.mark.parametrize(
    "launch", [launch_canary_scrub_kernel, launch_canary_scrub_kernel_torch_reference]
)
@given(seed=SEEDS)
def test_scrub_equals_oracle(launch: Any, seed: int) -> None:
    arguments = scenes.random_scrub(scenes.Dice(seed))
    after = scenes.run_on_copy(launch, arguments)["context"]

    world = world_of(arguments["context"], arguments["step"])
    count = max(0, int(arguments["num_valid"]))
    oracle.scrub(world, arguments["slots"].tolist()[:count])
    assert_left_behind(world, arguments["context"], after)
