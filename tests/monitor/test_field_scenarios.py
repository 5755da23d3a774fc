"""Faults that happened in the field, as slot events; each with a twin without the fault.

A test's parameter ``fault`` is True for the fault and False for its twin: both share every line but
the one that goes wrong. The twin must be silent; the fault must give the named check at the named
slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from kvcanary_plugin.cache import KVCacheGroup, row_source
from kvcanary_plugin.carried import ExternalSlots
from kvcanary_plugin.forward import ForwardKind
from kvcanary_plugin.identity import identity_key
from kvcanary_plugin.kernels import LaunchTag
from kvcanary_plugin.violations import Violation
from tests.monitor.world import Part, World, checking_everything, found

PROMPT = [11, 7, 7, 300, 0]
SLOTS = [5, 6, 9, 2, 31]
OTHER = [50, 51, 52, 53, 54]
OTHER_SLOTS = [20, 21, 22, 23, 24]
BACK = [40, 41, 42, 43, 44]

with_twin = pytest.mark.parametrize("fault", [True, False], ids=["fault", "twin"])


def tensor(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def world_of(**settings: object) -> World:
    settings.setdefault("config", checking_everything(reverify={"sample": 1.0}))
    return World(**settings)  # type: ignore[arg-type]


def alloc(world: World, *slots: int, group: int = 0) -> None:
    world.monitor.guards[group].events.alloc(tensor(*slots))


def free(world: World, *slots: int, group: int = 0) -> None:
    world.monitor.guards[group].events.free(tensor(*slots))


def prefilled(**settings: object) -> World:
    """Request 1 (row 1) has computed PROMPT into SLOTS."""
    world = world_of(**settings)
    if world.tracks_allocation:
        alloc(world, *SLOTS)
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
    return world


def decode(
    world: World,
    *,
    uid: int = 1,
    row: int = 1,
    tokens: Sequence[int] = PROMPT,
    slot: int = 12,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Violation]:
    """One more token behind ``tokens``."""
    part = Part(
        uid=uid,
        row=row,
        tokens=[*tokens, 40],
        slots=[slot],
        prefix=len(tokens),
        host_knows_tokens=False,
    )
    return world.forward(part, kind=ForwardKind.DECODE, meanwhile=meanwhile)


def admit(
    world: World,
    slots: Sequence[int],
    *,
    tokens: Sequence[int] = PROMPT,
    uid: int = 2,
    key: int = 0,
) -> list[Violation]:
    """Request ``uid`` (row 2) is given ``slots`` as its cached prefix and computes one token."""
    world.put_row(2, slots)
    part = Part(
        uid=uid, row=2, tokens=[*tokens, 8], slots=[13], prefix=len(slots), identity_key=key
    )
    return world.forward(part)


def bytes_at(world: World, slots: Sequence[int]) -> list[torch.Tensor]:
    """A copy of the bytes of ``slots``: one [n, bytes] tensor for each strip."""
    return [
        torch.stack([world.bytes_of(buffer, slot).clone() for slot in slots])
        for buffer in world.full_kv
    ]


def put_bytes(world: World, rows: list[torch.Tensor], slots: Sequence[int]) -> None:
    for buffer, strip in zip(world.full_kv, rows, strict=True):
        for slot, row in zip(slots, strip, strict=True):
            world.bytes_of(buffer, slot).copy_(row)


def groups_of(violations: Sequence[Violation]) -> set[str]:
    return {violation.group for violation in violations}


# --- transfers and frees --------------------------------------------------------------------------


@with_twin
def test_a_transfer_that_still_writes_after_the_abort(fault: bool):
    """sglang #24527, #35049."""
    world = world_of(tracks_allocation=True)
    alloc(world, *OTHER_SLOTS[:4])  # A; its transfer begins
    free(world, *OTHER_SLOTS[:4])  # A is aborted, its transfer goes on
    alloc(world, *OTHER_SLOTS[:4], 12)
    b = Part(uid=2, row=2, tokens=OTHER[:4], slots=OTHER_SLOTS[:4])
    assert world.forward(b) == []
    if fault:
        for slot in (21, 22):
            world.bytes_of(world.full_kv[0], slot).fill_(66)
    violations = decode(world, uid=2, row=2, tokens=OTHER[:4])
    assert found(violations) == ({("real_kv", 21), ("real_kv", 22)} if fault else set())
    assert all(violation.writer_uid == 2 for violation in violations)


