"""The canary in a real vLLM server: silence on healthy traffic, a report for every fault."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kvcanary_plugin.drill.dialect import VLLM
from kvcanary_plugin.drill.drill import (
    FULL_CASES,
    SWA_CASES,
    TABLE_CASES,
    Drill,
    DrillResult,
    FaultCase,
    write_drill_config,
)
from kvcanary_plugin.drill.http_client import post
from kvcanary_plugin.drill.metrics_client import MetricsSnapshot
from kvcanary_plugin.drill.server import MODELS_DIRECTORY, ServerError
from kvcanary_plugin.drill.settled import settled
from kvcanary_plugin.drill.soak import run_soak
from kvcanary_plugin.drill.traffic import (
    REQUEST_TIMEOUT_SECONDS,
    RequestError,
    TrafficSpec,
    fixed_prompts,
    generate,
    generate_all,
    run_traffic,
)
from kvcanary_plugin.drill.vllm_server import PRESETS, VLLMServer, VLLMServerSpec
from kvcanary_plugin.drill.weights import write_adapter, write_model
from kvcanary_plugin.metrics import (
    CONFIG_RELOADS,
    EXTERNAL_SLOTS,
    FORWARDS,
    GROUP_STATE,
    SLOTS_SEALED,
    SLOTS_VERIFIED,
    SLOTS_WRITTEN,
    VIOLATIONS,
)
from tests.deploy.alerting import assert_that_only_a_fault_fires
from tests.deploy.prometheus_harness import SKIP_REASON, Prometheus, is_installed
from tests.server_pool import END_SECONDS
from tests.waiting import replace_text, wait_until

pytestmark = pytest.mark.e2e

Directories = Callable[[str], Path]
# Forwards of healthy traffic, and conversations in a round of it; Triton's interpreter takes a
# hundred times as long as a compiled V1.
HEALTHY = {
    "llama": (400, 96),
    "gemma3": (400, 96),
    "mla": (200, 96),
    "pressure": (300, 96),
    "v2-gemma3": (60, 16),
    "v2-llama": (60, 16),
}
GROUPS = {"gemma3": ("full", "swa"), "v2-gemma3": ("full", "swa"), "mla": ("mla",)}
SOAK = pytest.mark.soak  # what another server here shows as well


@pytest.fixture(scope="session", autouse=True)
def _require_vllm() -> None:
    if importlib.util.find_spec("vllm") is not None:
        return
    reason = "vllm is not installed; `make venv-vllm` builds an environment that has it"
    if os.environ.get("REQUIRE_VLLM"):
        pytest.fail(reason)
    pytest.skip(reason)


def guarded(name: str, directories: Directories) -> VLLMServerSpec:
    """A preset under the canary, with the settings of a drill."""
    directory = directories(name)
    path = directory / "kvcanary.yaml"
    if not path.exists():
        write_drill_config(directory)
    return replace(PRESETS[name], kvcanary_config=path)


def snapshot(server: VLLMServer) -> MetricsSnapshot:
    return settled(server.metrics)


def assert_reported(result: DrillResult) -> None:
    assert result.planted, f"{result.case.title}: found no target"
    assert result.detected, result
    assert result.report is not None
    assert result.report["slot"] == result.planted["slot"]
    assert result.report["request_id"]
    assert result.steps_until_seen == 0


def change_while_serving(server: VLLMServer, settings: Path, text: str) -> None:
    """Change the settings file and wait until the server has taken it over."""
    taken_over = snapshot(server).total(CONFIG_RELOADS, result="ok")
    replace_text(settings, text)
    wait_until(
        lambda: snapshot(server).total(CONFIG_RELOADS, result="ok") > taken_over,
        "the change being taken over",
    )


# What production checks in every forward. Then a forward is looked at when it is launched.
NOTHING_THAT_A_FORWARD_CHANGES: dict[str, object] = {
    "write_input_assert": False,
    "checks": {"token": False},
    "verify": {"real_kv": "none"},
    "reverify": {"sample": 0},
}
SEEN_LATER = tuple(
    case
    for case in (*FULL_CASES, *TABLE_CASES)
    if case.fault in ("swap_table", "drop_write", "break_chain", "null_entry", "other_identity")
)


# Ordered by server, which takes longer to start than its tests to run.


@pytest.mark.skipif(not is_installed(), reason=SKIP_REASON)
def test_healthy_traffic_fires_nothing_and_a_planted_fault_fires_the_violation_alert(
    shared_server, directories, tmp_path
):
    server = shared_server(guarded("llama", directories))
    with Prometheus([f"{server.url}/metrics"], directory=tmp_path, job="vllm") as prometheus:
        assert_that_only_a_fault_fires(server, prometheus, directories("llama"), engine="vllm")


def test_tenants_with_salts_of_their_own_share_nothing_and_alarm_nothing(
    shared_server, directories
):
    server = shared_server(guarded("llama", directories))
    before = snapshot(server)
    prompt = tuple(range(10, 110))
    cached = []
    for salt in (None, "a", "b", "a"):
        payload = VLLM.payload(prompt, 4, None) | ({"cache_salt": salt} if salt else {})
        status, text = post(
            server.url, VLLM.generate_path, payload, timeout=REQUEST_TIMEOUT_SECONDS
        )
        assert status == 200
        cached.append(VLLM.completion(json.loads(text)).cached_tokens)
    assert cached[:3] == [0, 0, 0]
    assert cached[3] > 0
    after = snapshot(server)
    assert after.total(VIOLATIONS) == before.total(VIOLATIONS)
    assert after.total(FORWARDS) == after.total(FORWARDS, result="checked")


def test_mode_abort_ends_the_request_that_was_hit_and_the_server_lives_on(
    shared_server, directories
):
    server = shared_server(guarded("llama", directories))
    prompts = fixed_prompts(2, seed=9)
    settings = directories("llama") / "kvcanary.yaml"
    in_mode_log = settings.read_text()
    change_while_serving(server, settings, in_mode_log.replace("mode: log", "mode: abort"))
    drill = Drill(server, settings.parent)
    drill._ask_for(FULL_CASES[1])
    with pytest.raises(RequestError, match="status 500"):
        generate(server.url, prompts[0], max_new_tokens=800, dialect=VLLM)
    assert "its KV cache is corrupted" in server.log()
    drill._flush_cache()
    for prompt in prompts:
        assert len(generate(server.url, prompt, max_new_tokens=8, dialect=VLLM).output) == 8
    assert server.exit_status is None
    change_while_serving(server, settings, in_mode_log)


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3", "mla", "pressure", "v2-gemma3", pytest.param("v2-llama", marks=SOAK)],
    scope="class",
)
class TestServer:
    """One server a preset, for all tests of it."""

    def test_healthy_traffic_is_silent_and_every_forward_checked(
        self, name, shared_server, directories
    ):
        server = shared_server(guarded(name, directories))
        forwards, conversations = HEALTHY[name]
        result = run_soak(server, forwards=forwards, conversations=conversations, seed=7)
        assert result.passed, result.as_text() + "\n" + server.log()[-3000:]
        assert result.slots_verified > 20 * forwards
        assert result.cached_tokens > 0 or name == "mla"
        after = snapshot(server)
        assert after.total(SLOTS_WRITTEN) == after.total(SLOTS_SEALED)
        for group in GROUPS.get(name, ("full",)):
            assert after.total(GROUP_STATE, group=group, state="guarded") == 1
        assert re.search(r"INFO .*kvcanary: guarding group", server.log())

    def test_every_fault_is_reported_at_its_slot(self, name, shared_server, directories):
        if name == "pressure":
            pytest.skip("what llama shows of faults holds here as well")
        server = shared_server(guarded(name, directories))
        cases = FULL_CASES + (SWA_CASES if "gemma3" in name else ())
        cases += TABLE_CASES if name == "llama" else ()
        if name == "mla":
            cases = tuple(replace(case, group="mla") for case in cases)
        for result in Drill(server, directories(name)).run(cases):
            assert_reported(result)
            assert result.report is not None
            assert result.report["group"] == result.case.group

    def test_one_byte_is_real_kv_of_that_request_at_that_position(
        self, name, shared_server, directories
    ):
        server = shared_server(guarded(name, directories))
        case = FaultCase(
            title="V, last layer",
            fault="flip_kv",
            checks=("real_kv",),
            group=GROUPS.get(name, ("full",))[0],
            source=-1,
        )
        (result,) = Drill(server, directories(name)).run([case])
        assert result.report is not None
        assert result.report["checks"] == ["real_kv"]
        for field in ("slot", "position", "request_uid"):
            assert result.report[field] == result.planted[field]
        assert result.steps_until_seen == 0
        assert set(result.counted) == {"real_kv"}

    def test_requests_that_are_preempted_or_have_drafts_rejected_are_silent(
        self, name, shared_server, directories
    ):
        if name != "pressure":
            pytest.skip("a pool that is large enough, and no drafts")
        server = shared_server(guarded(name, directories))
        before = snapshot(server)
        # Eight that run need more blocks than there are on average already, and others always wait
        # for a place: they outgrow the pool however they arrive.
        spec = TrafficSpec(
            seed=5,
            conversations=24,
            concurrency=24,
            burst=24,
            prompt_tokens=(60, 100),
            long_prompt_share=0,
            output_tokens=(160, 200),
            multi_turn_share=0,
            abort_share=0.1,
        )
        result = run_traffic(server.url, spec, dialect=VLLM)
        assert not result.failures
        after = snapshot(server)
        preemptions = "vllm:num_preemptions_total"
        assert after.total(preemptions) > before.total(preemptions)
        drafts, accepted = (
            after.total(f"vllm:spec_decode_num_{what}_tokens_total")
            for what in ("draft", "accepted")
        )
        assert 0 < accepted < drafts
        assert after.total(VIOLATIONS) == before.total(VIOLATIONS)
        assert after.total(FORWARDS) == after.total(FORWARDS, result="checked")

    def test_the_canary_does_not_change_one_token(self, name, shared_server, directories):
        if name in ("gemma3", "mla", "pressure"):
            pytest.skip("what llama and v2-gemma3 show holds here as well")
        prompts = fixed_prompts(8 if PRESETS[name].runner == "v1" else 4, seed=3)
        # Once without the plugin, once with one that nobody asked to guard anything.
        without = replace(PRESETS[name], plugin=name == "v2-gemma3")
        outputs = []
        for spec in (guarded(name, directories), without):
            server = shared_server(spec)
            outputs.append(generate_all(server.url, prompts, max_new_tokens=24, dialect=VLLM))
        assert outputs[0] == outputs[1]
        assert "kvcanary_" not in server.metrics()

    def test_mode_raise_ends_the_server_with_the_report(self, name, shared_server, directories):
        if name != "llama":
            pytest.skip("what llama shows holds here as well")
        server = shared_server(guarded(name, directories))
        settings = directories(name) / "kvcanary.yaml"
        in_mode_log = settings.read_text()
        change_while_serving(server, settings, in_mode_log.replace("mode: log", "mode: raise"))
        Drill(server, settings.parent)._ask_for(FULL_CASES[1])
        with pytest.raises(RequestError):
            generate(server.url, fixed_prompts(1)[0], max_new_tokens=800, dialect=VLLM)
        # With status 0: to vLLM's server an engine that has died is a reason to end like any other.
        server.wait_for_exit(END_SECONDS)
        assert "kvcanary: real_kv violation" in server.log()
        settings.write_text(in_mode_log)


def test_faults_are_seen_where_a_forward_is_looked_at_when_it_is_launched(
    shared_server, tmp_path_factory
):
    directory = tmp_path_factory.mktemp("later")
    config = write_drill_config(directory, **NOTHING_THAT_A_FORWARD_CHANGES)
    server = shared_server(replace(PRESETS["llama"], kvcanary_config=config))
    result = run_soak(server, forwards=HEALTHY["llama"][0], conversations=96, seed=3)
    assert result.passed, result.as_text() + "\n" + server.log()[-3000:]
    for seen in Drill(server, directory).run(SEEN_LATER, with_twins=True):
        assert_reported(seen)
        assert seen.false_alarms == 0


def saving_to(storage: Path, *, several: bool) -> tuple[str, ...]:
    """Flags for vLLM's example connector, which keeps the K/V of whole prompts in files."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    several_connectors = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [example]},
    }
    chosen = json.dumps(several_connectors if several else example)
    # It stores what the first chunk of a prompt has, and loads all of it.
    return ("--kv-transfer-config", chosen, "--max-num-batched-tokens", "256")


