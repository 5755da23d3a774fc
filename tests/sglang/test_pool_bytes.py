"""The sources of a slot are the bytes that SGLang writes for it: all of them, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_plugin.hooks.sglang.layouts import LAYOUTS, SlotBytes
from kvcanary_plugin.kernels import (
    RealKvHashMode,
    RealKvSource,
    ViolationField,
    launch_canary_scrub_kernel,
    launch_canary_seal_kernel,
    load_kernels,
)
from tests.kernels import scenes
from tests.sglang.pool_cases import SINGLE_POOLS, Case, one_rank, store_dsa

cases = pytest.mark.parametrize("case", SINGLE_POOLS, ids=lambda case: case.name)

# The pool's own scratch, which no slot owns.
_NOT_SLOTS = ("ptrs", "strides", "scales_gpu", "workspace", "dq_")


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


def slot_bytes(pool: Any) -> SlotBytes:
    return LAYOUTS[type(pool).__name__].slot_bytes(pool)


def num_slots(pool: Any) -> int:
    return (pool.size // pool.page_size + 1) * pool.page_size


def first_byte(source: RealKvSource, slot: int) -> int:
    """Address of the slot's strip."""
    row = source.tensor.stride(0) * source.tensor.element_size()
    page, offset = divmod(slot, source.page_size)
    return source.tensor.data_ptr() + page * row + offset * source.num_bytes_per_token


def strip_of(source: RealKvSource, slot: int) -> set[int]:
    first = first_byte(source, slot)
    return set(range(first, first + source.num_bytes_per_token))


def buffers(owner: Any) -> Iterator[torch.Tensor]:
    """Every tensor that a pool holds, whatever it is called."""
    for name, value in vars(owner).items():
        if any(part in name for part in _NOT_SLOTS):
            continue
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, torch.Tensor):
                yield item
            elif type(item).__name__ == "IndexKeyCache":
                yield from item.buffer


class Memory:
    """All bytes of a pool, as they were."""

    def __init__(self, pool: Any) -> None:
        storages = {b.untyped_storage().data_ptr(): b.untyped_storage() for b in buffers(pool)}
        self._now = {
            address: torch.empty(0, dtype=torch.uint8).set_(storage)
            for address, storage in storages.items()
            if storage.nbytes()
        }
        self._before = {address: now.clone() for address, now in self._now.items()}

    def changed(self) -> set[int]:
        """Addresses of the bytes that are not what they were."""
        return {
            address + int(offset)
            for address, now in self._now.items()
            for offset in (now != self._before[address]).nonzero().flatten()
        }

    def __contains__(self, address: int) -> bool:
        return any(a <= address < a + now.numel() for a, now in self._now.items())


def inside(tensors: list[torch.Tensor]) -> set[int]:
    return {
        address
        for tensor in tensors
        for address in range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
    }


@cases
@settings(max_examples=8)
@given(data=st.data())
def test_a_write_changes_the_strips_of_its_slot_and_nothing_else(case: Case, data: st.DataObject):
    pool = case.make()
    held = slot_bytes(pool)
    slots = st.integers(pool.page_size, pool.size - 1)
    for slot in data.draw(st.lists(slots, min_size=1, max_size=3, unique=True)):
        memory = Memory(pool)
        case.store(pool, slot)
        changed = memory.changed()
        own = [strip_of(source, slot) for source in held.sources]
        # Some stores go through a slot of their own at the end of the pool.
        scratch = set().union(*(strip_of(source, pool.size) for source in held.sources))
        unexplained = changed - set().union(*own) - scratch - inside(case.left_out(pool))
        if case.store is store_dsa:
            unexplained -= inside(donor_page(pool))
        assert unexplained == set()
        assert all(strip & changed for strip in own), "a source that the engine does not write"


def donor_page(pool: Any) -> list[torch.Tensor]:
    """The last page, from which the DSA case moves."""
    last = pool.size // pool.page_size
    return [
        *(latent[last * pool.page_size :] for latent in pool.kv_buffer),
        *(index[last:] for index in pool.index_k_with_scale_buffer if index.shape[0]),
    ]


@cases
def test_what_is_left_out_is_said(case: Case):
    pool = case.make()
    held = slot_bytes(pool)
    assert bool(case.left_out(pool)) == bool(held.left_out)
    assert all("guarded" in part.reason for part in held.left_out)


@cases
def test_no_byte_belongs_to_two_slots_and_all_lie_in_the_pool(case: Case):
    pool = case.make()
    memory = Memory(pool)
    for source in slot_bytes(pool).sources:
        size = source.num_bytes_per_token
        firsts = sorted(first_byte(source, slot) for slot in range(num_slots(pool)))
        assert all(b - a >= size for a, b in pairwise(firsts))
        assert firsts[0] in memory
        assert firsts[-1] + size - 1 in memory
    strips = [strip_of(source, pool.page_size) for source in slot_bytes(pool).sources]
    assert len(set().union(*strips)) == sum(map(len, strips)), "two sources share bytes"


@cases
def test_a_flipped_byte_of_any_source_is_found_and_its_neighbour_stays_silent(case: Case):
    assert load_kernels("cpu") == "cpu"
    pool = case.make()
    sources = slot_bytes(pool).sources
    context = scenes.make_context(
        num_slots=num_slots(pool), sources=sources, mode=RealKvHashMode.ALL
    )
    hit, twin = pool.page_size, pool.page_size + 1
    case.store(pool, hit)
    case.store(pool, twin)
    both = torch.tensor([hit, twin])
    launch_canary_seal_kernel(
        context=context,
        plan=scenes.make_write_plan(lengths=[2]),
        out_cache_loc=both,
        step=1,
    )

    def reported() -> list[int]:
        context.violation_write_index.zero_()
        launch_canary_scrub_kernel(
            context=context, slots=both, num_valid=torch.tensor([2], dtype=torch.int32), step=2
        )
        count = int(context.violation_write_index)
        return context.violation_ring[:count, ViolationField.SLOT].tolist()

    assert reported() == []
    for source in sources:
        for place in (0, source.num_bytes_per_token - 1):
            flip(source, hit, place)
            assert reported() == [hit]
            flip(source, hit, place)
    assert reported() == []


def flip(source: RealKvSource, slot: int, place: int) -> None:
    storage = source.tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    memory[first_byte(source, slot) + place - storage.data_ptr()] ^= 0x40