@with_twin
@pytest.mark.parametrize("tracks", [True, False], ids=["allocator events", "no allocator events"])
def test_a_slot_freed_before_the_step_in_flight_ends(fault: bool, tracks: bool):
    """vllm #45357: A's queued step writes s12, which B has by then."""
    world = prefilled(tracks_allocation=tracks)
    if tracks:
        alloc(world, 12, 13)
        free(world, 12)
        alloc(world, 12)
    b = Part(uid=2, row=2, tokens=[8, 9], slots=[12, 14])
    if tracks:
        alloc(world, 14, 15)
    assert world.forward(b) == []
    at_the_write = decode(world, slot=12 if fault else 13)
    at_the_read = decode(world, uid=2, row=2, tokens=[8, 9], slot=15)
    if not fault:
        assert at_the_write == at_the_read == []
        return
    assert found(at_the_write) == ({("write_owned", 12)} if tracks else set())
    assert {("token", 12), ("position", 12), ("chain", 12)} <= found(at_the_read)


# --- page tables ----------------------------------------------------------------------------------


@with_twin
def test_a_table_row_given_away_under_the_forward(fault: bool):
    """sglang #18744."""
    world = prefilled()

    def row_is_given_away() -> None:
        world.put_row(1 if fault else 3, OTHER_SLOTS)

    violations = decode(world, meanwhile=row_is_given_away)
    assert {(v.checks, v.request_uid) for v in violations} == (
        {(("table_changed",), 1)} if fault else set()
    )


@with_twin
@pytest.mark.parametrize("when", ["before the launch", "under the forward"])
def test_a_lookup_entry_cleared_too_early(fault: bool, when: str):
    """sglang #31687."""
    world = world_of(swa_slots=32, swa_window=3)
    assert world.lookup is not None
    world.lookup[tensor(*SLOTS, 12)] = tensor(20, 21, 22, 23, 24, 30)
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
    # Outside the window of the last three tokens, an entry may go at any time.
    cleared = SLOTS[3] if fault else SLOTS[0]

    def clear() -> None:
        assert world.lookup is not None
        world.lookup[cleared] = 0

    if when == "before the launch":
        clear()
        violations = decode(world)
    else:
        violations = decode(world, meanwhile=clear)
    check = "out_of_pool" if when == "before the launch" else "table_changed"
    assert {(v.group, v.checks) for v in violations} == ({("swa", (check,))} if fault else set())


@with_twin
def test_a_staging_table_filled_again_before_its_copy(fault: bool):
    """TensorRT-LLM #15546."""
    world = prefilled()
    assert world.forward(Part(uid=2, row=2, tokens=OTHER, slots=OTHER_SLOTS)) == []
    staging = torch.tensor(SLOTS, dtype=torch.int32)
    if fault:
        staging.copy_(torch.tensor(OTHER_SLOTS))
    world.table[1, :5] = staging
    violations = decode(world)
    expected = {("token", slot) for slot in OTHER_SLOTS[:2]}
    assert expected <= found(violations) if fault else violations == []
    assert {v.request_uid for v in violations} <= {1}


@with_twin
def test_a_staging_table_filled_again_is_chain_where_only_a_part_is_foreign(fault: bool):
    """TensorRT-LLM #15546, without a token history."""
    config = checking_everything(checks={"token": False}, write_input_assert=False)
    world = prefilled(config=config)
    assert world.forward(Part(uid=2, row=2, tokens=OTHER, slots=OTHER_SLOTS)) == []
    if fault:
        world.table[1, 2:5] = torch.tensor(OTHER_SLOTS[2:])
    assert found(decode(world)) == ({("chain", 22)} if fault else set())


@with_twin
def test_two_table_entries_exchanged(fault: bool):
    """Swapped blocks."""
    world = prefilled()
    if fault:
        world.table[1, 1], world.table[1, 2] = 9, 6
    violations = decode(world)
    expected = {("position", 6), ("position", 9), ("chain", 9)}
    assert expected <= found(violations) if fault else violations == []


@with_twin
def test_a_table_of_zeros(fault: bool):
    """vllm #7018: the second request reads block 0 everywhere."""
    world = world_of(page_size=4)
    first = Part(uid=1, row=1, tokens=list(range(16)), slots=list(range(4, 20)))
    second = Part(uid=2, row=2, tokens=list(range(30, 46)), slots=list(range(20, 36)))
    assert world.forward(first, second) == []
    if fault:
        world.table[2, :4] = 0
    violations = decode(world, uid=2, row=2, tokens=list(range(30, 46)), slot=36)
    in_the_read = [v for v in violations if v.phase == "verify"]
    assert {check for check, _ in found(in_the_read)} == ({"out_of_pool"} if fault else set())
    assert len(in_the_read) == (16 if fault else 0)
    assert bool(violations) == fault


