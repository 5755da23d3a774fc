"""Slot states through the whole monitor: what an allocator does wrong, and what it may do."""

from __future__ import annotations

import torch

from kvcanary_plugin.forward import ForwardKind
from tests.monitor.world import Part, World, found

PROMPT = [11, 7, 7, 300, 0]
SLOTS = [5, 6, 9, 2, 31]


def tracked(**settings: object) -> World:
    """Request 1 (row 1) has been given SLOTS and has computed PROMPT into them."""
    world = World(tracks_allocation=True, **settings)  # type: ignore[arg-type]
    alloc(world, *SLOTS)
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
    return world


def alloc(world: World, *slots: int) -> None:
    world.monitor.guards[0].events.alloc(torch.tensor(slots))


def free(world: World, *slots: int) -> None:
    world.monitor.guards[0].events.free(torch.tensor(slots))


def decode(world: World, uid: int = 1, row: int = 1, token: int = 40, slot: int = 12) -> list:
    part = Part(
        uid=uid, row=row, tokens=[*PROMPT, token], slots=[slot], prefix=5, host_knows_tokens=False
    )
    return world.forward(part, kind=ForwardKind.DECODE)


def test_a_life_of_a_request_is_silent():
    world = tracked()
    alloc(world, 12)
    assert decode(world) == []
    free(world, *SLOTS, 12)
    alloc(world, *SLOTS)
    assert world.forward(Part(uid=2, row=2, tokens=PROMPT, slots=SLOTS)) == []


def test_reading_a_freed_slot_is_freed_read_even_before_it_is_used_again():
    world = tracked()
    free(world, 9)
    alloc(world, 12)
    assert found(decode(world)) == {("freed_read", 9)}


def test_reading_a_slot_that_was_given_out_but_never_written_is_unwritten():
    world = tracked()
    alloc(world, 12, 40)
    world.table[1, 4] = 40
    assert ("unwritten", 40) in found(decode(world))


def test_a_write_into_a_slot_of_another_live_request_is_write_owned():
    world = tracked()
    alloc(world, 20, 21, 22)
    violations = world.forward(Part(uid=2, row=2, tokens=[1, 2, 3], slots=[20, 9, 22]))
    (violation,) = violations
    assert violation.checks == ("write_owned",)
    assert (violation.slot, violation.request_uid, violation.writer_uid) == (9, 2, 1)


def test_double_free_and_double_alloc_are_seen_at_the_allocator():
    world = tracked()
    free(world, 9)
    free(world, 9)
    alloc(world, 5)
    assert found(world.forward(kind=ForwardKind.DUMMY)) == {("double_free", 9), ("double_alloc", 5)}


def test_slots_handed_out_for_a_new_request_end_the_old_ownership():
    world = tracked()
    free(world, *SLOTS)
    alloc(world, *SLOTS)
    assert world.forward(Part(uid=9, row=3, tokens=[4, 4, 4, 4, 4], slots=SLOTS)) == []


def test_without_allocator_events_nothing_that_needs_them_alarms():
    world = World()
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
    assert world.forward(Part(uid=2, row=2, tokens=[1, 2], slots=[5, 6])) == []
