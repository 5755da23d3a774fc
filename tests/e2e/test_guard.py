"""The canary in a real SGLang server: silence on healthy traffic, a report for every fault."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kvcanary_plugin import cli
from kvcanary_plugin.drill import http_client
from kvcanary_plugin.drill.drill import (
    FULL_CASES,
    GUARD_CASES,
    SWA_CASES,
    SWA_GUARD_CASES,
    Drill,
    DrillResult,
    FaultCase,
    write_drill_config,
)
from kvcanary_plugin.drill.metrics_client import MetricsSnapshot
from kvcanary_plugin.drill.server import PRESETS, ServerError, ServerSpec, SGLangServer
from kvcanary_plugin.drill.soak import run_soak
from kvcanary_plugin.drill.traffic import RequestError, fixed_prompts, generate, generate_all
from kvcanary_plugin.metrics import (
    CONFIG_RELOADS,
    FORWARDS,
    GROUP_STATE,
    INTERNAL_ERRORS,
    MODE,
    SLOTS_VERIFIED,
    VIOLATIONS,
)

pytestmark = pytest.mark.e2e

# One round of each preset; the long form is `kvcanary soak`.
SHORT_SOAK = {"forwards": 150, "conversations": 36, "seed": 7}
# SGLang chunks of 64 tokens and its mixed batches come on top of each preset's own point.
HEALTHY = {
    "llama": PRESETS["llama"],
    "no-overlap": PRESETS["no-overlap"],
    "page16": PRESETS["page16"],
    "swa": PRESETS["swa"],
    "mixed-chunk": replace(PRESETS["llama"], flags=("--enable-mixed-chunk",)),
    "small-pool": replace(PRESETS["llama"], flags=("--max-total-tokens", "700")),
    "no-radix-cache": replace(PRESETS["llama"], flags=("--disable-radix-cache",)),
}


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One directory a preset, so that equal settings have equal paths and share a server."""
    return {name: tmp_path_factory.mktemp(name) for name in (*HEALTHY, "dp2")}


def guarded(name: str, spec: ServerSpec, directories: dict[str, Path]) -> ServerSpec:
    path = directories[name] / "kvcanary.yaml"
    if not path.exists():
        write_drill_config(directories[name])
    return replace(spec, kvcanary_config=path)


def snapshot(server: SGLangServer) -> MetricsSnapshot:
    time.sleep(0.4)  # several polls of the drain
    return MetricsSnapshot.parse(server.metrics())


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_traffic_is_silent_and_every_forward_checked(name, shared_server, directories):
    server = shared_server(guarded(name, HEALTHY[name], directories))

    result = run_soak(server, **SHORT_SOAK)

    assert result.passed, result.as_text() + "\n" + server.log()[-3000:]
    assert result.slots_verified > 20 * SHORT_SOAK["forwards"]
    if name != "no-radix-cache":
        assert result.cached_tokens > 0


def test_two_data_parallel_ranks_are_guarded_apart(own_server, directories):
    server = own_server(guarded("dp2", PRESETS["dp2"], directories))

    result = run_soak(server, **SHORT_SOAK)

    assert result.passed, result.as_text()
    after = snapshot(server)
    for rank in ("0", "1"):
        assert after.total(SLOTS_VERIFIED, dp_rank=rank) > 0
        assert after.total(GROUP_STATE, dp_rank=rank, group="full", state="guarded") == 1


def assert_reported(result: DrillResult) -> None:
    assert result.planted, f"{result.case.title}: found no target"
    assert result.detected, result
    assert result.report is not None
    assert result.report["slot"] == result.planted["slot"]
    assert result.report["request_id"]
    assert result.steps_until_seen is not None
    assert result.steps_until_seen <= 1


@pytest.mark.parametrize("case", FULL_CASES, ids=lambda case: case.title)
def test_every_fault_is_reported_at_its_slot(case: FaultCase, shared_server, directories):
    server = shared_server(guarded("llama", HEALTHY["llama"], directories))
    (result,) = Drill(server, directories["llama"]).run([case])
    assert_reported(result)


