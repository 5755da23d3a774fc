"""What the tests of the CUDA kernels share: moving scenes to a device, comparing up to races.

The same comparison runs on a GPU and on a CPU, where ``emulated_cuda/cuda_runtime.h`` stands in for
CUDA: threads are fibers, blocks run one after the other. That shows wrong logic, not races.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi
from tvm_ffi import libinfo

import kvcanary_plugin.kernels as kernels
from kvcanary_plugin.kernels import VerifyOrWriteContext, WritePlan, backend
from kvcanary_plugin.kernels.build import SOURCE_DIR
from tests.kernels import scenes

SEQUENCE = 15
COUNT_MASK = 0xFFFFFFFF
EMULATION_DIR = Path(__file__).parent / "emulated_cuda"


# ---- the emulation -------------------------------------------------------------------------------


@functools.cache
def emulated_kernels() -> Any | None:
    """The CUDA kernels compiled for fibers on the CPU; None without a C++ compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return None
    sources = sorted([*SOURCE_DIR.glob("*.h"), *SOURCE_DIR.glob("*.cu*"), *EMULATION_DIR.iterdir()])
    key = hashlib.blake2b(
        b"".join(path.read_bytes() for path in sources), digest_size=8
    ).hexdigest()
    library = Path(tempfile.gettempdir()) / f"kvcanary-emulated-cuda-{key}.so"
    if not library.is_file():
        includes = {libinfo.find_include_path(), libinfo.find_dlpack_include_path()}
        with tempfile.NamedTemporaryFile(dir=library.parent, suffix=".so", delete=False) as output:
            subprocess.run(
                [
                    compiler,
                    *("-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-unknown-pragmas"),
                    f"-I{EMULATION_DIR}",
                    *(flag for path in sorted(includes) for flag in ("-isystem", path)),
                    *("-x", "c++", str(SOURCE_DIR / "cuda.cu"), "-o", output.name),
                    *(f"-L{Path(libinfo.find_libtvm_ffi()).parent}", "-ltvm_ffi"),
                ],
                check=True,
            )
        Path(output.name).replace(library)
    return tvm_ffi.load_module(str(library))


@contextmanager
def emulation_runs_cpu_launches() -> Iterator[None]:
    """Inside the block, launches on CPU tensors run the emulated CUDA kernels."""
    before = backend._loaded.get("cpu")
    backend._loaded["cpu"] = emulated_kernels()
    try:
        yield
    finally:
        if before is None:
            del backend._loaded["cpu"]
        else:
            backend._loaded["cpu"] = before


# ---- scenes on a device --------------------------------------------------------------------------


def moved(value: Any, device: torch.device) -> Any:
    """A deep copy on ``device``; strides and offsets of tensors survive, sources are copied too."""
    if isinstance(value, torch.Tensor):
        items = value.untyped_storage().nbytes() // value.element_size()
        storage = value.as_strided((items,), (1,), 0).clone().to(device)
        return storage.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field.name for field in dataclasses.fields(value) if field.init)
        return dataclasses.replace(
            value, **{name: moved(getattr(value, name), device) for name in fields}
        )
    return value


