"""What fails inside of the hook in mode log: the canary goes blind, and the engine goes on."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary_plugin.hooks.sglang import attach, copies, pools
from tests.sglang.engine import Engine, Request


@pytest.fixture
def engine(sglang_session: None) -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def forward_of(engine: Engine, batch: Any) -> str:
    """Runs ``batch``, whatever becomes of the canary; why it is blind now."""
    ran: list[bool] = []
    engine.session.forward(lambda: ran.append(True), batch)
    assert ran == [True]
    return str(engine.monitor.blind_because)


def test_requests_of_a_batch_that_cannot_be_made_out(engine: Engine):
    request = Request("a", 1, [5, 6, 7])
    engine.give_slots(request, 3)
    batch = engine.extend_batch(request)
    attach.after_new_batch(batch, type(batch), SimpleNamespace(reqs=None))
    assert "UnsupportedForward" in forward_of(engine, batch)
    assert engine.violations() == []


def test_requests_that_cannot_be_ended(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    request = Request("a", 1, [5, 6, 7])
    engine.prefill(request)

    def fails() -> tuple[int, ...]:
        raise OSError("no such thing")

    monkeypatch.setattr(engine.session._canary, "requests_to_abort", fails)
    engine.give_slots(request, 1)
    request.tokens.append(8)
    assert "no such thing" in forward_of(engine, engine.decode_batch(request))


def test_records_that_cannot_leave_with_their_bytes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    request = Request("a", 1, [5, 6, 7])
    engine.prefill(request)
    slots = torch.tensor(request.slots)
    before = [buffer[slots].clone() for buffer in engine.pool.k_buffer]

    def fails(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room for records")

    monkeypatch.setattr(copies, "_own", fails)
    copy = engine.allocator.get_cpu_copy(slots)
    assert "no room for records" in str(engine.monitor.blind_because)
    engine.fill(slots)
    engine.allocator.load_cpu_copy(copy, slots)
    for buffer, bytes_before in zip(engine.pool.k_buffer, before, strict=True):
        assert torch.equal(buffer[slots], bytes_before)


def test_what_a_blind_canary_is_told_is_forgotten(engine: Engine):
    engine.allocator.alloc(3)
    with engine.monitor.guard_errors("hook"):
        raise RuntimeError("boom")
    engine.allocator.free(engine.allocator.alloc(2))
    engine.allocator.clear()
    assert engine.monitor.guards[0].events.take() == []


def test_a_pool_that_is_built_in_another_way_is_unsupported(engine: Engine):
    del engine.pool.v_buffer
    held = pools.guarded_pools(engine.runner)
    assert held.groups == ()
    assert "not as its adapter knows it" in held.unsupported[0].reason
