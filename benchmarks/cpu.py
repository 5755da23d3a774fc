"""Benchmark of the CPU kernels: C++ beside the torch reference, on one core.

    python -m benchmarks.cpu

Rates are per second of CPU time of one core, medians of several runs. Neighbours on a shared
machine still cost cache and memory bandwidth, so read the ratio before the rate.
Slots come in pages of 16 in random order, as an engine hands them out, over a pool of 2^18 slots
(records: 8 MiB). ``tracked`` adds a slot table (owners, writers, states).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcanary_plugin.kernels import (
    RealKvHashMode,
    RealKvSource,
    SlotTable,
    TableReads,
    VerifyOrWriteContext,
    WritePlan,
    allocate_records,
    chain_hash,
    launch_canary_seal_kernel,
    launch_canary_table_verify_kernel,
    launch_canary_write_kernel,
    load_kernels,
    use_torch_reference,
)

CPU = torch.device("cpu")
POOL = 1 << 18
PAGE = 16
COMPILED_RUNS = 15
REFERENCE_RUNS = 3


@dataclass(frozen=True)
class Line:
    """One line of the table: ``launch(amount)`` does ``amount`` units of work."""

    name: str
    unit: str
    scale: float
    amount: int
    reference_amount: int
    prepare: Callable[[int], Callable[[], None]]


def median_rate(launch: Callable[[], None], amount: int, runs: int) -> float:
    launch()
    times = []
    for _ in range(runs):
        start = time.thread_time()
        launch()
        times.append(time.thread_time() - start)
    return amount / statistics.median(times)


# ---- the work ------------------------------------------------------------------------------------


def make_context(
    *, tracked: bool = False, num_slots: int = POOL, sources: tuple[RealKvSource, ...] = ()
) -> VerifyOrWriteContext:
    counter = torch.zeros(1, dtype=torch.int64)
    table = SlotTable.allocate(num_slots=num_slots, device=CPU, tracks_allocation=False)
    return VerifyOrWriteContext(
        canary_buf=allocate_records(num_slots=num_slots, device=CPU),
        kernel_kind=0,
        violation_ring=torch.zeros((64, 16), dtype=torch.int64),
        violation_write_index=torch.zeros(1, dtype=torch.int32),
        slot_run_counter=counter.clone(),
        kernel_run_counter=counter.clone(),
        real_kv_sources=sources,
        real_kv_hash_mode=RealKvHashMode.ALL if sources else RealKvHashMode.NONE,
        enable_chain_position_assert=torch.ones(1, dtype=torch.int32),
        slot_table=table if tracked else None,
    )


def make_plan(requests: int, length: int) -> WritePlan:
    plan = WritePlan.allocate(write_req_capacity=requests, device=CPU)
    plan.write_offsets.copy_(torch.arange(requests + 1) * length)
    plan.write_seed_slot_indices.fill_(-1)
    plan.write_num_valid_reqs.fill_(requests)
    return plan


def paged_slots(count: int) -> torch.Tensor:
    """``count`` slots in whole pages, the pages in random order; page 0 is padding."""
    generator = torch.Generator().manual_seed(1)
    pages = torch.randperm(POOL // PAGE - 1, generator=generator)[: -(-count // PAGE)] + 1
    return (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:count]


def write(requests: int, *, tracked: bool) -> Callable[[int], Callable[[], None]]:
    def prepare(amount: int) -> Callable[[], None]:
        return write_launch(make_context(tracked=tracked), requests, amount // requests)

    return prepare


def write_launch(context: VerifyOrWriteContext, requests: int, length: int) -> Callable[[], None]:
    entries = requests * length
    plan, slots = make_plan(requests, length), paged_slots(entries)
    tokens = torch.arange(entries) % 128_000
    positions = torch.arange(length).repeat(requests)

    def launch() -> None:
        launch_canary_write_kernel(
            context=context,
            plan=plan,
            input_ids=tokens,
            positions=positions,
            out_cache_loc=slots,
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
            step=1,
        )

    return launch


def verify(requests: int, *, tracked: bool) -> Callable[[int], Callable[[], None]]:
    def prepare(amount: int) -> Callable[[], None]:
        length = amount // requests
        context = make_context(tracked=tracked)
        write_launch(context, requests, length)()
        reads = TableReads(
            page_table=paged_slots(requests * length).reshape(requests, length).int(),
            page_size=1,
            padding_row=-1,
            request_rows=torch.arange(requests),
            request_uids=torch.arange(requests),
            prefix_lens=torch.full((requests,), length),
            extend_lens=torch.zeros(requests, dtype=torch.int64),
            max_prefix_len=length,
        )

        def launch() -> None:
            launch_canary_table_verify_kernel(context=context, reads=reads, step=2)
            if context.violation_write_index.item() != 0:
                raise RuntimeError("kvcanary: the benchmark's own records do not verify")

        return launch

    return prepare


def fold(sources: int, bytes_per_slot: int) -> Callable[[int], Callable[[], None]]:
    """Seals slots of a fresh pool; an amount is a number of bytes."""

    def prepare(amount: int) -> Callable[[], None]:
        slots = amount // (sources * bytes_per_slot)
        strips = tuple(
            RealKvSource(
                tensor=torch.randint(0, 256, (slots + 1, bytes_per_slot), dtype=torch.uint8),
                page_size=1,
                num_bytes_per_token=bytes_per_slot,
                read_bytes=bytes_per_slot,
            )
            for _ in range(sources)
        )
        context = make_context(num_slots=slots + 1, sources=strips)
        plan, out_cache_loc = make_plan(1, slots), torch.arange(1, slots + 1)

        def launch() -> None:
            launch_canary_seal_kernel(
                context=context, plan=plan, out_cache_loc=out_cache_loc, step=1
            )

        return launch

    return prepare


def hash_chain(amount: int) -> Callable[[], None]:
    tokens = torch.arange(amount) % 128_000

    def launch() -> None:
        chain_hash(tokens)

    return launch


# ---- the table -----------------------------------------------------------------------------------

MEGA, GIGA = 1e6, 1e9
BATCHES = [(1, "1 request"), (64, "64 requests")]
LINES = [
    *(
        Line(
            f"{name}, {label}{suffix}",
            *("M records/s", MEGA, 1 << 17, 1 << 13),
            make(count, tracked=tracked),
        )
        for name, make in (("write", write), ("verify", verify))
        for tracked, suffix in ((False, ""), (True, ", tracked"))
        for count, label in BATCHES
    ),
    Line("fold, 64 x 2048 B a slot", "GB/s", GIGA, 1 << 26, 1 << 23, fold(64, 2048)),
    Line("fold, 61 x 584 B a slot", "GB/s", GIGA, 1 << 26, 1 << 23, fold(61, 584)),
    Line("fold, 64 x 132 B a slot", "GB/s", GIGA, 1 << 24, 1 << 22, fold(64, 132)),
    Line("chain_hash", "M tokens/s", MEGA, 1 << 18, 1 << 14, hash_chain),
]


def main() -> None:
    torch.set_num_threads(1)
    if load_kernels(CPU) != "cpu":
        raise SystemExit("kvcanary: no C++ compiler, so there is nothing to compare")
    print("| work | C++ | torch reference | unit | ratio |")
    print("| --- | ---: | ---: | --- | ---: |")
    for line in LINES:
        compiled = median_rate(line.prepare(line.amount), line.amount, COMPILED_RUNS)
        with use_torch_reference():
            reference = median_rate(
                line.prepare(line.reference_amount), line.reference_amount, REFERENCE_RUNS
            )
        print(
            f"| {line.name} | {compiled / line.scale:.1f} | {reference / line.scale:.3f} "
            f"| {line.unit} | {compiled / reference:.0f} |"
        )


if __name__ == "__main__":
    main()