@pytest.mark.parametrize("name", ["llama", pytest.param("v2-llama", marks=SOAK)])
def test_what_a_connector_loads_is_adopted_and_guarded_from_then_on(
    name, shared_server, tmp_path_factory
):
    directory = tmp_path_factory.mktemp("connector")
    # The settings travel in another way than elsewhere: inside vLLM's own.
    labels = {"labels": {"pool": "blue"}}
    settings = yaml.safe_load(write_drill_config(directory, metrics=labels).read_text())
    flags = ("--additional-config", json.dumps({"kvcanary": settings}))
    flags += saving_to(directory / "stored", several=name == "llama")
    server = shared_server(replace(PRESETS[name], flags=flags))
    prompts = [tuple(range(10, 80)) + (number,) * 50 for number in range(80, 84)]
    drill, outputs = Drill(server, directory), []
    for _ in range(2):  # saved, then loaded, a part of each behind tokens that are in the cache
        outputs.append(generate_all(server.url, prompts, max_new_tokens=8, dialect=VLLM))
        drill._flush_cache()
    assert outputs[0] == outputs[1]
    assert "External Cache Hit!" in server.log()
    time.sleep(1.1)  # the gauge is counted once a second, when a forward runs
    generate_all(server.url, [(5, 6, 7)], max_new_tokens=2, dialect=VLLM)
    after = snapshot(server)
    assert after.total(SLOTS_VERIFIED, pool="blue") > 0
    assert after.total(EXTERNAL_SLOTS) > 0
    assert after.total(VIOLATIONS) == 0
    assert after.total(FORWARDS) == after.total(FORWARDS, result="checked")
    case = FaultCase(title="V, last layer", fault="flip_kv", checks=("real_kv",), source=-1)
    (result,) = drill.run([case])
    assert_reported(result)


