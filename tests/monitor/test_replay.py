"""Every planted fault is one incident with its root at the planted slot, and replays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvcanary_plugin.faults import FAULTS
from kvcanary_plugin.forward import ForwardKind
from kvcanary_plugin.replay import replay
from tests.monitor.incident_world import IncidentWorld
from tests.monitor.world import Part, checking_everything

PROMPT = [11, 7, 7, 300, 0, 12, 13, 14]
SLOTS = [5, 6, 9, 2, 31, 33, 34, 35]
SHARED = [40, 41, 42]


def serve(world: IncidentWorld, *, fault: str | None = None, decodes: int = 6) -> None:
    """Two requests share a prompt; the second decodes alone, then both; ``fault`` on the way."""
    world.forward(Part(uid=1, row=1, tokens=PROMPT[:4], slots=SLOTS[:4]))
    late = fault not in ("shift_positions", "rotate_inputs")
    if fault is not None and not late:
        world.ask_for(fault)
    world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS[4:], prefix=4))
    world.put_row(2, SLOTS)
    world.forward(Part(uid=2, row=2, tokens=[*PROMPT, 3], slots=[50], prefix=8))
    tokens = {1: [*PROMPT], 2: [*PROMPT, 3]}
    free = iter(range(10, 30))
    for number in range(decodes):
        if number == 2 and fault is not None and late:
            world.ask_for(fault)
        parts = []
        for uid in (1, 2):
            tokens[uid].append(100 + number)
            parts.append(
                Part(
                    uid=uid,
                    row=uid,
                    tokens=list(tokens[uid]),
                    slots=[next(free)],
                    prefix=len(tokens[uid]) - 1,
                    host_knows_tokens=False,
                )
            )
        world.forward(*parts, kind=ForwardKind.DECODE)


def test_a_healthy_run_has_no_incident(tmp_path: Path) -> None:
    world = IncidentWorld(directory=tmp_path)
    serve(world)
    assert world.incidents() == []


@pytest.mark.parametrize("forwards", [64, 3])
@pytest.mark.parametrize("include_tokens", [False, True])
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_each_fault_is_one_incident_at_the_planted_slot_and_replays(
    fault: str, include_tokens: bool, forwards: int, tmp_path: Path
) -> None:
    world = IncidentWorld(
        directory=tmp_path,
        config=checking_everything(
            report={"include_tokens": include_tokens}, recorder={"forwards": forwards}
        ),
    )
    serve(world, fault=fault)
    planted = world.planted()
    assert planted is not None
    (incident,) = world.incidents()
    root = incident.root
    # Exchanged with the entry before it, the slot is first met one position earlier.
    position = planted["position"] - (fault == "swap_table")
    assert (root.slot, root.read_position) == (planted["slot"], position)
    result = replay(incident)
    assert result.reproduced, result


# --- faults that no injector plants ---------------------------------------------------------------

PROMPT_5 = [11, 7, 7, 300, 0]
SLOTS_5 = [5, 6, 9, 2, 31]


def prefilled(tmp_path: Path, **settings: object) -> IncidentWorld:
    world = IncidentWorld(directory=tmp_path, **settings)  # type: ignore[arg-type]
    world.forward(Part(uid=1, row=1, tokens=PROMPT_5, slots=SLOTS_5))
    return world


def decode(world: IncidentWorld, *, token: int = 40, slot: int = 12, **changes: object) -> None:
    part = Part(
        uid=1,
        row=1,
        tokens=[*PROMPT_5, token],
        slots=[slot],
        prefix=5,
        host_knows_tokens=False,
        **changes,  # type: ignore[arg-type]
    )
    world.forward(part, kind=ForwardKind.DECODE)


def replayed(world: IncidentWorld) -> str:
    """Explanation of the only incident, which must replay."""
    (incident,) = world.incidents()
    result = replay(incident)
    assert result.reproduced, result
    assert bool(result.outside) == result.explanation.startswith("not explained")
    return result.explanation


def test_a_foreign_write_is_explained_by_the_recorded_events(tmp_path: Path) -> None:
    world = prefilled(tmp_path)
    world.forward(Part(uid=2, row=2, tokens=[50, 51, 52], slots=[20, 9, 22]))
    decode(world)
    (incident,) = world.incidents()
    assert incident.cause == (
        "slot 9: written by request req-2 at step 2 while request req-1 still owned it, which had"
        " written it at step 1; request req-1 read it at step 3, position 2"
    )
    assert replayed(world) == (
        "explained by the recorded events: in step 2 request req-2 wrote position 1 to slot 9"
    )


def test_a_foreign_write_in_the_middle_of_a_chunk_replays(tmp_path: Path) -> None:
    world = prefilled(tmp_path)
    other = list(range(500, 520))
    world.forward(Part(uid=2, row=2, tokens=other[:10], slots=range(40, 50)))
    slots = [51, 52, 53, 9, 55, 56, 57, 58, 59, 60]
    world.forward(Part(uid=2, row=2, tokens=other, slots=slots, prefix=10))
    decode(world)
    assert "in step 3 request req-2 wrote position 13 to slot 9" in replayed(world)


def test_a_foreign_block_in_the_page_table_is_from_outside(tmp_path: Path) -> None:
    world = prefilled(tmp_path)
    world.forward(Part(uid=2, row=2, tokens=[50, 51, 52], slots=[20, 21, 22]))
    world.table[1, 2] = 22
    decode(world)
    assert "page-table entry for position 2 in group full was changed from outside" in replayed(
        world
    )


@pytest.mark.parametrize("entry", [0, -1, 64, 2**31 - 1, 60])
def test_an_entry_that_names_no_written_slot_replays(entry: int, tmp_path: Path) -> None:
    world = prefilled(tmp_path)
    world.table[1, 3] = entry
    decode(world)
    assert f"it names slot {entry}, and slot 2 was recorded" in replayed(world)


def test_a_row_outside_the_page_table_replays(tmp_path: Path) -> None:
    config = checking_everything(checks={"token": False}, write_input_assert=False)
    world = prefilled(tmp_path, config=config)
    step = world._step_of(
        [Part(uid=1, row=1, tokens=[*PROMPT_5, 4], slots=[12], prefix=5, host_knows_tokens=False)],
        ForwardKind.DECODE,
    )
    step.request_rows.fill_(99)
    world.step = 2
    world.monitor.before_forward(
        type(step)(**{name: getattr(step, name) for name in step.__slots__} | {"step": 2})
    )
    world.monitor.after_forward()
    world.drain.flush()
    replayed(world)


def test_a_sampled_token_that_does_not_come_back_replays(tmp_path: Path) -> None:
    world = prefilled(tmp_path)
    world.monitor.record_sampled(torch.tensor([1]), torch.tensor([5]), torch.tensor([40]))
    decode(world, token=41)
    assert replayed(world).startswith("explained by the recorded events: what went into")


def test_a_cached_prefix_of_other_tokens_replays(tmp_path: Path) -> None:
    config = checking_everything(checks={"token": False}, write_input_assert=False)
    world = prefilled(tmp_path, config=config)
    world.put_row(2, SLOTS_5)
    world.forward(Part(uid=2, row=2, tokens=[11, 7, 8, 300, 0, 8], slots=[13], prefix=5))
    (incident,) = world.incidents()
    assert incident.root.checks == ["prefix_identity"]
    replayed(world)


@pytest.mark.parametrize("include_tokens", [False, True])
def test_a_prefix_of_another_identity_replays(include_tokens: bool, tmp_path: Path) -> None:
    config = checking_everything(report={"include_tokens": include_tokens})
    world = IncidentWorld(directory=tmp_path, config=config)
    world.forward(Part(uid=1, row=1, tokens=PROMPT_5, slots=SLOTS_5, identity_key=77))
    world.put_row(2, SLOTS_5)
    world.forward(Part(uid=2, row=2, tokens=[*PROMPT_5, 8], slots=[13], prefix=5, identity_key=78))
    replayed(world)


def test_a_successor_alone_tells_of_a_rewritten_record(tmp_path: Path) -> None:
    config = checking_everything(checks={"token": False}, write_input_assert=False)
    world = prefilled(tmp_path, config=config)
    world.monitor.guards[0].records[6].view(torch.int64)[0] += 1
    decode(world)
    (incident,) = world.incidents()
    assert (incident.root.slot, incident.root.checks) == (9, ["chain"])
    assert "the record of slot 6 was written from outside: token not as" in replayed(world)


def test_a_byte_in_a_paged_pool_replays(tmp_path: Path) -> None:
    world = IncidentWorld(directory=tmp_path, page_size=4)
    world.forward(Part(uid=1, row=1, tokens=PROMPT_5, slots=[8, 9, 10, 11, 20]))
    world.bytes_of(world.full_kv[3], 10)[0] ^= 255
    decode(world, slot=21)
    assert "bytes of slot 10 were changed from outside" in replayed(world)


def test_a_fault_in_a_sliding_window_replays_in_its_group(tmp_path: Path) -> None:
    world = IncidentWorld(directory=tmp_path, swa_slots=32, swa_window=3)
    assert world.lookup is not None
    for index, slot in enumerate(SLOTS_5):
        world.lookup[slot] = 20 + index
    world.lookup[12] = 30
    world.forward(Part(uid=1, row=1, tokens=PROMPT_5, slots=SLOTS_5))
    for slot in SLOTS_5[:2]:
        world.lookup[slot] = 0  # evicted
    world.bytes_of(world.swa_kv[1], 23)[0] ^= 1
    decode(world)
    (incident,) = world.incidents()
    assert (incident.root.group, incident.root.slot) == ("swa", 23)
    assert "bytes of slot 23" in replayed(world)


def test_a_mapping_lost_inside_the_window_replays(tmp_path: Path) -> None:
    world = IncidentWorld(directory=tmp_path, swa_slots=32, swa_window=3)
    assert world.lookup is not None
    for index, slot in enumerate(SLOTS_5):
        world.lookup[slot] = 20 + index
    world.lookup[12] = 30
    world.forward(Part(uid=1, row=1, tokens=PROMPT_5, slots=SLOTS_5))
    world.lookup[SLOTS_5[3]] = 0
    decode(world)
    assert "position 3 in group swa was changed from outside: it names slot 0" in replayed(world)


def test_a_moved_slot_is_followed(tmp_path: Path) -> None:
    world = prefilled(tmp_path)
    world.monitor.copy_slots(0, torch.tensor([9]), torch.tensor([44]))
    for buffer in world.full_kv:
        buffer[44] = buffer[9]
    world.table[1, 2] = 44
    world.bytes_of(world.full_kv[0], 44)[0] ^= 1
    decode(world)
    explanation = replayed(world)
    assert "bytes of slot 44" in explanation
    assert "page-table" not in explanation


def test_a_slot_that_the_engine_cleared_is_explained_by_that_event(tmp_path: Path) -> None:
    world = prefilled(tmp_path)
    world.monitor.forget_slots(0, torch.tensor([9]))
    decode(world)
    assert "before step 2 slot 9 was given up (reset)" in replayed(world)


def test_two_incidents_at_once_replay_each(tmp_path: Path) -> None:
    world = prefilled(tmp_path)
    world.forward(Part(uid=2, row=2, tokens=[50, 51, 52], slots=[20, 21, 22]))
    world.bytes_of(world.full_kv[0], 9)[0] ^= 1
    world.monitor.guards[0].records[21].view(torch.int64)[0] += 1
    world.forward(
        Part(uid=1, row=1, tokens=[*PROMPT_5, 1], slots=[12], prefix=5, host_knows_tokens=False),
        Part(uid=2, row=2, tokens=[50, 51, 52, 1], slots=[13], prefix=3, host_knows_tokens=False),
        kind=ForwardKind.DECODE,
    )
    incidents = {incident.root.slot: incident for incident in world.incidents()}
    assert set(incidents) == {9, 21}
    for incident in incidents.values():
        assert replay(incident).reproduced


def test_a_long_context_is_cut_around_the_root_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcanary_plugin.evidence.MAX_POSITIONS", 8)
    world = IncidentWorld(directory=tmp_path)
    prompt, slots = list(range(200, 240)), list(range(1, 41))
    world.forward(Part(uid=1, row=1, tokens=prompt[:20], slots=slots[:20]))
    world.forward(Part(uid=1, row=1, tokens=prompt, slots=slots[20:], prefix=20))
    world.bytes_of(world.full_kv[0], 26)[0] ^= 1
    part = Part(uid=1, row=1, tokens=[*prompt, 1], slots=[50], prefix=40, host_knows_tokens=False)
    world.forward(part, kind=ForwardKind.DECODE)
    (incident,) = world.incidents()
    assert incident.evidence is not None
    (reader,) = incident.evidence.requests
    assert (reader.first, len(reader.rows[0].slots)) == (21, 8)
    assert "bytes of slot 26" in replayed(world)


def test_a_violation_that_the_evidence_does_not_lead_to_is_said_so(tmp_path: Path) -> None:
    world = prefilled(tmp_path)
    world.bytes_of(world.full_kv[0], 9)[0] ^= 1
    decode(world)
    (incident,) = world.incidents()
    assert incident.evidence is not None
    never = incident.root.model_copy(update={"checks": ["double_free"]})
    assert not replay(incident.model_copy(update={"root": never})).reproduced
    empty = incident.evidence.model_copy(update={"window": []})
    result = replay(incident.model_copy(update={"evidence": empty}))
    assert not result.reproduced
    assert "does not hold step 2" in result.explanation


def test_a_table_row_that_changes_under_a_forward_replays(tmp_path: Path) -> None:
    world = prefilled(tmp_path, config=checking_everything(reverify={"sample": 1.0}))
    world.forward(Part(uid=2, row=2, tokens=[50, 51, 52], slots=[20, 21, 22]))

    def give_the_row_to_another() -> None:
        world.table[1, :3] = torch.tensor([20, 21, 22])

    part = Part(uid=1, row=1, tokens=[*PROMPT_5, 4], slots=[12], prefix=5, host_knows_tokens=False)
    world.forward(part, kind=ForwardKind.DECODE, meanwhile=give_the_row_to_another)
    (incident,) = world.incidents()
    assert incident.cause == (
        "slot 20: the page-table entry of request req-1 for position 0 changed to it from slot 5"
        " while the forward of step 3 was running"
    )
    assert "it names slot 20, and slot 5 was recorded" in replayed(world)


def test_bytes_that_change_under_a_forward_replay(tmp_path: Path) -> None:
    world = prefilled(tmp_path, config=checking_everything(reverify={"sample": 1.0}))

    def overwrite() -> None:
        world.bytes_of(world.full_kv[0], 9)[0] ^= 1

    part = Part(uid=1, row=1, tokens=[*PROMPT_5, 4], slots=[12], prefix=5, host_knows_tokens=False)
    world.forward(part, kind=ForwardKind.DECODE, meanwhile=overwrite)
    (incident,) = world.incidents()
    assert incident.root.phase == "reverify"
    assert "bytes of slot 9 were changed from outside" in replayed(world)


@pytest.mark.parametrize("forwards", [64, 2])
def test_bytes_that_the_scrub_finds_replay(tmp_path: Path, forwards: int) -> None:
    """The only look at bytes in production; mostly long after the write, here also behind it."""
    config = checking_everything(
        verify={"real_kv": "none"},
        scrub={"percent_of_step_time": 50},
        recorder={"forwards": forwards},
    )
    world = prefilled(tmp_path, config=config)
    world.bytes_of(world.full_kv[0], 9)[0] ^= 1
    for _ in range(1000):
        world.forward(Part(uid=2, row=2, tokens=[50, 51, 52], slots=[20, 21, 22]))
        if world.incidents():
            break
    (incident,) = world.incidents()
    assert (incident.root.phase, incident.root.slot) == ("scrub", 9)
    assert replayed(world) == (
        "not explained by recorded events: the K/V bytes of slot 9 were changed from outside,"
        " after the seal of step 1"
    )


class TestAllocator:
    """Faults of an allocator whose events reach the canary."""

    @staticmethod
    def world(tmp_path: Path) -> IncidentWorld:
        world = IncidentWorld(directory=tmp_path, tracks_allocation=True)
        world.monitor.guards[0].events.alloc(torch.tensor(SLOTS_5))
        world.forward(Part(uid=1, row=1, tokens=PROMPT_5, slots=SLOTS_5))
        return world

    def test_a_freed_slot_that_is_read_replays(self, tmp_path: Path) -> None:
        world = self.world(tmp_path)
        world.monitor.guards[0].events.free(torch.tensor([9]))
        world.monitor.guards[0].events.alloc(torch.tensor([12]))
        decode(world)
        assert "before step 2 slot 9 was given up (free)" in replayed(world)

    def test_a_slot_that_is_handed_out_and_written_in_one_step_is_explained_by_the_write(
        self, tmp_path: Path
    ) -> None:
        world = self.world(tmp_path)
        events = world.monitor.guards[0].events
        events.free(torch.tensor([9]))
        events.alloc(torch.tensor([9, 12]))
        world.forward(Part(uid=2, row=2, tokens=[40, 41], slots=[9, 12]))
        decode(world, slot=13)
        assert "in step 2 request req-2 wrote position 0 to slot 9" in replayed(world)

    def test_a_double_free_replays(self, tmp_path: Path) -> None:
        world = self.world(tmp_path)
        world.monitor.guards[0].events.free(torch.tensor(SLOTS_5))
        world.forward()
        world.monitor.guards[0].events.free(torch.tensor([6]))
        world.forward()
        assert replayed(world).endswith(
            "before step 1 alloc; before step 2 free; before step 3 free"
        )

    def test_a_double_alloc_replays(self, tmp_path: Path) -> None:
        world = self.world(tmp_path)
        world.monitor.guards[0].events.alloc(torch.tensor([6]))
        world.forward()
        assert "before step 1 alloc; before step 2 alloc" in replayed(world)

    def test_a_write_into_a_slot_of_another_request_replays(self, tmp_path: Path) -> None:
        world = self.world(tmp_path)
        world.monitor.guards[0].events.alloc(torch.tensor([20, 22]))
        world.forward(Part(uid=2, row=2, tokens=[50, 51, 52], slots=[20, 9, 22]))
        world.monitor.guards[0].events.alloc(torch.tensor([12]))
        decode(world)
        (incident,) = world.incidents()
        assert "while another request (request req-1 wrote it last) still owned" in incident.cause
        replayed(world)

    @pytest.mark.parametrize("forwards", [1, 2])
    def test_a_fault_whose_beginning_the_window_has_lost_replays(
        self, forwards: int, tmp_path: Path
    ) -> None:
        world = IncidentWorld(
            directory=tmp_path,
            tracks_allocation=True,
            config=checking_everything(recorder={"forwards": forwards}),
        )
        world.monitor.guards[0].events.alloc(torch.tensor(SLOTS_5))
        world.forward(Part(uid=1, row=1, tokens=PROMPT_5, slots=SLOTS_5))
        world.monitor.guards[0].events.free(torch.tensor(SLOTS_5))
        world.forward()
        world.forward()
        world.monitor.guards[0].events.free(torch.tensor([6]))
        world.forward()
        assert "slot 6 was free, which no recorded event made it" in replayed(world)
