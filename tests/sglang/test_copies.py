"""K/V that SGLang's real pools copy themselves: moves, and retraction to the host and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcanary_plugin.kernels import SlotState
from tests.monitor.world import found
from tests.sglang.engine import Engine, Request

TOKENS = list(range(100, 124))


def slots(*which: int) -> torch.Tensor:
    return torch.tensor(which, dtype=torch.int64)


def moved(engine: Engine, request: Request, positions: list[int]) -> None:
    """The engine copies the slots of ``positions`` to fresh ones and frees the old ones."""
    old = slots(*(request.slots[position] for position in positions))
    new = engine.allocator.alloc(len(positions))
    engine.pool.move_kv_cache(new, old)
    for position, slot in zip(positions, new.tolist(), strict=True):
        request.slots[position] = slot
        engine.table[request.row, position] = slot
    engine.allocator.free(old)


@pytest.fixture(params=["mha", "swa"])
def engine(request: Any, sglang_session: None) -> Any:
    engine = Engine(swa=request.param == "swa")
    yield engine
    engine.close()


def test_slots_that_the_engine_moves_keep_their_records(engine: Engine):
    request = Request("a", 1, list(TOKENS))
    assert engine.prefill(request) == []
    moved(engine, request, [3, 4, len(TOKENS) - 1])
    assert engine.decode(request, tokens=[7]) == []
    assert engine.decode(request, tokens=[8]) == []


def test_a_move_that_copies_nothing_is_found(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    request = Request("a", 1, list(TOKENS))
    engine.prefill(request)
    for part in engine.parts:
        monkeypatch.setattr(type(part), "_move_kv_cache_impl", lambda *_: None)
    last = len(TOKENS) - 1
    moved(engine, request, [last])
    assert ("real_kv", request.slots[last]) in found(engine.decode(request, tokens=[7]))


def test_a_page_table_that_does_not_follow_a_move_is_found(engine: Engine):
    request = Request("a", 1, list(TOKENS))
    engine.prefill(request)
    before = request.slots[5]
    moved(engine, request, [5])
    engine.table[request.row, 5] = before
    assert ("freed_read", before) in found(engine.decode(request, tokens=[7]))


def retracted(engine: Engine, request: Request) -> Any:
    """The request goes to the host, as ``Req.offload_kv_cache`` does it."""
    copy = engine.allocator.get_cpu_copy(engine.table[request.row, : len(request.slots)])
    engine.allocator.free(slots(*request.slots))
    request.slots = []
    return copy


def resumed(engine: Engine, request: Request, copy: Any, row: int) -> None:
    request.row = row
    engine.give_slots(request, len(request.tokens))
    engine.allocator.load_cpu_copy(copy, engine.table[row, : len(request.tokens)])


def others_take_its_place(engine: Engine) -> None:
    other = Request("b", 2, list(range(500, 540)))
    assert engine.prefill(other) == []


def test_a_retracted_request_comes_back_with_its_records(engine: Engine):
    request = Request("a", 1, list(TOKENS))
    engine.prefill(request)
    copy = retracted(engine, request)
    others_take_its_place(engine)
    resumed(engine, request, copy, row=3)
    assert engine.violations() == []
    guard = engine.monitor.guards[0]
    states = guard.slots.state[slots(*request.slots)] & 0xFF
    assert set(states.tolist()) == {int(SlotState.EXTERNAL)}
    assert engine.decode(request, tokens=[7]) == []
    assert engine.decode(request, tokens=[8]) == []


def test_bytes_that_changed_on_the_host_are_found_when_they_come_back(engine: Engine):
    request = Request("a", 1, list(TOKENS))
    engine.prefill(request)
    copy = retracted(engine, request)
    layers = copy["full"] if isinstance(copy, dict) else copy
    layers[0][0][0][4] += 1.0
    resumed(engine, request, copy, row=3)
    assert found(engine.violations()) == {("real_kv", request.slots[4])}


def test_a_load_into_the_wrong_order_of_slots_is_found(engine: Engine):
    request = Request("a", 1, list(TOKENS))
    engine.prefill(request)
    copy = retracted(engine, request)
    resumed(engine, request, copy, row=3)
    a, b = request.slots[2], request.slots[3]
    engine.table[3, 2], engine.table[3, 3] = b, a
    seen = found(engine.decode(request, tokens=[7]))
    assert {("position", a), ("position", b)} <= seen


def test_a_copy_that_nobody_saw_leave_blinds_the_canary_instead_of_alarming(engine: Engine):
    request = Request("a", 1, list(TOKENS))
    engine.prefill(request)
    plain = type(engine.pool).get_cpu_copy(engine.pool, slots(*request.slots))
    if isinstance(plain, dict):
        plain = dict(plain)
    engine.allocator.load_cpu_copy(plain, slots(*request.slots))
    assert "without records" in str(engine.monitor.blind_because)
    assert engine.violations() == []


def test_a_pool_that_cannot_be_copied_says_so_as_before(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    def no_copy(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("not here")

    copies = engine.session._copies
    assert copies is not None
    with pytest.raises(NotImplementedError, match="not here"):
        copies.around_get(no_copy, slots(1))
    assert engine.monitor.blind_because is None
