"""Requests whose prompts another server has computed, in the engine's own prebuilt batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary_plugin.carried import ExternalSlots
from kvcanary_plugin.hooks.sglang import attach
from kvcanary_plugin.kernels import SlotState
from tests.monitor.world import found
from tests.sglang.engine import WINDOW, Engine, Request
from tests.sglang.test_host_tier import Tier

PROMPT = [5, 6, 7, 8, 9, 10]


@dataclass(eq=False)
class SentRequest(Request):
    """A request that arrives with its prompt computed and one token sampled."""

    prefix_len: int = 0
    retracted_stain: bool = False
    is_retracted: bool = False
    already_computed: int = 0
    cached_tokens: int = 0
    cached_tokens_device: int = 0

    @property
    def origin_input_ids(self) -> list[int]:
        return self.tokens[:-1]

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[-1:]

    @property
    def extend_len(self) -> int:
        return len(self.tokens) - 1 - self.prefix_len


@pytest.fixture
def engine(sglang_session: None) -> Iterator[Engine]:
    engine = Engine(disaggregation_mode="decode")
    yield engine
    engine.close()


def received(
    engine: Engine, *requests: SentRequest, monkeypatch: pytest.MonkeyPatch, arrives: bool = True
) -> Any:
    """The batch in which ``requests`` become ready to run, their bytes in place."""
    from sglang.srt.disaggregation import decode_schedule_batch_mixin as mixin

    for request in requests:
        engine.give_slots(request, len(request.tokens) - 1 - len(request.slots))
        if arrives:
            engine.fill(torch.tensor(request.slots[request.prefix_len :], dtype=torch.int64))
    batch = SimpleNamespace(
        reqs=list(requests),
        req_to_token_pool=engine.req_to_token_pool,
        token_to_kv_pool_allocator=engine.allocator,
        device="cpu",
        return_logprob=False,
        model_config=SimpleNamespace(vocab_size=100),
    )
    monkeypatch.setattr(mixin.SamplingBatchInfo, "from_schedule_batch", lambda *_: None)
    mixin.ScheduleBatchDisaggregationDecodeMixin.prepare_for_prebuilt(batch)
    return batch


def decode(engine: Engine, *requests: SentRequest) -> list[Any]:
    """The forward that computes the K/V of each request's last token, then the next one."""
    for request in requests:
        engine.give_slots(request, len(request.tokens) - len(request.slots))
    seen = engine.forward(engine.decode_batch(*requests))
    return seen + engine.decode(*requests, tokens=[3] * len(requests))


def external(engine: Engine) -> int:
    slots = ExternalSlots(engine.monitor.guards[0])
    slots.refresh()
    return slots.count


