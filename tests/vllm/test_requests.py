"""Who stands in a batch: uids, identity keys, who came, who moved."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary_plugin.hooks.vllm import versions
from kvcanary_plugin.hooks.vllm.requests import CACHE_SALT, RequestBook
from kvcanary_plugin.violations import RequestNames


def step(*new: Any, finished: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(finished_req_ids=set(finished), scheduled_new_reqs=list(new))


def admitted(
    name: str,
    *,
    lora: str | None = None,
    path: str = "/x",
    salt: str | None = None,
    tokens: Any = None,
):
    request = SimpleNamespace(
        req_id=name,
        lora_request=SimpleNamespace(lora_name=lora, lora_path=path) if lora else None,
        prefill_token_ids=tokens,
    )
    if salt is not None:
        setattr(request, CACHE_SALT, salt)
    return request


@pytest.fixture
def names() -> RequestNames:
    return RequestNames()


@pytest.fixture
def book(names: RequestNames) -> RequestBook:
    return RequestBook(names=names, device=torch.device("cpu"), max_requests=8, keeps_tokens=True)


def uids(book: RequestBook, *request_ids: str) -> list[int]:
    return book.batch_of(list(request_ids))[0].uids.tolist()


def test_a_uid_stays_with_its_request_and_leads_to_its_id(book, names):
    book.scheduled(step(admitted("a"), admitted("b")))
    first = uids(book, "a", "b")
    assert len(set(first)) == 2
    assert uids(book, "b", "a") == first[::-1]
    assert [names.get(uid) for uid in first] == ["a", "b"]


def test_an_unchanged_batch_is_reused(book):
    book.scheduled(step(admitted("a"), admitted("b")))
    batch, _ = book.batch_of(["a", "b"])
    book.scheduled(step())
    again, change = book.batch_of(["a", "b"])
    assert again is batch
    assert change.entered == ()
    assert change.moved is None


def test_an_id_used_again_is_another_request_even_in_the_same_row(book):
    book.scheduled(step(admitted("a")))
    (before,) = uids(book, "a")
    book.scheduled(step(admitted("a"), finished=("a",)))
    batch, change = book.batch_of(["a"])
    assert batch.uids.tolist() != [before]
    assert change.entered == [0]


def test_a_request_that_comes_back_from_preemption_keeps_its_uid_and_counts_as_entered(book):
    book.scheduled(step(admitted("a"), admitted("b")))
    a, _ = uids(book, "a", "b")
    book.scheduled(step())
    book.batch_of(["b"])
    book.scheduled(step())
    batch, change = book.batch_of(["b", "a"])
    assert batch.uids.tolist()[1] == a
    assert change.entered == [1]


def test_those_who_move_to_another_row_are_named(book):
    book.scheduled(step(admitted("a"), admitted("b"), admitted("c")))
    book.batch_of(["a", "b", "c"])
    book.scheduled(step(finished=("a",)))
    _, change = book.batch_of(["c", "b"])
    assert change.moved is not None
    old_rows, new_rows = change.moved
    assert (old_rows.tolist(), new_rows.tolist()) == ([2], [0])
    assert change.entered == []


def test_a_request_from_before_the_canary_has_no_uid(book):
    batch, _ = book.batch_of(["stranger"])
    assert batch.uids.tolist() == [-1]
    assert batch.requests == [None]


def test_adapters_and_salts_are_different_keys_and_none_is_no_tensor(book):
    book.scheduled(step(admitted("plain")))
    assert book.batch_of(["plain"])[0].keys is None
    book.scheduled(
        step(
            admitted("x", lora="x"),
            admitted("y", salt="x"),
            admitted("z", lora="x"),
            admitted("another", lora="x", path="/y"),
        )
    )
    batch, _ = book.batch_of(["plain", "x", "y", "z", "another"])
    assert batch.keys is not None
    plain, lora, salt, same_lora, another_adapter = batch.keys.tolist()
    assert plain == 0
    assert lora == same_lora
    assert len({plain, lora, salt, another_adapter}) == 4


def test_a_finished_request_is_forgotten(book):
    book.scheduled(step(admitted("a")))
    book.scheduled(step(finished=("a",)))
    assert uids(book, "a") == [-1]


def test_rows_count_from_zero(book):
    book.scheduled(step(admitted("a"), admitted("b")))
    assert book.batch_of(["a", "b"])[0].rows.tolist() == [0, 1]


def test_every_rank_of_an_engine_has_a_number_of_its_own(monkeypatch):
    distributed = pytest.importorskip("vllm.distributed")
    numbers = []
    for dp, pp, tp in itertools.product(range(2), range(3), range(2)):
        for name, rank, size in (("get_pp_group", pp, 3), ("get_tp_group", tp, 2)):
            group = SimpleNamespace(rank_in_group=rank, world_size=size)
            monkeypatch.setattr(distributed, name, lambda group=group: group)
        labels = versions.rank_labels(SimpleNamespace(data_parallel_rank=dp))
        assert (labels.dp_rank, labels.pp_rank, labels.tp_rank) == (dp, pp, tp)
        numbers.append(labels.process_index)
    assert numbers == list(range(12))


def test_lists_of_tokens_are_converted_when_the_forward_is_launched(book):
    tokens = [5, 6, 7]
    book.scheduled(step(admitted("a", tokens=tokens)))
    batch, _ = book.batch_of(["a"])
    request = batch.requests[0]
    tokens.append(8)  # the scheduler goes on with its own list
    book.forward_is_launched()
    tokens[0] = 99
    assert request.tokens.num_tokens == 3
    assert request.tokens.marked().tolist() == [5, 6, 7]