@with_twin
def test_a_stale_mapping_into_the_window_pool(fault: bool):
    """sglang #25805: f5's mapping to w20 outlives f5; freeing its next owner frees B's w20."""
    world = world_of(swa_slots=32, swa_window=3, tracks_allocation=True)
    assert world.lookup is not None
    alloc(world, 5)
    alloc(world, 20, group=1)
    world.lookup[5] = 20
    free(world, 5)
    free(world, 20, group=1)
    if not fault:
        world.lookup[5] = 0
    alloc(world, 6)  # B
    alloc(world, 20, group=1)
    world.lookup[6] = 20
    assert world.forward(Part(uid=2, row=2, tokens=[8], slots=[6])) == []
    alloc(world, 5)  # C, full slots only; it is evicted
    free(world, 5)
    if int(world.lookup[5]):
        free(world, int(world.lookup[5]), group=1)
        world.lookup[5] = 0
    alloc(world, 9)  # D
    alloc(world, 20 if fault else 21, group=1)
    world.lookup[9] = 20 if fault else 21
    at_the_write = world.forward(Part(uid=4, row=3, tokens=[9], slots=[9]))
    alloc(world, 12)
    alloc(world, 25, group=1)
    world.lookup[12] = 25
    at_the_read = decode(world, uid=2, row=2, tokens=[8])
    # Nothing is wrong with the calls at the allocator: free and alloc of w20 take turns.
    assert at_the_write == []
    assert {("token", 20)} <= found(at_the_read) if fault else at_the_read == []
    assert groups_of(at_the_read) == ({"swa"} if fault else set())


@with_twin
def test_a_stale_mapping_freed_by_both_of_its_owners(fault: bool):
    """sglang #25805, the end of it: B frees w20 as well."""
    world = world_of(swa_slots=32, swa_window=3, tracks_allocation=True)
    alloc(world, 20, group=1)
    free(world, 20, group=1)
    if fault:
        free(world, 20, group=1)
    violations = world.forward(kind=ForwardKind.DUMMY)
    assert found(violations) == ({("double_free", 20)} if fault else set())
    assert groups_of(violations) == ({"swa"} if fault else set())
    alloc(world, 20, group=1)
    if fault:
        alloc(world, 20, group=1)
    violations = world.forward(kind=ForwardKind.DUMMY)
    assert found(violations) == ({("double_alloc", 20)} if fault else set())


@with_twin
def test_a_dummy_batch_that_writes_a_real_block(fault: bool):
    """vllm #56734: row 0 last held the block, which is still prefix-cached."""
    world = prefilled(tracks_allocation=True)
    slots = [9, 2, 31] if fault else [0, -1, 0]
    dummy = Part(uid=-1, row=0, tokens=[0] * 5, slots=slots, prefix=2, host_knows_tokens=False)
    violations = world.forward(dummy, kind=ForwardKind.DUMMY)
    assert found(violations) == ({("write_owned", slot) for slot in (9, 2, 31)} if fault else set())
    alloc(world, 13)
    violations = admit(world, SLOTS)
    assert {("token", 9), ("token", 2)} <= found(violations) if fault else violations == []


@with_twin
def test_a_dummy_batch_that_writes_bytes_alone(fault: bool):
    """vllm #56734, a write that no record goes with (the draft's, say): its bytes tell."""
    world = prefilled(tracks_allocation=True)
    if fault:
        world.bytes_of(world.full_kv[3], 9).fill_(0)
    alloc(world, 13)
    assert found(admit(world, SLOTS)) == ({("real_kv", 9)} if fault else set())


# --- offload and loads ----------------------------------------------------------------------------


@with_twin
@pytest.mark.parametrize("carried_along", [True, False], ids=["records carried", "adopted"])
def test_a_copy_to_the_host_that_ran_before_the_write(fault: bool, carried_along: bool):
    """vllm #45704."""
    world = world_of()
    too_early = bytes_at(world, SLOTS)
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
    carried = world.monitor.export_slots(0, tensor(*SLOTS))
    assert carried is not None
    put_bytes(world, too_early if fault else bytes_at(world, SLOTS), BACK)
    if carried_along:
        world.monitor.import_slots(0, tensor(*BACK), carried)
        seen = world.violations()
        assert found(seen) == ({("real_kv", slot) for slot in BACK} if fault else set())
        return
    # Without records nothing can tell; the gauge says how many slots are taken on trust.
    world.monitor.adopt_slots(0, tensor(*BACK), tensor(*PROMPT), torch.arange(5))
    assert world.violations() == []
    assert admit(world, BACK) == []
    external = ExternalSlots(world.monitor.guards[0])
    external.refresh()
    assert external.count == len(BACK)


