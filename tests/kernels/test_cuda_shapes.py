"""The CUDA kernels at the sizes where they change their ways: tiles, strips, shared slots.

Each grid of sizes says why it has these: an edge of a warp (32), of a tile (127 judged positions a
warp, 508 a block), or of a way to read strips (16-byte vectors: 1, 2, up to 32, up to 64, more).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kvcanary_plugin.kernels import (
    RealKvHashMode,
    RealKvSource,
    SlotTable,
    VerifyOrWriteContext,
)
from kvcanary_plugin.kernels.reference import fold_slots, record_fields
from tests.kernels import oracle, scenes
from tests.kernels.cuda_support import assert_agreement, on_every_device

SEALED = 3


def _shuffled(values: range, seed: int = 0) -> list[int]:
    order = list(values)
    scenes.Dice(seed).shuffle(order)
    return order


def table_of(num_slots: int, *, state: int = SEALED, tracks_allocation: bool = True) -> SlotTable:
    table = SlotTable.allocate(
        num_slots=num_slots, device=scenes.CPU, tracks_allocation=tracks_allocation
    )
    table.state.fill_(state)
    return table


def _source(num_slots: int, num_bytes: int, *, page_size: int = 1, seed: int = 0) -> RealKvSource:
    generator = torch.Generator().manual_seed(seed)
    rows = -(-num_slots // page_size)
    content = torch.randint(0, 256, (rows, page_size * num_bytes), generator=generator)
    return RealKvSource(
        tensor=content.to(torch.uint8),
        page_size=page_size,
        num_bytes_per_token=num_bytes,
        read_bytes=num_bytes,
    )


def _write(
    context: VerifyOrWriteContext, lengths: list[int], slots: list[int], **plan: Any
) -> dict[str, Any]:
    entries = sum(lengths)
    return {
        "context": context,
        "plan": scenes.make_write_plan(lengths=lengths, **plan),
        "input_ids": torch.arange(entries) * 7 % 1000,
        "positions": torch.cat([torch.arange(length) for length in [*lengths, 0]]),
        "out_cache_loc": torch.tensor(slots[:entries], dtype=torch.int64),
        "enable_write_input_assert": False,
        "expected_input_tokens": None,
        "expected_input_positions": None,
        "step": 5,
    }


# ---- write ---------------------------------------------------------------------------------------


@on_every_device
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("skipped", [False, True])
def test_write_at_every_edge_of_a_tile(device: str, skipped: bool, beside: bool) -> None:
    lengths = [1, 31, 32, 33, 63, 64, 65, 0, 300]
    slots = _shuffled(range(1, 700))
    if skipped:
        slots = [-1 if index % 3 == 1 else slot for index, slot in enumerate(slots)]
    context = scenes.make_context(num_slots=700, slot_table=table_of(700), position_assert=1)
    # Continuing behind a record at position 0: the first position is wrong, all others follow.
    seeds = [*slots[-8:], -1]
    arguments = _write(context, lengths, slots, seeds=seeds) | {"beside": beside}
    assert_agreement("launch_canary_write_kernel", arguments, device)


@on_every_device
def test_last_write_of_a_request_into_one_slot_stays(device: str) -> None:
    context = scenes.make_context(num_slots=50)
    slots = [3, 9, 3, 4, 9, *range(10, 40), 3, 4]
    arguments = _write(context, [len(slots)], slots)
    assert_agreement("launch_canary_write_kernel", arguments, device, remove_races=False)


@on_every_device
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_prefix_hit_inside_the_batch_follows_the_other_chain(device: str, order: list[int]) -> None:
    # A writes slots 1..40; B continues behind slot 40 with 41..50; C behind slot 50.
    slots = [list(range(1, 41)), list(range(41, 51)), list(range(51, 120))]
    starts, seeds = [0, 40, 50], [-1, 40, 50]
    context = scenes.make_context(num_slots=130, slot_table=table_of(130, state=1))
    arguments = _write(
        context,
        [len(slots[index]) for index in order],
        [slot for index in order for slot in slots[index]],
        seeds=[seeds[index] for index in order],
    )
    arguments["positions"] = torch.cat(
        [torch.arange(starts[index], starts[index] + len(slots[index])) for index in order]
    )
    assert_agreement("launch_canary_write_kernel", arguments, device)


@on_every_device
@pytest.mark.parametrize("mode", [RealKvHashMode.PARTIAL, RealKvHashMode.ALL])
def test_write_folds_what_it_stored(device: str, mode: RealKvHashMode) -> None:
    context = scenes.make_context(
        num_slots=200, sources=(_source(200, 48), _source(200, 13, page_size=4)), mode=mode
    )
    arguments = _write(context, [70, 1, 40], _shuffled(range(200)))
    assert_agreement("launch_canary_write_kernel", arguments, device)


# ---- folds ---------------------------------------------------------------------------------------

STRIP_BYTES = [16, 32, 48, 128, 256, 512, 528, 1024, 1040, 2048, 2064, 656, 584, 132, 7, 8, 24]


def _seal(context: VerifyOrWriteContext, slots: list[int]) -> dict[str, Any]:
    return {
        "context": context,
        "plan": scenes.make_write_plan(lengths=[len(slots)]),
        "out_cache_loc": torch.tensor(slots),
        "step": 5,
    }


@on_every_device
@pytest.mark.parametrize("num_bytes", STRIP_BYTES)
def test_fold_of_strips_of_every_width(device: str, num_bytes: int) -> None:
    sources = (_source(9, num_bytes, seed=1), _source(9, num_bytes, page_size=4, seed=2))
    context = scenes.make_context(num_slots=9, sources=sources, mode=RealKvHashMode.ALL)
    assert_agreement("launch_canary_seal_kernel", _seal(context, [8, 1, 5]), device)


@on_every_device
@pytest.mark.parametrize("num_slots", [2, 40, 300])  # eight warps a slot, some, one
@pytest.mark.parametrize("num_sources", [1, 7, 33, 70])  # more than a warp has lanes
@pytest.mark.parametrize("num_bytes", [16, 64, 528])
def test_fold_of_many_sources(
    device: str, num_bytes: int, num_sources: int, num_slots: int
) -> None:
    sources = tuple(_source(num_slots, num_bytes, seed=seed) for seed in range(num_sources))
    context = scenes.make_context(
        num_slots=num_slots,
        sources=sources,
        mode=RealKvHashMode.ALL,
        slot_table=table_of(num_slots),
    )
    assert_agreement(
        "launch_canary_seal_kernel", _seal(context, _shuffled(range(num_slots))), device
    )


@on_every_device
def test_fold_of_sources_of_different_width_and_alignment(device: str) -> None:
    sources = [_source(60, num_bytes, seed=num_bytes) for num_bytes in STRIP_BYTES]
    shifted = _source(60, 64)
    flat = torch.zeros(60 * 64 + 5, dtype=torch.uint8)
    flat[5:] = shifted.tensor.flatten()
    sources.append(dataclasses.replace(shifted, tensor=flat[5:].view(60, 64)))
    context = scenes.make_context(num_slots=60, sources=tuple(sources), mode=RealKvHashMode.ALL)
    assert_agreement("launch_canary_seal_kernel", _seal(context, list(range(60))), device)


@on_every_device
def test_scrub_reports_every_flipped_byte(device: str) -> None:
    sources = (_source(90, 2048), _source(90, 96, page_size=8))
    context = scenes.make_context(
        num_slots=90, sources=sources, mode=RealKvHashMode.ALL, slot_table=table_of(90)
    )
    record_fields(context)[:, 3] = fold_slots(context, torch.arange(90))
    for slot in (3, 44, 89):
        sources[0].tensor[slot, slot * 20] ^= 1
    assert context.slot_table is not None
    context.slot_table.state[44] = 2  # written, not sealed: passed over
    arguments = {
        "context": context,
        "slots": torch.tensor(_shuffled(range(90))),
        "num_valid": torch.tensor([90], dtype=torch.int32),
        "step": 9,
    }
    assert_agreement("launch_canary_scrub_kernel", arguments, device)


# ---- verify --------------------------------------------------------------------------------------

PREFIX_LENS = [1, 2, 31, 32, 33, 126, 127, 128, 129, 254, 255, 507, 508, 509, 1100]


def chained_pool(
    prefix_lens: list[int], *, page_size: int, faults: int, mode: RealKvHashMode
) -> dict[str, Any]:
    """Arguments of a table verify over requests with their own pages, in shuffled order."""
    pages = [-(-length // page_size) for length in prefix_lens]
    num_slots = (sum(pages) + 1) * page_size
    sources = (_source(num_slots, 32), _source(num_slots, 24, page_size=3, seed=4))
    context = scenes.make_context(
        num_slots=num_slots,
        sources=sources,
        mode=mode,
        slot_table=table_of(num_slots),
        ring_capacity=4096,
    )
    free_pages = _shuffled(range(1, sum(pages) + 1))
    table = torch.zeros((len(pages), max(pages)), dtype=torch.int32)
    fields = record_fields(context)
    tokens = torch.full((len(pages), max(prefix_lens)), -1)
    hashes = []
    for request, length in enumerate(prefix_lens):
        for page in range(pages[request]):
            table[request, page] = free_pages.pop()
        running = oracle.splitmix64(oracle.ANCHOR ^ request)
        for position in range(length):
            slot = int(table[request, position // page_size]) * page_size + position % page_size
            token = (request * 31 + position * 7) % 1000
            tokens[request, position] = token
            fields[slot, :3] = torch.tensor([token, position, oracle.signed(running)])
            running = oracle.mix3(running, token, position)
        hashes.append(oracle.signed(running))
    fields[:, 3] = fold_slots(context, torch.arange(num_slots))
    reads = scenes.make_reads(
        table.tolist(),
        prefix_lens,
        page_size=page_size,
        identity_keys=torch.arange(len(pages)),
        expected_tokens=tokens,
        expected_valid_lens=torch.tensor(prefix_lens),
        prefix_hashes=torch.tensor(hashes),
        prefix_hash_valid=torch.ones(len(pages), dtype=torch.int32),
    )
    dice = scenes.Dice(faults)
    for _ in range(faults):
        fields[dice.randrange(num_slots), dice.randrange(4)] += 1
    return {"context": context, "reads": reads, "step": 5}


@on_every_device
@pytest.mark.parametrize("page_size", [1, 16, 12])
@pytest.mark.parametrize("mode", [RealKvHashMode.NONE, RealKvHashMode.ALL])
@pytest.mark.parametrize("faults", [0, 40])
def test_table_verify_at_every_edge_of_a_tile(
    device: str, faults: int, mode: RealKvHashMode, page_size: int
) -> None:
    arguments = chained_pool(PREFIX_LENS, page_size=page_size, faults=faults, mode=mode)
    assert_agreement("launch_canary_table_verify_kernel", arguments, device)


@on_every_device
def test_a_clean_pool_gives_no_rows(device: str) -> None:
    arguments = chained_pool([300, 5], page_size=1, faults=0, mode=RealKvHashMode.ALL)
    after = assert_agreement("launch_canary_table_verify_kernel", arguments, device)
    assert int(after["context"].violation_write_index) == 0
    assert int(after["context"].slot_run_counter) == 305


@on_every_device
@pytest.mark.parametrize("max_prefix_len", [0, 100, 1 << 20])
def test_max_prefix_len_changes_the_grid_and_nothing_else(device: str, max_prefix_len: int) -> None:
    arguments = chained_pool([700, 1100], page_size=1, faults=9, mode=RealKvHashMode.NONE)
    arguments["reads"] = dataclasses.replace(arguments["reads"], max_prefix_len=max_prefix_len)
    assert_agreement("launch_canary_table_verify_kernel", arguments, device)


@on_every_device
@pytest.mark.parametrize("window", [1, 127, 128, 600])
def test_table_verify_of_a_window(device: str, window: int) -> None:
    arguments = chained_pool([700, 100], page_size=1, faults=9, mode=RealKvHashMode.NONE)
    arguments["reads"] = dataclasses.replace(arguments["reads"], swa_window_size=window)
    assert_agreement("launch_canary_table_verify_kernel", arguments, device)


@on_every_device
@pytest.mark.parametrize("prefix_lens", [[0], [1], [1000], list(range(70))])
def test_plan_and_verify_of_the_plan(device: str, prefix_lens: list[int]) -> None:
    pool = chained_pool(
        [max(1, length) for length in prefix_lens], page_size=1, faults=3, mode=RealKvHashMode.NONE
    )
    reads = pool["reads"]
    plan = scenes.make_verify_plan([(0, 0, 0, 0)] * (sum(prefix_lens) + 5))
    arguments = {
        "verify_plan_out": plan,
        "write_plan_out": scenes.make_write_plan(lengths=[], capacity=len(prefix_lens)),
        "req_pool_indices": reads.request_rows,
        "prefix_lens": torch.tensor(prefix_lens),
        "extend_seq_lens": torch.arange(len(prefix_lens)),
        "req_to_token": reads.page_table,
        "swa_window_size": 0,
        "full_to_swa_index_mapping": None,
        "verify_capacity": plan.verify_slot_indices.numel(),
        "padding_row": -1,
    }
    after = assert_agreement("launch_canary_plan_kernels", arguments, device)
    assert_agreement(
        "launch_canary_verify_kernel",
        {
            "context": pool["context"],
            "plan": after["verify_plan_out"],
            "check_verify_expected_token": True,
            "step": 5,
        },
        device,
    )


# ---- prepare -------------------------------------------------------------------------------------


@on_every_device
@pytest.mark.parametrize("requests", [1, 8, 9, 300])
def test_prepare_of_many_requests(device: str, requests: int) -> None:
    context = scenes.make_context(num_slots=5000, slot_table=table_of(5000))
    reads = dataclasses.replace(
        scenes.make_reads([[1 + row] for row in range(requests)], [1] * requests),
        extend_lens=torch.arange(requests) % 7,
    )
    arguments = {
        "context": context,
        "reads": reads,
        "write_plan_out": scenes.make_write_plan(lengths=[], capacity=requests + 2),
        "out_cache_loc": torch.tensor(_shuffled(range(1000, 2000))),
        "step": 5,
    }
    assert_agreement("launch_canary_prepare_kernel", arguments, device)
