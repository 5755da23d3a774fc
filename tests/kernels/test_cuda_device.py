"""The CUDA launches on a device: streams, graphs, several GPUs, memory beyond 2^31."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import kvcanary_plugin.kernels as kernels
from kvcanary_plugin.kernels import RealKvHashMode, RealKvSource
from kvcanary_plugin.kernels.reference import record_fields
from tests.kernels import cuda_support, oracle, scenes
from tests.kernels.test_cuda_shapes import chained_pool, table_of

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")


def _forward(seed: int) -> dict[str, Any]:
    """One forward of four requests of 100 cached tokens that extend by 1, 2, 3 and 40."""
    pool = chained_pool([100] * 4, page_size=1, faults=3, mode=RealKvHashMode.ALL)
    extends = [1, 2, 3, 40]
    tokens = sum(extends)
    reads = dataclasses.replace(pool["reads"], extend_lens=torch.tensor(extends))
    free = [slot for slot in range(401) if slot not in set(reads.page_table.flatten().tolist())]
    old = scenes.Dice(seed).sample(range(1, 401), tokens - len(free))
    return {
        "context": pool["context"],
        "reads": reads,
        "plan": scenes.make_write_plan(lengths=[], capacity=6),
        "input_ids": torch.arange(tokens) + seed,
        "positions": torch.cat([torch.arange(100, 100 + count) for count in extends]),
        "out_cache_loc": torch.tensor([*free, *old]),
        "step": 7,
    }


def _run_forward(forward: dict[str, Any]) -> None:
    """The launches of one forward, in the order of production."""
    context, plan, slots = forward["context"], forward["plan"], forward["out_cache_loc"]
    shared = {"context": context, "step": 7}
    kernels.launch_canary_prepare_kernel(
        **shared, reads=forward["reads"], write_plan_out=plan, out_cache_loc=slots
    )
    kernels.launch_canary_table_verify_kernel(**shared, reads=forward["reads"])
    kernels.launch_canary_write_kernel(
        **shared,
        plan=plan,
        input_ids=forward["input_ids"],
        positions=forward["positions"],
        out_cache_loc=slots,
        enable_write_input_assert=False,
        expected_input_tokens=None,
        expected_input_positions=None,
    )
    kernels.launch_canary_seal_kernel(**shared, plan=plan, out_cache_loc=slots)


def _after_reference(forward: dict[str, Any]) -> dict[str, Any]:
    own = cuda_support.moved_all(forward, CPU)
    with kernels.use_torch_reference():
        _run_forward(own)
    return own


def _assert_ended_as(forward: dict[str, Any], on_device: dict[str, Any]) -> None:
    compiled = cuda_support.moved_all(on_device, CPU)
    cuda_support.assert_equivalent(forward, compiled, _after_reference(forward))


def test_launches_follow_each_other_on_a_stream_of_the_caller() -> None:
    forward = _forward(1)
    device = torch.device("cuda", torch.cuda.current_device())
    own = cuda_support.moved_all(forward, device)
    late_tokens = own["input_ids"].clone()
    own["input_ids"].zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # a launch on any other stream would not see the tokens
        own["input_ids"].copy_(late_tokens)
        _run_forward(own)
    stream.synchronize()
    _assert_ended_as(forward, own)


def test_a_captured_forward_replays_with_refilled_inputs() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    own = cuda_support.moved_all(_forward(1), device)
    _run_forward(own)  # loads the kernels: nothing is loaded while a graph is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _run_forward(own)

    for seed in (2, 3):
        forward = _forward(seed)
        for name, values in cuda_support.moved_all(forward, device).items():
            for path, tensor in scenes.tensors(values).items():
                scenes.tensors(own[name])[path].copy_(tensor)
        graph.replay()
        torch.cuda.synchronize()
        _assert_ended_as(forward, own)


def test_launches_on_another_device_leave_the_current_one_alone() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    forward = _forward(1)
    own = cuda_support.moved_all(forward, torch.device("cuda", 1))
    with torch.cuda.device(0):
        _run_forward(own)
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    _assert_ended_as(forward, own)


def test_a_tensor_on_the_wrong_device_is_refused_by_name() -> None:
    own = cuda_support.moved_all(_forward(1), torch.device("cuda", torch.cuda.current_device()))
    own["out_cache_loc"] = own["out_cache_loc"].cpu()
    with pytest.raises(ValueError, match="out_cache_loc must be on the records' device cuda"):
        _run_forward(own)


# ---- beyond 2^31 ---------------------------------------------------------------------------------

SLOTS = 1_500_000
BYTES = 2048  # of a slot: 3.07e9 bytes a source, and as many of records


def _large_source(device: torch.device, seed: int, slots: list[int]) -> RealKvSource:
    generator = torch.Generator(device).manual_seed(seed)
    tensor = torch.zeros((SLOTS, BYTES), dtype=torch.uint8, device=device)
    for slot in slots:
        tensor[slot].random_(0, 256, generator=generator)
    return RealKvSource(tensor=tensor, page_size=1, num_bytes_per_token=BYTES, read_bytes=BYTES)


def test_write_seal_and_verify_reach_both_ends_of_large_pools() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_properties(device).total_memory < 24 << 30:
        pytest.skip("needs 24 GiB of device memory")
    slots = [1, 2, SLOTS // 2, SLOTS - 2, SLOTS - 1]
    sources = (_large_source(device, 1, slots), _large_source(device, 2, slots))
    context = scenes.make_context(
        num_slots=SLOTS,
        stride=BYTES,
        sources=sources,
        mode=RealKvHashMode.ALL,
        slot_table=cuda_support.moved(table_of(SLOTS, state=1), device),
        device=device,
    )
    plan = scenes.make_write_plan(lengths=[len(slots)], device=device)
    positions = torch.arange(len(slots), device=device)
    shared: dict[str, Any] = {
        "context": context,
        "plan": plan,
        "out_cache_loc": torch.tensor(slots, device=device),
        "step": 3,
    }
    kernels.launch_canary_write_kernel(
        **shared,
        input_ids=positions + 40,
        positions=positions,
        enable_write_input_assert=False,
        expected_input_tokens=None,
        expected_input_positions=None,
    )
    kernels.launch_canary_seal_kernel(**shared)

    running = oracle.splitmix64(oracle.ANCHOR)
    for position, slot in enumerate(slots):
        content = [source.tensor[slot].cpu().numpy().tobytes() for source in sources]
        fold = oracle.fold(content)
        record = record_fields(context)[slot].tolist()
        assert record == [position + 40, position, oracle.signed(running), oracle.signed(fold)]
        running = oracle.mix3(running, position + 40, position)

    # The page table too: its last row begins behind element 2^31.
    table = torch.zeros((1 << 16, (1 << 15) + 8), dtype=torch.int32, device=device)
    table[-1, : len(slots)] = shared["out_cache_loc"]
    reads = dataclasses.replace(
        cuda_support.moved(scenes.make_reads([[0]], [len(slots)]), device),
        page_table=table,
        request_rows=torch.tensor([table.shape[0] - 1], device=device),
    )
    kernels.launch_canary_table_verify_kernel(context=context, reads=reads, step=4)
    assert int(context.violation_write_index) == 0
    sources[1].tensor[SLOTS - 1, BYTES - 1] ^= 1
    kernels.launch_canary_table_verify_kernel(context=context, reads=reads, step=4)
    (row,) = scenes.rows(context).tolist()
    assert row[1] == SLOTS - 1
    assert row[7] == 1 << 2
