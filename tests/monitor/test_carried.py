"""Slots that leave and come back: records that travel, and bytes that come without any."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcanary_plugin.carried import (
    CarriedRecords,
    ExternalSlots,
    fold_layout,
    import_records,
)
from kvcanary_plugin.forward import ForwardKind
from kvcanary_plugin.kernels import SlotState, use_torch_reference
from tests.monitor.world import Part, World, checking_everything, found

PROMPT = [11, 7, 7, 300, 0]
SLOTS = [5, 6, 9, 2, 31]
BACK = [40, 41, 42, 43, 44]


def tensor(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def prefilled(**settings: Any) -> World:
    """Request 1 (row 1) has computed PROMPT into SLOTS."""
    world = World(**settings)
    if world.tracks_allocation:
        world.monitor.guards[0].events.alloc(tensor(*SLOTS))
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
    return world


def host_copy(world: World, slots: list[int]) -> list[torch.Tensor]:
    """The bytes of ``slots``, as an offload takes them away."""
    return [
        torch.stack([world.bytes_of(buffer, slot).clone() for slot in slots])
        for buffer in world.full_kv
    ]


def load(world: World, copy: list[torch.Tensor], slots: list[int]) -> None:
    for buffer, rows in zip(world.full_kv, copy, strict=True):
        for slot, row in zip(slots, rows, strict=True):
            world.bytes_of(buffer, slot).copy_(row)


def export(world: World, slots: list[int] = SLOTS) -> CarriedRecords:
    carried = world.monitor.export_slots(0, tensor(*slots))
    assert carried is not None
    return carried


def put_back(world: World, carried: CarriedRecords, slots: list[int] = BACK, **how: Any) -> list:
    world.monitor.import_slots(0, tensor(*slots), carried, **how)
    return world.violations()


def read(world: World, slots: list[int] = BACK, tokens: list[int] = PROMPT, uid: int = 2) -> list:
    """Request ``uid`` reads ``tokens`` from ``slots`` and computes one more."""
    world.put_row(2, slots)
    part = Part(uid=uid, row=2, tokens=[*tokens, 40], slots=[50], prefix=len(tokens))
    return world.forward(part)


def external(world: World) -> int:
    """What the gauge would show if it were read now."""
    slots = ExternalSlots(world.monitor.guards[0])
    slots.refresh()
    return slots.count


# --- records that travel --------------------------------------------------------------------------


def test_a_round_trip_is_silent_and_counts_as_external():
    world = prefilled()
    carried, copy = export(world), host_copy(world, SLOTS)
    load(world, copy, BACK)
    assert put_back(world, carried) == []
    assert read(world) == []
    assert external(world) == len(BACK)


def test_a_round_trip_through_bytes_into_another_engine_is_silent():
    world, other = prefilled(), World()
    data = export(world).to_bytes()
    load(other, host_copy(world, SLOTS), BACK)
    assert put_back(other, CarriedRecords.from_bytes(data, device="cpu")) == []
    assert read(other) == []


def test_bytes_that_are_still_on_their_way_are_looked_at_when_they_are_there():
    config = checking_everything(scrub={"bytes_per_second": 10**13})
    world = prefilled(config=config)
    carried, copy = export(world), host_copy(world, SLOTS)
    assert put_back(world, carried, verify=False) == []
    for _ in range(3):
        assert world.forward(kind=ForwardKind.DUMMY) == []  # the scrub leaves them alone
    load(world, copy, BACK)
    world.bytes_of(world.full_kv[0], 41)[0] ^= 1
    world.monitor.verify_imported(0, tensor(*BACK), carried)
    assert found(world.violations()) == {("real_kv", 41)}


def test_folds_of_another_layout_are_not_compared_but_taken_as_found():
    world = prefilled()
    fewer = World(
        config=checking_everything(verify={"real_kv": "partial"}, seal={"real_kv": "partial"})
    )
    assert fold_layout(world.monitor.guards[0]) != fold_layout(fewer.monitor.guards[0])
    carried = export(world)
    load(fewer, host_copy(world, SLOTS), BACK)
    assert put_back(fewer, carried) == []
    assert read(fewer) == []
    fewer.bytes_of(fewer.full_kv[0], 42)[0] ^= 1
    assert found(read(fewer)) == {("real_kv", 42)}


def test_a_slot_that_was_never_sealed_carries_its_record_and_no_fold():
    config = checking_everything(verify={"real_kv": "none"}, seal={"real_kv": "none"})
    world = prefilled(config=config)
    carried = export(world)
    assert set(carried.states.tolist()) == {int(SlotState.WRITTEN)}
    assert put_back(world, carried) == []
    assert read(world) == []
    assert ("token", 42) in found(read(world, tokens=[11, 7, 8, 300, 0], uid=3))


def test_slots_outside_the_pool_carry_nothing_and_change_nothing():
    world = prefilled()
    before = world.monitor.guards[0].records.clone()
    carried = export(world, [-1, 0, 64, 2**40])
    assert set(carried.states.tolist()) == {int(SlotState.FREE)}
    mine = export(world, SLOTS[:4])
    assert put_back(world, mine, [-1, 0, 64, 2**40]) == []
    assert torch.equal(before, world.monitor.guards[0].records)


def test_an_import_comes_after_the_allocation_that_waits_for_the_next_forward():
    world = prefilled(tracks_allocation=True)
    carried, copy = export(world), host_copy(world, SLOTS)
    world.monitor.guards[0].events.alloc(tensor(*BACK, 50))
    load(world, copy, BACK)
    assert put_back(world, carried) == []
    assert read(world) == []
    world.monitor.guards[0].events.free(tensor(*BACK))
    assert {("freed_read", slot) for slot in BACK} <= found(read(world))


def test_an_import_into_slots_that_nobody_was_given_stays_free():
    world = prefilled(tracks_allocation=True)
    carried = export(world)
    load(world, host_copy(world, SLOTS), BACK)
    put_back(world, carried)
    assert {("freed_read", slot) for slot in BACK} <= found(read(world))


def test_as_many_records_as_slots_are_needed():
    world = prefilled()
    with pytest.raises(ValueError, match=r"carried got 5 records for 2 slots"):
        import_records(world.monitor.guards[0], tensor(1, 2), export(world), step=1)


# --- the bytes of the records ---------------------------------------------------------------------


def test_the_format_of_carried_records_is_pinned():
    data = export(prefilled(), SLOTS[:2]).to_bytes()
    assert data[:6] == b"KVCR\x01\x00"
    assert len(data) == 40 + 2 * 33
    assert data[8:16] == (2).to_bytes(8, "little")
    assert data[40:48] == (11).to_bytes(8, "little")  # the first token
    assert data[-2:] == bytes([int(SlotState.SEALED)] * 2)


@pytest.mark.parametrize("where", [0, 4, 9, 17, 25, 45, 100, -1])
def test_one_changed_bit_anywhere_is_refused(where: int):
    data = bytearray(export(prefilled()).to_bytes())
    data[where] ^= 1
    with pytest.raises(ValueError, match="kvcanary: carried records got"):
        CarriedRecords.from_bytes(bytes(data), device="cpu")


@pytest.mark.parametrize("length", [0, 10, 39, 40, 100])
def test_bytes_cut_short_are_refused(length: int):
    data = export(prefilled()).to_bytes()[:length]
    with pytest.raises(ValueError, match="store and fetch all of them"):
        CarriedRecords.from_bytes(data, device="cpu")


# --- bytes that come without records --------------------------------------------------------------


def adopt(world: World, slots: list[int] = BACK, tokens: list[int] = PROMPT, **how: Any) -> None:
    start = how.pop("start", 0)
    world.monitor.adopt_slots(
        0, tensor(*slots), tensor(*tokens), torch.arange(start, start + len(tokens)), **how
    )


def test_adopted_slots_are_external_and_checked_from_then_on():
    world = World()
    for buffer in world.full_kv:
        buffer[40:45] = 9
    adopt(world)
    assert world.violations() == []
    assert read(world) == []
    assert external(world) == len(BACK)
    world.bytes_of(world.full_kv[2], 41)[0] ^= 1
    assert found(read(world)) == {("real_kv", 41)}


def test_bytes_that_come_after_the_record_are_looked_at_when_they_are_there():
    source, world = prefilled(), World()
    copy = host_copy(source, SLOTS)
    adopt(world, bytes_are_there=False)
    load(world, [rows[:2] for rows in copy], BACK[:2])
    # They may come as late as within their first reader's forward.
    world.put_row(2, BACK)
    first_reader = Part(uid=2, row=2, tokens=[*PROMPT, 40], slots=[50], prefix=len(PROMPT))
    assert world.forward(first_reader, meanwhile=lambda: load(world, copy, BACK)) == []
    adopt(world)
    assert read(world, uid=3) == []
    world.bytes_of(world.full_kv[0], BACK[1])[0] ^= 1
    assert found(read(world, uid=4)) == {("real_kv", BACK[1])}


def test_an_adopted_prefix_of_another_prompt_is_found_at_its_reader():
    world = World()
    adopt(world, tokens=[11, 7, 8, 300, 0])
    assert {("token", 42), ("prefix_identity", 44)} <= found(read(world))


def test_the_second_part_of_a_sequence_continues_the_first():
    world = World()
    adopt(world, BACK[:3], PROMPT[:3])
    adopt(world, BACK[3:], PROMPT[3:], start=3, previous_slot=BACK[2])
    assert world.violations() == []
    assert read(world) == []


def test_an_adopted_prefix_carries_the_identity_key():
    world = World()
    adopt(world, identity_key=77)
    assert ("prefix_identity", 44) in found(read(world))
    world.put_row(3, BACK)
    part = Part(uid=3, row=3, tokens=[*PROMPT, 1], slots=[51], prefix=5, identity_key=77)
    assert world.forward(part) == []


def test_a_load_of_which_the_end_failed_is_unwritten():
    # sglang #30986: admitted with prefix 5, the load of the last two failed.
    world = prefilled()
    assert (
        world.forward(Part(uid=3, row=3, tokens=[1, 2, 3, 4, 5], slots=BACK)) == []
    )  # earlier use
    world.monitor.forget_slots(0, tensor(*BACK))  # the load begins
    adopt(world, BACK[:3], PROMPT[:3])
    assert {("unwritten", 43), ("unwritten", 44)} <= found(read(world))


def test_the_owner_of_adopted_slots_is_who_had_them_loaded():
    world = prefilled(tracks_allocation=True)
    world.monitor.guards[0].events.alloc(tensor(*BACK, 50))
    adopt(world, request_uid=2)
    assert read(world) == []
    world.put_row(3, BACK)
    intruder = Part(uid=9, row=3, tokens=[1, 2], slots=BACK[:2])
    assert {("write_owned", 40), ("write_owned", 41)} <= found(world.forward(intruder))


def test_a_blind_canary_neither_exports_nor_imports():
    world = prefilled()
    carried = export(world)
    world.monitor.blind_because = "test"
    before = world.monitor.guards[0].records.clone()
    assert world.monitor.export_slots(0, tensor(*SLOTS)) is None
    put_back(world, carried)
    adopt(world)
    assert torch.equal(before, world.monitor.guards[0].records)


def test_the_torch_reference_does_the_same():
    with use_torch_reference():
        world = prefilled()
        carried, copy = export(world), host_copy(world, SLOTS)
        load(world, copy, BACK)
        world.bytes_of(world.full_kv[0], 41)[0] ^= 1
        assert found(put_back(world, carried)) == {("real_kv", 41)}
        adopt(world, [20, 21], PROMPT[:2])
        assert read(world, [20, 21], PROMPT[:2], uid=5) == []


# --- the gauge ------------------------------------------------------------------------------------


def test_external_slots_are_counted_once_a_second_and_leave_the_gauge_when_freed():
    world = prefilled(tracks_allocation=True)
    now = [0.0]
    external = ExternalSlots(world.monitor.guards[0], clock=lambda: now[0])
    world.monitor.guards[0].events.alloc(tensor(*BACK))
    adopt(world)
    external.refresh()
    assert external.count == len(BACK)
    world.monitor.guards[0].events.free(tensor(*BACK[:2]))
    world.forward(kind=ForwardKind.DUMMY)
    external.refresh()
    assert external.count == len(BACK)
    now[0] = 1.5
    external.refresh()
    assert external.count == len(BACK) - 2