@with_twin
@pytest.mark.parametrize("records_in_the_page", [True, False])
def test_a_host_page_filled_again_before_its_load(fault: bool, records_in_the_page: bool):
    """sglang #31427."""
    world = prefilled()
    assert world.forward(Part(uid=3, row=3, tokens=OTHER, slots=OTHER_SLOTS)) == []
    mine, refilled = (
        world.monitor.export_slots(0, tensor(*slots)) for slots in (SLOTS, OTHER_SLOTS)
    )
    assert mine is not None
    assert refilled is not None
    put_bytes(world, bytes_at(world, OTHER_SLOTS if fault else SLOTS), BACK)
    world.monitor.import_slots(
        0, tensor(*BACK), refilled if fault and records_in_the_page else mine
    )
    at_the_load = world.violations()
    at_the_read = admit(world, BACK)
    if not fault:
        assert at_the_load == at_the_read == []
    elif records_in_the_page:
        assert at_the_load == []
        assert {("token", slot) for slot in BACK} <= found(at_the_read)
        assert ("prefix_identity", BACK[-1]) in found(at_the_read)
    else:
        assert found(at_the_load) == {("real_kv", slot) for slot in BACK}


@with_twin
def test_a_host_page_filled_again_breaks_the_chain_inside_a_prefix(fault: bool):
    """sglang #31427: one page of several."""
    world = prefilled()
    assert world.forward(Part(uid=3, row=3, tokens=OTHER, slots=OTHER_SLOTS)) == []
    source = [*SLOTS[:2], OTHER_SLOTS[2] if fault else SLOTS[2], *SLOTS[3:]]
    carried = world.monitor.export_slots(0, tensor(*source))
    assert carried is not None
    put_bytes(world, bytes_at(world, source), BACK)
    world.monitor.import_slots(0, tensor(*BACK), carried)
    violations = admit(world, BACK)
    expected = {("token", 42), ("chain", 42), ("chain", 43)}
    assert expected <= found(violations) if fault else violations == []


@with_twin
@pytest.mark.parametrize("missing", ["records and bytes", "bytes"])
def test_a_chunk_of_which_one_half_was_stored(fault: bool, missing: str):
    """LMCache #4991."""
    world = world_of()
    half = fault and missing == "records and bytes"
    first = Part(
        uid=1, row=1, tokens=PROMPT[:3] if half else PROMPT, slots=SLOTS[: 3 if half else 5]
    )
    assert world.forward(first) == []
    carried = world.monitor.export_slots(0, tensor(*SLOTS))
    assert carried is not None
    stored = bytes_at(world, SLOTS)
    if fault and missing == "bytes":
        for strip in stored:
            strip[3:] = 0
    put_bytes(world, stored, BACK)
    world.monitor.import_slots(0, tensor(*BACK), carried)
    violations = [*world.violations(), *admit(world, BACK)]
    check = "unwritten" if missing == "records and bytes" else "real_kv"
    expected = {(check, 43), (check, 44)}
    assert expected <= found(violations) if fault else violations == []


@with_twin
@pytest.mark.parametrize("seen_by", ["the next check", "the scrub"])
def test_bytes_that_land_after_done(fault: bool, seen_by: str):
    """vllm #44238."""
    scrub = {"bytes_per_second": 10**13} if seen_by == "the scrub" else {"percent_of_step_time": 0}
    world = prefilled(config=checking_everything(scrub=scrub))
    carried = world.monitor.export_slots(0, tensor(*SLOTS))
    assert carried is not None
    put_bytes(world, bytes_at(world, SLOTS), BACK)
    world.monitor.import_slots(0, tensor(*BACK), carried)
    assert admit(world, BACK) == []
    if fault:
        world.bytes_of(world.full_kv[1], 43)[5] ^= 1
    if seen_by == "the next check":
        violations = admit(world, BACK, uid=3)
        phases = {"verify"}
    else:
        violations = [v for _ in range(3) for v in world.forward(kind=ForwardKind.DUMMY)]
        phases = {"scrub"}
    assert found(violations) == ({("real_kv", 43)} if fault else set())
    assert {v.phase for v in violations} == (phases if fault else set())


