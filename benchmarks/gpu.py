"""Benchmark of the CUDA kernels: one group, one launch set, on one GPU.

    python -m benchmarks.gpu --out DIR [--sglang-kernels .../sglang/kernels] [--quick]

Times are medians of 20 replays of a CUDA graph, per launch; inputs rotate among several copies
where one copy would stay in the L2 cache. Host times are wall-clock times of the Python launchers.
With ``--sglang-kernels`` the kernels of SGLang's canary run beside ours in the same process.
Writes ``gpu.md`` and ``gpu.json`` to DIR and prints the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import kvcanary_plugin.kernels as kernels
from benchmarks.sglang_kernels import load_sglang_canary
from kvcanary_plugin.kernels import (
    RealKvHashMode,
    RealKvSource,
    SlotTable,
    TableReads,
    VerifyOrWriteContext,
    VerifyPlan,
    WritePlan,
)

REPLAYS = 20
Launch = Callable[[], None]
NONE, ALL = RealKvHashMode.NONE, RealKvHashMode.ALL


# ---- measuring -----------------------------------------------------------------------------------


def device_us(launches: Sequence[Launch], *, rounds: int = 1) -> float:
    """Device time of one of ``launches`` in µs; a graph holds all of them ``rounds`` times."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1000)
    return statistics.median(times) / (rounds * len(launches))


def host_us(launch: Launch, *, calls: int = 100) -> float:
    """Host time of one call in µs; the queue of the stream never fills up."""
    times = []
    for _ in range(REPLAYS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            launch()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times[1:])


def copy_bytes_per_s(gibibytes: int = 8) -> float:
    """Bytes read plus bytes written per second by a large copy on the device.

    Outside of a graph, where ``copy_`` is a kernel: as a node of one it would be left to the slower
    copy engine.
    """
    source = torch.empty(gibibytes << 27, dtype=torch.int64, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(REPLAYS):
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record()
        target.copy_(source)
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1e-3)
    return 2 * source.numel() * source.element_size() / statistics.median(times)