def moved_all(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """:func:`moved` for every argument of a launch."""
    return {name: moved(value, device) for name, value in arguments.items()}


def with_pinned_ring(context: VerifyOrWriteContext, *, capacity: int) -> VerifyOrWriteContext:
    """The context with a fresh ring and a counter mirror in pinned host memory."""
    return dataclasses.replace(
        context,
        violation_ring=torch.zeros((capacity, 16), dtype=torch.int64).pin_memory(),
        counter_mirror=torch.zeros(2, dtype=torch.int64).pin_memory(),
    )


def with_ring(context: VerifyOrWriteContext, ring: torch.Tensor) -> VerifyOrWriteContext:
    return dataclasses.replace(context, violation_ring=ring)


def run_on(
    launch: Callable[..., None], arguments: dict[str, Any], device: torch.device, *, pinned: bool
) -> dict[str, Any]:
    """Run ``launch`` on a copy on ``device`` and return what became of it, back on the CPU."""
    own = moved_all(arguments, device)
    if pinned and "context" in own:
        rows = own["context"].violation_ring.cpu()
        own["context"] = with_pinned_ring(own["context"], capacity=rows.shape[0])
        own["context"].violation_ring.copy_(rows)
    launch(**own)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if pinned and "context" in own:
        own["context"] = dataclasses.replace(own["context"], counter_mirror=None)
    return moved_all(own, torch.device("cpu"))


def run_reference(launch: Callable[..., None], arguments: dict[str, Any]) -> dict[str, Any]:
    """Run the torch reference on a copy whose ring holds every row that the launch records."""
    own = moved_all(arguments, torch.device("cpu"))
    if "context" in own:
        own["context"] = with_ring(own["context"], torch.zeros((4096, 16), dtype=torch.int64))
    launch(**own)
    return own


# ---- comparing up to the order of rows -----------------------------------------------------------


def assert_equivalent(
    before: dict[str, Any], compiled: dict[str, Any], reference: dict[str, Any]
) -> None:
    """Same bytes everywhere; ring rows in any order, as far as the ring can hold them."""
    for name in before:
        left, right = scenes.tensors(compiled[name]), scenes.tensors(reference[name])
        assert left.keys() == right.keys()
        for path, tensor in left.items():
            if path != ".violation_ring":
                assert torch.equal(tensor, right[path]), f"{name}{path}:\n{tensor}\n{right[path]}"
    if "context" in before:
        _assert_same_rows(before["context"], compiled["context"], reference["context"])


def _assert_same_rows(
    before: VerifyOrWriteContext, compiled: VerifyOrWriteContext, reference: VerifyOrWriteContext
) -> None:
    first = int(before.violation_write_index.item())
    count = (int(reference.violation_write_index.item()) - first) & COUNT_MASK
    numbers = [(first + offset) & COUNT_MASK for offset in range(count)]
    expected = [_row(reference, number) for number in numbers]

    capacity = before.violation_ring.shape[0]
    newest = {number % capacity: number for number in numbers}
    found = [_row(compiled, number) for number in newest.values()]
    for row, number in zip(found, newest.values(), strict=True):
        assert row[SEQUENCE] == number + 1
    surplus = Counter(row[:SEQUENCE] for row in found) - Counter(row[:SEQUENCE] for row in expected)
    assert not surplus, f"rows that the reference does not have: {surplus}\nit has {expected}"
    if len(newest) == count:
        assert len(found) == len(expected)
    for index in range(capacity):
        if index not in newest:
            assert torch.equal(compiled.violation_ring[index], before.violation_ring[index])


def _row(context: VerifyOrWriteContext, number: int) -> tuple[int, ...]:
    ring = context.violation_ring
    return tuple(ring[number % ring.shape[0]].tolist())


def assert_agreement(
    name: str, arguments: dict[str, Any], device: str, *, remove_races: bool = True
) -> dict[str, Any]:
    """``kernels.<name>`` on ``device`` equals its torch reference on the CPU; returns what it left.

    Devices: ``emulated``, ``cuda`` (ring in device memory) and ``pinned`` (ring and counter mirror
    in pinned host memory, as in production).
    """
    if remove_races:
        arguments = without_races(arguments)
    reference = run_reference(getattr(kernels, f"{name}_torch_reference"), arguments)
    launch = getattr(kernels, name)
    if device == "emulated":
        if emulated_kernels() is None:
            pytest.skip("needs a C++ compiler")
        with emulation_runs_cpu_launches():
            compiled = run_on(launch, arguments, torch.device("cpu"), pinned=False)
    else:
        cuda = torch.device("cuda", torch.cuda.current_device())
        compiled = run_on(launch, arguments, cuda, pinned=device == "pinned")
    assert_equivalent(arguments, compiled, reference)
    return compiled


DEVICES = ["emulated", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "pinned"))]
on_every_device = pytest.mark.parametrize("device", DEVICES)


# ---- scenes without races ------------------------------------------------------------------------


def without_races(arguments: dict[str, Any]) -> dict[str, Any]:
    """The scene with everything removed whose outcome depends on the order of requests.

    A slot is written once; a seed that the plan writes is marked as in flight, as the prepare
    launch would, or given up (seeds that wait in a circle as well); the count of violations does
    not wrap.
    """
    context = arguments.get("context")
    if context is not None and int(context.violation_write_index.item()) == -2:
        context.violation_write_index.fill_(5)
    plan = arguments.get("plan")
    if plan is None or not hasattr(plan, "write_offsets"):
        return arguments
    slots = arguments["out_cache_loc"]
    seen: set[int] = set()
    for index, slot in enumerate(slots.tolist()):
        if slot >= 0 and slot in seen:
            slots[index] = -1
        seen.add(slot)
    table, step = context.slot_table, arguments["step"]
    seeds = plan.write_seed_slot_indices
    count = max(0, min(int(plan.write_num_valid_reqs.item()), seeds.numel()))
    writers = _writers(plan, count, slots.tolist())
    for index, seed in enumerate(seeds[:count].tolist()):
        if seed not in writers or not 0 <= seed < context.canary_buf.shape[0]:
            continue
        if table is None or step == -1 or seed == 0 or _waits_in_circle(index, seeds, writers):
            seeds[index] = -1
        else:
            table.writer_step[seed] = step
    return arguments


def _writers(plan: WritePlan, count: int, slots: list[int]) -> dict[int, int]:
    """Which request of the plan writes a slot."""
    offsets = plan.write_offsets.clamp(0, len(slots)).tolist()
    return {
        slots[entry]: request
        for request in range(count)
        for entry in range(offsets[request], offsets[request + 1])
        if slots[entry] >= 0
    }


def _waits_in_circle(request: int, seeds: torch.Tensor, writers: dict[int, int]) -> bool:
    for _ in range(seeds.numel() + 1):
        if int(seeds[request]) not in writers:
            return False
        request = writers[int(seeds[request])]
    return True