@pytest.mark.parametrize("case", SWA_CASES, ids=lambda case: case.title)
def test_every_sliding_window_fault_is_reported_in_its_group(
    case: FaultCase, shared_server, directories
):
    server = shared_server(guarded("swa", HEALTHY["swa"], directories))
    (result,) = Drill(server, directories["swa"]).run([case])
    assert_reported(result)
    assert result.report is not None
    assert result.report["group"] == "swa"


def assert_seen_where_planted_and_silent_in_the_twin(result: DrillResult) -> None:
    assert result.planted, f"{result.case.title}: found no target"
    assert result.detected, result
    assert result.steps_until_seen == 0
    assert result.false_alarms == 0


@pytest.mark.parametrize("case", GUARD_CASES, ids=lambda case: case.title)
def test_faults_of_allocator_tables_and_identity_are_reported_and_their_twins_silent(
    case: FaultCase, shared_server, directories
):
    server = shared_server(guarded("llama", HEALTHY["llama"], directories))
    drill = Drill(server, directories["llama"])
    (result,) = drill.run([case], with_twins=True)
    assert_seen_where_planted_and_silent_in_the_twin(result)


@pytest.mark.parametrize("case", SWA_GUARD_CASES, ids=lambda case: case.title)
def test_faults_of_the_sliding_window_pool_are_reported_and_their_twins_silent(
    case: FaultCase, shared_server, directories
):
    server = shared_server(guarded("swa", HEALTHY["swa"], directories))
    (result,) = Drill(server, directories["swa"]).run([case], with_twins=True)
    assert_seen_where_planted_and_silent_in_the_twin(result)


def test_one_byte_of_v_in_the_last_layer_is_real_kv_of_that_request(shared_server, directories):
    server = shared_server(guarded("llama", HEALTHY["llama"], directories))
    case = FaultCase(title="V, last layer", fault="flip_kv", checks=("real_kv",), source=-1)
    (result,) = Drill(server, directories["llama"]).run([case])
    assert result.report is not None
    assert result.report["checks"] == ["real_kv"]
    assert (result.report["slot"], result.report["position"]) == (
        result.planted["slot"],
        result.planted["position"],
    )
    assert result.report["request_uid"] == result.planted["request_uid"]
    assert result.steps_until_seen == 0
    assert set(result.counted) == {"real_kv"}


@pytest.mark.parametrize("preset", ["llama", "swa"])
def test_the_canary_does_not_change_one_token(preset, shared_server, directories):
    prompts = fixed_prompts(12, seed=3)
    plain = shared_server(replace(PRESETS[preset], plugin=False))
    without = generate_all(plain.url, prompts, max_new_tokens=32)
    with_canary = generate_all(
        shared_server(guarded(preset, HEALTHY[preset], directories)).url, prompts, max_new_tokens=32
    )
    assert with_canary == without


def test_mode_raise_ends_the_server_with_the_report(own_server, tmp_path):
    config = write_drill_config(tmp_path, mode="raise")
    server = own_server(replace(PRESETS["llama"], kvcanary_config=config))
    drill = Drill(server, tmp_path)
    drill._ask_for(FULL_CASES[1])
    prompt = fixed_prompts(1)[0]
    with pytest.raises(RequestError):
        generate(server.url, prompt, max_new_tokens=200)
    assert server.wait_for_exit(60) != 0
    assert "kvcanary: real_kv violation" in server.log()


