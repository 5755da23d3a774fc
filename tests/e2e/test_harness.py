"""The drill's server and traffic against the real engine, without the plugin."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from kvcanary_plugin.drill.metrics_client import MetricsSnapshot
from kvcanary_plugin.drill.server import PRESETS, ServerError, SGLangServer
from kvcanary_plugin.drill.traffic import (
    RequestError,
    TrafficSpec,
    fixed_prompts,
    generate,
    generate_all,
    run_traffic,
)
from tests.e2e.processes import live_processes, session_members
from tests.server_pool import END_SECONDS
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

PLAIN = replace(PRESETS["llama"], plugin=False)


def test_mixed_traffic_is_served_with_prefix_hits_and_aborts_and_without_failures(shared_server):
    server = shared_server(PLAIN)
    before = MetricsSnapshot.parse(server.metrics())

    result = run_traffic(server.url, TrafficSpec(conversations=40, seed=1, abort_share=0.2))

    assert result.failures == ()
    assert result.requests >= 40
    assert result.aborted >= 4
    assert result.cached_tokens > 0
    assert result.tokens == sum(len(output) for output in result.outputs.values())
    prompts = "sglang:prompt_tokens_total"

    def served() -> float:
        return MetricsSnapshot.parse(server.metrics()).total(prompts) - before.total(prompts)

    wait_until(lambda: served() >= result.prompt_tokens, "the prompts being counted")


def test_outputs_hang_on_the_first_token_of_a_long_prompt(shared_server):
    # Otherwise equal outputs would say nothing about the K/V cache behind them.
    url = shared_server(PLAIN).url
    prompts = [prompt[:40] for prompt in fixed_prompts(24) if len(prompt) >= 40]
    others = [(prompt[0] ^ 1, *prompt[1:]) for prompt in prompts]

    outputs = generate_all(url, prompts, max_new_tokens=24)
    changed = generate_all(url, others, max_new_tokens=24)

    differing = sum(a != b for a, b in zip(outputs, changed, strict=True))
    assert differing > len(prompts) // 2


def test_a_request_the_server_refuses_raises_with_the_servers_reason(shared_server):
    with pytest.raises(RequestError, match=r"status 400.*context length"):
        generate(shared_server(PLAIN).url, [3] * 4000, max_new_tokens=1)


def test_greedy_outputs_are_equal_on_two_servers_and_under_concurrency(shared_server, directories):
    guarded = replace(PRESETS["llama"], kvcanary_config=directories("llama") / "kvcanary.yaml")
    prompts = fixed_prompts(12)

    one_by_one = generate_all(shared_server(PLAIN).url, prompts, max_new_tokens=24)
    at_once = generate_all(shared_server(guarded).url, prompts, max_new_tokens=24, concurrency=6)

    assert at_once == one_by_one


def test_a_server_that_dies_by_itself_shows_its_status_and_fails_the_traffic(shared_server):
    server = shared_server(PLAIN)  # the last test of it
    leader = server._process.pid
    os.kill(leader, signal.SIGKILL)

    assert server.wait_for_exit(END_SECONDS) == -signal.SIGKILL
    result = run_traffic(server.url, TrafficSpec(conversations=2, abort_share=0.0))
    assert len(result.failures) == 2
    server.stop()
    assert session_members(leader) == []


def test_a_server_that_cannot_start_is_reported_with_the_end_of_its_log(tmp_path):
    spec = replace(PLAIN, flags=("--no-such-flag",))

    with pytest.raises(ServerError, match=r"(?s)ended with status 2 at start-up.*--no-such-flag"):
        SGLangServer(spec, log_path=tmp_path / "server.log").start()


def test_a_server_does_not_outlive_the_process_that_started_it(tmp_path):
    script = (
        "from pathlib import Path\n"
        "from kvcanary_plugin.drill.server import SGLangServer, ServerSpec\n"
        f"SGLangServer(ServerSpec(plugin=False), log_path=Path({str(tmp_path / 'log')!r})).start()"
    )
    starter = subprocess.Popen([sys.executable, "-c", script])

    def servers() -> list[int]:
        return [
            process
            for process, parent, _, command in live_processes()
            if parent == starter.pid and "sglang.launch_server" in command
        ]

    def watchdogs() -> list[int]:
        return [
            process
            for process, parent, _, command in live_processes()
            if parent == starter.pid and command.startswith("sh -c read")
        ]

    try:
        (server,) = wait_until(servers, "the start of a server")
        wait_until(watchdogs, "the start of its watchdog")
    finally:
        starter.kill()
        starter.wait()

    wait_until(lambda: not session_members(server), "the end of the server")
