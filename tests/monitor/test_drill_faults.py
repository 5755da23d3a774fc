"""What drills plant in tables, identities and allocator events, in an engine that delivers them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcanary_plugin.faults import GUARD_FAULTS
from kvcanary_plugin.forward import ForwardKind
from kvcanary_plugin.replay import replay
from tests.monitor.incident_world import IncidentWorld
from tests.monitor.world import Part, checking_everything, found

EXPECTED = {
    "break_chain": "chain",
    "null_entry": "out_of_pool",
    "unfilled_slot": "unwritten",
    "other_identity": "prefix_identity",
    "free_in_use": "freed_read",
    "free_twice": "double_free",
    "hand_out_in_use": "double_alloc",
    "write_into_owned": "write_owned",
    "change_table": "table_changed",
}
PROMPT = [11, 7, 7, 300, 0, 12, 13, 14]


class DrillWorld(IncidentWorld):
    """An engine that wraps its forwards as ``Canary.around_forward`` does."""

    def forward(self, *parts: Part, **options: Any) -> list:
        violations = super().forward(*parts, meanwhile=self.injector.under_forward, **options)
        self.injector.after_forward()
        return violations


def drill_world(directory: Path) -> DrillWorld:
    config = checking_everything(reverify={"sample": 1.0}, report={"include_tokens": True})
    return DrillWorld(directory=directory, config=config, tracks_allocation=True)


def serve(world: DrillWorld, fault: str, *, dry_run: bool) -> list:
    """Two requests with prompts of their own; then a third is given the first one's prefix."""
    alloc = world.monitor.guards[0].events.alloc
    slots = {1: list(range(1, 9)), 2: list(range(11, 19))}
    tokens = {1: list(PROMPT), 2: [40 + token for token in PROMPT]}
    for uid in (1, 2):
        alloc(torch.tensor(slots[uid]))
        part = Part(uid=uid, row=uid, tokens=tokens[uid], slots=slots[uid])
        assert world.forward(part) == []
    violations = []
    world.ask_for(fault, dry_run=dry_run)
    for number in range(3):
        parts = []
        for uid in (1, 2):
            tokens[uid].append(100 + number)
            slot = 20 + 2 * number + uid
            alloc(torch.tensor([slot]))
            part = Part(
                uid=uid,
                row=uid,
                tokens=list(tokens[uid]),
                slots=[slot],
                prefix=len(tokens[uid]) - 1,
                host_knows_tokens=False,
            )
            parts.append(part)
        violations += world.forward(*parts, kind=ForwardKind.DECODE)
    world.put_row(3, slots[1])
    alloc(torch.tensor([30]))
    reader = Part(uid=3, row=3, tokens=[*PROMPT, 5], slots=[30], prefix=len(PROMPT))
    return violations + world.forward(reader)


def test_every_fault_has_its_check():
    assert set(EXPECTED) == set(GUARD_FAULTS)


@pytest.mark.parametrize("fault", EXPECTED)
def test_a_fault_is_reported_where_it_was_planted(fault: str, tmp_path: Path):
    world = drill_world(tmp_path)
    violations = serve(world, fault, dry_run=False)
    planted = world.planted()
    assert planted is not None
    assert (EXPECTED[fault], planted["slot"]) in found(violations)
    seen = [v for v in violations if EXPECTED[fault] in v.checks and v.slot == planted["slot"]]
    assert min(v.step for v in seen) == planted["step"]


@pytest.mark.parametrize("fault", EXPECTED)
def test_its_twin_finds_the_same_place_and_is_silent(fault: str, tmp_path: Path):
    places = []
    for dry_run in (True, False):
        world = drill_world(tmp_path / str(dry_run))
        violations = serve(world, fault, dry_run=dry_run)
        places.append(world.planted())
        assert (violations == []) == dry_run
    assert places[0] is not None
    assert places[0] == {**(places[1] or {}), "dry_run": True}


@pytest.mark.parametrize("fault", EXPECTED)
def test_its_incident_replays(fault: str, tmp_path: Path):
    world = drill_world(tmp_path)
    serve(world, fault, dry_run=False)
    for incident in world.incidents():
        result = replay(incident)
        assert result.reproduced, result


def test_faults_that_need_allocator_events_find_no_place_without_them(tmp_path: Path):
    world = drill_world(tmp_path)
    guard = world.monitor.guards[0]
    assert guard.slots.tracks_allocation
    object.__setattr__(guard.slots, "tracks_allocation", False)
    assert serve(world, "free_twice", dry_run=False) == []
    assert world.planted() is None
