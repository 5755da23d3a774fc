"""Slots that go to the host and come back, through the engine's own transfer engine.

The host pool is a stand-in: the engine's copies with kernels that need a GPU. Its loads arrive when
the test says so, as on a GPU, where they run beside the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary_plugin.carried import ExternalSlots
from kvcanary_plugin.hooks.sglang import attach, host_tier
from kvcanary_plugin.kernels import SlotState
from tests.monitor.world import found
from tests.sglang.engine import SIZE, WINDOW, Engine, Request

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


class Event:
    """The event behind a transfer; ``record`` comes with the submission, arrival later."""

    def __init__(self) -> None:
        self.arrived = False

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return self.arrived


class HostPool:
    """Host memory for every layer's K and V of one pool, slot by slot."""

    def __init__(self, pool: Any) -> None:
        self.size = 2 * SIZE
        self.layer_num = len(pool.k_buffer)
        self.buffers = [
            (torch.zeros(self.size, *k.shape[1:]), torch.zeros(self.size, *v.shape[1:]))
            for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True)
        ]
        self.late: list[Callable[[], None]] | None = None

    def prepare_transfer_indices(self, host: Any, device: Any, _backend: str) -> Any:
        return host, device

    def backup_from_device_all_layer_physical(self, pool: Any, host: Any, device: Any, _: Any):
        for (k, v), k_pool, v_pool in zip(self.buffers, pool.k_buffer, pool.v_buffer, strict=True):
            k[host], v[host] = k_pool[device], v_pool[device]

    def load_to_device_per_layer_physical(
        self, pool: Any, host: Any, device: Any, layer: int, _: str, *, is_draft: bool
    ) -> None:
        def copy() -> None:
            k, v = self.buffers[layer]
            pool.k_buffer[layer][device], pool.v_buffer[layer][device] = k[host], v[host]

        copy() if self.late is None else self.late.append(copy)


class Tier:
    """A hierarchical cache with the engine's transfer engine under the hooks."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt.mem_cache import l2_transfer

        monkeypatch.setattr(
            l2_transfer, "make_timing_event_pair", lambda: (Event(), Event(), False)
        )
        monkeypatch.setattr(
            l2_transfer.L2TransferEngine, "_start_event", staticmethod(lambda _: Event())
        )
        self.l2 = l2_transfer
        self.transfers = l2_transfer.L2TransferEngine("direct")
        self.engine = engine
        self.hosts = [HostPool(part) for part in engine.parts]
        self.host = self.hosts[0]
        self.next_host_slot = 0

    def back_up(self, slots: list[int], swa_slots: list[int] | None = None) -> list[int]:
        first, self.next_host_slot = self.next_host_slot, self.next_host_slot + len(slots)
        host = list(range(first, self.next_host_slot))
        attach.around_backup(
            self.l2.L2TransferEngine.submit_device_to_host,
            self.transfers,
            self._all(host, slots, swa_slots),
        )
        return host

    def load(
        self,
        host: list[int],
        slots: list[int],
        swa_slots: list[int] | None = None,
        *,
        late: bool = False,
    ) -> Event:
        self.host.late = [] if late else None
        completion = attach.around_load(
            self.l2.L2TransferEngine.submit_host_to_device,
            self.transfers,
            self._all(host, slots, swa_slots),
            transfer_layer_id_max=self.host.layer_num,
        )
        event: Event = completion.finish_event
        event.arrived = not late
        return event

    def arrive(self, event: Event) -> None:
        for copy in self.host.late or ():
            copy()
        event.arrived = True

    def _all(self, host: list[int], slots: list[int], swa_slots: list[int] | None) -> list[Any]:
        """The window's slots are the last ones of the sequence, in a pool of their own."""
        transfers = [self._transfer(host, slots)]
        if swa_slots:
            transfers.append(self._transfer(host[-len(swa_slots) :], swa_slots, part=1))
        return transfers

    def _transfer(self, host: list[int], slots: list[int], part: int = 0) -> Any:
        return self.l2.L2Transfer(
            host_pool=self.hosts[part],
            device_pool=self.engine.parts[part],
            host_indices=torch.tensor(host, dtype=torch.int64),
            device_indices=torch.tensor(slots, dtype=torch.int64),
        )


