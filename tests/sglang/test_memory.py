"""Sleep, weight updates and flushes, with the scheduler's own weight updater."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvcanary_plugin.hooks.sglang import attach, memory
from tests.monitor.world import found
from tests.sglang.engine import Engine, Request

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def engine(sglang_session: None) -> Iterator[Engine]:
    engine = Engine()
    setattr(engine.runner, attach._ATTRIBUTE, engine.session)
    yield engine
    engine.close()


class Updater:
    """SGLang's weight updater over an engine, with the hooks around it."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt.managers.scheduler_components import weight_updater

        cls = weight_updater.SchedulerWeightUpdaterManager
        self.engine = engine
        self.scrubbed_while_pausing: list[bool] = []
        updater = object.__new__(cls)
        updater.tp_worker = SimpleNamespace(model_runner=engine.runner)
        updater.memory_saver_adapter = SimpleNamespace(pause=self.pause)
        updater.flush_cache = self.flush
        updater.is_fully_idle = lambda **_: True
        updater.scheduler = None
        updater.offload_tags = set()
        self.updater = updater
        self.release = cls.release_memory_occupation
        self.flush_after_update = cls.flush_cache_after_weight_update
        monkeypatch.setattr(
            weight_updater.torch, "get_device_module", lambda: SimpleNamespace(synchronize=int)
        )

    def pause(self, _tag: str) -> None:
        """The memory goes away: whoever looks at it now finds anything."""
        gate = self.engine.monitor._gate

        def look() -> None:
            with gate.idle_turn() as may:
                self.scrubbed_while_pausing.append(may)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        for part in self.engine.parts:
            for buffer in (*part.k_buffer, *part.v_buffer):
                buffer.fill_(7.0)

    def flush(self, **_: Any) -> bool:
        self.engine.allocator.clear()
        return True

    def sleep(self) -> None:
        attach.around_release_memory(self.release, self.updater, SimpleNamespace(tags=["kv_cache"]))

    def update_weights(self, *, flush: bool) -> None:
        request = SimpleNamespace(flush_cache=flush, torch_empty_cache=False)
        attach.around_flush_after_update(
            self.flush_after_update, self.updater, request, *self._outcome()
        )

    def _outcome(self) -> tuple[Any, ...]:
        # Later versions hand in what the update said.
        return (True, "") if self.flush_after_update.__code__.co_argcount > 2 else ()


@pytest.fixture
def updater(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Updater:
    return Updater(engine, monkeypatch)


def test_a_server_that_sleeps_and_wakes_is_silent(engine: Engine, updater: Updater):
    request = Request("a", 1, list(PROMPT))
    assert engine.prefill(request) == []
    updater.sleep()
    assert updater.scrubbed_while_pausing == [False]
    again = Request("b", 1, list(PROMPT))
    assert engine.prefill(again) == []
    assert engine.decode(again, tokens=[3]) == []


def test_no_byte_is_read_while_the_server_sleeps(engine: Engine, updater: Updater):
    request = Request("a", 1, list(PROMPT))
    engine.prefill(request)
    updater.sleep()
    guard = engine.monitor.guards[0]
    assert set((guard.slots.state & 0xFF).tolist()) == {0}


@pytest.mark.parametrize(("tags", "forgets"), [(None, True), ([], True), (["weights"], False)])
def test_only_kv_memory_makes_the_canary_forget(
    engine: Engine, tags: list[str] | None, forgets: bool
):
    engine.prefill(Request("a", 1, list(PROMPT)))
    assert memory.around_release_memory(engine.monitor, lambda: "slept", tags) == "slept"
    states = set((engine.monitor.guards[0].slots.state & 0xFF).tolist())
    assert (states == {0}) is forgets


def test_memory_that_is_lost_under_a_running_request_is_found(engine: Engine, updater: Updater):
    request = Request("a", 1, list(PROMPT))
    engine.prefill(request)
    updater.pause("kv_cache")
    checks = {check for check, _ in found(engine.decode(request, tokens=[3]))}
    assert checks == {"real_kv"}


def test_what_is_computed_behind_a_weight_update_is_silent(engine: Engine, updater: Updater):
    request = Request("a", 1, list(PROMPT))
    engine.prefill(request)
    updater.update_weights(flush=True)
    again = Request("b", 1, list(PROMPT))
    assert engine.prefill(again) == []
    sharer = Request("c", 2, [*PROMPT, 20])
    engine.share(sharer, again.slots)
    assert engine.prefill(sharer, prefix=len(PROMPT)) == []


def test_a_prefix_of_the_old_weights_that_outlives_the_flush_is_found(
    engine: Engine, updater: Updater
):
    request = Request("a", 1, list(PROMPT))
    engine.prefill(request)
    updater.update_weights(flush=True)
    sharer = Request("c", 2, [*PROMPT, 20])
    engine.share(sharer, request.slots)
    engine.allocator.free_pages = engine.allocator.free_pages[len(PROMPT) :]
    checks = {check for check, _ in found(engine.prefill(sharer, prefix=len(PROMPT)))}
    assert {"prefix_identity", "freed_read"} <= checks


def test_without_a_flush_old_prefixes_go_on_being_shared(engine: Engine, updater: Updater):
    request = Request("a", 1, list(PROMPT))
    engine.prefill(request)
    updater.update_weights(flush=False)
    sharer = Request("c", 2, [*PROMPT, 20])
    engine.share(sharer, request.slots)
    assert engine.prefill(sharer, prefix=len(PROMPT)) == []