def test_what_was_sent_is_adopted_and_decodes_in_silence(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    a = SentRequest("a", 1, [*PROMPT, 1])
    b = SentRequest("b", 2, [20, 21, 22, 2], lora_id="x")
    attach.before_prebuilt(received(engine, a, b, monkeypatch=monkeypatch))
    assert external(engine) == 6 + 3
    assert decode(engine, a, b) == []


def test_a_prefix_of_this_servers_own_cache_keeps_its_records(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    a = SentRequest("a", 1, [*PROMPT, 1])
    attach.before_prebuilt(received(engine, a, monkeypatch=monkeypatch))
    assert decode(engine, a) == []
    b = SentRequest("b", 2, [*PROMPT, 30, 31, 2], prefix_len=len(PROMPT))
    engine.share(b, a.slots[: len(PROMPT)])
    attach.before_prebuilt(received(engine, b, monkeypatch=monkeypatch))
    assert external(engine) == len(PROMPT) + 2
    assert decode(engine, a, b) == []


def test_the_next_request_in_the_same_row_is_silent(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    a = SentRequest("a", 1, [*PROMPT, 1])
    attach.before_prebuilt(received(engine, a, monkeypatch=monkeypatch))
    assert decode(engine, a) == []
    b = SentRequest("b", 1, [*reversed(PROMPT), 44])
    attach.before_prebuilt(received(engine, b, monkeypatch=monkeypatch))
    assert decode(engine, b) == []


def test_a_prefix_that_has_just_been_loaded_from_the_host_is_continued(
    sglang_session: None, monkeypatch: pytest.MonkeyPatch
):
    """The decode server was idle: no forward between the load and the request that uses it."""
    engine = Engine(disaggregation_mode="decode", enable_hierarchical_cache=True)
    tier = Tier(engine, monkeypatch)
    a = SentRequest("a", 1, [*PROMPT, 1])
    attach.before_prebuilt(received(engine, a, monkeypatch=monkeypatch))
    assert decode(engine, a) == []
    host = tier.back_up(a.slots[: len(PROMPT)])
    engine.allocator.free(torch.tensor(a.slots, dtype=torch.int64))
    assert engine.prefill(Request("c", 3, list(range(40, 60)))) == []

    loaded = engine.allocator.alloc(len(PROMPT)).tolist()
    tier.load(host, loaded)
    b = SentRequest("b", 2, [*PROMPT, 30, 31, 2], prefix_len=len(PROMPT))
    engine.share(b, loaded)
    attach.before_prebuilt(received(engine, b, monkeypatch=monkeypatch))
    assert decode(engine, b) == []
    engine.close()


def test_a_row_whose_prompt_is_all_in_the_cache_forgets_its_last_tenant(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    a = SentRequest("a", 1, [*PROMPT, 1])
    attach.before_prebuilt(received(engine, a, monkeypatch=monkeypatch))
    assert decode(engine, a) == []
    b = SentRequest("b", 2, [20, 21, 22, 2])
    attach.before_prebuilt(received(engine, b, monkeypatch=monkeypatch))
    assert decode(engine, a, b) == []
    c = SentRequest("c", 2, [*PROMPT, 7], prefix_len=len(PROMPT))
    engine.share(c, a.slots[: len(PROMPT)])
    attach.before_prebuilt(received(engine, c, monkeypatch=monkeypatch))
    assert decode(engine, c) == []


def test_another_first_token_than_the_one_that_was_sent_is_found(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    a = SentRequest("a", 1, [*PROMPT, 1])
    attach.before_prebuilt(received(engine, a, monkeypatch=monkeypatch))
    engine.give_slots(a, 1)
    a.tokens[-1] = 2
    assert found(engine.forward(engine.decode_batch(a))) == {("write_input", a.slots[-1])}


def test_slots_that_nobody_adopted_are_found(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    a = SentRequest("a", 1, [*PROMPT, 1])
    received(engine, a, monkeypatch=monkeypatch)
    assert ("unwritten", a.slots[0]) in found(decode(engine, a))


def test_bytes_that_change_behind_the_adoption_are_found(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    a = SentRequest("a", 1, [*PROMPT, 1])
    attach.before_prebuilt(received(engine, a, monkeypatch=monkeypatch))
    engine.damage(a.slots[2])
    assert ("real_kv", a.slots[2]) in found(decode(engine, a))


def test_a_transfer_into_slots_of_a_running_request_is_found(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    a = SentRequest("a", 1, [*PROMPT, 1])
    attach.before_prebuilt(received(engine, a, monkeypatch=monkeypatch))
    decode(engine, a)
    b = SentRequest("b", 2, [20, 21, 22, 2], slots=list(a.slots[:3]))
    engine.table[2, :3] = torch.tensor(a.slots[:3], dtype=torch.int32)
    attach.before_prebuilt(received(engine, b, monkeypatch=monkeypatch))
    assert ("write_owned", a.slots[0]) in found(engine.violations())


def test_a_finished_prefix_is_folded_into_the_tree_in_silence(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    a = SentRequest("a", 1, [*PROMPT, 1])
    attach.before_prebuilt(received(engine, a, monkeypatch=monkeypatch))
    b = SentRequest("b", 2, [*PROMPT, 1])
    attach.before_prebuilt(received(engine, b, monkeypatch=monkeypatch))
    # The tree has a's slots for the same prompt: b gives its own back and reads those.
    engine.allocator.free(torch.tensor(b.slots, dtype=torch.int64))
    engine.share(b, a.slots[: len(PROMPT)])
    assert decode(engine, a, b) == []
    freed = engine.monitor.guards[0].slots.state & 0xFF
    assert int(SlotState.FREE) in freed.tolist()


# --- sliding windows ------------------------------------------------------------------------------


@pytest.fixture
def windowed(sglang_session: None) -> Iterator[Engine]:
    engine = Engine(swa=True, disaggregation_mode="decode")
    yield engine
    engine.close()


LONG = list(range(20, 20 + 2 * WINDOW))


def tail_received(
    engine: Engine, request: SentRequest, *, tail: int, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """As ``received``, where the window's pool has slots for the last ``tail`` tokens only."""
    count = len(request.tokens) - 1 - len(request.slots)
    full = engine.allocator.full_attn_allocator.alloc(count)
    swa = engine.allocator.swa_attn_allocator.alloc(tail)
    engine.pool.full_to_swa_index_mapping[full] = 0
    engine.allocator.set_full_to_swa_mapping(full[-tail:], swa)
    engine.share(request, [*request.slots, *full.tolist()])
    return received(engine, request, monkeypatch=monkeypatch)


@pytest.mark.parametrize("tail", [2 * WINDOW, WINDOW + 1, WINDOW])
def test_the_end_of_a_sequence_is_adopted_for_the_window(
    windowed: Engine, monkeypatch: pytest.MonkeyPatch, tail: int
):
    a = SentRequest("a", 1, [*LONG, 1])
    attach.before_prebuilt(tail_received(windowed, a, tail=tail, monkeypatch=monkeypatch))
    assert decode(windowed, a) == []
    assert windowed.decode(a, tokens=[4]) == []


@pytest.mark.parametrize("tail", [4, WINDOW, 3 * WINDOW])
def test_a_window_goes_on_from_a_prefix_or_leaves_a_gap(
    windowed: Engine, monkeypatch: pytest.MonkeyPatch, tail: int
):
    a = SentRequest("a", 1, [*LONG, 1])
    attach.before_prebuilt(received(windowed, a, monkeypatch=monkeypatch))
    assert decode(windowed, a) == []
    more = list(range(60, 60 + max(tail, 3 * WINDOW if tail == WINDOW else tail)))
    b = SentRequest("b", 2, [*LONG, *more, 2], prefix_len=len(LONG))
    windowed.share(b, a.slots[: len(LONG)])
    attach.before_prebuilt(tail_received(windowed, b, tail=tail, monkeypatch=monkeypatch))
    assert decode(windowed, b) == []
    assert windowed.decode(a, b, tokens=[4, 4]) == []


def test_bytes_of_the_window_that_change_are_found(
    windowed: Engine, monkeypatch: pytest.MonkeyPatch
):
    a = SentRequest("a", 1, [*LONG, 1])
    attach.before_prebuilt(tail_received(windowed, a, tail=WINDOW, monkeypatch=monkeypatch))
    last = int(windowed.pool.full_to_swa_index_mapping[a.slots[-1]])
    windowed.parts[1].k_buffer[0][last] += 1.0
    seen = decode(windowed, a)
    assert {(v.group, v.slot, *v.checks) for v in seen} == {("swa", last, "real_kv")}


@pytest.mark.parametrize("prompts", [[], [[1, 2]]])
def test_a_batch_without_anything_to_adopt_changes_nothing(
    engine: Engine, prompts: Sequence[list[int]], monkeypatch: pytest.MonkeyPatch
):
    requests = [SentRequest("a", 1, [*p, 3], prefix_len=len(p)) for p in prompts]
    for request in requests:
        engine.share(request, [0] * request.prefix_len)
    attach.before_prebuilt(received(engine, *requests, monkeypatch=monkeypatch, arrives=False))
    assert external(engine) == 0