@pytest.fixture(scope="session")
def two_by_two(directories: Directories) -> VLLMServerSpec:
    """Two API servers, two tensor-parallel ranks, two adapters."""
    spec = guarded("two-by-two", directories)
    model = MODELS_DIRECTORY / spec.model
    adapters = [
        f"{name}={write_adapter(model, directories(f'adapter-{name}'), seed)}"
        for seed, name in enumerate(("x", "y"))
    ]
    lora = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules")
    return replace(spec, flags=(*spec.flags, *lora, *adapters))


def test_two_api_servers_both_show_the_metrics_of_two_ranks(shared_server, two_by_two):
    server = shared_server(two_by_two)
    result = run_soak(server, forwards=20, conversations=16, seed=1)
    assert result.passed, result.as_text()
    # Which of the two answers is up to the kernel.
    seen = {
        tuple(after.total(SLOTS_VERIFIED, tp_rank=rank) for rank in ("0", "1"))
        for after in (snapshot(server) for _ in range(8))
    }
    ((first, second),) = seen
    assert first == second > 0


def test_adapters_share_nothing_and_alarm_nothing(shared_server, two_by_two):
    server = shared_server(two_by_two)
    before = snapshot(server)
    outputs, cached = [], []
    for model in ("tiny", "x", "y", "x"):
        payload = VLLM.payload(tuple(range(300, 400)), 6, None) | {"model": model}
        status, text = post(
            server.url, VLLM.generate_path, payload, timeout=REQUEST_TIMEOUT_SECONDS
        )
        assert status == 200, text
        completion = VLLM.completion(json.loads(text))
        outputs.append(completion.output)
        cached.append(completion.cached_tokens)
    assert len(set(outputs)) == 3
    assert outputs[1] == outputs[3]
    assert cached[:3] == [0, 0, 0]
    assert cached[3] > 0
    after = snapshot(server)
    assert after.total(VIOLATIONS) == before.total(VIOLATIONS)
    assert after.total(FORWARDS) == after.total(FORWARDS, result="checked")


