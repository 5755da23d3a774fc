"""The flight recorder on a device: one launch, no synchronisation, read beside the engine."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcanary_plugin.cache import KVCacheGroup
from kvcanary_plugin.faults import FAULTS
from kvcanary_plugin.forward import ForwardStep
from kvcanary_plugin.recorder import FlightRecorder
from kvcanary_plugin.replay import replay
from tests.monitor.incident_world import IncidentWorld
from tests.monitor.test_recorder import step_of
from tests.monitor.test_replay import serve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def on_device(step: ForwardStep) -> ForwardStep:
    fields: dict[str, Any] = {name: getattr(step, name) for name in step.__slots__}
    moved = {name: v.cuda() for name, v in fields.items() if isinstance(v, torch.Tensor)}
    moved["out_cache_loc"] = tuple(slots.cuda() for slots in step.out_cache_loc)
    return type(step)(**fields | moved)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_forward_is_one_launch_and_no_synchronisation(dtype: torch.dtype):
    recorder, step = FlightRecorder(8), on_device(step_of(3, dtype=dtype))
    recorder.record(step)
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        recorder.record(step)
        torch.cuda.synchronize()
    device = [
        event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    assert len(device) == 1, [event.name for event in device]
    torch.cuda.set_sync_debug_mode("error")
    try:
        recorder.record(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kept = recorder.window(until_step=3)[0]
    assert kept.input_ids.tolist() == [103] * 5
    assert [slots.tolist() for slots in kept.slots] == [[303] * 5, [403] * 5]


def test_the_window_is_read_while_the_engines_stream_is_busy():
    recorder = FlightRecorder(8)
    recorder.record(on_device(step_of(1)))
    torch.cuda.synchronize()
    engine, beside = torch.cuda.Stream(), torch.cuda.Stream()
    took: list[float] = []
    with torch.cuda.stream(engine):
        torch.cuda._sleep(4_000_000_000)  # about two seconds
    recorder.record(on_device(step_of(2)))

    def read() -> None:
        start = time.monotonic()
        with torch.cuda.stream(beside):
            (kept,) = recorder.window(until_step=1)
        took.append(time.monotonic() - start)
        assert kept.input_ids.tolist() == [101] * 5

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert not engine.query(), "the engine's work is still running"
    assert took[0] < 0.5


class CudaWorld(IncidentWorld):
    """The world of the scenarios with its pools and page table on a device."""

    def _pool(self, slots: int) -> list[torch.Tensor]:
        return [buffer.cuda() for buffer in super()._pool(slots)]

    def _group(self, *arguments: Any, **options: Any) -> KVCacheGroup:
        self.table = self.table.cuda()
        return super()._group(*arguments, **options)

    def _step_of(self, *arguments: Any, **options: Any) -> ForwardStep:
        # The injector has planted into the arrays that are copied here.
        return on_device(super()._step_of(*arguments, **options))

    def violations(self) -> list:
        torch.cuda.synchronize()
        return super().violations()


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_on_a_device_is_one_incident_that_replays_on_the_cpu(fault: str, tmp_path: Path):
    world = CudaWorld(directory=tmp_path)
    serve(world, fault=fault)
    (incident,) = world.incidents()
    planted = world.planted()
    assert planted is not None
    assert incident.root.slot == planted["slot"]
    assert replay(incident).reproduced
