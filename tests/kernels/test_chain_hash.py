"""The host chain hash is the chain that the write launch stores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcanary_plugin.kernels import chain_hash, chain_hash_reference
from tests.kernels import oracle, scenes

TOKENS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)
KEYS = st.integers(-(2**63), 2**64 - 1)


def by_oracle(tokens: list[int], key: int, start: int, previous: int | None) -> int:
    running = oracle.splitmix64(oracle.ANCHOR ^ key & oracle.MASK) if previous is None else previous
    for position, token in enumerate(tokens, start=start):
        running = oracle.mix3(running, token, position)
    return oracle.signed(running)


@given(
    tokens=TOKENS,
    key=KEYS,
    start=st.integers(0, 2**40),
    previous=st.none() | KEYS,
)
def test_equals_oracle(tokens: list[int], key: int, start: int, previous: int | None) -> None:
    expected = by_oracle(tokens, key, start, previous)
    for function in (chain_hash, chain_hash_reference):
        result = function(
            torch.tensor(tokens, dtype=torch.int64),
            identity_key=key,
            start_position=start,
            previous=previous,
        )
        assert result == expected


@given(tokens=TOKENS, cut=st.integers(0, 40))
def test_goes_on_where_it_stopped(tokens: list[int], cut: int) -> None:
    whole = np.array(tokens, dtype=np.int64)
    first = chain_hash(whole[:cut], identity_key=3)
    assert chain_hash(
        whole[cut:], start_position=min(cut, len(tokens)), previous=first
    ) == chain_hash(whole, identity_key=3)


def test_is_what_the_next_record_stores(implementation: str) -> None:
    context = scenes.make_context()
    scenes.write_sequence(context, tokens=[5, 6, 7], slots=[3, 4, 9], key=-8)
    stored = int(context.canary_buf.view(torch.int64)[9, 2])
    assert chain_hash(np.array([5, 6]), identity_key=-8) == stored


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_takes_numpy_and_torch_read_only_too(implementation: str, dtype: type) -> None:
    array = np.array([5, 6, 7], dtype=dtype)
    expected = chain_hash(torch.from_numpy(array))
    array.flags.writeable = False
    assert chain_hash(array) == expected


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([1.0]), "tokens must be int32 or int64, got float64"),
        (torch.tensor([1.0]), "tokens must be int32 or int64, got torch.float32"),
        (torch.zeros(4, 4, dtype=torch.int64)[:, 0], "tokens must be contiguous"),
        (torch.zeros(2, 2, dtype=torch.int64), "tokens must have one dimension"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "tokens must be on .* cpu, got meta"),
    ],
)
def test_refuses_other_tokens(implementation: str, tokens: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain_hash(tokens)  # type: ignore[arg-type]
