"""What looks like a fault and is none: the ten points that must never alarm, one class each.

A count is a page to an operator. Where a point has an unhealthy sibling, it stands beside it, so
that no silence here comes from a canary that does not look.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvcanary_plugin.cache import KVCacheGroup
from kvcanary_plugin.forward import ForwardKind
from kvcanary_plugin.identity import identity_key
from kvcanary_plugin.kernels import LaunchTag
from tests.monitor.world import Part, World, checking_everything, found

PROMPT = [11, 7, 7, 300, 0]
SLOTS = [5, 6, 9, 2, 31]
OTHER_SLOTS = [40, 41, 42, 43, 44]
EVERYTHING = {"reverify": {"sample": 1.0}}


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def world_of(**settings: object) -> World:
    settings.setdefault("config", checking_everything(**EVERYTHING))
    return World(**settings)  # type: ignore[arg-type]


def alloc(world: World, *slots: int) -> None:
    if world.tracks_allocation:
        world.monitor.guards[0].events.alloc(tensor(*slots))


def free(world: World, *slots: int) -> None:
    if world.tracks_allocation:
        world.monitor.guards[0].events.free(tensor(*slots))


def prefilled(**settings: object) -> World:
    """Request 1 (row 1) has computed PROMPT into SLOTS."""
    world = world_of(**settings)
    alloc(world, *SLOTS)
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
    return world


def decode(world: World, *, uid: int = 1, row: int = 1, token: int = 40, slot: int = 12) -> list:
    part = Part(
        uid=uid,
        row=row,
        tokens=[*PROMPT, token],
        slots=[slot],
        prefix=len(PROMPT),
        host_knows_tokens=False,
    )
    return world.forward(part, kind=ForwardKind.DECODE)


@pytest.fixture(params=[False, True], ids=["no allocator events", "allocator events"])
def tracks(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class TestOnePrefixSharingInsideOneStep:
    @pytest.mark.parametrize("reader_first", [False, True])
    def test_it_is_silent(self, tracks: bool, reader_first: bool):
        world = world_of(tracks_allocation=tracks)
        alloc(world, *SLOTS, 13)
        world.put_row(2, SLOTS)
        writer = Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)
        reader = Part(uid=2, row=2, tokens=[*PROMPT, 8], slots=[13], prefix=len(PROMPT))
        parts = (reader, writer) if reader_first else (writer, reader)
        assert world.forward(*parts) == []
        alloc(world, 14)
        again = Part(uid=2, row=2, tokens=[*PROMPT, 8, 9], slots=[14], prefix=6)
        assert world.forward(again) == []

    def test_the_same_slots_are_looked_at_from_the_next_step_on(self):
        world = world_of()
        world.put_row(2, SLOTS)
        reader = Part(uid=2, row=2, tokens=[*PROMPT, 8], slots=[13], prefix=len(PROMPT))
        assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS), reader) == []
        world.bytes_of(world.full_kv[0], 9)[0] ^= 1
        again = Part(uid=2, row=2, tokens=[*PROMPT, 8, 9], slots=[14], prefix=6)
        assert ("real_kv", 9) in found(world.forward(again))


class TestTwoDuplicatePrefixOfWhichOneCopyIsKept:
    def test_it_is_silent(self, tracks: bool):
        world = prefilled(tracks_allocation=tracks)
        alloc(world, *OTHER_SLOTS)
        assert world.forward(Part(uid=2, row=2, tokens=PROMPT, slots=OTHER_SLOTS)) == []
        world.put_row(2, SLOTS)
        free(world, *OTHER_SLOTS)
        alloc(world, 12)
        assert decode(world, uid=2, row=2) == []

    def test_freeing_the_copy_that_is_kept_is_not(self):
        world = prefilled(tracks_allocation=True)
        alloc(world, *OTHER_SLOTS)
        assert world.forward(Part(uid=2, row=2, tokens=PROMPT, slots=OTHER_SLOTS)) == []
        world.put_row(2, SLOTS)
        free(world, *SLOTS)
        alloc(world, 12)
        assert {("freed_read", slot) for slot in SLOTS} <= found(decode(world, uid=2, row=2))


class TestThreeWhatASlidingWindowNoLongerSees:
    """The sliding group sees the last three tokens before a new one."""

    @staticmethod
    def world() -> World:
        world = world_of(swa_slots=32, swa_window=3)
        assert world.lookup is not None
        for index, slot in enumerate(SLOTS):
            world.lookup[slot] = 20 + index
        assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
        world.lookup[12] = 30
        return world

    def test_evicted_predecessors_are_silent(self):
        world = self.world()
        assert world.lookup is not None
        for slot in SLOTS[:2]:
            world.lookup[slot] = 0
        assert decode(world) == []
        assert world.monitor.guards[1].slots_run(LaunchTag.VERIFY) == 3

    def test_stale_entries_outside_the_window_are_silent(self):
        world = self.world()
        assert world.lookup is not None
        world.lookup[SLOTS[0]] = 7  # somebody else's by now
        assert decode(world) == []

    def test_an_evicted_slot_inside_the_window_is_not(self):
        world = self.world()
        assert world.lookup is not None
        world.lookup[SLOTS[3]] = 0
        assert {(v.group, v.checks) for v in decode(world)} == {("swa", ("out_of_pool",))}


class TestFourRecomputeAndRejectedTokens:
    def test_recompute_into_other_slots_is_silent(self, tracks: bool):
        world = prefilled(tracks_allocation=tracks)
        alloc(world, 12)
        assert decode(world) == []
        free(world, *SLOTS, 12)
        alloc(world, *OTHER_SLOTS, 45)
        again = Part(uid=1, row=3, tokens=[*PROMPT, 40], slots=[*OTHER_SLOTS, 45])
        assert world.forward(again) == []

    def test_recompute_into_the_same_slots_is_silent(self, tracks: bool):
        world = prefilled(tracks_allocation=tracks)
        free(world, *SLOTS)
        alloc(world, *SLOTS)
        assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
        alloc(world, 12)
        assert decode(world) == []

    def test_the_slot_of_a_rejected_token_written_again_is_silent(self, tracks: bool):
        world = prefilled(tracks_allocation=tracks)
        alloc(world, 12, 13, 14)
        drafts = Part(
            uid=1,
            row=1,
            tokens=[*PROMPT, 40, 41, 42],
            slots=[12, 13, 14],
            prefix=5,
            host_knows_tokens=False,
        )
        assert world.forward(drafts, kind=ForwardKind.VERIFY) == []
        # 41 and 42 were rejected: position 6 is another token now.
        accepted = Part(
            uid=1,
            row=1,
            tokens=[*PROMPT, 40, 50],
            slots=[13],
            prefix=6,
            host_knows_tokens=False,
        )
        assert world.forward(accepted, kind=ForwardKind.DECODE) == []


class TestFivePaddingDummyIdleWarmUpAndCapture:
    PADDING = (
        Part(uid=-1, row=0, tokens=[0] * 3, slots=[0], prefix=2, host_knows_tokens=False),
        Part(uid=-1, row=0, tokens=[0], slots=[-1], host_knows_tokens=False),
        # Filled with zeros, whatever the lengths say.
        Part(uid=-1, row=0, tokens=[0] * 3, slots=[0], prefix=2, positions=[0]),
    )

    @pytest.mark.parametrize("kind", [ForwardKind.DUMMY, ForwardKind.DECODE])
    def test_padding_rows_alone_are_silent(self, tracks: bool, kind: ForwardKind):
        world = prefilled(tracks_allocation=tracks)
        padding = [replace(part, host_knows_tokens=False) for part in self.PADDING]
        assert world.forward(*padding, kind=kind) == []
        alloc(world, 12)
        assert decode(world) == []

    def test_padding_rows_beside_requests_are_silent(self, tracks: bool):
        world = prefilled(tracks_allocation=tracks)
        alloc(world, 12)
        request = Part(
            uid=1, row=1, tokens=[*PROMPT, 4], slots=[12], prefix=5, host_knows_tokens=False
        )
        padding = [replace(part, host_knows_tokens=False) for part in self.PADDING]
        assert world.forward(request, *padding, kind=ForwardKind.DECODE) == []

    def test_an_idle_step_is_silent(self, tracks: bool):
        world = prefilled(tracks_allocation=tracks)
        assert world.forward(kind=ForwardKind.DUMMY) == []
        alloc(world, 12)
        assert decode(world) == []

    def test_a_warm_up_that_is_dropped_afterwards_is_silent(self, tracks: bool):
        world = world_of(tracks_allocation=tracks)
        alloc(world, *SLOTS)
        warm_up = Part(uid=-1, row=1, tokens=[0] * 5, slots=SLOTS, host_knows_tokens=False)
        assert world.forward(warm_up, kind=ForwardKind.DUMMY) == []
        free(world, *SLOTS)
        world.monitor.forget_everything()
        alloc(world, *SLOTS)
        assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []

    def test_a_dummy_batch_that_writes_a_live_slot_is_not(self):
        world = prefilled(tracks_allocation=True)
        dummy = Part(uid=-1, row=0, tokens=[0] * 4, slots=[9], prefix=3, host_knows_tokens=False)
        (violation,) = world.forward(dummy, kind=ForwardKind.DUMMY)
        assert (violation.checks, violation.slot) == (("write_owned",), 9)

    def test_nor_is_it_without_allocator_events_at_the_next_read(self):
        world = prefilled()
        dummy = Part(uid=-1, row=0, tokens=[0] * 4, slots=[9], prefix=3, host_knows_tokens=False)
        assert world.forward(dummy, kind=ForwardKind.DUMMY) == []
        assert {("token", 9), ("position", 9)} <= found(decode(world))


class TestSixSlotsFilledBySomebodyElse:
    @staticmethod
    def offloaded(world: World) -> list[torch.Tensor]:
        """The bytes of SLOTS, as they lie on the host."""
        return [
            torch.stack([world.bytes_of(buffer, slot).clone() for slot in SLOTS])
            for buffer in world.full_kv
        ]

    @staticmethod
    def load(world: World, copy: list[torch.Tensor]) -> None:
        for buffer, rows in zip(world.full_kv, copy, strict=True):
            for slot, row in zip(OTHER_SLOTS, rows, strict=True):
                world.bytes_of(buffer, slot).copy_(row)

    @pytest.mark.parametrize("carried_along", [True, False])
    @pytest.mark.parametrize("damaged", [False, True])
    def test_they_are_external_and_checked_from_then_on(
        self, tracks: bool, carried_along: bool, damaged: bool
    ):
        world = prefilled(tracks_allocation=tracks)
        copy = self.offloaded(world)
        carried = world.monitor.export_slots(0, tensor(*SLOTS))
        assert carried is not None
        free(world, *SLOTS)
        alloc(world, *OTHER_SLOTS, 12)
        self.load(world, copy)
        if carried_along:
            world.monitor.import_slots(0, tensor(*OTHER_SLOTS), carried)
        else:
            world.monitor.adopt_slots(0, tensor(*OTHER_SLOTS), tensor(*PROMPT), torch.arange(5))
        world.put_row(2, OTHER_SLOTS)
        if damaged:
            world.bytes_of(world.full_kv[2], 42)[3] ^= 1
        reader = Part(uid=2, row=2, tokens=[*PROMPT, 8], slots=[12], prefix=5)
        assert found(world.forward(reader)) == ({("real_kv", 42)} if damaged else set())
        assert world.monitor.external_slots[0].count in (0, 5)  # counted once a second


class TestSevenMovesResizeSleepWakeUpdateFlush:
    @pytest.mark.parametrize("by_event", [True, False])
    def test_records_move_with_the_bytes(self, by_event: bool):
        world = prefilled(tracks_allocation=True)
        alloc(world, 50, 12)
        for buffer in world.full_kv:
            world.bytes_of(buffer, 50).copy_(world.bytes_of(buffer, 9))
        if by_event:
            world.monitor.guards[0].events.move(tensor(9), tensor(50))
        else:
            world.monitor.copy_slots(0, tensor(9), tensor(50))
        free(world, 9)
        world.table[1, 2] = 50
        assert decode(world) == []

    def test_a_move_that_forgot_the_bytes_is_not_silent(self):
        world = prefilled(tracks_allocation=True)
        alloc(world, 50, 12)
        world.monitor.guards[0].events.move(tensor(9), tensor(50))
        free(world, 9)
        world.table[1, 2] = 50
        assert found(decode(world)) == {("real_kv", 50)}

    def test_a_flush_ends_everything_that_was_there(self):
        world = prefilled(tracks_allocation=True)
        world.monitor.guards[0].events.reset()
        alloc(world, *SLOTS)
        assert world.forward(Part(uid=2, row=2, tokens=[8, 8, 8], slots=SLOTS[:3])) == []

    def test_reading_across_a_flush_is_not_silent(self):
        world = prefilled(tracks_allocation=True)
        world.monitor.guards[0].events.reset()
        alloc(world, 12)
        assert {("freed_read", slot) for slot in SLOTS} <= found(decode(world))

    def test_sleep_and_wake_with_other_bytes_is_silent(self, tracks: bool):
        world = prefilled(tracks_allocation=tracks)
        free(world, *SLOTS)
        world.monitor.forget_everything()
        for buffer in world.full_kv:
            buffer.fill_(171)
        assert world.forward(kind=ForwardKind.DUMMY) == []
        alloc(world, *SLOTS, 12)
        assert world.forward(Part(uid=2, row=2, tokens=PROMPT, slots=SLOTS)) == []
        assert decode(world, uid=2, row=2) == []

    def test_a_resized_pool_is_another_monitor_and_starts_silent(self, tracks: bool):
        small, large = prefilled(tracks_allocation=tracks), world_of(slots=128)
        large.tracks_allocation = False
        assert large.forward(Part(uid=1, row=1, tokens=PROMPT, slots=[100, 101, 127, 90, 5])) == []
        alloc(small, 12)
        assert decode(small) == []

    @pytest.mark.parametrize("reuses_old_prefix", [False, True])
    def test_a_weight_update_changes_the_key(self, reuses_old_prefix: bool):
        world = world_of()
        old, new = (identity_key(weight_version=version) for version in ("1", "2"))
        first = Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS, identity_key=old)
        assert world.forward(first) == []
        slots = SLOTS if reuses_old_prefix else OTHER_SLOTS
        if not reuses_old_prefix:
            again = Part(uid=2, row=2, tokens=PROMPT, slots=OTHER_SLOTS, identity_key=new)
            assert world.forward(again) == []
        world.put_row(3, slots)
        reader = Part(uid=3, row=3, tokens=[*PROMPT, 8], slots=[13], prefix=5, identity_key=new)
        checks = {check for check, _ in found(world.forward(reader))}
        assert ("prefix_identity" in checks) == reuses_old_prefix
        assert bool(checks) == reuses_old_prefix


class TestEightBytesBehindTheEndOfASequence:
    @pytest.mark.parametrize("inside_the_sequence", [False, True])
    def test_only_the_slots_in_use_count(self, inside_the_sequence: bool):
        world = world_of(page_size=4)
        slots = [8, 9, 10, 11, 20]
        assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=slots)) == []
        for buffer in world.full_kv:
            for slot in (21, 22, 23, *([20] if inside_the_sequence else [])):
                world.bytes_of(buffer, slot).fill_(77)
        part = Part(
            uid=1, row=1, tokens=[*PROMPT, 4], slots=[21], prefix=5, host_knows_tokens=False
        )
        expected = {("real_kv", 20)} if inside_the_sequence else set()
        assert found(world.forward(part, kind=ForwardKind.DECODE)) == expected


class TestNineNumbersThatStartAgain:
    def test_the_very_first_step_with_step_number_zero_is_silent(self, tracks: bool):
        world = world_of(tracks_allocation=tracks)
        world.step = -1
        alloc(world, *SLOTS, 12)
        assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
        assert decode(world) == []

    @pytest.mark.parametrize("first", [2**31 - 3, 2**32 - 3, 2**62])
    def test_step_numbers_beyond_an_int32_are_silent(self, tracks: bool, first: int):
        world = world_of(tracks_allocation=tracks)
        world.step = first
        alloc(world, *SLOTS, 12, 13)
        assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
        for token in range(4):
            assert decode(world, token=token) == []
        world.bytes_of(world.full_kv[0], 9)[0] ^= 1
        assert ("real_kv", 9) in found(decode(world))

    def test_step_numbers_that_start_again_are_silent(self, tracks: bool):
        world = prefilled(tracks_allocation=tracks)
        alloc(world, 12)
        assert decode(world) == []
        world.step = 0
        assert decode(world) == []
        assert decode(world) == []

    @pytest.mark.parametrize("rows", [(1, 1), (1, 2)])
    def test_uids_that_start_again_are_silent(self, tracks: bool, rows: tuple[int, int]):
        world = world_of(tracks_allocation=tracks)
        alloc(world, *SLOTS, *OTHER_SLOTS)
        assert world.forward(Part(uid=1, row=rows[0], tokens=PROMPT[:3], slots=SLOTS[:3])) == []
        rest = Part(uid=1, row=rows[0], tokens=PROMPT, slots=SLOTS[3:], prefix=3)
        assert world.forward(rest) == []
        free(world, *SLOTS)
        # Another request under the same uid, with other tokens, in chunks as well.
        other = [60, 61, 62, 63, 64]
        first = Part(uid=1, row=rows[1], tokens=other[:4], slots=OTHER_SLOTS[:4])
        assert world.forward(first) == []
        rest = Part(uid=1, row=rows[1], tokens=other, slots=OTHER_SLOTS[4:], prefix=4)
        assert world.forward(rest) == []

    def test_an_engine_without_a_prefix_cache_is_silent(self, tracks: bool):
        world = world_of(tracks_allocation=tracks)
        for uid in range(1, 6):
            alloc(world, *SLOTS, 12)
            row = 1 + uid % 3
            assert world.forward(Part(uid=uid, row=row, tokens=PROMPT, slots=SLOTS)) == []
            assert decode(world, uid=uid, row=row) == []
            free(world, *SLOTS, 12)


class TestTenDraftPools:
    """The slot of position p holds the K/V of the token at p + 1."""

    TOKENS = (1, 2, 3, 4, 5, 6)

    @staticmethod
    def world() -> World:
        return world_of(token_offset=1)

    def chunk(self, start: int, end: int, *, rotated: tuple[int, ...] | None = None) -> Part:
        return Part(
            uid=1,
            row=1,
            tokens=self.TOKENS[:end],
            slots=[10 + position for position in range(start, end)],
            prefix=start,
            inputs=rotated or [*self.TOKENS[start + 1 : end], (*self.TOKENS, 7)[end]],
        )

    def test_a_prompt_in_chunks_and_a_cached_prefix_are_silent(self):
        world = self.world()
        assert world.forward(self.chunk(0, 2), kind=ForwardKind.DRAFT) == []
        assert world.forward(self.chunk(2, 4), kind=ForwardKind.DRAFT) == []
        assert world.forward(self.chunk(4, 6), kind=ForwardKind.DRAFT) == []
        world.put_row(2, range(10, 14))
        reuse = Part(uid=2, row=2, tokens=[1, 2, 3, 4, 5], slots=[30], prefix=4, inputs=[9])
        assert world.forward(reuse, kind=ForwardKind.DRAFT) == []

    def test_a_chunk_end_that_is_rotated_wrongly_is_not(self):
        world = self.world()
        world.forward(self.chunk(0, 2, rotated=(2, 99)), kind=ForwardKind.DRAFT)
        assert ("token", 11) in found(world.forward(self.chunk(2, 4), kind=ForwardKind.DRAFT))


def test_every_point_has_a_group_that_all_checks_work_on():
    """Silence of a check that is not supported would be worth nothing."""
    group: KVCacheGroup = world_of(tracks_allocation=True).groups[0]
    assert group.unsupported_checks == frozenset()
    assert np.all([getattr(checking_everything().checks, name) for name in ("token", "chain")])
