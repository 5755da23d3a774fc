"""The table of checks covers every bit once and says something useful about each."""

from __future__ import annotations

import pytest

from kvcanary_plugin.checks import CHECKS, Check, check_named, labels_of
from kvcanary_plugin.kernels.consts import FailReason


@pytest.mark.parametrize("reason", list(FailReason))
def test_every_reason_bit_belongs_to_exactly_one_check(reason: FailReason) -> None:
    assert len(labels_of(int(reason))) == 1


def test_labels_are_those_of_the_specification() -> None:
    by_bit = [labels_of(1 << bit)[0] for bit in range(14)]
    assert by_bit == [
        "chain",
        "position",
        "real_kv",
        "write_input",
        "write_input",
        "token",
        "unwritten",
        "freed_read",
        "out_of_pool",
        "write_owned",
        "double_free",
        "double_alloc",
        "prefix_identity",
        "table_changed",
    ]


def test_both_write_bits_are_one_violation_of_write_input() -> None:
    assert labels_of(FailReason.WRITE_TOKEN | FailReason.WRITE_POSITION) == ("write_input",)


def test_all_bits_give_all_labels() -> None:
    assert labels_of(sum(FailReason)) == tuple(check.label for check in CHECKS)


@pytest.mark.parametrize("bits", [0, 1 << 14, 1 | 1 << 20, -1])
def test_bits_that_no_check_knows_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="unknown reason bits"):
        labels_of(bits)


def test_unknown_label_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'chains'.*allowed chain, position"):
        check_named("chains")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.label)
def test_every_check_has_words_for_the_operator(check: Check) -> None:
    assert check.meaning.endswith(".")
    assert check.do.endswith(".")
    assert len(check.causes) >= 2
    assert not any(cause.endswith(".") for cause in check.causes)
