"""The canary in a real SGLang server: silence on healthy traffic, a report for every fault."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcanary_plugin import cli
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
from kvcanary_plugin.drill.server import (
    MODELS_DIRECTORY,
    PRESETS,
    ServerError,
    ServerSpec,
    SGLangServer,
)
from kvcanary_plugin.drill.settled import settled
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
from tests.deploy.alerting import assert_that_only_a_fault_fires
from tests.deploy.prometheus_harness import SKIP_REASON, Prometheus, is_installed
from tests.e2e.processes import session_members
from tests.server_pool import END_SECONDS
from tests.waiting import replace_text, wait_until

pytestmark = pytest.mark.e2e

# One round of each server; the long form is `kvcanary soak`.
SHORT_SOAK = {"forwards": 150, "conversations": 36, "seed": 7}
# SGLang chunks of 64 tokens and its mixed batches come on top of each preset's own point.
SMALL_POOL = ("--max-total-tokens", "700")
OTHER_SERVERS = {
    "page16-mixed-chunk": replace(
        PRESETS["page16"], flags=(*PRESETS["page16"].flags, "--enable-mixed-chunk")
    ),
    "no-overlap-small-pool": replace(
        PRESETS["no-overlap"], flags=(*PRESETS["no-overlap"].flags, *SMALL_POOL)
    ),
    "no-radix-cache": replace(PRESETS["llama"], flags=("--disable-radix-cache",)),
}
# Each of the above alone: only in long runs.
ONE_BY_ONE = {
    "page16": PRESETS["page16"],
    "mixed-chunk": replace(PRESETS["llama"], flags=("--enable-mixed-chunk",)),
    "no-overlap": PRESETS["no-overlap"],
    "small-pool": replace(PRESETS["llama"], flags=SMALL_POOL),
}

# What the drain finds meanwhile ends the request; the context ends at 2048.
MORE_TOKENS_THAN_A_DRAIN_LETS_PASS = 1500

Directories = Callable[[str], Path]


def guarded(spec: ServerSpec, directory: Path) -> ServerSpec:
    """The same server under the canary, with the settings of a drill."""
    return replace(spec, kvcanary_config=directory / "kvcanary.yaml")


def snapshot(server: SGLangServer) -> MetricsSnapshot:
    return settled(server.metrics)


def assert_silent(server: SGLangServer, *, prefixes_are_cached: bool = True) -> None:
    result = run_soak(server, **SHORT_SOAK)
    assert result.passed, result.as_text() + "\n" + server.log()[-3000:]
    assert result.slots_verified > 20 * SHORT_SOAK["forwards"]
    assert (result.cached_tokens > 0) == prefixes_are_cached


def assert_reported(result: DrillResult) -> None:
    assert result.planted, f"{result.case.title}: found no target"
    assert result.detected, result
    assert result.report is not None
    assert result.report["slot"] == result.planted["slot"]
    assert result.report["request_id"]
    assert result.steps_until_seen == 0


def assert_seen_where_planted_and_silent_in_the_twin(result: DrillResult) -> None:
    assert result.planted, f"{result.case.title}: found no target"
    assert result.detected, result
    assert result.steps_until_seen == 0
    assert result.false_alarms == 0


def assert_same_tokens(server: SGLangServer, without_canary: SGLangServer) -> None:
    prompts = fixed_prompts(12, seed=3)
    expected = generate_all(without_canary.url, prompts, max_new_tokens=32)
    assert generate_all(server.url, prompts, max_new_tokens=32) == expected


def serve_with(server: SGLangServer, path: Path, text: str, outcome: str = "ok") -> None:
    """Change the settings file and wait until the server has said what it makes of it."""
    counted = snapshot(server).total(CONFIG_RELOADS, result=outcome)
    replace_text(path, text)
    wait_until(
        lambda: snapshot(server).total(CONFIG_RELOADS, result=outcome) > counted,
        f"the change being {outcome}",
    )


def changed(path: Path, **values: Any) -> str:
    """The settings in ``path`` with some values changed."""
    return yaml.safe_dump(yaml.safe_load(path.read_text(encoding="utf-8")) | values)


# Tests of one server stand together: a start takes longer than most of them.


@pytest.mark.parametrize(
    "name", [*OTHER_SERVERS, *(pytest.param(name, marks=pytest.mark.soak) for name in ONE_BY_ONE)]
)
def test_healthy_traffic_is_silent_and_every_forward_checked(name, shared_server, directories):
    spec = (OTHER_SERVERS | ONE_BY_ONE)[name]
    server = shared_server(guarded(spec, directories(name)))
    assert_silent(server, prefixes_are_cached=name != "no-radix-cache")


def test_two_data_parallel_ranks_are_guarded_apart(own_server, directories):
    server = own_server(guarded(PRESETS["dp2"], directories("dp2")))

    result = run_soak(server, **SHORT_SOAK)

    assert result.passed, result.as_text()
    after = snapshot(server)
    for rank in ("0", "1"):
        assert after.total(SLOTS_VERIFIED, dp_rank=rank) > 0
        assert after.total(GROUP_STATE, dp_rank=rank, group="full", state="guarded") == 1


class TestSlidingWindows:
    """A model that has them in some of its layers."""

    # The plugin is loaded here, and nobody asked it to guard anything.
    NOT_ENABLED = PRESETS["swa"]

    @pytest.fixture
    def server(self, shared_server, directories) -> SGLangServer:
        return shared_server(guarded(PRESETS["swa"], directories("swa")))

    @pytest.fixture
    def drill(self, server, directories) -> Drill:
        return Drill(server, directories("swa"))

    def test_all_series_exist_at_zero_from_the_start(self, server_pool, directories):
        text = server_pool.metrics_at_start(guarded(PRESETS["swa"], directories("swa")))
        start = MetricsSnapshot.parse(text)
        for group in ("full", "swa"):
            assert start.total(VIOLATIONS, check="real_kv", group=group, phase="verify") == 0
            assert start.total(GROUP_STATE, group=group, state="guarded") == 1
            assert start.total(GROUP_STATE, group=group, state="unsupported") == 0
        assert start.total(FORWARDS, kind="mixed", result="error") == 0
        assert start.total(INTERNAL_ERRORS, where="launch") == 0

    def test_healthy_traffic_is_silent_and_every_forward_checked(self, server):
        assert_silent(server)

    @pytest.mark.parametrize("case", SWA_CASES, ids=lambda case: case.title)
    def test_every_fault_is_reported_in_its_group(self, case: FaultCase, drill):
        (result,) = drill.run([case])
        assert_reported(result)
        assert result.report is not None
        assert result.report["group"] == "swa"

    @pytest.mark.parametrize("case", SWA_GUARD_CASES, ids=lambda case: case.title)
    def test_faults_of_the_pool_are_reported_and_their_twins_silent(self, case: FaultCase, drill):
        (result,) = drill.run([case], with_twins=True)
        assert_seen_where_planted_and_silent_in_the_twin(result)

    def test_the_canary_does_not_change_one_token(self, server, shared_server):
        assert_same_tokens(server, shared_server(self.NOT_ENABLED))

    def test_without_the_flag_nothing_is_hooked_and_no_metric_appears(self, shared_server):
        server = shared_server(self.NOT_ENABLED)
        generate(server.url, fixed_prompts(1)[0], max_new_tokens=4)
        assert "kvcanary_" not in server.metrics()
        assert "installed but not enabled" in server.log()

    def test_stop_ends_every_process_of_the_server_with_status_zero(self, server):
        leader = server._process.pid
        assert len(session_members(leader)) >= 3  # main, scheduler, detokenizer

        server.stop()

        assert server.exit_status == 0
        assert session_members(leader) == []


class TestFullAttention:
    @pytest.fixture
    def server(self, shared_server, directories) -> SGLangServer:
        return shared_server(guarded(PRESETS["llama"], directories("llama")))

    @pytest.fixture
    def drill(self, server, directories) -> Drill:
        return Drill(server, directories("llama"))

    @pytest.mark.skipif(not is_installed(), reason=SKIP_REASON)
    def test_healthy_traffic_fires_nothing_and_a_planted_fault_fires_the_violation_alert(
        self, server, directories, tmp_path
    ):
        with Prometheus([f"{server.url}/metrics"], directory=tmp_path) as prometheus:
            assert_that_only_a_fault_fires(
                server, prometheus, directories("llama"), engine="sglang"
            )

    def test_healthy_traffic_is_silent_and_every_forward_checked(self, server):
        assert_silent(server)

    @pytest.mark.parametrize("case", FULL_CASES, ids=lambda case: case.title)
    def test_every_fault_is_reported_at_its_slot(self, case: FaultCase, drill):
        (result,) = drill.run([case])
        assert_reported(result)

    @pytest.mark.parametrize("case", GUARD_CASES, ids=lambda case: case.title)
    def test_faults_of_allocator_tables_and_identity_are_reported_and_their_twins_silent(
        self, case: FaultCase, drill
    ):
        (result,) = drill.run([case], with_twins=True)
        assert_seen_where_planted_and_silent_in_the_twin(result)

    def test_one_byte_of_v_in_the_last_layer_is_real_kv_of_that_request(self, drill):
        case = FaultCase(title="V, last layer", fault="flip_kv", checks=("real_kv",), source=-1)
        (result,) = drill.run([case])
        assert result.report is not None
        assert result.report["checks"] == ["real_kv"]
        assert (result.report["slot"], result.report["position"]) == (
            result.planted["slot"],
            result.planted["position"],
        )
        assert result.report["request_uid"] == result.planted["request_uid"]
        assert result.steps_until_seen == 0
        assert set(result.counted) == {"real_kv"}

    def test_the_canary_does_not_change_one_token(self, server, shared_server):
        assert_same_tokens(server, shared_server(replace(PRESETS["llama"], plugin=False)))


class TestActions:
    """A server that is started in mode abort, and then told to end itself."""

    @pytest.fixture(scope="class")
    @classmethod
    def config(cls, tmp_path_factory) -> Path:
        return write_drill_config(tmp_path_factory.mktemp("actions"), mode="abort")

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, server_of_class, config) -> SGLangServer:
        return server_of_class(replace(PRESETS["llama"], kvcanary_config=config))

    def test_mode_abort_ends_the_request_that_was_hit_and_the_server_lives_on(self, server, config):
        prompt, drill = fixed_prompts(1)[0], Drill(server, config.parent)
        drill._ask_for(FULL_CASES[1])

        with pytest.raises(
            RequestError, match="kvcanary: the KV cache of this request is corrupted"
        ):
            generate(server.url, prompt, max_new_tokens=MORE_TOKENS_THAN_A_DRAIN_LETS_PASS)

        drill._flush_cache()
        assert len(generate(server.url, prompt, max_new_tokens=8).output) == 8
        assert server.exit_status is None

    def test_mode_raise_ends_the_server_with_the_report(self, server, config):
        serve_with(server, config, changed(config, mode="raise"))
        Drill(server, config.parent)._ask_for(FULL_CASES[1])
        with pytest.raises(RequestError):
            generate(
                server.url, fixed_prompts(1)[0], max_new_tokens=MORE_TOKENS_THAN_A_DRAIN_LETS_PASS
            )
        assert server.wait_for_exit(END_SECONDS) != 0
        assert "kvcanary: real_kv violation" in server.log()


class TestOneServer:
    """From start to end, through whatever an operator and an accident do to it."""

    @pytest.fixture(scope="class")
    @classmethod
    def config(cls, tmp_path_factory) -> Path:
        # Evidence of an incident is collected when the drain comes to it: the recorder keeps all
        # forwards of a case until then.
        return write_drill_config(
            tmp_path_factory.mktemp("one-server"),
            write_input_assert=False,
            recorder={"forwards": 1024},
        )

    @pytest.fixture(scope="class")
    @classmethod
    def fail(cls, config) -> Path:
        """While this file exists, the canary fails inside of itself."""
        return config.parent / "fail"

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, server_of_class, config, fail) -> SGLangServer:
        env = (
            ("SGLANG_EXTERNAL_MODEL_PACKAGE", "failing_canary"),
            ("PYTHONPATH", str(Path(__file__).parent)),
            ("FAIL_CANARY", str(fail)),
        )
        return server_of_class(replace(PRESETS["llama"], env=env, kvcanary_config=config))

    @pytest.fixture
    def drill(self, server, config) -> Drill:
        return Drill(server, config.parent)

    def test_the_incidents_of_a_drill_are_reproduced_by_replay(self, drill, config, tmp_path):
        faults = ("flip_kv", "swap_table", "break_chain", "free_in_use")
        cases = [case for case in (*FULL_CASES[1:], *GUARD_CASES) if case.fault in faults]
        assert all(result.detected for result in drill.run(cases))

        def incidents() -> list[str]:
            return [
                line
                for path in sorted((config.parent / "reports").glob("*.jsonl"))
                for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
                if line.endswith("\n") and json.loads(line)["type"] == "incident"
            ]

        # A row is reported before the incident that it opens.
        wait_until(lambda: len(incidents()) >= len(cases), "a report of each incident")
        reports = incidents()
        assert len(reports) == len(cases)
        for number, report in enumerate(reports):
            incident = tmp_path / f"incident-{number}.jsonl"
            incident.write_text(report, encoding="utf-8")
            assert cli.main(["replay", str(incident)]) == 0

    def test_settings_change_while_serving_and_a_bad_file_changes_nothing(
        self, server, drill, config
    ):
        rotate = next(case for case in FULL_CASES if case.fault == "rotate_inputs")
        # Nobody reports it: that is not waited for long.
        (off,) = Drill(server, config.parent, report_timeout_seconds=5.0).run([rotate])
        assert off.planted
        assert "write_input" not in off.counted

        with_assert = changed(config, write_input_assert=True)
        serve_with(server, config, with_assert)
        (on,) = drill.run([rotate])
        assert on.counted["write_input"] > 0

        ring = yaml.safe_dump(yaml.safe_load(with_assert) | {"ring": {"capacity": 128}})
        for bad in ("mode: [", "mode: loud", "surprise: 1", ring):
            serve_with(server, config, bad, "refused")
        assert snapshot(server).total(MODE, mode="log") == 1
        (still_on,) = drill.run([rotate])
        assert still_on.counted["write_input"] > 0
        assert snapshot(server).total(INTERNAL_ERRORS) == 0

    def test_an_error_of_the_canary_blinds_it_for_good_and_the_server_lives_on(
        self, server, fail, capsys
    ):
        prompt = fixed_prompts(1)[0]
        start = snapshot(server)
        before = generate(server.url, prompt, max_new_tokens=8).output

        fail.touch()
        while_failing = generate(server.url, prompt, max_new_tokens=8).output
        fail.unlink()
        afterwards = generate(server.url, prompt, max_new_tokens=8).output

        assert before == while_failing == afterwards
        now = snapshot(server)
        assert now.total(GROUP_STATE, group="full", state="blind") == 1
        assert now.total(GROUP_STATE, group="full", state="guarded") == 0
        assert now.total(INTERNAL_ERRORS) == now.total(INTERNAL_ERRORS, where="hook") == 1
        assert now.total(VIOLATIONS) == start.total(VIOLATIONS)
        capsys.readouterr()
        assert cli.main(["status", server.url]) != 0
        assert "group full is blind after an error" in capsys.readouterr().out
        assert "RuntimeError: no batch is translated" in server.log()

    def test_a_killed_scheduler_takes_the_server_down_and_leaves_no_process(self, server):
        main = server._process.pid
        children = Path(f"/proc/{main}/task/{main}/children").read_text()
        schedulers = [
            int(pid)
            for pid in children.split()
            if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        assert schedulers
        os.kill(schedulers[0], signal.SIGKILL)
        assert server.wait_for_exit(END_SECONDS) != 0


def test_a_broken_config_stops_the_server_before_it_loads_a_model(tmp_path):
    path = tmp_path / "kvcanary.yaml"
    path.write_text("mode: loud\n", encoding="utf-8")
    server = SGLangServer(
        replace(PRESETS["llama"], kvcanary_config=path), log_path=tmp_path / "server.log"
    )
    with pytest.raises(ServerError, match="ended with status"):
        server.start()
    log = server.log()
    assert "kvcanary: " in log
    assert "kvcanary: kvcanary: " not in log
    assert "loud" in log
    assert "Load weight" not in log


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
    done = subprocess.run(
        [sys.executable, str(script), str(MODELS_DIRECTORY / "tiny-llama"), str(settings)],
        env=ServerSpec().environment(),
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "output_ids" in done.stdout
    assert "kvcanary: guarding" in done.stdout + done.stderr
