"""Seal, scrub and the fold over sources of every shape."""

from __future__ import annotations

import pytest
import torch

from kvcanary_plugin.kernels import (
    FailReason,
    RealKvHashMode,
    RealKvSource,
    SlotState,
    SlotTable,
    VerifyOrWriteContext,
    ViolationField,
    launch_canary_scrub_kernel,
    launch_canary_seal_kernel,
)
from tests.kernels import oracle, scenes

pytestmark = pytest.mark.usefixtures("implementation")

NUM_SLOTS = 21


def seal(context: VerifyOrWriteContext, slots: list[int], *, num_valid: int = 1) -> None:
    plan = scenes.make_write_plan(lengths=[len(slots)])
    plan.write_num_valid_reqs.fill_(num_valid)
    launch_canary_seal_kernel(
        context=context, plan=plan, out_cache_loc=torch.tensor(slots, dtype=torch.int64), step=3
    )


def scrub(context: VerifyOrWriteContext, slots: list[int], *, num_valid: int | None = None) -> None:
    launch_canary_scrub_kernel(
        context=context,
        slots=torch.tensor(slots, dtype=torch.int64),
        num_valid=torch.tensor([len(slots) if num_valid is None else num_valid], dtype=torch.int32),
        step=5,
    )


def folds(context: VerifyOrWriteContext) -> list[int]:
    return context.canary_buf.view(torch.int64)[:, 3].tolist()


def source(
    content: torch.Tensor, *, page_size: int = 1, num_bytes: int, read_bytes: int | None = None
) -> RealKvSource:
    return RealKvSource(
        tensor=content,
        page_size=page_size,
        num_bytes_per_token=num_bytes,
        read_bytes=read_bytes or num_bytes,
    )


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


def pool(*sources: RealKvSource, mode: RealKvHashMode = RealKvHashMode.ALL) -> VerifyOrWriteContext:
    return scenes.make_context(num_slots=NUM_SLOTS, sources=sources, mode=mode)


# 584: compressed rows of DeepSeek-V4; 132: an FP8 row with its scale; 13: less than two words; 1,
# 7: less than one; 8, 4096: whole words, beyond every vector width.
@pytest.mark.parametrize("num_bytes", [1, 7, 8, 13, 132, 584, 4096])
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_fold_of_any_width_and_page(num_bytes: int, page_size: int) -> None:
    pages = -(-NUM_SLOTS // page_size)
    content = random_bytes(pages, page_size * num_bytes + 3)  # 3 bytes behind each page
    context = pool(source(content, page_size=page_size, num_bytes=num_bytes))
    seal(context, list(range(1, NUM_SLOTS)))
    for slot in range(1, NUM_SLOTS):
        first = slot % page_size * num_bytes
        strip = bytes(content[slot // page_size, first : first + num_bytes].tolist())
        assert folds(context)[slot] == oracle.signed(oracle.fold([strip]))


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 13, 132])
def test_every_byte_counts_and_no_other(num_bytes: int) -> None:
    content = random_bytes(NUM_SLOTS, num_bytes + 5)
    context = pool(source(content, num_bytes=num_bytes))
    seal(context, [4])
    before = folds(context)[4]
    for byte in range(num_bytes + 5):
        content[4, byte] ^= 0x80
        seal(context, [4])
        assert (folds(context)[4] != before) == (byte < num_bytes)
        content[4, byte] ^= 0x80


@pytest.mark.parametrize(
    ("mode", "read_bytes", "counted"),
    [
        (RealKvHashMode.ALL, 64, 64),
        (RealKvHashMode.ALL, 21, 21),
        (RealKvHashMode.PARTIAL, 64, 16),
        (RealKvHashMode.PARTIAL, 5, 5),
    ],
)
def test_mode_and_read_bytes_decide_how_much_is_folded(
    mode: RealKvHashMode, read_bytes: int, counted: int
) -> None:
    content = random_bytes(NUM_SLOTS, 64)
    context = pool(source(content, num_bytes=64, read_bytes=read_bytes), mode=mode)
    seal(context, [4])
    strip = bytes(content[4, :counted].tolist())
    assert folds(context)[4] == oracle.signed(oracle.fold([strip]))


def test_several_hundred_sources_are_folded_in_their_order() -> None:
    contents = [random_bytes(NUM_SLOTS, 24) + index for index in range(320)]
    context = pool(*(source(content, num_bytes=24) for content in contents))
    seal(context, [4])
    strips = [bytes(content[4].tolist()) for content in contents]
    assert folds(context)[4] == oracle.signed(oracle.fold(strips))
    exchanged = [strips[1], strips[0], *strips[2:]]
    assert folds(context)[4] != oracle.signed(oracle.fold(exchanged))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int8])
def test_bytes_are_folded_whatever_their_dtype(dtype: torch.dtype) -> None:
    content = random_bytes(NUM_SLOTS, 4, 16)
    typed = content.view(dtype)
    context = pool(source(typed, num_bytes=64))
    seal(context, [4])
    assert folds(context)[4] == oracle.signed(oracle.fold([bytes(content[4].flatten().tolist())]))


def test_views_into_an_interleaved_buffer_are_read_in_place() -> None:
    interleaved = random_bytes(NUM_SLOTS, 3, 2, 40)  # [slot, layer, k | v, bytes]
    key, value = interleaved[:, 1, 0], interleaved[:, 1, 1]
    context = pool(source(key, num_bytes=40), source(value, num_bytes=40))
    seal(context, [4])
    strips = [bytes(view[4].tolist()) for view in (key, value)]
    assert folds(context)[4] == oracle.signed(oracle.fold(strips))
    interleaved[4, 0] += 1  # another layer
    interleaved[4, 1, 1, 0] += 1
    scrub(context, [4])
    assert context.violation_write_index.item() == 1


