"""What each check adds to a decode step: the whole monitor on a CPU pool, settings one by one.

    python -m benchmarks.steps

64 requests of 512 tokens, 2 x 8 strips of 256 bytes a slot. The engine's forward is left out; the
time is that of the canary's two halves, median of 60 steps.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from kvcanary_plugin.cache import KVCacheGroup, row_source
from kvcanary_plugin.config import CanaryConfig
from kvcanary_plugin.forward import ForwardKind, ForwardStep
from kvcanary_plugin.monitor import CanaryMonitor

REQUESTS, PREFIX, STRIPS, STRIP_BYTES, STEPS = 64, 512, 16, 256, 60
WIDTH = PREFIX + STEPS + 8
SLOTS = REQUESTS * WIDTH + 1

BARE: dict[str, Any] = {
    "seal": {"real_kv": "none"},
    "scrub": {"percent_of_step_time": 0},
    "reverify": {"sample": 0},
    "recorder": {"forwards": 0},
}
ALL_BYTES = {"seal": {"real_kv": "all"}}
SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("records and states: prepare, verify, write", BARE),
    ("+ seal, all bytes", BARE | ALL_BYTES),
    ("+ seal and verify, all bytes", BARE | ALL_BYTES | {"verify": {"real_kv": "all"}}),
    ("+ token check", BARE | {"checks": {"token": True}}),
    ("+ write-input assert", BARE | {"write_input_assert": True}),
    ("+ re-verify of every forward", BARE | {"reverify": {"sample": 1.0}}),
    ("+ flight recorder", BARE | {"recorder": {"forwards": 64}}),
    ("+ seal and a scrub of 1 %", BARE | ALL_BYTES | {"scrub": {"percent_of_step_time": 1.0}}),
    ("production settings", {}),
)


def main() -> None:
    print("| checks | us a step | over the first row |\n| --- | ---: | ---: |")
    first = None
    for name, settings in SETTINGS:
        median = statistics.median(step_times(CanaryConfig.model_validate(settings)))
        first = first or median
        print(f"| {name} | {median:.0f} | {median - first:+.0f} |")


def step_times(config: CanaryConfig) -> list[float]:
    """Microseconds of the canary's work in each decode step, warm-up left out."""
    table = torch.zeros((REQUESTS + 1, WIDTH), dtype=torch.int32)
    table[1:] = 1 + torch.arange(REQUESTS * WIDTH, dtype=torch.int32).reshape(REQUESTS, WIDTH)
    pools = [torch.zeros((SLOTS, STRIP_BYTES), dtype=torch.uint8) for _ in range(STRIPS)]
    group = KVCacheGroup(
        name="full",
        num_slots=SLOTS,
        page_table=table,
        page_size=1,
        padding_row=0,
        sources=tuple(row_source(pool) for pool in pools),
        table_stable_through_forward=True,
    )
    monitor = CanaryMonitor(
        config=config,
        groups=[group],
        max_requests=REQUESTS,
        raise_pending=lambda: None,
        on_error=_fail,
    )
    run_step(monitor, table, pools, number=1, prefix=0, extend=PREFIX)
    times = [
        run_step(monitor, table, pools, number=2 + done, prefix=PREFIX + done, extend=1)
        for done in range(STEPS)
    ]
    if int(monitor.sink.write_index[0]):
        raise SystemExit("the benchmark's own steps are not healthy")
    return times[10:]


def run_step(
    monitor: CanaryMonitor,
    table: torch.Tensor,
    pools: list[torch.Tensor],
    *,
    number: int,
    prefix: int,
    extend: int,
) -> float:
    """One forward of all requests; microseconds of the canary's two halves."""
    positions = torch.arange(prefix, prefix + extend).repeat(REQUESTS)
    lens = torch.full((REQUESTS,), prefix)
    step = ForwardStep(
        kind=ForwardKind.DECODE if extend == 1 else ForwardKind.PREFILL,
        step=number,
        request_rows=torch.arange(1, REQUESTS + 1),
        request_uids=torch.arange(1, REQUESTS + 1),
        prefix_lens=lens,
        extend_lens=torch.full((REQUESTS,), extend),
        max_prefix_len=prefix,
        input_ids=positions % 97,
        positions=positions,
        out_cache_loc=(table[1:, prefix : prefix + extend].reshape(-1).to(torch.int64),),
        host_prefix_lens=np.full(REQUESTS, prefix),
        host_extend_lens=np.full(REQUESTS, extend),
    )
    begin = time.perf_counter()
    monitor.before_forward(step)
    before = time.perf_counter() - begin
    for pool in pools:
        written = step.out_cache_loc[0]
        pool[written] = torch.randint(256, (written.shape[0], STRIP_BYTES), dtype=torch.uint8)
    begin = time.perf_counter()
    monitor.after_forward()
    return (before + time.perf_counter() - begin) * 1e6


def _fail(where: str, error: BaseException) -> None:
    raise SystemExit(f"the canary failed in {where}: {error}")


if __name__ == "__main__":
    main()
