"""Chain hashes of prefixes on the host: equal to those of the whole prefix, however they came."""

from __future__ import annotations

import numpy as np
import pytest

from kvcanary_plugin import identity
from kvcanary_plugin.identity import KnownPrefixes, PrefixHasher
from kvcanary_plugin.kernels import chain_hash

DICE = np.random.default_rng(11)


def tokens(count: int) -> np.ndarray:
    return DICE.integers(0, 1000, count)


class Counted:
    """How many tokens were hashed, through the real hash."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(identity, "chain_hash", self._hash)

    def _hash(self, hashed: np.ndarray, **how: object) -> int:
        self.count += hashed.shape[0]
        return chain_hash(hashed, **how)  # type: ignore[arg-type]

    def since(self) -> int:
        count, self.count = self.count, 0
        return count


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_any_mixture_of_prefixes_has_the_hashes_of_whole_prefixes():
    """Requests that share beginnings of all lengths, come in chunks, and differ in keys."""
    hasher = PrefixHasher()
    beginnings = [tokens(length) for length in (20, 33, 64, 200)]
    for number in range(300):
        beginning = beginnings[DICE.integers(4)]
        own = np.concatenate([beginning[: DICE.integers(1, len(beginning) + 1)], tokens(40)])
        key = int(DICE.integers(2))
        for prefix in sorted(DICE.integers(1, len(own) + 1, 2).tolist()):
            result = hasher.prefix_hash(request_uid=number, tokens=own, prefix_len=prefix, key=key)
            assert result == chain_hash(own[:prefix], identity_key=key)


def test_a_shared_prefix_is_hashed_once(hashed: Counted):
    hasher, shared = PrefixHasher(), tokens(500)
    hasher.prefix_hash(request_uid=1, tokens=shared, prefix_len=500)
    assert hashed.since() == 500
    longer = np.concatenate([shared, tokens(70)])
    assert hasher.prefix_hash(request_uid=2, tokens=longer, prefix_len=500) == chain_hash(shared)
    assert hashed.since() == 0
    hasher.prefix_hash(request_uid=3, tokens=longer, prefix_len=570)
    assert hashed.since() == 70


@pytest.mark.parametrize("position", [0, 31, 32, 250, 499])
def test_one_other_token_is_another_prefix(position: int):
    hasher, one = PrefixHasher(), tokens(500)
    other = one.copy()
    other[position] += 1
    for uid, own in enumerate((one, other, one), start=1):
        result = hasher.prefix_hash(request_uid=uid, tokens=own, prefix_len=500)
        assert result == chain_hash(own)


def test_the_same_tokens_under_another_key_are_another_prefix():
    hasher, own = PrefixHasher(), tokens(100)
    for uid, key in enumerate((0, 7, 0, -7), start=1):
        result = hasher.prefix_hash(request_uid=uid, tokens=own, prefix_len=100, key=key)
        assert result == chain_hash(own, identity_key=key)


def test_what_is_kept_is_a_copy():
    known, own = KnownPrefixes(), tokens(64)
    before = own.copy()
    known.add(own, 0, 5)
    own[40] += 1
    assert known.longest(own, 0) == (0, None)
    assert known.longest(before, 0) == (64, 5)


def test_the_tokens_kept_are_bounded_and_the_least_used_go_first():
    known = KnownPrefixes(max_tokens=1000)
    prefixes = [tokens(100) for _ in range(10)]
    for number, prefix in enumerate(prefixes):
        known.add(prefix, 0, number)
    assert known.num_tokens == 1000
    assert known.longest(prefixes[0], 0) == (100, 0)
    known.add(tokens(100), 0, 10)
    assert known.num_tokens == 1000
    assert known.longest(prefixes[0], 0) == (100, 0), "used after the second"
    assert known.longest(prefixes[1], 0) == (0, None)
    known.add(tokens(1001), 0, 11)
    assert known.num_tokens == 1000, "larger than all there is room for"


def test_prefixes_that_begin_alike_take_a_bounded_place():
    known, beginning = KnownPrefixes(), tokens(32)
    prefixes = [np.concatenate([beginning, tokens(10 + number)]) for number in range(20)]
    for number, prefix in enumerate(prefixes):
        known.add(prefix, 0, number)
    kept = [number for number, prefix in enumerate(prefixes) if known.longest(prefix, 0)[0]]
    assert 19 in kept
    assert len(kept) == 4
    assert known.num_tokens == sum(len(prefixes[number]) for number in kept)