# ---- inputs --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests that hold ``prefix`` tokens each and extend by ``extend``, in shuffled pages."""

    requests: int
    prefix: int
    extend: int
    page_size: int = 1

    @property
    def pages(self) -> int:
        return -(-(self.prefix + self.extend) // self.page_size)

    @property
    def num_slots(self) -> int:
        return (self.requests * self.pages + 1) * self.page_size

    def page_table(self) -> torch.Tensor:
        pages = torch.randperm(self.requests * self.pages, device="cuda", dtype=torch.int32) + 1
        return pages.view(self.requests, self.pages)

    def slots(self, table: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        position = torch.arange(begin, end, device="cuda")
        page = table[:, position // self.page_size].long()
        return (page * self.page_size + position % self.page_size).flatten()


@dataclasses.dataclass(frozen=True)
class Pool:
    """One group with written and sealed records, and one forward over it."""

    context: VerifyOrWriteContext
    reads: TableReads
    plan: WritePlan
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    scrub_slots: torch.Tensor
    scrub_count: torch.Tensor

    def seen_by(self, mode: RealKvHashMode, *, slot_table: bool = True) -> Pool:
        """The same pool in a launch of another mode, or without its slot table."""
        table = self.context.slot_table if slot_table else None
        context = dataclasses.replace(self.context, real_kv_hash_mode=mode, slot_table=table)
        return dataclasses.replace(self, context=context)

    def prepare(self, step: int = 9) -> None:
        kernels.launch_canary_prepare_kernel(
            context=self.context,
            reads=self.reads,
            write_plan_out=self.plan,
            out_cache_loc=self.out_cache_loc,
            step=step,
        )

    def verify(self, step: int = 9) -> None:
        kernels.launch_canary_table_verify_kernel(context=self.context, reads=self.reads, step=step)

    def write(self, step: int = 9) -> None:
        kernels.launch_canary_write_kernel(
            context=self.context,
            plan=self.plan,
            input_ids=self.input_ids,
            positions=self.positions,
            out_cache_loc=self.out_cache_loc,
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
            step=step,
        )

    def seal(self, step: int = 9) -> None:
        kernels.launch_canary_seal_kernel(
            context=self.context, plan=self.plan, out_cache_loc=self.out_cache_loc, step=step
        )

    def scrub(self, step: int = 9) -> None:
        kernels.launch_canary_scrub_kernel(
            context=self.context, slots=self.scrub_slots, num_valid=self.scrub_count, step=step
        )

    def assert_clean(self) -> None:
        torch.cuda.synchronize()
        found = int(self.context.violation_write_index)
        assert found == 0, f"{found} violations: {self.context.violation_ring[:3].tolist()}"


def random_sources(num_slots: int, num_bytes: int, count: int) -> tuple[RealKvSource, ...]:
    return tuple(
        RealKvSource(
            tensor=torch.empty((num_slots, num_bytes), dtype=torch.uint8, device="cuda").random_(
                0, 256
            ),
            page_size=1,
            num_bytes_per_token=num_bytes,
            read_bytes=num_bytes,
        )
        for _ in range(count)
    )


def make_pool(batch: Batch, sources: tuple[RealKvSource, ...] = ()) -> Pool:
    """A pool whose prefixes were written and sealed by our own launches in step 1."""
    cuda = torch.device("cuda")
    context = VerifyOrWriteContext(
        canary_buf=kernels.allocate_records(num_slots=batch.num_slots, device=cuda),
        kernel_kind=0,
        violation_ring=torch.zeros((4096, 16), dtype=torch.int64).pin_memory(),
        violation_write_index=torch.zeros(1, dtype=torch.int32, device=cuda),
        slot_run_counter=torch.zeros(1, dtype=torch.int64, device=cuda),
        kernel_run_counter=torch.zeros(1, dtype=torch.int64, device=cuda),
        real_kv_sources=sources,
        real_kv_hash_mode=ALL,
        enable_chain_position_assert=torch.zeros(1, dtype=torch.int32, device=cuda),
        slot_table=SlotTable.allocate(
            num_slots=batch.num_slots, device=cuda, tracks_allocation=False
        ),
        counter_mirror=torch.zeros(2, dtype=torch.int64).pin_memory(),
    )
    table = batch.page_table()

    def forward(begin: int, end: int) -> Pool:
        count = end - begin
        slots = batch.slots(table, begin, end)
        entries = max(batch.requests * count, 1)
        reads = TableReads(
            page_table=table,
            page_size=batch.page_size,
            padding_row=-1,
            request_rows=torch.arange(batch.requests, device=cuda),
            request_uids=torch.arange(batch.requests, device=cuda),
            prefix_lens=torch.full((batch.requests,), begin, device=cuda),
            extend_lens=torch.full((batch.requests,), count, device=cuda),
            max_prefix_len=begin,
        )
        positions = torch.arange(begin, end, device=cuda).repeat(batch.requests)
        prefix_slots = batch.slots(table, 0, batch.prefix) if batch.prefix else slots
        return Pool(
            context=context,
            reads=reads,
            plan=WritePlan.allocate(write_req_capacity=batch.requests, device=cuda),
            input_ids=torch.randint(0, 100_000, (entries,), device=cuda)[: positions.numel()],
            positions=positions,
            out_cache_loc=slots,
            scrub_slots=prefix_slots,
            scrub_count=torch.tensor([prefix_slots.numel()], dtype=torch.int32, device=cuda),
        )

    if batch.prefix:
        first = forward(0, batch.prefix)
        first.prepare(step=1)
        first.seen_by(NONE).write(step=1)
        first.seal(step=1)
    pool = forward(batch.prefix, batch.prefix + batch.extend)
    pool.prepare()
    return pool


def rotating(batch: Batch, sources: tuple[RealKvSource, ...] = ()) -> list[Pool]:
    """As many pools as it takes to leave the L2 cache between two launches on one of them."""
    cache = 2 * torch.cuda.get_device_properties(0).L2_cache_size
    copies = min(4, 1 + cache // max(batch.num_slots * kernels.RECORD_BYTES, 1 << 20))
    return [make_pool(batch, sources) for _ in range(copies)]


# ---- the built-in canary beside it ---------------------------------------------------------------


class SglangPool:
    """The same batch for SGLang's kernels: its own records, plans and forms of the inputs."""

    def __init__(self, api: Any, pool: Pool, batch: Batch, mode: RealKvHashMode) -> None:
        cuda = torch.device("cuda")
        self._api = api
        self._pool = pool
        self._context = api.VerifyOrWriteContext(
            canary_buf=torch.zeros_like(pool.context.canary_buf),
            kernel_kind=0,
            violation_ring=torch.zeros(
                (4096, api.consts.VIOLATION_FIELDS), dtype=torch.int64, device=cuda
            ),
            violation_write_index=torch.zeros(1, dtype=torch.int32, device=cuda),
            slot_run_counter=torch.zeros(1, dtype=torch.int64, device=cuda),
            kernel_run_counter=torch.zeros(1, dtype=torch.int64, device=cuda),
            real_kv_sources=tuple(
                api.RealKvSource(
                    tensor=source.tensor,
                    page_size=source.page_size,
                    num_bytes_per_token=source.num_bytes_per_token,
                    read_bytes=source.read_bytes,
                )
                for source in pool.context.real_kv_sources
            ),
            real_kv_hash_mode=api.consts.RealKvHashMode(int(mode)),
            enable_chain_position_assert=torch.zeros(1, dtype=torch.int32, device=cuda),
        )
        self._verify_plan = api.VerifyPlan.allocate(
            verify_capacity=max(batch.requests * batch.prefix, 1), device=cuda
        )
        self._write_plan = api.WritePlan.allocate(write_req_capacity=batch.requests, device=cuda)
        # Row 0 of the request table is padding there.
        padding = torch.zeros((1, batch.pages), dtype=torch.int32, device=cuda)
        self._table = torch.cat([padding, pool.reads.page_table])
        self._rows = pool.reads.request_rows + 1
        if batch.prefix:
            slots = batch.slots(pool.reads.page_table, 0, batch.prefix)
            none = torch.zeros_like(pool.reads.prefix_lens)
            self._plan(none, pool.reads.prefix_lens)
            positions = torch.arange(batch.prefix, device=cuda).repeat(batch.requests)
            self._write(torch.randint_like(positions, 100_000), positions, slots)
        self.plan()

    def plan(self) -> None:
        self._plan(self._pool.reads.prefix_lens, self._pool.reads.extend_lens)

    def verify(self) -> None:
        self._api.verify(
            context=self._context, plan=self._verify_plan, check_verify_expected_token=False
        )

    def write(self) -> None:
        self._write(self._pool.input_ids, self._pool.positions, self._pool.out_cache_loc)

    def assert_clean(self) -> None:
        torch.cuda.synchronize()
        assert int(self._context.violation_write_index) == 0

    def _plan(self, prefix_lens: torch.Tensor, extend_lens: torch.Tensor) -> None:
        self._api.plan(
            verify_plan_out=self._verify_plan,
            write_plan_out=self._write_plan,
            req_pool_indices=self._rows,
            prefix_lens=prefix_lens,
            extend_seq_lens=extend_lens,
            req_to_token=self._table,
            swa_window_size=0,
            full_to_swa_index_mapping=None,
            verify_capacity=self._verify_plan.verify_slot_indices.numel(),
            req_to_verify_expected_tokens=None,
            req_to_verify_expected_tokens_valid_lens=None,
            kv_token_id_vs_position_offset=0,
        )

    def _write(self, input_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        self._api.write(
            context=self._context,
            plan=self._write_plan,
            input_ids=input_ids,
            positions=positions,
            out_cache_loc=slots,
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )


# ---- the table -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line: times in µs, bytes that the launch must read at least, and what is aimed for."""

    work: str
    ours: float
    sglang: float | None = None
    bytes_read: int = 0
    target: str = ""

    def cells(self, ceiling: float) -> list[str]:
        rate = self.bytes_read / (self.ours * 1e-6)
        return [
            self.work,
            f"{self.ours:.1f}",
            "" if self.sglang is None else f"{self.sglang:.1f}",
            "" if self.sglang is None else f"{self.sglang / self.ours:.2f}x",
            f"{rate / 1e12:.2f} TB/s, {rate / ceiling:.0%}" if self.bytes_read else "",
            self.target,
        ]


class Benchmark:
    """Runs the cases one after the other; each frees its memory before the next."""

    def __init__(self, api: Any | None, *, quick: bool) -> None:
        self._api = api
        self._quick = quick
        self.rows: list[Row] = []

    def run(self) -> None:
        for case in (
            self._writes,
            self._verifies,
            self._verify_with_bytes,
            self._folds,
            self._decode_seals,
            self._production_step,
            self._sweep,
        ):
            case()
            torch.cuda.empty_cache()

    def _add(self, **fields: Any) -> None:
        row = Row(**fields)
        self.rows.append(row)
        print(f"{row.work}: {row.ours:.1f} us, SGLang {row.sglang}", flush=True)

    def _beside(
        self, pools: list[Pool], batch: Batch, mode: RealKvHashMode, *names: str, rounds: int = 1
    ) -> float | None:
        """Time of SGLang's launches ``names``, one after the other."""
        if self._api is None:
            return None
        others = [SglangPool(self._api, pool, batch, mode) for pool in pools]
        total = sum(
            device_us([getattr(other, name) for other in others], rounds=rounds) for name in names
        )
        for other in others:
            other.assert_clean()
        return total

    def _writes(self) -> None:
        for tokens, target in ((4096, "<= 480 us, >= 2.2x"), (16384, ">= 2.2x")):
            batch = Batch(1, 0, tokens)
            pools = [make_pool(batch).seen_by(NONE) for _ in range(2)]
            self._add(
                work=f"write, prefill 1 x {tokens}",
                ours=device_us([pool.write for pool in pools]),
                sglang=self._beside(pools, batch, NONE, "write"),
                target=target,
            )
        batch = Batch(1, 0, 4096)
        pools = [make_pool(batch, random_sources(batch.num_slots, 2048, 1))]
        (pool,) = pools
        write_only = pool.seen_by(NONE)
        self._add(
            work="write + seal, prefill 1 x 4096, 2048 B a token",
            ours=device_us([write_only.write]) + device_us([pool.seal], rounds=4),
            sglang=self._beside(pools, batch, ALL, "write"),
            target=">= 80x",
        )
        batch = Batch(256, 64, 1)
        pools = rotating(batch)
        self._add(
            work="write, decode 256 x 1",
            ours=device_us([pool.seen_by(NONE).write for pool in pools], rounds=8),
            sglang=self._beside(pools, batch, NONE, "write", rounds=8),
            target="not slower",
        )
        self._add(
            work="prepare, decode 256 x 1",
            ours=device_us([pool.prepare for pool in pools], rounds=8),
        )

    def _verifies(self) -> None:
        for requests, prefix, target in ((256, 4096, ">= 2.9x"), (128, 10240, ">= 3.2x")):
            batch = Batch(requests, prefix, 1)
            pools = rotating(batch)
            bare = [pool.seen_by(NONE, slot_table=False) for pool in pools]
            work = f"verify, decode {requests} x {prefix}"
            self._add(
                work=f"{work}, records (SGLang: plan + verify)",
                ours=device_us([pool.verify for pool in bare], rounds=4),
                sglang=self._beside(bare, batch, NONE, "plan", "verify", rounds=2),
                bytes_read=requests * prefix * 36,
                target=target,
            )
            self._add(
                work=f"{work}, records and slot table",
                ours=device_us([pool.seen_by(NONE).verify for pool in pools], rounds=4),
                bytes_read=requests * prefix * 48,
            )
            plan = _materialised_plan(bare[0], batch)
            self._add(
                work=f"plan kernel, {requests} x {prefix}", ours=device_us([plan[0]], rounds=4)
            )
            self._add(
                work=f"verify of that plan, {requests} x {prefix}",
                ours=device_us([plan[1]], rounds=4),
            )
            for pool in pools:
                pool.assert_clean()
        batch = Batch(256, 4096, 1, page_size=16)
        pools = rotating(batch)
        self._add(
            work="verify, decode 256 x 4096, pages of 16, records and slot table",
            ours=device_us([pool.seen_by(NONE).verify for pool in pools], rounds=4),
            bytes_read=256 * 4096 * 48,
        )

    def _verify_with_bytes(self) -> None:
        batch = Batch(256, 4096, 1)
        pools = [make_pool(batch, random_sources(batch.num_slots, 2048, 1))]
        self._add(
            work="verify + 2048 B of real KV, 256 x 4096 (SGLang: plan + verify)",
            ours=device_us([pools[0].verify]),
            sglang=self._beside(pools, batch, ALL, "plan", "verify"),
            bytes_read=256 * 4096 * 2048,
            target=">= 4.5x",
        )
        pools[0].assert_clean()

    def _folds(self) -> None:
        for slots, target in ((4096, ">= 85 % of copy"), (16384, ">= 90 % of copy")):
            batch = Batch(slots // 1024, 1024, 1)
            pool = make_pool(batch, random_sources(batch.num_slots, 2048, 64))
            self._add(
                work=f"scrub, {slots} slots x 64 sources x 2048 B",
                ours=device_us([pool.scrub], rounds=2),
                bytes_read=slots * 64 * 2048,
                target=target,
            )
            pool.assert_clean()
            del pool
            torch.cuda.empty_cache()
        shapes = ((256, 64), (128, 64), (584, 61), (656, 61), (1152, 61), (132, 61))
        for num_bytes, count in shapes[: 2 if self._quick else None]:
            batch = Batch(16, 1024, 1)
            pool = make_pool(batch, random_sources(batch.num_slots, num_bytes, count))
            self._add(
                work=f"scrub, 16384 slots x {count} sources x {num_bytes} B",
                ours=device_us([pool.scrub], rounds=4),
                bytes_read=16384 * count * num_bytes,
            )
            pool.assert_clean()

    def _decode_seals(self) -> None:
        for requests in (1, 64, 256):
            batch = Batch(requests, 16, 1)
            pool = make_pool(batch, random_sources(batch.num_slots, 2048, 64))
            self._add(
                work=f"seal, decode {requests} x 1, 64 sources x 2048 B",
                ours=device_us([pool.seal], rounds=8),
                bytes_read=requests * 64 * 2048,
            )

    def _production_step(self) -> None:
        batch = Batch(64, 1024, 1)
        pool = make_pool(batch, random_sources(batch.num_slots, 2048, 64))
        records = pool.seen_by(NONE)
        few = dataclasses.replace(
            pool, scrub_slots=pool.scrub_slots[:64], scrub_count=pool.scrub_count.clamp(max=64)
        )
        launches = (pool.prepare, records.verify, records.write, pool.seal, few.scrub)

        def step() -> None:
            for launch in launches:
                launch()

        names = ("prepare", "verify", "write", "seal", "scrub")
        for launch, name in zip(launches, names, strict=True):
            self._add(work=f"host: {name}", ours=host_us(launch), target="<= 6 us")
        self._add(work="host: a step (5 launches)", ours=host_us(step), target="<= 40 us")
        one = torch.zeros(1, device="cuda")
        self._add(
            work="host: one in-place add by torch, to compare", ours=host_us(lambda: one.add_(1))
        )
        self._add(
            work="device: a step, 64 x 1024, 64 sources, 64 slots scrubbed",
            ours=device_us([step], rounds=4),
        )
        pool.assert_clean()

    def _sweep(self) -> None:
        prefixes = (1024,) if self._quick else (0, 1024, 16384, 131072)
        for prefix in prefixes:
            for requests in (1, 16, 256, 1024):
                if requests * prefix > 1 << 22:
                    continue
                for page_size in (1, 16):
                    batch = Batch(requests, prefix, 1, page_size)
                    pools = [pool.seen_by(NONE) for pool in rotating(batch)]
                    shape = f"{requests} x {prefix}, pages of {page_size}"
                    self._add(
                        work=f"sweep: verify, {shape}",
                        ours=device_us([pool.verify for pool in pools], rounds=4),
                        bytes_read=requests * prefix * 48,
                    )
                    self._add(
                        work=f"sweep: write, {shape}",
                        ours=device_us([pool.write for pool in pools], rounds=4),
                    )


def _materialised_plan(pool: Pool, batch: Batch) -> tuple[Launch, Launch]:
    """The plan launch over the batch, and the verify launch over what it fills."""
    reads = pool.reads
    capacity = max(batch.requests * batch.prefix, 1)
    verify_plan = VerifyPlan.allocate(verify_capacity=capacity, device="cuda")

    def plan() -> None:
        kernels.launch_canary_plan_kernels(
            verify_plan_out=verify_plan,
            write_plan_out=pool.plan,
            req_pool_indices=reads.request_rows,
            prefix_lens=reads.prefix_lens,
            extend_seq_lens=reads.extend_lens,
            req_to_token=reads.page_table,
            swa_window_size=0,
            full_to_swa_index_mapping=None,
            verify_capacity=capacity,
            padding_row=-1,
            page_size=batch.page_size,
        )

    def verify() -> None:
        kernels.launch_canary_verify_kernel(
            context=pool.context, plan=verify_plan, check_verify_expected_token=False
        )

    plan()
    return plan, verify


def as_markdown(rows: Sequence[Row], ceiling: float) -> str:
    head = ["work", "us", "SGLang us", "ratio", "read rate, share of copy", "target"]
    lines = [head, ["---"] * len(head), *(row.cells(ceiling) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for gpu.md and gpu.json")
    parser.add_argument("--sglang-kernels", type=Path, help="the folder sglang/kernels")
    parser.add_argument("--quick", action="store_true", help="leave out most of the sweep")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    api = None
    if arguments.sglang_kernels is not None:
        api = load_sglang_canary(arguments.sglang_kernels)
    ceiling = copy_bytes_per_s()
    benchmark = Benchmark(api, quick=arguments.quick)
    try:
        benchmark.run()
    finally:  # what was measured before a failure is worth keeping
        arguments.out.mkdir(parents=True, exist_ok=True)
        device = torch.cuda.get_device_name()
        table = as_markdown(benchmark.rows, ceiling)
        report = f"{device}, copy ceiling {ceiling / 1e12:.2f} TB/s\n\n{table}\n"
        (arguments.out / "gpu.md").write_text(report)
        (arguments.out / "gpu.json").write_text(
            json.dumps(
                {
                    "device": device,
                    "copy_bytes_per_s": ceiling,
                    "rows": [dataclasses.asdict(row) for row in benchmark.rows],
                },
                indent=1,
            )
        )
        print(report)


if __name__ == "__main__":
    main()