@with_twin
def test_a_prefix_published_before_its_load_is_sure(fault: bool):
    """sglang #30986: admitted with prefix 8, the load of the last four fails."""
    world = world_of(tracks_allocation=True)
    slots, tokens = list(range(40, 48)), list(range(8))
    alloc(world, *slots, 13)
    world.monitor.adopt_slots(0, tensor(*slots[:4]), tensor(*tokens[:4]), torch.arange(4))
    if not fault:
        world.monitor.adopt_slots(
            0, tensor(*slots[4:]), tensor(*tokens[4:]), torch.arange(4, 8), previous_slot=slots[3]
        )
    violations = admit(world, slots, tokens=tokens)
    expected = {("unwritten", slot) for slot in slots[4:]}
    assert expected <= found(violations) if fault else violations == []


# --- whose prefix it is ---------------------------------------------------------------------------


@pytest.mark.parametrize("reader_first", [True, False])
def test_a_hit_in_the_same_step_is_no_fault(reader_first: bool):
    """vllm #41838 family: A writes s1..s4 and B reads them in one forward. Silent."""
    world = world_of()
    world.put_row(2, SLOTS)
    a = Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)
    b = Part(uid=2, row=2, tokens=[*PROMPT, 8], slots=[13], prefix=5)
    assert world.forward(*((b, a) if reader_first else (a, b))) == []


@with_twin
@pytest.mark.parametrize(
    ("filled_by", "read_by"),
    [
        pytest.param(
            {"multimodal": [(2, "image X")]},
            {"multimodal": [(2, "image Y")]},
            id="LMCache #3301: the same placeholders, another image",
        ),
        pytest.param(
            {"lora_id": "X"},
            {"cache_salt": "X"},
            id="vllm #44701: LoRA X, then salt X on the base model",
        ),
        pytest.param(
            {"weight_version": "1"},
            {"weight_version": "2"},
            id="K/V kept across a weight update",
        ),
    ],
)
def test_a_prefix_of_another_identity(fault: bool, filled_by: dict, read_by: dict):
    world = world_of(config=checking_everything(checks={"token": False}))
    filled = Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS, identity_key=identity_key(**filled_by))
    assert world.forward(filled) == []
    key = identity_key(**(read_by if fault else filled_by))
    violations = admit(world, SLOTS, key=key)
    expected = {("prefix_identity", SLOTS[-1])}
    assert expected <= found(violations) if fault else violations == []


def test_a_weight_update_without_a_version_in_the_key_is_allowed():
    """By design: an engine that keeps its K/V over an update on purpose must not alarm."""
    world = prefilled()
    assert admit(world, SLOTS) == []


# --- what is written ------------------------------------------------------------------------------


@with_twin
def test_the_end_of_a_draft_chunk_rotated_wrongly(fault: bool):
    """sglang #26329: prompt a b c d in chunks of two; the draft should hold b c, holds b y."""
    world = world_of(token_offset=1)
    a, b, c, d, y = 1, 2, 3, 4, 25
    first = Part(uid=1, row=1, tokens=[a, b], slots=[10, 11], inputs=[b, y if fault else c])
    assert world.forward(first, kind=ForwardKind.DRAFT) == []
    second = Part(uid=1, row=1, tokens=[a, b, c, d], slots=[12, 13], prefix=2, inputs=[d, 9])
    violations = world.forward(second, kind=ForwardKind.DRAFT)
    assert ("token", 11) in found(violations) if fault else violations == []


@with_twin
@pytest.mark.parametrize("oracle", [True, False], ids=["write-input assert", "no oracle"])
def test_positions_off_by_one(fault: bool, oracle: bool):
    world = world_of(
        config=checking_everything(write_input_assert=oracle, checks={"token": oracle})
    )
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT[:2], slots=SLOTS[:2])) == []
    positions = [3, 4, 5] if fault else [2, 3, 4]
    chunk = Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS[2:], prefix=2, positions=positions)
    at_the_write = world.forward(chunk)
    if not fault:
        assert at_the_write == decode(world) == []
    elif oracle:
        assert found(at_the_write) == {("write_input", slot) for slot in SLOTS[2:]}
    else:
        # The first does not follow its seed; behind it, one follows the other.
        assert found(at_the_write) == {("write_input", SLOTS[2])}
        assert {("position", slot) for slot in SLOTS[2:]} <= found(decode(world))