@pytest.fixture
def engine(sglang_session: None) -> Iterator[Engine]:
    engine = Engine(enable_hierarchical_cache=True)
    yield engine
    engine.close()


@pytest.fixture
def tier(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Tier:
    return Tier(engine, monkeypatch)


def evicted(engine: Engine, tier: Tier) -> list[int]:
    """A prompt is computed, backed up and evicted; others take its slots. Its host slots."""
    request = Request("a", 1, list(PROMPT))
    assert engine.prefill(request) == []
    host = tier.back_up(request.slots)
    engine.allocator.free(torch.tensor(request.slots, dtype=torch.int64))
    assert engine.prefill(Request("b", 2, list(range(40, 60)))) == []
    return host


def load_back(engine: Engine, tier: Tier, host: list[int], **how: Any) -> tuple[Request, Event]:
    """Another request finds the prompt on the host; it has one token more to compute."""
    request = Request("c", 3, [*PROMPT, 30])
    engine.give_slots(request, len(PROMPT))
    return request, tier.load(host, request.slots, **how)


def external(engine: Engine) -> int:
    slots = ExternalSlots(engine.monitor.guards[0])
    slots.refresh()
    return slots.count


def test_what_is_loaded_back_has_the_records_it_left_with(engine: Engine, tier: Tier):
    request, _ = load_back(engine, tier, evicted(engine, tier))
    assert engine.prefill(request, prefix=len(PROMPT)) == []
    assert external(engine) == len(PROMPT)
    assert engine.decode(request, tokens=[3]) == []


def test_bytes_that_arrive_during_the_forward_are_looked_at_behind_it(engine: Engine, tier: Tier):
    request, event = load_back(engine, tier, evicted(engine, tier), late=True)
    assert engine.prefill(request, prefix=len(PROMPT)) == []
    assert external(engine) == 0
    assert engine.decode(request, tokens=[3]) == []
    tier.arrive(event)
    assert engine.decode(request, tokens=[4]) == []
    assert external(engine) == len(PROMPT)
    assert engine.decode(request, tokens=[5]) == []


def test_bytes_that_changed_on_the_host_are_found(engine: Engine, tier: Tier):
    host = evicted(engine, tier)
    tier.host.buffers[1][1][host[3]] += 1.0
    request, _ = load_back(engine, tier, host)
    seen = engine.prefill(request, prefix=len(PROMPT))
    assert found(seen) == {("real_kv", request.slots[3])}


def test_bytes_that_never_arrive_are_found(engine: Engine, tier: Tier):
    request, event = load_back(engine, tier, evicted(engine, tier), late=True)
    assert engine.prefill(request, prefix=len(PROMPT)) == []
    event.arrived = True
    seen = found(engine.decode(request, tokens=[3]))
    assert seen == {("real_kv", slot) for slot in request.slots[: len(PROMPT)]}


def test_slots_loaded_in_another_order_are_found(engine: Engine, tier: Tier):
    host = evicted(engine, tier)
    host[1], host[2] = host[2], host[1]
    request, _ = load_back(engine, tier, host)
    seen = found(engine.prefill(request, prefix=len(PROMPT)))
    assert {("position", request.slots[1]), ("position", request.slots[2])} <= seen


def test_the_prompt_of_another_request_loaded_back_is_found(engine: Engine, tier: Tier):
    host = evicted(engine, tier)
    request = Request("c", 3, [*PROMPT[:-1], 99, 30])
    engine.give_slots(request, len(PROMPT))
    tier.load(host, request.slots)
    seen = {check for check, _ in found(engine.prefill(request, prefix=len(PROMPT)))}
    assert "prefix_identity" in seen


def test_slots_that_were_not_loaded_are_found(engine: Engine, tier: Tier):
    evicted(engine, tier)
    request = Request("c", 3, [*PROMPT, 30])
    engine.give_slots(request, len(PROMPT))
    seen = {check for check, _ in found(engine.prefill(request, prefix=len(PROMPT)))}
    assert "unwritten" in seen


def test_slots_that_are_given_back_before_they_arrive_are_left_alone(engine: Engine, tier: Tier):
    request, event = load_back(engine, tier, evicted(engine, tier), late=True)
    assert engine.prefill(request, prefix=len(PROMPT)) == []
    engine.allocator.alloc(engine.allocator.available_size() - 2)
    engine.allocator.free(torch.tensor(request.slots, dtype=torch.int64))
    other = Request("d", 4, list(range(70, 79)))
    assert engine.prefill(other) == []
    assert len(set(other.slots) & set(request.slots)) >= 7
    event.arrived = True
    assert engine.decode(other, tokens=[3]) == []
    assert engine.decode(other, tokens=[4]) == []


def test_another_pools_transfers_are_not_looked_at(engine: Engine, tier: Tier):
    engine.prefill(Request("a", 1, list(PROMPT)))
    draft = SimpleNamespace(k_buffer=engine.pool.k_buffer, v_buffer=engine.pool.v_buffer)
    transfer = tier._transfer([0, 1], [1, 2])._replace(device_pool=draft)
    attach.around_backup(tier.l2.L2TransferEngine.submit_device_to_host, tier.transfers, [transfer])
    host_tier = engine.session._host_tier
    assert host_tier is not None
    assert [part._host_records for part in host_tier._parts] == [{}]


def test_a_storage_backend_attached_later_blinds_the_canary(engine: Engine, tier: Tier):
    controller = SimpleNamespace(mem_pool_device_allocator=engine.allocator)
    attach.before_attach_storage(controller, "file")
    assert "storage backend" in str(engine.monitor.blind_because)
    request, _ = load_back(engine, tier, list(range(len(PROMPT))))
    engine.give_slots(request, 1)
    engine.session.forward(lambda: None, engine.decode_batch(request))
    assert engine.violations() == []


def test_what_has_not_arrived_is_not_scrubbed(engine: Engine, tier: Tier):
    request, _ = load_back(engine, tier, evicted(engine, tier), late=True)
    engine.prefill(request, prefix=len(PROMPT))
    words = engine.monitor.guards[0].slots.state[torch.tensor(request.slots[: len(PROMPT)])]
    assert set((words & 0xFF).tolist()) == {int(SlotState.WRITTEN)}


@pytest.mark.parametrize("call", ["back up", "submit", "load"])
def test_an_error_of_the_canary_does_not_reach_the_engine(
    engine: Engine, tier: Tier, monkeypatch: pytest.MonkeyPatch, call: str
):
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room for records")

    host = evicted(engine, tier)
    if call == "back up":
        monkeypatch.setattr(host_tier.HostRecords, "put", fails)
        tier.back_up(engine.table[2, :4].tolist())
        request = Request("c", 3, [1])
    else:
        owner, name = {
            "submit": (host_tier.TierPart, "_indices"),
            "load": (host_tier.HostRecords, "take"),
        }[call]
        monkeypatch.setattr(owner, name, fails)
        request, _ = load_back(engine, tier, host)
    engine.give_slots(request, 1)
    ran: list[bool] = []
    engine.session.forward(lambda: ran.append(True), engine.decode_batch(request))
    assert ran == [True]
    assert "no room for records" in str(engine.monitor.blind_because)
    assert engine.violations() == []


# --- streams, as far as they can be told apart without a GPU --------------------------------------


class Streams:
    """The stream that is current, and the tensors that each stream is said to read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = "scheduling"
        self.reads: list[tuple[str, int]] = []  # (stream, address)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(
            torch.Tensor,
            "record_stream",
            lambda tensor, stream: self.reads.append((stream, tensor.data_ptr())),
        )

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, str(stream)
        yield
        self.current = before


class SideStream:
    def wait_stream(self, other: str) -> None:
        assert other == "scheduling"

    def __str__(self) -> str:
        return "side"


@pytest.fixture
def part(engine: Engine) -> host_tier.TierPart:
    """Of a pool on a GPU, as far as it matters for streams."""
    assert engine.session._host_tier is not None
    (part,) = engine.session._host_tier._parts
    return part


def test_slots_of_a_backup_stay_until_its_stream_has_read_them(
    engine: Engine, tier: Tier, part: host_tier.TierPart, monkeypatch: pytest.MonkeyPatch
):
    """Hundreds of backups may wait for the same forward: no number of kept ones is enough."""
    request = Request("a", 1, list(PROMPT))
    engine.prefill(request)
    tier.back_up(request.slots)
    streams = Streams(monkeypatch)
    mine = torch.arange(8), torch.tensor(request.slots)
    monkeypatch.setattr(part, "_indices", lambda _transfer: mine)
    monkeypatch.setattr(part, "_device", torch.device("cuda", 0))
    part.before_backup(tier._transfer([0], [0]), SideStream())
    assert streams.reads == [("side", tensor.data_ptr()) for tensor in mine]
    assert engine.monitor.blind_because is None


def test_what_a_load_was_submitted_with_stays_until_the_forwards_stream_has_read_it(
    engine: Engine, tier: Tier, part: host_tier.TierPart, monkeypatch: pytest.MonkeyPatch
):
    load_back(engine, tier, evicted(engine, tier))
    (load,) = part._submitted
    streams = Streams(monkeypatch)
    monkeypatch.setattr(part, "_device", torch.device("cuda", 0))
    with streams.on("forward"):
        part.before_forward()
    kept = (load.slots, load.carried.records, load.carried.states)
    assert streams.reads == [("forward", tensor.data_ptr()) for tensor in kept]
    assert engine.monitor.blind_because is None


# --- a pool for full attention and one for the window ---------------------------------------------


@pytest.fixture
def windowed(sglang_session: None) -> Iterator[Engine]:
    engine = Engine(swa=True, enable_hierarchical_cache=True)
    yield engine
    engine.close()


LONG = list(range(20, 20 + 2 * WINDOW))


def window_is_loaded_back(
    engine: Engine, tier: Tier, *, harm: Callable[[Tier, list[int]], None] | None = None
) -> tuple[Request, list[int]]:
    """A prompt comes back whole for full attention, and its last tokens for the window."""
    first = Request("a", 1, list(LONG))
    assert engine.prefill(first) == []
    mapping = engine.pool.full_to_swa_index_mapping
    old = mapping[torch.tensor(first.slots)].tolist()
    host = tier.back_up(first.slots, old)
    engine.allocator.free(torch.tensor(first.slots, dtype=torch.int64))
    assert engine.prefill(Request("b", 2, list(range(70, 84)))) == []
    if harm is not None:
        harm(tier, host)
    full = engine.allocator.full_attn_allocator.alloc(len(LONG))
    swa = engine.allocator.swa_attn_allocator.alloc(WINDOW)
    tier.load(host, full.tolist(), swa.tolist())
    engine.allocator.set_full_to_swa_mapping(full[-WINDOW:], swa)
    request = Request("c", 3, [*LONG, 30])
    engine.share(request, full.tolist())
    return request, swa.tolist()


def test_a_window_comes_back_without_what_lies_before_it(
    windowed: Engine, monkeypatch: pytest.MonkeyPatch
):
    request, _ = window_is_loaded_back(windowed, Tier(windowed, monkeypatch))
    assert windowed.prefill(request, prefix=len(LONG)) == []
    assert windowed.decode(request, tokens=[3]) == []
    assert windowed.decode(request, tokens=[4]) == []


def test_bytes_of_the_window_that_changed_on_the_host_are_found(
    windowed: Engine, monkeypatch: pytest.MonkeyPatch
):
    def harm(tier: Tier, host: list[int]) -> None:
        tier.hosts[1].buffers[0][0][host[-2]] += 1.0

    tier = Tier(windowed, monkeypatch)
    request, swa = window_is_loaded_back(windowed, tier, harm=harm)
    seen = windowed.prefill(request, prefix=len(LONG))
    assert {(v.group, *f) for v in seen for f in found([v])} == {("swa", "real_kv", swa[-2])}
