"""Streams and threads, as far as they can be told apart on the emulated device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcanary_plugin.kernels import launch_canary_write_kernel
from tests.kernels import cuda_support, scenes

GLOBAL, THREAD_LOCAL = 0, 1


@pytest.fixture
def emulated() -> Any:
    kernels = cuda_support.emulated_kernels()
    if kernels is None:
        pytest.skip("needs a C++ compiler")
    return kernels


def in_threads(*works: Callable[[], None]) -> list[BaseException]:
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_two_engines_of_a_process_do_not_branch_off_from_each_others_stream(emulated: Any):
    """tvm-ffi lets go of the interpreter's lock: both are inside at once."""
    contexts = [scenes.make_context(num_slots=80) for _ in range(2)]

    def forwards(context: Any) -> None:
        for step in range(40):
            launch_canary_write_kernel(
                context=context,
                plan=scenes.make_write_plan(lengths=[40]),
                input_ids=torch.arange(40),
                positions=torch.arange(40),
                out_cache_loc=torch.arange(1, 41),
                enable_write_input_assert=False,
                expected_input_tokens=None,
                expected_input_positions=None,
                step=step,
                beside=True,
            )
            emulated.canary_join_writes(context.canary_buf)

    with cuda_support.emulation_runs_cpu_launches():
        works = [lambda context=context: forwards(context) for context in contexts]
        assert in_threads(*works) == []
    assert torch.equal(contexts[0].canary_buf, contexts[1].canary_buf)
    assert int(contexts[0].slot_run_counter) == 40 * 40


def test_a_thread_that_ignores_captures_is_alone_with_it(emulated: Any):
    seen = []
    assert emulated.canary_exchange_capture_mode(THREAD_LOCAL) == GLOBAL
    assert not in_threads(lambda: seen.append(emulated.canary_exchange_capture_mode(THREAD_LOCAL)))
    assert seen == [GLOBAL]
    assert emulated.canary_exchange_capture_mode(GLOBAL) == THREAD_LOCAL
