"""The published check values, for every place where the hashes are computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcanary_plugin.kernels import (
    RealKvHashMode,
    RealKvSource,
    chain_hash,
    launch_canary_seal_kernel,
    splitmix64,
    splitmix64_mix3,
)
from kvcanary_plugin.kernels.hashes import (
    splitmix64_mix3_tensor,
    splitmix64_tensor,
    to_signed,
)
from tests.kernels import oracle, scenes

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors.json").read_text())
SPLITMIX = [(int(x, 16), int(y, 16)) for x, y in VECTORS["splitmix64"]]
MIX3 = [(int(a, 16), b, c, int(y, 16)) for a, b, c, y in VECTORS["mix3"]]
CHAIN_TOKENS = [link["token"] for link in VECTORS["chain"]]
CHAIN_HASHES = [to_signed(int(link["prev_hash"], 16)) for link in VECTORS["chain"]]
CHAIN_NEXT = to_signed(int(VECTORS["chain_next"], 16))
FOLDS = [
    ([bytes.fromhex(text) for text in case["sources_hex"]], to_signed(int(case["hash"], 16)))
    for case in VECTORS["fold"]
]


@pytest.mark.parametrize(("x", "expected"), SPLITMIX)
def test_splitmix64(x: int, expected: int) -> None:
    assert splitmix64(x) == expected
    assert oracle.splitmix64(x) == expected
    tensor = splitmix64_tensor(torch.tensor([to_signed(x)]))
    assert tensor.tolist() == [to_signed(expected)]


@pytest.mark.parametrize(("a", "b", "c", "expected"), MIX3)
def test_mix3(a: int, b: int, c: int, expected: int) -> None:
    assert splitmix64_mix3(a, b, c) == expected
    assert oracle.mix3(a, b, c) == expected
    tensors = (torch.tensor([to_signed(value)]) for value in (a, b, c))
    assert splitmix64_mix3_tensor(*tensors).tolist() == [to_signed(expected)]


@pytest.mark.parametrize(("a", "b", "c", "expected"), MIX3)
def test_mix3_as_one_link_of_the_host_chain(
    implementation: str, a: int, b: int, c: int, expected: int
) -> None:
    link = chain_hash(torch.tensor([b]), start_position=c, previous=a)
    assert link == to_signed(expected)


def test_chain_of_a_written_sequence(implementation: str) -> None:
    context = scenes.make_context()
    slots = [5, 3, 9, 1, 30]
    scenes.write_sequence(context, tokens=CHAIN_TOKENS, slots=slots)
    records = context.canary_buf.view(torch.int64)[slots]
    assert records[:, 0].tolist() == CHAIN_TOKENS
    assert records[:, 1].tolist() == list(range(len(slots)))
    assert records[:, 2].tolist() == CHAIN_HASHES


def test_chain_hash_behind_the_sequence(implementation: str) -> None:
    assert chain_hash(torch.tensor(CHAIN_TOKENS)) == CHAIN_NEXT


@pytest.mark.parametrize(("strips", "expected"), FOLDS)
def test_fold(implementation: str, strips: list[bytes], expected: int) -> None:
    assert oracle.signed(oracle.fold(strips)) == expected
    # Slot 1 of three holds the bytes; its neighbours hold others.
    sources = tuple(
        RealKvSource(
            tensor=torch.tensor([[7] * len(strip), list(strip), [9] * len(strip)]).byte(),
            page_size=1,
            num_bytes_per_token=len(strip),
            read_bytes=len(strip),
        )
        for strip in strips
    )
    context = scenes.make_context(num_slots=3, sources=sources, mode=RealKvHashMode.ALL)
    launch_canary_seal_kernel(
        context=context,
        plan=scenes.make_write_plan(lengths=[1]),
        out_cache_loc=torch.tensor([1]),
        step=1,
    )
    assert context.canary_buf.view(torch.int64)[1, 3].item() == expected
