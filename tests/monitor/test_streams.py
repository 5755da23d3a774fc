"""Which stream waits for which, and whose device a thread works on: streams that keep a diary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary_plugin import monitor as monitor_module
from kvcanary_plugin.gate import EngineGate
from kvcanary_plugin.kernels import SlotEvent, side_stream
from kvcanary_plugin.kernels.consts import EventKind
from kvcanary_plugin.lifecycle import SlotEvents
from tests.monitor.world import Part, World

SLOTS = [5, 6, 9]
GLOBAL, THREAD_LOCAL = 0, 1


class Stream:
    def __init__(self, name: str, cuda: Cuda, device: int = 0) -> None:
        self.name, self.cuda, self.device = name, cuda, torch.device("cuda", device)

    def wait_stream(self, other: Stream) -> None:
        self.cuda.diary.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.cuda.diary.append(f"the host waits for {self.name}")


class Event:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.cuda.diary.append("recorded")

    def wait(self) -> None:
        self.cuda.diary.append("waited for")

    def query(self) -> bool:
        self.cuda.diary.append(f"asked with {self.cuda.state}")
        return self.cuda.device_is_done


class Cuda:
    """A thread's view of CUDA: current device, stream and capture mode, and what was done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.diary: list[str] = []
        self.device_is_done = True
        self.captures: set[str] = set()  # names of streams
        self._device, self._mode, self._stream = 0, GLOBAL, Stream("default", self)
        monkeypatch.setattr(torch.cuda, "device", self.on_device)
        monkeypatch.setattr(torch.cuda, "stream", self.on_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: self._stream)
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda: self._stream.name in self.captures
        )
        kernels = SimpleNamespace(canary_exchange_capture_mode=self._exchange)
        monkeypatch.setattr(side_stream, "kernels_for", lambda _device: kernels)

    @property
    def state(self) -> tuple[int, int, str]:
        return self._device, self._mode, self._stream.name

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        before, self._device = self._device, device.index
        yield
        self._device = before

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        # As torch does it: the way back sets the device, which makes a context there.
        assert stream.device.index == self._device, "a context on the thread's first device"
        before, self._stream = self._stream, stream
        yield
        self._stream = before

    def _exchange(self, mode: int) -> int:
        before, self._mode = self._mode, mode
        return before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def on_a_gpu(gate: EngineGate, cuda: Cuda) -> EngineGate:
    """A gate of the records of the second device."""
    gate._launched, gate._idle_stream = Event(cuda), Stream("idle", cuda, device=1)
    return gate


@pytest.fixture
def gate(cuda: Cuda) -> EngineGate:
    return on_a_gpu(EngineGate(torch.device("cpu")), cuda)


def test_an_idle_turn_takes_place_on_the_device_of_the_records(gate: EngineGate, cuda: Cuda):
    """And disturbs no CUDA graph that the engine captures meanwhile."""
    before = cuda.state
    with gate.idle_turn() as may:
        assert may
        assert cuda.state == (1, THREAD_LOCAL, "idle")
    assert cuda.state == before == (0, GLOBAL, "default")
    assert cuda.diary == [
        f"asked with {(1, THREAD_LOCAL, 'idle')}",
        "the host waits for idle",
    ]


def test_no_idle_turn_while_the_device_works(gate: EngineGate, cuda: Cuda):
    cuda.device_is_done = False
    with gate.idle_turn() as may:
        assert not may
    assert cuda.state == (0, GLOBAL, "default")


def test_no_idle_turn_on_a_stream_on_which_the_engine_captures_a_graph(
    gate: EngineGate, cuda: Cuda
):
    cuda.captures.add("idle")
    with gate.idle_turn() as may:
        assert not may
    assert cuda.diary == []  # a wait for the stream would end the capture


def test_an_idle_turn_that_fails_leaves_nothing_running(gate: EngineGate, cuda: Cuda):
    with pytest.raises(ValueError, match="made up"), gate.idle_turn():
        raise ValueError("made up")
    assert cuda.diary[-1] == "the host waits for idle"
    with gate.idle_turn() as may:
        assert may


