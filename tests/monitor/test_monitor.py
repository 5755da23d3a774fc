"""Scenarios through the whole monitor; each fault has a twin without it that must stay silent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kvcanary_plugin.forward import ForwardKind, ForwardResult
from kvcanary_plugin.identity import identity_key
from kvcanary_plugin.kernels import LaunchTag
from tests.monitor.world import LAYERS, Part, World, checking_everything, found

PROMPT = [11, 7, 7, 300, 0]
SLOTS = [5, 6, 9, 2, 31]


def prefilled(**settings: object) -> World:
    """A world in which request 1 (row 1) has computed PROMPT into SLOTS."""
    world = World(**settings)  # type: ignore[arg-type]
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
    return world


def decode(world: World, token: int = 40, slot: int = 12, **changes: object) -> list:
    """Request 1 decodes one token."""
    part = Part(
        uid=1,
        row=1,
        tokens=[*PROMPT, token],
        slots=[slot],
        prefix=len(PROMPT),
        host_knows_tokens=False,
        **changes,  # type: ignore[arg-type]
    )
    return world.forward(part, kind=ForwardKind.DECODE)


def test_a_healthy_prefill_and_decode_are_silent_and_counted():
    world = prefilled()
    assert decode(world) == []
    guard = world.monitor.guards[0]
    assert guard.slots_run(LaunchTag.VERIFY) == len(PROMPT)
    assert guard.slots_run(LaunchTag.WRITE) == len(PROMPT) + 1
    assert guard.slots_run(LaunchTag.SEAL) == len(PROMPT) + 1
    assert world.monitor.forward_counts == {
        (ForwardKind.PREFILL, ForwardResult.CHECKED): 1,
        (ForwardKind.DECODE, ForwardResult.CHECKED): 1,
    }


@pytest.mark.parametrize("strip", range(2 * LAYERS))
def test_one_flipped_byte_in_any_layer_is_real_kv_at_that_slot(strip: int):
    world = prefilled()
    world.bytes_of(world.full_kv[strip], 9)[-1] ^= 1
    (violation,) = decode(world)
    assert violation.checks == ("real_kv",)
    assert (violation.slot, violation.position, violation.request_uid) == (9, 2, 1)
    assert (violation.writer_uid, violation.writer_step, violation.step) == (1, 1, 2)


def test_exchanged_table_entries_are_position_and_chain():
    world = prefilled()
    world.table[1, 1], world.table[1, 2] = 9, 6
    assert {("position", 6), ("position", 9), ("chain", 9)} <= found(decode(world))


def test_a_foreign_block_in_a_prefix_names_its_writer():
    world = prefilled()
    other = [50, 51, 52, 53, 54]
    assert world.forward(Part(uid=2, row=2, tokens=other, slots=[20, 21, 22, 23, 24])) == []
    world.table[1, 2] = 22
    foreign = [v for v in decode(world) if v.slot == 22]
    assert {"chain", "token"} <= set(foreign[0].checks)
    assert foreign[0].writer_uid == 2


def test_a_rewritten_record_is_token_there_and_chain_behind_it():
    world = prefilled()
    world.monitor.guards[0].records[6].view(torch.int64)[0] += 1
    assert found(decode(world)) == {("token", 6), ("chain", 9)}


def test_reading_a_slot_nobody_wrote_is_unwritten_alone():
    world = prefilled()
    world.table[1, 3] = 60
    assert ("unwritten", 60) in found(decode(world))
    assert {check for check, slot in found(world.violations()) if slot == 60} <= {"unwritten"}


@pytest.mark.parametrize("entry", [0, -1, 64, 2**31 - 1])
def test_an_entry_outside_the_pool_is_out_of_pool(entry: int):
    world = prefilled()
    world.table[1, 3] = entry
    assert ("out_of_pool", entry) in found(decode(world))


def test_wrong_input_tokens_are_write_input():
    world = World()
    part = Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS, inputs=[0, 11, 7, 7, 300])
    violations = world.forward(part)
    assert {v.checks for v in violations} == {("write_input",)}
    assert {v.slot for v in violations} == {5, 6, 2, 31}  # slot 9's token is 7 either way


def test_shifted_positions_are_write_input():
    world = World()
    part = Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS, positions=[1, 2, 3, 4, 5])
    assert found(world.forward(part)) == {("write_input", slot) for slot in SLOTS}


def test_the_write_input_assert_is_a_switch_that_works_while_serving():
    world = World(config=checking_everything(write_input_assert=False))
    shifted = Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS, positions=[1, 2, 3, 4, 5])
    assert world.forward(shifted) == []
    world.monitor.reconfigure(checking_everything(write_input_assert=True))
    again = Part(uid=2, row=2, tokens=PROMPT, slots=[40, 41, 42, 43, 44], positions=[1, 2, 3, 4, 5])
    assert found(world.forward(again)) == {("write_input", slot) for slot in again.slots}


def test_without_room_for_the_token_history_no_setting_is_taken_over(monkeypatch):
    before = checking_everything(write_input_assert=False, checks={"token": False})
    world = World(config=before)

    def no_room(group: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(world.monitor, "_make_history", no_room)
        with pytest.raises(torch.OutOfMemoryError):
            world.monitor.reconfigure(checking_everything(mode="off", checks={"token": False}))
    assert world.monitor.config is before
    part = Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)
    assert world.forward(part) == []
    world.bytes_of(world.full_kv[0], 9)[0] ^= 1
    assert ("real_kv", 9) in found(decode(world))


def test_a_sampled_token_that_does_not_come_back_is_write_input():
    world = prefilled()
    world.monitor.record_sampled(torch.tensor([1]), torch.tensor([len(PROMPT)]), torch.tensor([40]))
    assert found(decode(world, token=41)) == {("write_input", 12)}


def test_a_sampled_token_that_comes_back_is_silent():
    world = prefilled()
    world.monitor.record_sampled(torch.tensor([1]), torch.tensor([len(PROMPT)]), torch.tensor([40]))
    assert decode(world, token=40) == []


def test_a_position_that_does_not_follow_is_seen_without_an_oracle():
    world = prefilled(config=checking_everything(write_input_assert=False, checks={"token": False}))
    assert found(decode(world, positions=[6])) == {("write_input", 12)}


def test_a_cached_prefix_of_the_same_tokens_is_silent():
    world = prefilled()
    world.put_row(2, SLOTS)
    reuse = Part(uid=2, row=2, tokens=[*PROMPT, 8], slots=[13], prefix=len(PROMPT))
    assert world.forward(reuse) == []


def test_a_cached_prefix_of_other_tokens_is_prefix_identity():
    world = prefilled(config=checking_everything(checks={"token": False}, write_input_assert=False))
    world.put_row(2, SLOTS)
    wrong = Part(uid=2, row=2, tokens=[11, 7, 8, 300, 0, 8], slots=[13], prefix=len(PROMPT))
    assert found(world.forward(wrong)) == {("prefix_identity", SLOTS[-1])}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"lora_id": "x"}, {"cache_salt": "x"}),
        ({}, {"lora_id": "x"}),
        ({"multimodal": [(0, "cat")]}, {"multimodal": [(0, "dog")]}),
        ({"weight_version": "1"}, {"weight_version": "2"}),
    ],
)
def test_equal_tokens_of_another_identity_are_prefix_identity(written: dict, read: dict):
    world = World()
    first, second = identity_key(**written), identity_key(**read)
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS, identity_key=first)) == []
    world.put_row(2, SLOTS)
    reuse = Part(
        uid=2, row=2, tokens=[*PROMPT, 8], slots=[13], prefix=len(PROMPT), identity_key=second
    )
    checks = {check for check, _ in found(world.forward(reuse))}
    assert "prefix_identity" in checks


def test_equal_tokens_of_the_same_identity_are_silent():
    world = World()
    key = identity_key(lora_id="x", cache_salt="tenant", multimodal=[(2, "cat")])
    world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS, identity_key=key))
    world.put_row(2, SLOTS)
    reuse = Part(
        uid=2, row=2, tokens=[*PROMPT, 8], slots=[13], prefix=len(PROMPT), identity_key=key
    )
    assert world.forward(reuse) == []


def test_chunks_of_one_prompt_are_silent_and_checked_each_time():
    world = World()
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT[:2], slots=SLOTS[:2])) == []
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS[2:], prefix=2)) == []
    assert decode(world) == []


def test_a_fault_in_a_paged_pool_is_named_by_slot():
    world = World(page_size=4)
    world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=[8, 9, 10, 11, 20]))
    world.bytes_of(world.full_kv[3], 10)[0] ^= 255
    part = Part(uid=1, row=1, tokens=[*PROMPT, 4], slots=[21], prefix=5, host_knows_tokens=False)
    assert found(world.forward(part, kind=ForwardKind.DECODE)) == {("real_kv", 10)}


class TestSlidingWindow:
    """Two groups; the sliding one sees the last three tokens before a new one."""

    @staticmethod
    def world() -> World:
        world = World(swa_slots=32, swa_window=3)
        assert world.lookup is not None
        for index, slot in enumerate(SLOTS):
            world.lookup[slot] = 20 + index
        assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
        world.lookup[12] = 30
        return world

    def test_a_byte_in_the_window_is_seen_in_its_group_only(self):
        world = self.world()
        world.bytes_of(world.swa_kv[1], 23)[0] ^= 1
        (violation,) = decode(world)
        assert (violation.group, violation.slot, violation.checks) == ("swa", 23, ("real_kv",))

    def test_a_byte_outside_the_window_is_not_read_and_not_reported(self):
        world = self.world()
        world.bytes_of(world.swa_kv[1], 20)[0] ^= 1
        assert decode(world) == []


def test_an_internal_error_blinds_the_canary_and_the_forward_goes_on():
    world = prefilled()
    world.monitor.guards[0].group.page_table.resize_(0)
    world.monitor.before_forward(world._step_of([], ForwardKind.DECODE))
    world.monitor.after_forward()


def test_mode_raise_passes_internal_errors_on():
    world = World(config=checking_everything(mode="raise"))
    step = world._step_of([Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)], ForwardKind.PREFILL)
    broken = type(step)(
        **{name: getattr(step, name) for name in step.__slots__} | {"positions": None}
    )
    with pytest.raises((TypeError, ValueError, AttributeError)):
        world.monitor.before_forward(broken)
    assert world.monitor.blind_because is not None


def test_a_blind_canary_counts_forwards_as_unchecked_and_never_alarms():
    world = prefilled()
    step = world._step_of(
        [Part(uid=2, row=2, tokens=PROMPT, slots=[40, 41, 42, 43, 44])], ForwardKind.PREFILL
    )
    broken = type(step)(
        **{name: getattr(step, name) for name in step.__slots__} | {"positions": None}
    )
    world.monitor.before_forward(broken)
    world.monitor.after_forward()
    assert world.errors
    assert world.monitor.forward_counts[ForwardKind.PREFILL, ForwardResult.ERROR] == 1
    world.bytes_of(world.full_kv[0], 9)[0] ^= 1
    world.errors.clear()
    assert decode(world) == []
    assert world.monitor.forward_counts[ForwardKind.DECODE, ForwardResult.UNCHECKED] == 1


def test_prompts_are_learned_behind_the_forward_before(monkeypatch: pytest.MonkeyPatch):
    """On another stream than the forwards', whose rows they may be."""
    world = World()
    history = world.monitor.history
    assert history is not None
    order: list[str] = []

    @contextmanager
    def engine_works() -> Iterator[None]:
        order.append("waits")
        yield
        order.append("lets wait")

    monkeypatch.setattr(world.monitor._gate, "engine_works", engine_works)
    monkeypatch.setattr(history, "record_prompt", lambda _requests: order.append("learns"))
    world.monitor.learn_prompts(())
    assert order == ["waits", "learns", "lets wait"]