def test_settings_change_while_serving_and_a_bad_file_changes_nothing(own_server, tmp_path):
    path = write_drill_config(tmp_path, write_input_assert=False)
    server = own_server(replace(PRESETS["llama"], kvcanary_config=path))
    settings = yaml.safe_load(path.read_text())
    drill = Drill(server, tmp_path)
    rotate = next(case for case in FULL_CASES if case.fault == "rotate_inputs")

    def serve_with(text: str, outcome: str) -> None:
        counted = snapshot(server).total(CONFIG_RELOADS, result=outcome)
        path.write_text(text, encoding="utf-8")
        deadline = time.monotonic() + 10
        while snapshot(server).total(CONFIG_RELOADS, result=outcome) == counted:
            assert time.monotonic() < deadline, f"the change was not {outcome}"

    (off,) = drill.run([rotate])
    assert "write_input" not in off.counted

    serve_with(yaml.safe_dump(settings | {"write_input_assert": True}), "ok")
    (on,) = drill.run([rotate])
    assert on.counted["write_input"] > 0

    for bad in (
        "mode: [",
        "mode: loud",
        "surprise: 1",
        yaml.safe_dump(settings | {"ring": {"capacity": 128}}),
    ):
        serve_with(bad, "refused")
    assert snapshot(server).total(MODE, mode="log") == 1
    (still_on,) = drill.run([rotate])
    assert still_on.counted["write_input"] > 0
    assert snapshot(server).total(INTERNAL_ERRORS) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mode: [", "YAML"),
        ("surprise: 1", "surprise"),
        ("mode: loud", "loud"),
        ("scrub: {percent_of_step_time: 80}", "80"),
        ("ring: {capacity: 0}", "capacity"),
        (None, "no such file"),
    ],
)
def test_a_broken_config_stops_the_server_before_it_loads_a_model(tmp_path, text, expected):
    path = tmp_path / "kvcanary.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    server = SGLangServer(
        replace(PRESETS["llama"], kvcanary_config=path), log_path=tmp_path / "server.log"
    )
    begin = time.monotonic()
    with pytest.raises(ServerError):
        server.start()
    log = server.log()
    assert "kvcanary: " in log
    assert "kvcanary: kvcanary: " not in log
    assert expected.lower() in log.lower()
    assert "Load weight" not in log
    assert time.monotonic() - begin < 60


def test_without_the_flag_nothing_is_hooked_and_no_metric_appears(shared_server):
    server = shared_server(PRESETS["llama"])
    generate(server.url, fixed_prompts(1)[0], max_new_tokens=4)
    assert "kvcanary_" not in server.metrics()
    assert "installed but not enabled" in server.log()


def test_all_series_exist_at_zero_from_the_start(own_server, tmp_path):
    server = own_server(replace(PRESETS["swa"], kvcanary_config=write_drill_config(tmp_path)))
    now = snapshot(server)
    for group in ("full", "swa"):
        assert now.total(VIOLATIONS, check="real_kv", group=group, phase="verify") == 0
        assert now.total(GROUP_STATE, group=group, state="guarded") == 1
        assert now.total(GROUP_STATE, group=group, state="unsupported") == 0
    assert now.total(FORWARDS, kind="mixed", result="error") == 0
    assert now.total(INTERNAL_ERRORS, where="launch") == 0