@with_twin
@pytest.mark.parametrize("pool", ["fresh", "used"])
def test_a_write_hook_that_is_skipped(fault: bool, pool: str):
    """vllm-plugin-FL #353: the forward runs, the K/V of its tokens is never stored."""
    world = world_of()
    if pool == "used":
        assert world.forward(Part(uid=2, row=2, tokens=OTHER, slots=SLOTS)) == []
    part = Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)
    assert world.forward(part, stores_kv=not fault) == []
    violations = decode(world)
    expected = {("unwritten", slot) for slot in SLOTS}
    assert expected <= found(violations) if fault else violations == []


def test_the_same_tokens_computed_again_into_their_own_slots_are_no_skipped_write():
    world = prefilled()
    for _ in range(2):
        assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
        assert decode(world) == []


def test_a_write_skipped_for_a_part_of_a_forward_cannot_be_seen():
    """By design: bytes that were wrong when they were sealed. docs/detection.md says so."""
    world = world_of()
    kept = world.bytes_of(world.full_kv[0], SLOTS[2]).clone()

    def one_store_is_lost() -> None:
        for buffer in world.full_kv:
            world.bytes_of(buffer, SLOTS[2]).copy_(kept)

    part = Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)
    assert world.forward(part, meanwhile=one_store_is_lost) == []
    assert decode(world) == []


# --- sizes ----------------------------------------------------------------------------------------


class OddPool(World):
    """A world whose full pool has other rows."""

    row_bytes = 0

    def _pool(self, slots: int) -> list[torch.Tensor]:
        # Calloc: pages that nobody touches take no memory.
        return [torch.zeros((slots, self.row_bytes), dtype=torch.uint8)]

    def _group(
        self,
        name: str,
        slots: int,
        kv: list[torch.Tensor],
        lookup: torch.Tensor | None = None,
    ) -> KVCacheGroup:
        return KVCacheGroup(
            name=name,
            num_slots=slots,
            page_table=self.table,
            page_size=1,
            padding_row=0,
            sources=tuple(row_source(buffer) for buffer in kv),
        )

    def bytes_of(self, buffer: torch.Tensor, slot: int) -> torch.Tensor:
        return buffer[slot, :24]


class HugePool(OddPool):
    """2^31 bytes and elements are passed at slot 2^16."""

    row_bytes = 1 << 15


class Fp8WithScales(OddPool):
    """128 values and one 4-byte scale a slot."""

    row_bytes = 132


@with_twin
def test_a_slot_computed_in_32_bits(fault: bool):
    """vllm #1486 and many: slot s beyond 2^31 bytes is stored to where s wraps around."""
    size = HugePool.row_bytes
    far = (1 << 31) // size + 7
    wrapped = (far * size - (1 << 31)) // size
    world = HugePool(slots=far + 10, config=checking_everything())
    victim = Part(uid=1, row=1, tokens=PROMPT, slots=[3, 4, wrapped, 9, 10])
    assert world.forward(victim) == []

    def store_wraps() -> None:
        if fault:
            world.full_kv[0][wrapped].copy_(world.full_kv[0][far])

    far_part = Part(uid=2, row=2, tokens=[77, 78], slots=[far, far + 1])
    assert world.forward(far_part, meanwhile=store_wraps) == []
    assert found(decode(world)) == ({("real_kv", wrapped)} if fault else set())
    # The canary itself looks at the far slot, not at where it would wrap to.
    assert decode(world, uid=2, row=2, tokens=[77, 78], slot=14) == []
    world.full_kv[0][far, size - 1] ^= 1
    seen = decode(world, uid=2, row=2, tokens=[77, 78], slot=14)
    assert found(seen) == {("real_kv", far)}


@with_twin
@pytest.mark.parametrize("byte", [128, 131])
def test_only_the_scale_of_an_fp8_row_changes(fault: bool, byte: int):
    world = Fp8WithScales(config=checking_everything())
    assert world.forward(Part(uid=1, row=1, tokens=PROMPT, slots=SLOTS)) == []
    if fault:
        world.full_kv[0][9, byte] ^= 1
    assert found(decode(world)) == ({("real_kv", 9)} if fault else set())


def test_the_twins_are_looked_at():
    """Their silence is worth something only if the slots were verified."""
    world = prefilled()
    assert decode(world) == []
    assert world.monitor.guards[0].slots_run(LaunchTag.VERIFY) == len(PROMPT)
    assert world.monitor.guards[0].slots_run(LaunchTag.REVERIFY) == len(PROMPT)