def test_a_blind_canary_keeps_nothing_of_what_the_allocator_does():
    world = World()
    events = world.monitor.guards[0].events
    events.alloc(torch.tensor([3]))
    with world.monitor.guard_errors("hook"):
        raise RuntimeError("boom")
    events.alloc(torch.tensor([4]))
    events.reset()
    assert events.take() == []


def test_more_requests_than_the_plan_holds_is_an_error_that_says_so():
    world = World(rows=2)
    parts = [Part(uid=n, row=1, tokens=[1], slots=[n]) for n in range(1, 4)]
    world.monitor.before_forward(world._step_of(parts, ForwardKind.PREFILL))
    ((_, error),) = world.errors
    assert isinstance(error, ValueError)
    assert "3" in str(error)
    assert "2" in str(error)


def test_no_group_is_an_error():
    from kvcanary_plugin.monitor import CanaryMonitor

    with pytest.raises(ValueError, match="no KV cache group"):
        CanaryMonitor(
            config=checking_everything(),
            groups=[],
            max_requests=1,
            raise_pending=lambda: None,
            on_error=lambda *_: None,
        )


def test_host_lengths_that_are_not_known_make_a_forward_partial():
    world = World()
    step = world._step_of([Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)], ForwardKind.PREFILL)
    unknown = type(step)(
        **{name: getattr(step, name) for name in step.__slots__} | {"host_prefix_lens": None}
    )
    world.monitor.before_forward(unknown)
    world.monitor.after_forward()
    assert world.monitor.forward_counts[ForwardKind.PREFILL, ForwardResult.PARTIAL] == 1
    assert np.array_equal(world.monitor.sink.write_index.numpy(), [0])
