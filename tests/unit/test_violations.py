"""Decoding a row, describing it, request names, and what each mode does."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcanary_plugin.checks import CHECKS
from kvcanary_plugin.config import CanaryConfig, load_config
from kvcanary_plugin.kernels.consts import FailReason, LaunchTag, SlotState, pack_kernel_kind
from kvcanary_plugin.violations import (
    PHASES,
    RequestNames,
    Violation,
    ViolationPolicy,
    describe,
)

GROUPS = ("full", "swa")


@pytest.fixture
def names() -> RequestNames:
    names = RequestNames()
    names.remember(5, "req-A")
    names.remember(6, "req-B")
    return names


def decoded(ring_writer: Any, names: RequestNames, *args: Any, **fields: Any) -> Violation:
    ring_writer.put(*args, **fields)
    row = ring_writer.ring[(ring_writer.written - 1) % ring_writer.ring.shape[0]].numpy()
    return Violation.from_row(row, GROUPS, names)


# --- decoding ---------------------------------------------------------------------------------


def test_row_is_decoded_field_by_field(ring_writer: Any, names: RequestNames) -> None:
    violation = decoded(
        ring_writer,
        names,
        FailReason.VERIFY_CHAIN_HASH | FailReason.VERIFY_TOKEN,
        group_index=1,
        expected_position=78,
    )
    assert violation == Violation(
        checks=("chain", "token"),
        group="swa",
        phase="verify",
        slot=8123,
        position=77,
        expected_position=78,
        stored_token=31337,
        expected_token=42424,
        stored_hash="0xfffffffffffffffb",
        expected_hash="0x0000000000000063",
        step=1043,
        request_uid=5,
        request_id="req-A",
        writer_uid=6,
        writer_id="req-B",
        writer_step=1042,
        batch_row=3,
        slot_state="sealed",
        slot_before=None,
        sequence=1,
    )


@pytest.mark.parametrize(("tag", "known"), [(LaunchTag.WRITE, None), (LaunchTag.VERIFY, 1043)])
def test_a_write_does_not_take_its_own_mark_for_the_last_writers(
    ring_writer: Any, names: RequestNames, tag: LaunchTag, known: int | None
) -> None:
    kind = pack_kernel_kind(tag, 0)
    violation = decoded(ring_writer, names, kernel_kind=kind, step=1043, writer_step=1043)
    assert (violation.writer_uid, violation.writer_step) == (6, known)


def test_minus_one_means_unknown(ring_writer: Any, names: RequestNames) -> None:
    violation = decoded(
        ring_writer,
        names,
        expected_token=-1,
        request_uid=-1,
        writer_uid=-1,
        writer_step=-1,
        batch_row=-1,
        slot_state=-1,
        expected_position=-1,
    )
    assert violation.expected_token is None
    assert violation.request_uid is None
    assert violation.request_id is None
    assert violation.writer_uid is None
    assert violation.writer_id is None
    assert violation.writer_step is None
    assert violation.batch_row is None
    assert violation.slot_state is None
    assert violation.expected_position is None


@pytest.mark.parametrize("tag", list(LaunchTag))
def test_every_launch_is_a_phase_and_only_verifies_expect_a_hash(
    ring_writer: Any, names: RequestNames, tag: LaunchTag
) -> None:
    violation = decoded(ring_writer, names, tag=tag)
    assert violation.phase == tag.name.lower()
    assert violation.phase in PHASES
    assert (violation.expected_hash is not None) == (violation.phase in ("verify", "reverify"))


def test_slot_state_is_the_low_byte(ring_writer: Any, names: RequestNames) -> None:
    state = SlotState.FREE | 12345 << 8
    assert decoded(ring_writer, names, slot_state=state).slot_state == "free"


def test_overwritten_slot_state_is_shown_and_not_an_error(
    ring_writer: Any, names: RequestNames
) -> None:
    assert decoded(ring_writer, names, slot_state=0x77).slot_state == "invalid (119)"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_index": 2}, "group 2, there are 2"),
        ({"kernel_kind": 0xFF}, "not a valid LaunchTag"),
        ({"kernel_kind": -1}, "not a valid LaunchTag"),
        ({"fail_reason_bits": 0}, "unknown reason bits"),
    ],
)
def test_row_that_cannot_be_is_refused(
    ring_writer: Any, names: RequestNames, fields: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        decoded(ring_writer, names, **fields)


def test_row_of_the_wrong_length_is_refused(names: RequestNames) -> None:
    with pytest.raises(ValueError, match="shape"):
        Violation.from_row(np.zeros(15, np.int64), GROUPS, names)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=16, max_size=16))
def test_any_row_is_decoded_or_refused_with_a_value_error(row: list[int]) -> None:
    row[0] %= 8
    row[7] %= 1 << 14
    try:
        violation = Violation.from_row(np.array(row, np.int64), GROUPS, RequestNames())
    except ValueError:
        return
    assert describe(violation)
    assert json.dumps(violation.as_dict(include_tokens=True))


# --- words ------------------------------------------------------------------------------------


def test_description_says_where_who_and_what_is_likely(
    ring_writer: Any, names: RequestNames
) -> None:
    text = describe(decoded(ring_writer, names, FailReason.VERIFY_CHAIN_HASH))
    assert "slot 8123 of group full, position 77, request 'req-A'" in text
    assert "last written by request 'req-B' at step 1042" in text
    assert "Likely: slot 8123 was written by request 'req-B' at step 1042 while request" in text


def test_description_of_a_write_into_an_owned_slot_names_both_sides(
    ring_writer: Any, names: RequestNames
) -> None:
    text = describe(decoded(ring_writer, names, FailReason.WRITE_OWNED, tag=LaunchTag.WRITE))
    assert "request 'req-A' wrote slot 8123, which request 'req-B' still owned" in text


def test_description_of_the_readers_own_write_gives_the_usual_cause(
    ring_writer: Any, names: RequestNames
) -> None:
    text = describe(decoded(ring_writer, names, FailReason.VERIFY_POSITION, writer_uid=5))
    assert "Likely: entries of the page table were exchanged or shifted." in text


def test_description_falls_back_to_uids_and_to_unknown(
    ring_writer: Any, names: RequestNames
) -> None:
    text = describe(decoded(ring_writer, names, request_uid=900, writer_uid=-1))
    assert "request with uid 900" in text
    assert "last writer unknown" in text
    assert "None" not in text


def test_expected_position_is_named_only_when_it_differs(
    ring_writer: Any, names: RequestNames
) -> None:
    assert "position 77 (expected 78)" in describe(
        decoded(ring_writer, names, expected_position=78)
    )
    assert "(expected" not in describe(decoded(ring_writer, names, expected_position=77))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.label)
@pytest.mark.parametrize("tag", list(LaunchTag))
def test_token_ids_appear_only_when_allowed(
    ring_writer: Any, names: RequestNames, check: Any, tag: LaunchTag
) -> None:
    violation = decoded(ring_writer, names, check.reasons, tag=tag)
    silent, open_ = describe(violation), describe(violation, include_tokens=True)
    for token in ("31337", "42424"):
        assert token not in silent
        assert token in open_
        assert token not in json.dumps(violation.as_dict(include_tokens=False))
        assert token in json.dumps(violation.as_dict(include_tokens=True))
    assert check.meaning in silent


# --- request names ----------------------------------------------------------------------------


def test_at_least_the_last_hundred_thousand_requests_are_known() -> None:
    names = RequestNames()
    for uid in range(300_000):
        names.remember(uid, f"r{uid}")
    assert all(names.get(uid) == f"r{uid}" for uid in range(200_000, 300_000))
    assert len(names) < 200_000
    assert names.get(0) is None


def test_uid_used_again_takes_the_new_name_and_counts_as_new() -> None:
    names = RequestNames(capacity=2)
    names.remember(1, "old")
    names.remember(2, "other")
    names.remember(1, "new")
    names.remember(3, "third")
    assert (names.get(1), names.get(2), names.get(3)) == ("new", None, "third")


def test_unknown_uid_has_no_name() -> None:
    assert RequestNames().get(None) is None
    assert RequestNames().get(7) is None


def test_capacity_of_names_must_be_positive() -> None:
    with pytest.raises(ValueError, match="got 0"):
        RequestNames(capacity=0)


def test_names_may_be_added_and_read_by_several_threads() -> None:
    names = RequestNames(capacity=100)
    failures: list[BaseException] = []

    def work(base: int) -> None:
        try:
            for uid in range(base, base + 5000):
                names.remember(uid, str(uid))
                assert names.get(uid) in (str(uid), None)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(base,)) for base in (0, 10_000, 20_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(names) == 100


# --- policy -----------------------------------------------------------------------------------


def policy_of(names: RequestNames, **environ: str) -> ViolationPolicy:
    return ViolationPolicy(config_of(**environ), names)


def config_of(**environ: str) -> CanaryConfig:
    return load_config(None, {f"KVCANARY_{name}": value for name, value in environ.items()})


def act(policy: ViolationPolicy, ring_writer: Any, names: RequestNames) -> None:
    rows = ring_writer.ring[: ring_writer.written].numpy()
    policy.act_on(rows, lambda row: Violation.from_row(row, GROUPS, names))


def test_mode_log_neither_raises_nor_aborts(ring_writer: Any, names: RequestNames) -> None:
    policy = policy_of(names, MODE="log")
    ring_writer.put()
    act(policy, ring_writer, names)
    assert policy.pending_error() is None
    assert policy.take_requests_to_abort() == ()


def test_mode_raise_keeps_the_first_violation_as_the_error(
    ring_writer: Any, names: RequestNames
) -> None:
    policy = policy_of(names, MODE="raise")
    assert policy.stops_the_engine
    ring_writer.put(slot=1)
    ring_writer.put(slot=2)
    act(policy, ring_writer, names)
    error = policy.pending_error()
    assert error is not None
    assert error.violation.slot == 1
    assert str(error).startswith("kvcanary: chain violation in step 1043")
    assert policy.pending_error() is error


def test_error_shows_tokens_only_when_allowed(ring_writer: Any, names: RequestNames) -> None:
    ring_writer.put()
    texts = []
    for allowed in ("false", "true"):
        policy = policy_of(names, MODE="raise", REPORT__INCLUDE_TOKENS=allowed)
        act(policy, ring_writer, names)
        texts.append(str(policy.pending_error()))
    assert "31337" not in texts[0]
    assert "31337" in texts[1]


def test_mode_abort_hands_over_each_request_once(ring_writer: Any, names: RequestNames) -> None:
    policy = policy_of(names, MODE="abort")
    for uid in (5, 6, 5, -1):
        ring_writer.put(request_uid=uid)
    act(policy, ring_writer, names)
    assert policy.take_requests_to_abort() == (5, 6)
    assert policy.take_requests_to_abort() == ()
    assert policy.pending_error() is None


def test_leaving_a_mode_drops_what_it_had_pending(ring_writer: Any, names: RequestNames) -> None:
    policy = policy_of(names, MODE="raise")
    ring_writer.put()
    act(policy, ring_writer, names)
    policy.apply(config_of(MODE="abort"))
    assert policy.pending_error() is None
    act(policy, ring_writer, names)
    policy.apply(config_of(MODE="log"))
    assert policy.take_requests_to_abort() == ()


def test_checks_that_are_off_are_removed_from_rows(ring_writer: Any, names: RequestNames) -> None:
    policy = policy_of(names, CHECKS__CHAIN="false")
    ring_writer.put(FailReason.VERIFY_CHAIN_HASH)
    ring_writer.put(FailReason.VERIFY_CHAIN_HASH | FailReason.VERIFY_POSITION)
    ring_writer.put(FailReason.FREED_READ)
    rows = ring_writer.ring[:3].numpy()
    kept = policy.keep_enabled(rows)
    assert kept[:, 7].tolist() == [FailReason.VERIFY_POSITION, FailReason.FREED_READ]
    assert rows[0, 7] == FailReason.VERIFY_CHAIN_HASH, "the caller's rows stay as they are"


def test_nothing_is_a_violation_in_mode_off(ring_writer: Any, names: RequestNames) -> None:
    """Launches that keep records go on in it, and put what they notice into the ring."""
    policy = policy_of(names, MODE="off")
    ring_writer.put(FailReason.WRITE_OWNED)
    rows = ring_writer.ring[:1].numpy()
    assert len(policy.keep_enabled(rows)) == 0
    policy.apply(config_of(MODE="log"))
    assert len(policy.keep_enabled(rows)) == 1


def test_rows_with_unknown_bits_are_kept_for_the_decoder_to_refuse(
    ring_writer: Any, names: RequestNames
) -> None:
    policy = policy_of(names)
    ring_writer.put(fail_reason_bits=1 << 40)
    assert len(policy.keep_enabled(ring_writer.ring[:1].numpy())) == 1