def test_a_killed_scheduler_takes_the_server_down_and_leaves_no_process(own_server, directories):
    server = own_server(guarded("llama", HEALTHY["llama"], directories))
    children = Path(f"/proc/{server._process.pid}/task/{server._process.pid}/children").read_text()
    schedulers = [
        int(pid)
        for pid in children.split()
        if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert schedulers
    os.kill(schedulers[0], signal.SIGKILL)
    assert server.wait_for_exit(60) != 0


ENGINE_SCRIPT = """
import sys
import sglang

if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=sys.argv[1], kvcanary_config=sys.argv[2], device="cpu", load_format="dummy",
        dtype="float32", skip_tokenizer_init=True, attention_backend="torch_native",
        sampling_backend="pytorch", grammar_backend="none", disable_cuda_graph=True,
        max_total_tokens=1024, max_running_requests=4, mem_fraction_static=0.3, log_level="info",
    )
    print(engine.generate(input_ids=[[5, 6, 7, 8]], sampling_params={"max_new_tokens": 4}))
    engine.shutdown()
"""


def test_the_python_engine_takes_kvcanary_config(tmp_path):
    script = tmp_path / "engine.py"
    script.write_text(ENGINE_SCRIPT, encoding="utf-8")
    settings = tmp_path / "kvcanary.yaml"
    settings.write_text("mode: log\nscrub: {percent_of_step_time: 0}\n", encoding="utf-8")
    from kvcanary_plugin.drill.server import MODELS_DIRECTORY

    done = subprocess.run(
        [sys.executable, str(script), str(MODELS_DIRECTORY / "tiny-llama"), str(settings)],
        env=ServerSpec().environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "output_ids" in done.stdout
    assert "kvcanary: guarding" in done.stdout + done.stderr


def test_mode_abort_ends_the_request_that_was_hit_and_the_server_lives_on(own_server, tmp_path):
    config = write_drill_config(tmp_path, mode="abort")
    server = own_server(replace(PRESETS["llama"], kvcanary_config=config))
    prompt = fixed_prompts(1)[0]
    Drill(server, tmp_path)._ask_for(FULL_CASES[1])

    with pytest.raises(RequestError, match="kvcanary: the KV cache of this request is corrupted"):
        generate(server.url, prompt, max_new_tokens=200)

    http_client.post(server.url, "/flush_cache", {}, timeout=30.0)
    assert len(generate(server.url, prompt, max_new_tokens=8).output) == 8
    assert server.exit_status is None


def test_an_error_of_the_canary_blinds_it_for_good_and_the_server_lives_on(
    own_server, tmp_path, capsys
):
    fail = tmp_path / "fail"
    spec = replace(
        PRESETS["llama"],
        env=(
            ("SGLANG_EXTERNAL_MODEL_PACKAGE", "failing_canary"),
            ("PYTHONPATH", str(Path(__file__).parent)),
            ("FAIL_CANARY", str(fail)),
        ),
        kvcanary_config=write_drill_config(tmp_path),
    )
    server = own_server(spec)
    prompt = fixed_prompts(1)[0]
    before = generate(server.url, prompt, max_new_tokens=8).output
    assert cli.main(["status", server.url]) == 0

    fail.touch()
    while_failing = generate(server.url, prompt, max_new_tokens=8).output
    fail.unlink()
    afterwards = generate(server.url, prompt, max_new_tokens=8).output

    assert before == while_failing == afterwards
    now = snapshot(server)
    assert now.total(GROUP_STATE, group="full", state="blind") == 1
    assert now.total(GROUP_STATE, group="full", state="guarded") == 0
    assert now.total(INTERNAL_ERRORS) == now.total(INTERNAL_ERRORS, where="hook") == 1
    assert now.total(VIOLATIONS) == 0
    capsys.readouterr()
    assert cli.main(["status", server.url]) == 2
    assert "blind" in capsys.readouterr().out.lower()
    assert "RuntimeError: no batch is translated" in server.log()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--enable-page-major-kv-layout",), "has no adapter"),
        (
            ("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
            "hierarchical cache with storage",
        ),
    ],
)
def test_what_cannot_be_guarded_is_shown_as_unsupported(own_server, tmp_path, flags, reason):
    spec = replace(PRESETS["llama"], flags=flags, kvcanary_config=write_drill_config(tmp_path))
    try:
        server = own_server(spec)
    except ServerError as error:
        pytest.skip(f"the engine itself does not start with {flags}: {str(error)[-300:]}")
    now = snapshot(server)
    assert now.total(GROUP_STATE, group="full", state="unsupported") == 1
    assert reason in server.log()


def test_the_incident_of_a_drill_is_reproduced_by_replay(own_server, tmp_path):
    server = own_server(replace(PRESETS["llama"], kvcanary_config=write_drill_config(tmp_path)))
    faults = ("flip_kv", "swap_table", "break_chain", "free_in_use")
    cases = [case for case in (*FULL_CASES[1:], *GUARD_CASES) if case.fault in faults]
    assert all(result.detected for result in Drill(server, tmp_path).run(cases))
    server.stop()

    reports = [
        line
        for path in sorted((tmp_path / "reports").glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if json.loads(line)["type"] == "incident"
    ]
    assert len(reports) == len(cases)
    for number, report in enumerate(reports):
        incident = tmp_path / f"incident-{number}.jsonl"
        incident.write_text(report + "\n", encoding="utf-8")
        assert cli.main(["replay", str(incident)]) == 0