@SOAK
def test_k_and_v_packed_for_amx_are_shown_as_not_guarded(shared_server, directories):
    import torch

    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX tiles, so that vLLM packs K/V in a way that is guarded")
    spec = guarded("llama", directories)
    server = shared_server(replace(spec, flags=("--dtype", "bfloat16")))
    result = run_soak(server, forwards=50, seed=1)
    assert not result.violations
    after = snapshot(server)
    assert after.total(GROUP_STATE, group="full", state="guarded") == 1
    assert after.total(GROUP_STATE, group="full_bytes", state="unsupported") == 1
    assert "packed for 'amx'" in server.log()


def test_a_broken_config_stops_the_server_before_it_loads_a_model(tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("mode: loud\n")
    server = VLLMServer(VLLMServerSpec(kvcanary_config=broken), log_path=tmp_path / "server.log")
    with pytest.raises(ServerError, match="mode"):
        server.start()
    assert "broken.yaml" in server.log()
    assert "Starting to load model" not in server.log()


def test_llm_takes_the_settings_as_a_keyword(directories, tmp_path):
    write_model(MODELS_DIRECTORY / "vllm-llama", tmp_path)
    config = write_drill_config(directories("offline"))
    script = f"""
from kvcanary_plugin.hooks.vllm.plugin import register
register()
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    from prometheus_client import REGISTRY, generate_latest
    import time
    llm = LLM({str(tmp_path)!r}, kvcanary_config={str(config)!r}, skip_tokenizer_init=True,
        dtype="float32", enforce_eager=True, max_model_len=512, block_size=32,
        kv_cache_memory_bytes=1 << 24)
    llm.generate([{{"prompt_token_ids": [5, 6, 7, 8]}}],
        SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False))
    def slots_verified():
        samples = (sample for family in REGISTRY.collect() for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == {SLOTS_VERIFIED!r})
    deadline = time.monotonic() + 120
    while not slots_verified() and time.monotonic() < deadline:
        time.sleep(0.1)
    print(generate_latest(REGISTRY).decode())
"""
    path = tmp_path / "offline.py"
    path.write_text(script)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    run = subprocess.run(
        [sys.executable, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    text = "\n".join(line for line in run.stdout.splitlines() if line.startswith("kvcanary_"))
    assert MetricsSnapshot.parse(text + "\n").total(SLOTS_VERIFIED) > 0
