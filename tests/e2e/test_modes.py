"""SGLang run in other ways than plain serving, as far as a CPU can.

A decode server without a prefill server takes the prompts of its requests for sent ("fake"
transfers): what lies in their slots is adopted. SGLANG_TEST_RETRACT makes it take requests to the
host and back all the time.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcanary_plugin.drill import http_client, weights
from kvcanary_plugin.drill.drill import FULL_CASES, GUARD_CASES, Drill, write_drill_config
from kvcanary_plugin.drill.server import PRESETS, SGLangServer
from kvcanary_plugin.drill.traffic import REQUEST_TIMEOUT_SECONDS
from kvcanary_plugin.metrics import (
    EXTERNAL_SLOTS,
    FORWARDS,
    GROUP_STATE,
    INTERNAL_ERRORS,
    VIOLATIONS,
)
from tests.e2e.test_guard import assert_reported, guarded, snapshot
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

DECODE_SERVER = (
    *("--disaggregation-mode", "decode"),
    *("--disaggregation-transfer-backend", "fake"),
    *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
)
NOBODYS_PREFILL_SERVER = "2.2.2.2"
HIERARCHICAL_CACHE = (
    "--enable-hierarchical-cache",
    *("--hicache-ratio", "4"),
    *("--hicache-io-backend", "direct"),
    *("--hicache-mem-layout", "layer_first"),
    *("--hicache-write-policy", "write_through"),
    # So few slots that prompts are evicted, and come back from the host.
    *("--max-total-tokens", "700"),
)
HOST_TIER_ON_A_CPU = (
    ("SGLANG_EXTERNAL_MODEL_PACKAGE", "host_tier_on_cpu"),
    ("PYTHONPATH", str(Path(__file__).parent)),
)
N_GRAM = (
    *("--speculative-algorithm", "NGRAM"),
    *("--speculative-num-draft-tokens", "6"),
)
SPECULATION_ON_A_CPU = (
    ("SGLANG_EXTERNAL_MODEL_PACKAGE", "speculation_on_cpu"),
    ("PYTHONPATH", str(Path(__file__).parent)),
    ("SGLANG_NATIVE_MOVE_KV_CACHE", "1"),
)
MODEL_CONFIGS = Path(weights.__file__).parent / "models"
NEW_TOKENS = 24
CLIENTS = 4
SOME_FAULTS = ("flip_kv", "swap_table")
# Half a minute each; windows take the same ways, and are looked at in long runs alone.
PRESETS_OF_A_MODE = ("llama", pytest.param("swa", marks=pytest.mark.soak))


def ask(server: SGLangServer, prompt: list[int], **how: Any) -> Mapping[str, Any]:
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    sampling |= how.pop("sampling_params", {})
    body = {"input_ids": prompt, "sampling_params": sampling, **how}
    status, text = http_client.post(server.url, "/generate", body, timeout=REQUEST_TIMEOUT_SECONDS)
    assert status == 200, text
    answer: Mapping[str, Any] = json.loads(text)
    return answer


def prompts(seed: int, count: int = 24) -> list[list[int]]:
    """Half of them begin alike."""
    rng = random.Random(seed)
    return [
        [*(range(10, 40) if index % 2 else ()), *rng.choices(range(3, 90), k=rng.randint(5, 60))]
        for index in range(count)
    ]


def receive(server: SGLangServer, seed: int) -> int:
    """Requests whose prompts were "sent"; how often one of them was taken to the host."""

    def one(numbered: tuple[int, list[int]]) -> int:
        room, prompt = numbered
        sent = {"bootstrap_host": NOBODYS_PREFILL_SERVER, "bootstrap_room": 1000 * seed + room}
        return int(ask(server, prompt, **sent)["meta_info"]["num_retractions"])

    with ThreadPoolExecutor(CLIENTS) as pool:
        return sum(pool.map(one, enumerate(prompts(seed))))


class DrillOnADecodeServer(Drill):
    """The drill with requests that a decode server takes."""

    def _traffic(self, seed: int) -> None:
        receive(self._server, seed)


def test_beam_searches_beside_other_requests_are_silent(shared_server, directories):
    server = shared_server(guarded(PRESETS["llama"], directories("llama")))
    before = snapshot(server)

    def one(numbered: tuple[int, list[int]]) -> None:
        index, prompt = numbered
        beams = {"sampling_params": {"beam_width": 3, "n": 2}} if index % 3 == 0 else {}
        ask(server, prompt, **beams, **({"extra_key": "tenant"} if index % 2 else {}))

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(one, enumerate(prompts(seed=2, count=36))))

    after = snapshot(server)

    def gained(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    # Where beams take part, the oracle of tokens stands aside.
    assert gained(FORWARDS, kind="decode", result="partial") > 50
    assert gained(VIOLATIONS) == 0
    assert after.total(INTERNAL_ERRORS) == 0


@pytest.mark.parametrize("preset", PRESETS_OF_A_MODE)
def test_a_decode_server_that_retracts_is_silent_and_reports_faults(preset, own_server, tmp_path):
    spec = replace(
        PRESETS[preset],
        flags=DECODE_SERVER,
        env=(("SGLANG_TEST_RETRACT", "true"),),
        kvcanary_config=write_drill_config(tmp_path),
    )
    server = own_server(spec)

    seeds = itertools.count(1)
    # Of requests that run at once one is taken, and how many do is up to when they arrive.
    wait_until(lambda: receive(server, next(seeds)) > 10, "requests being taken to the host")

    now = snapshot(server)
    assert now.total(GROUP_STATE, group="full", state="guarded") == 1
    assert now.total(FORWARDS, kind="decode", result="checked") > 100
    assert now.total(VIOLATIONS) == 0
    assert now.total(INTERNAL_ERRORS) == 0

    cases = [case for case in (*FULL_CASES, *GUARD_CASES) if case.fault in SOME_FAULTS]
    for result in DrillOnADecodeServer(server, tmp_path).run(cases):
        assert_reported(result)


@pytest.mark.parametrize("preset", PRESETS_OF_A_MODE)
def test_n_gram_drafts_are_silent_and_faults_are_reported(preset, own_server, tmp_path):
    speculation_is_silent_and_reports_faults(own_server, tmp_path, preset, N_GRAM)


@pytest.mark.parametrize(
    "children", [pytest.param(1, marks=pytest.mark.soak, id="chain"), pytest.param(4, id="tree")]
)
def test_drafts_of_a_model_are_silent_and_faults_are_reported(children, own_server, tmp_path):
    """The draft model is the target model itself, so that most drafts are accepted."""
    draft_model = tmp_path / "draft"
    draft_model.mkdir()
    weights.write_model(MODEL_CONFIGS / PRESETS["llama"].model, draft_model)
    flags = (
        *("--speculative-algorithm", "STANDALONE"),
        *("--speculative-draft-model-path", str(draft_model)),
        *("--speculative-num-steps", "1"),
        *("--speculative-eagle-topk", str(children)),
        *("--speculative-num-draft-tokens", str(children + 1)),
    )
    server = speculation_is_silent_and_reports_faults(own_server, tmp_path, "llama", flags)
    assert snapshot(server).total(GROUP_STATE, group="draft", state="unsupported") == 1


def speculation_is_silent_and_reports_faults(own_server, tmp_path, preset, flags) -> SGLangServer:
    spec = replace(
        PRESETS[preset],
        flags=flags,
        env=SPECULATION_ON_A_CPU,
        kvcanary_config=write_drill_config(tmp_path),
    )
    server: SGLangServer = own_server(spec)

    # A small model repeats itself, which is what n-grams live on.
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda prompt: ask(server, prompt), prompts(seed=3, count=32)))

    now = snapshot(server)
    drafted = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert now.total(FORWARDS, kind="verify") >= drafted / CLIENTS > 0
    assert drafted < len(answers) * NEW_TOKENS, "not one draft was accepted"
    assert now.total(VIOLATIONS) == 0
    assert now.total(INTERNAL_ERRORS) == 0

    cases = [case for case in (*FULL_CASES, *GUARD_CASES) if case.fault in SOME_FAULTS]
    for result in Drill(server, tmp_path).run(cases):
        assert_reported(result)
    return server


@pytest.mark.parametrize("preset", PRESETS_OF_A_MODE)
def test_a_hierarchical_cache_is_silent_and_a_bad_load_is_reported(preset, own_server, tmp_path):
    harm = tmp_path / "harm"
    spec = replace(
        PRESETS[preset],
        flags=HIERARCHICAL_CACHE,
        env=(*HOST_TIER_ON_A_CPU, ("HARM_NEXT_LOAD", str(harm))),
        kvcanary_config=write_drill_config(tmp_path),
    )
    server = own_server(spec)
    come_again = [[*range(3 + start, 100 + start)] for start in range(0, 60, 5)]

    def serve() -> None:
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda prompt: ask(server, prompt), come_again * 4))

    def has_loaded() -> bool:
        serve()
        return snapshot(server).total(EXTERNAL_SLOTS) > 0

    wait_until(has_loaded, "a prompt being loaded back")
    now = snapshot(server)
    assert now.total(VIOLATIONS) == 0
    assert now.total(INTERNAL_ERRORS) == 0

    harm.touch()

    def has_loaded_harm() -> bool:
        serve()
        return not harm.exists()

    wait_until(has_loaded_harm, "a load that goes wrong")
    now = snapshot(server)
    assert now.total(VIOLATIONS, check="real_kv", phase="adopt") == 1
    assert now.total(INTERNAL_ERRORS) == 0


def test_what_cannot_be_guarded_is_shown_as_unsupported(own_server, tmp_path):
    spec = replace(
        PRESETS["llama"],
        flags=(*HIERARCHICAL_CACHE, "--hicache-storage-backend", "file"),
        env=(
            *HOST_TIER_ON_A_CPU,
            ("HARM_NEXT_LOAD", str(tmp_path / "never")),
            ("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "storage")),
        ),
        kvcanary_config=write_drill_config(tmp_path),
    )
    server = own_server(spec)
    now = snapshot(server)
    assert now.total(GROUP_STATE, group="full", state="unsupported") == 1
    assert now.total(GROUP_STATE, group="full", state="guarded") == 0
    assert "hierarchical cache with storage" in server.log()