def test_one_dimensional_source_has_one_element_a_slot() -> None:
    scales = torch.arange(NUM_SLOTS, dtype=torch.float32)
    context = pool(source(scales, num_bytes=4))
    seal(context, [4])
    strip = bytes(scales.view(torch.uint8)[16:20].tolist())
    assert folds(context)[4] == oracle.signed(oracle.fold([strip]))


# ---- seal ----------------------------------------------------------------------------------------


def test_seal_covers_the_plans_entries_and_no_padding() -> None:
    context = pool(source(random_bytes(NUM_SLOTS, 8), num_bytes=8))
    plan = scenes.make_write_plan(lengths=[2, 1, 2])
    plan.write_num_valid_reqs.fill_(2)
    launch_canary_seal_kernel(
        context=context, plan=plan, out_cache_loc=torch.tensor([4, 5, 6, 7, 8]), step=3
    )
    assert [slot for slot, value in enumerate(folds(context)) if value] == [4, 5, 6]
    assert context.slot_run_counter.item() == 3
    assert context.kernel_run_counter.item() == 1


def test_seal_passes_over_skipped_padding_and_outside_slots() -> None:
    context = pool(source(random_bytes(NUM_SLOTS, 8), num_bytes=8))
    seal(context, [-1, 0, NUM_SLOTS, 2**40, 3])
    assert [slot for slot, value in enumerate(folds(context)) if value] == [3]
    assert context.slot_run_counter.item() == 1


@pytest.mark.parametrize("state", list(SlotState))
def test_seal_turns_written_into_sealed_and_nothing_else(state: SlotState) -> None:
    table = SlotTable.allocate(num_slots=NUM_SLOTS, device=scenes.CPU, tracks_allocation=True)
    table.state.fill_(int(state) | 9 << 8)
    context = scenes.make_context(
        num_slots=NUM_SLOTS,
        sources=(source(random_bytes(NUM_SLOTS, 8), num_bytes=8),),
        mode=RealKvHashMode.ALL,
        slot_table=table,
    )
    seal(context, [3])
    after = SlotState.SEALED if state is SlotState.WRITTEN else state
    assert table.state[3].item() == int(after) | 9 << 8
    assert table.state[4].item() == int(state) | 9 << 8


@pytest.mark.parametrize("with_source", [True, False])
def test_without_real_kv_seal_and_scrub_only_count_the_launch(with_source: bool) -> None:
    sources = (source(random_bytes(NUM_SLOTS, 8), num_bytes=8),) if with_source else ()
    mode = RealKvHashMode.NONE if with_source else RealKvHashMode.ALL
    context = pool(*sources, mode=mode)
    context.canary_buf.fill_(1)
    before = context.canary_buf.clone()
    seal(context, [3])
    scrub(context, [3])
    assert torch.equal(context.canary_buf, before)
    assert context.kernel_run_counter.item() == 2
    assert context.slot_run_counter.item() == 0
    assert context.violation_write_index.item() == 0


# ---- scrub ---------------------------------------------------------------------------------------


def test_scrub_reports_changed_bytes_with_the_record_and_no_reader() -> None:
    content = random_bytes(NUM_SLOTS, 8)
    context = scenes.with_mode(
        pool(source(content, num_bytes=8), mode=RealKvHashMode.NONE), RealKvHashMode.ALL
    )
    scenes.write_sequence(context, tokens=[5, 6], slots=[3, 4])
    seal(context, [3, 4])
    context.slot_run_counter.zero_()
    content[4, 7] ^= 1
    scrub(context, [3, 4])
    (row,) = scenes.rows(context).tolist()
    chain = int(context.canary_buf.view(torch.int64)[4, 2])
    reason = FailReason.VERIFY_REAL_KV_HASH
    assert row == [1, 4, 1, 6, -1, chain, -1, reason, 5, -1, -1, -1, -1, -1, -1, 1]
    assert context.slot_run_counter.item() == 2


def test_scrub_compares_sealed_and_external_slots_only() -> None:
    table = SlotTable.allocate(num_slots=NUM_SLOTS, device=scenes.CPU, tracks_allocation=True)
    context = scenes.make_context(
        num_slots=NUM_SLOTS,
        sources=(source(random_bytes(NUM_SLOTS, 8), num_bytes=8),),
        mode=RealKvHashMode.ALL,
        slot_table=table,
    )
    for slot, state in enumerate(SlotState, start=1):
        table.state[slot] = int(state)
    scrub(context, [0, 1, 2, 3, 4, 5, -1, NUM_SLOTS])
    slots = scenes.rows(context)[:, ViolationField.SLOT].tolist()
    assert slots == [1 + SlotState.SEALED, 1 + SlotState.EXTERNAL]
    assert context.slot_run_counter.item() == 2


@pytest.mark.parametrize(("num_valid", "compared"), [(-1, 0), (0, 0), (2, 2), (1000, 3)])
def test_scrub_looks_at_num_valid_slots(num_valid: int, compared: int) -> None:
    context = pool(source(random_bytes(NUM_SLOTS, 8), num_bytes=8))
    scrub(context, [3, 4, 5], num_valid=num_valid)
    assert context.slot_run_counter.item() == compared
