"""The second look after a forward: what changed under it, and what may change by right."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from kvcanary_plugin import reverify as reverify_module
from kvcanary_plugin.forward import ForwardKind
from kvcanary_plugin.kernels import LaunchTag, RealKvSource
from tests.monitor.world import Part, World, checking_everything, found

PROMPT = [11, 7, 7, 300, 0]
SLOTS = [5, 6, 9, 2, 31]
OTHER = [50, 51, 52, 53, 54]
OTHER_SLOTS = [20, 21, 22, 23, 24]


def always(**changes: object) -> object:
    return checking_everything(reverify={"sample": 1.0}, **changes)


def prefilled(**settings: object) -> World:
    """Requests 1 (row 1) and 2 (row 2) have computed their prompts."""
    settings.setdefault("config", always())
    world = World(**settings)  # type: ignore[arg-type]
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
    assert world.forward(Part(uid=2, row=2, tokens=OTHER, slots=OTHER_SLOTS)) == []
    return world


def decode(world: World, meanwhile: object = lambda: None, slot: int = 12) -> list:
    part = Part(uid=1, row=1, tokens=[*PROMPT, 40], slots=[slot], prefix=5, host_knows_tokens=False)
    return world.forward(part, kind=ForwardKind.DECODE, meanwhile=meanwhile)  # type: ignore[arg-type]


def test_a_healthy_forward_is_silent_and_its_slots_are_counted():
    world = prefilled()
    assert decode(world) == []
    assert world.monitor.guards[0].slots_run(LaunchTag.REVERIFY) == len(PROMPT)


# --- the table ------------------------------------------------------------------------------------


def test_a_row_given_to_another_request_during_the_forward_is_table_changed():
    # sglang #18744: the row of the running request 1 is freed and filled for request 2.
    world = prefilled()

    def row_is_given_away() -> None:
        world.put_row(1, OTHER_SLOTS)

    violations = decode(world, meanwhile=row_is_given_away)
    assert [v.checks for v in violations] == [("table_changed",)]
    (violation,) = violations
    assert (violation.phase, violation.request_uid, violation.group) == ("reverify", 1, "full")
    assert (violation.slot, violation.position, violation.writer_uid) == (20, 0, 2)


def test_the_first_changed_position_is_the_one_reported():
    world = prefilled()

    def one_entry_changes() -> None:
        world.table[1, 3] = 23
        world.table[1, 4] = 24

    (violation,) = decode(world, meanwhile=one_entry_changes)
    assert (violation.position, violation.slot, violation.expected_position) == (3, 23, 3)


def test_a_changed_row_is_reported_with_both_slots_and_no_hash():
    world = prefilled()
    (violation,) = decode(world, meanwhile=lambda: world.put_row(1, OTHER_SLOTS))
    assert (violation.slot_before, violation.slot) == (5, 20)
    assert violation.expected_hash is None


def test_entries_behind_the_prefix_and_rows_of_others_may_change():
    world = prefilled()

    def scheduler_prepares_the_next_forward() -> None:
        world.table[1, 6:20] = 33
        world.put_row(2, [40, 41, 42, 43, 44])
        world.put_row(3, SLOTS)

    assert decode(world, meanwhile=scheduler_prepares_the_next_forward) == []


def test_a_table_that_may_change_by_right_is_not_compared_and_not_read_again():
    # Overlap scheduling: by then the row holds what the next forward will read.
    world = prefilled(table_stable=False)
    assert decode(world, meanwhile=lambda: world.put_row(1, [60, 61, 62, 63, 1])) == []
    assert "table_changed" in world.groups[0].unsupported_checks
    assert "table_changed" not in prefilled().groups[0].unsupported_checks


def test_the_check_can_be_turned_off():
    config = always(checks={"token": True, "table_changed": False})
    world = prefilled(config=config)
    assert decode(world, meanwhile=lambda: world.put_row(1, OTHER_SLOTS)) == []


def test_pages_are_compared_page_by_page():
    world = World(page_size=4, config=always())  # type: ignore[arg-type]
    slots = [8, 9, 10, 11, 20]
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=slots)) == []
    part = Part(uid=1, row=1, tokens=[*PROMPT, 1], slots=[21], prefix=5, host_knows_tokens=False)

    def page_changes() -> None:
        world.table[1, 1] = 9

    (violation,) = world.forward(part, kind=ForwardKind.DECODE, meanwhile=page_changes)
    assert (violation.checks, violation.position, violation.slot) == (("table_changed",), 4, 36)
    again = Part(uid=1, row=1, tokens=[*PROMPT, 1, 2], slots=[22], prefix=6)
    world.put_row(1, [20, 21], start=4)
    assert world.forward(dataclasses.replace(again, host_knows_tokens=False)) == []


# --- the lookup table -----------------------------------------------------------------------------


def sliding() -> World:
    """A window of 3 earlier tokens; full slot f has SWA slot f + 1."""
    world = World(swa_slots=64, swa_window=3, config=always())  # type: ignore[arg-type]
    assert world.lookup is not None
    for slot in [*SLOTS, 12]:
        world.lookup[slot] = slot + 1
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
    return world


def test_a_lookup_entry_cleared_before_the_read_is_table_changed_in_group_swa_only():
    # sglang #31687.
    world = sliding()
    assert world.lookup is not None

    def entry_is_cleared() -> None:
        world.lookup[9] = 0  # position 2, inside the window

    violations = decode(world, meanwhile=entry_is_cleared)
    assert {(v.group, *v.checks) for v in violations} == {("swa", "table_changed")}
    assert (violations[0].position, violations[0].slot) == (2, 0)


def test_a_lookup_entry_that_is_rewritten_names_the_slot_of_now():
    world = sliding()
    assert world.lookup is not None

    def entry_is_rewritten() -> None:
        world.lookup[2] = 44

    violations = decode(world, meanwhile=entry_is_rewritten)
    assert {(v.group, v.slot, *v.checks) for v in violations} == {("swa", 44, "table_changed")}


def test_lookup_entries_below_the_window_may_be_cleared():
    world = sliding()
    assert world.lookup is not None

    def evicted() -> None:
        world.lookup[5] = world.lookup[6] = 0

    assert decode(world, meanwhile=evicted) == []


# --- the records ----------------------------------------------------------------------------------


def test_a_record_that_changes_under_the_forward_is_seen_after_it():
    world = prefilled()

    def record_changes() -> None:
        world.monitor.guards[0].records[9].view(torch.int64)[1] = 77

    violations = decode(world, meanwhile=record_changes)
    assert {v.phase for v in violations} == {"reverify"}
    assert ("position", 9) in found(violations)


def test_bytes_that_change_under_the_forward_are_seen_after_it():
    world = prefilled()

    def late_copy() -> None:
        world.bytes_of(world.full_kv[0], 9)[0] ^= 1

    (violation,) = decode(world, meanwhile=late_copy)
    assert (violation.checks, violation.slot, violation.phase) == (("real_kv",), 9, "reverify")


def test_slots_that_the_forward_writes_are_left_out():
    # A computes its prompt and B reads it in the same forward.
    world = World(config=always())  # type: ignore[arg-type]
    a = Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)
    b = Part(uid=2, row=2, tokens=[*PROMPT, 9], slots=[40], prefix=5)
    world.put_row(2, SLOTS)
    assert world.forward(a, b, kind=ForwardKind.MIXED) == []


# --- sampling and the bounded snapshot ------------------------------------------------------------


def test_the_sample_is_a_share_of_the_forwards_and_may_change_while_serving():
    world = prefilled(config=checking_everything(reverify={"sample": 0.0}))
    guard = world.monitor.guards[0]
    world.monitor.reverifier._dice = random.Random(7)
    assert decode(world, meanwhile=lambda: world.put_row(1, OTHER_SLOTS)) == []
    assert guard.launches_run(LaunchTag.REVERIFY) == 0
    world.put_row(1, SLOTS)
    world.monitor.reconfigure(checking_everything(reverify={"sample": 0.25}))
    for _ in range(200):
        assert decode(world) == []
    sampled = guard.launches_run(LaunchTag.REVERIFY) / 2  # compare and verify
    # 200 forwards at 1/4: mean 50, standard deviation 6.
    assert 50 - 4 * 6.2 <= sampled <= 50 + 4 * 6.2


def test_mode_off_looks_at_nothing_again():
    world = prefilled()
    world.monitor.reconfigure(always(mode="off"))  # type: ignore[arg-type]
    before = world.monitor.guards[0].launches_run(LaunchTag.REVERIFY)
    decode(world)
    assert world.monitor.guards[0].launches_run(LaunchTag.REVERIFY) == before


def test_requests_beyond_the_snapshot_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reverify_module, "_MOST_ENTRIES", 10)
    world = World(rows=8, width=8, config=always())  # type: ignore[arg-type]
    prompts = {row: [row * 10 + i for i in range(5)] for row in range(1, 5)}
    slots = {row: [row * 10 + i for i in range(5)] for row in range(1, 5)}
    for row in prompts:
        assert world.forward(Part(uid=row, row=row, tokens=prompts[row], slots=slots[row])) == []
    parts = [
        Part(uid=row, row=row, tokens=[*prompts[row], 1], slots=[50 + row], prefix=5)
        for row in prompts
    ]
    seen = set()
    for _ in range(60):

        def all_rows_change() -> None:
            for row in prompts:
                world.put_row(row, [60] * 5)

        violations = world.forward(*parts, kind=ForwardKind.DECODE, meanwhile=all_rows_change)
        assert {v.checks for v in violations} == {("table_changed",)}
        assert len(violations) == 2  # 10 entries, 5 a request
        assert all(v.batch_row == v.request_uid - 1 for v in violations)
        seen |= {v.request_uid for v in violations}
        for row in prompts:
            world.put_row(row, slots[row])
    assert seen == {1, 2, 3, 4}
    assert world.monitor.reverifier.requests_left_out["full"] == 60 * 2


def test_the_snapshot_takes_no_memory_until_a_forward_is_sampled():
    world = prefilled(config=checking_everything(reverify={"sample": 0.0}))
    snapshots = world.monitor.reverifier._snapshots[0]
    assert snapshots._entries is None
    world.monitor.reconfigure(always())  # type: ignore[arg-type]
    decode(world)
    assert snapshots._entries is not None
    assert snapshots._entries.numel() <= world.rows * world.width
    assert isinstance(world.groups[0].sources[0], RealKvSource)