def test_inside_a_forward_an_idle_turn_asks_the_device_nothing(gate: EngineGate, cuda: Cuda):
    """A forward may capture a graph, in which even a question is one too many."""
    gate.engine_enters()
    with gate.idle_turn() as may:
        assert not may
    assert cuda.diary == []


# --- events of an allocator -----------------------------------------------------------------------


class OnDevice(SimpleNamespace):
    """A tensor on a GPU, as far as a queue looks at it."""

    is_cuda, device = True, torch.device("cuda", 0)


def test_who_takes_events_on_an_idle_engine_waits_for_their_tensors(cuda: Cuda):
    events = SlotEvents()
    scheduling: Any = Stream("scheduling", cuda)
    slots: Any = OnDevice()
    with torch.cuda.stream(scheduling):
        events.alloc(slots)
        events.free(slots)
    idle: Any = Stream("idle", cuda)
    with torch.cuda.stream(idle):
        assert len(events.take()) == 2
        events.wait_for_tensors()
        assert cuda.diary == ["idle waits for scheduling"]
        events.reset()
        assert len(events.take()) == 1
        events.wait_for_tensors()
        assert len(cuda.diary) == 1


def test_events_on_a_cpu_wait_for_nothing(cuda: Cuda):
    events = SlotEvents()
    events.alloc(torch.tensor(SLOTS))
    events.wait_for_tensors()
    assert cuda.diary == []


def tracked() -> World:
    """Request 1 has been given SLOTS and computed its prompt into them."""
    world = World(tracks_allocation=True)
    world.monitor.guards[0].events.alloc(torch.tensor(SLOTS))
    assert world.forward(Part(uid=1, row=1, tokens=[11, 7, 3], slots=SLOTS)) == []
    return world


def test_an_idle_turn_waits_for_tensors_before_it_launches(
    monkeypatch: pytest.MonkeyPatch, cuda: Cuda
):
    world = tracked()
    monkeypatch.setattr(
        SlotEvents, "wait_for_tensors", lambda _self: cuda.diary.append("waited for tensors")
    )
    monkeypatch.setattr(
        monitor_module,
        "launch_canary_prepare_kernel",
        lambda **arguments: cuda.diary.append(f"launched {len(arguments['events'])}"),
    )
    world.monitor._apply_events_on_idle()
    assert cuda.diary == []
    world.monitor.guards[0].events.free(torch.tensor(SLOTS))
    world.monitor._apply_events_on_idle()
    assert cuda.diary == ["waited for tensors", "launched 1"]


def test_events_that_an_idle_turn_lost_make_the_canary_blind(monkeypatch: pytest.MonkeyPatch):
    """A slot of which it never heard that it was handed out would alarm at its first reader."""
    world = tracked()
    broken: Any = SlotEvent(kind=EventKind.FREE)  # without slots
    world.monitor.guards[0].events._queue(broken)
    with pytest.raises(ValueError, match="slots"):
        world.monitor._apply_events_on_idle()
    assert "slots" in str(world.monitor.blind_because)
    assert [where for where, _ in world.errors] == ["lifecycle"]


# --- tokens of the sampler ------------------------------------------------------------------------


def test_what_comes_next_to_a_row_on_another_stream_waits_for_the_sampled_token(
    monkeypatch: pytest.MonkeyPatch, cuda: Cuda
):
    """With overlap scheduling a request that is done has one more token sampled, while its row goes
    to a request whose prompt another server computed (``learn_prompts``)."""
    world = tracked()
    on_a_gpu(world.monitor._gate, cuda)
    history = world.monitor.history
    assert history is not None
    original = history.record_sampled
    monkeypatch.setattr(
        history,
        "record_sampled",
        lambda *arguments: (cuda.diary.append("sampled"), original(*arguments)),
    )
    world.monitor.record_sampled(torch.tensor([1]), torch.tensor([3]), torch.tensor([77]))
    assert cuda.diary == ["waited for", "sampled", "recorded"]
    world.monitor.learn_prompts(())
    assert cuda.diary[3:] == ["waited for", "recorded"]
