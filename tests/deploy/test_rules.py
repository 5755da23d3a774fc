"""The alerting rules under promtool: which alerts fire in which situation, and no others."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcanary_plugin.checks import CHECKS
from kvcanary_plugin.metrics import METRICS
from tests.deploy.paths import DOCS, RULES, alert_names, load_rules

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (apt-get install prometheus)",
)

RANK = {
    "job": "sglang",
    "instance": "node-1:30000",
    "engine": "sglang",
    "tp_rank": "0",
    "pp_rank": "0",
    "dp_rank": "0",
}
INSTANCE = {name: RANK[name] for name in ("job", "instance", "engine")}
VLLM_RANK = {**RANK, "job": "vllm", "instance": "node-2:8000", "engine": "vllm"}
VLLM_INSTANCE = {name: VLLM_RANK[name] for name in ("job", "instance", "engine")}


def series(name: str, values: str, rank: Mapping[str, str] = RANK, **labels: str) -> dict[str, str]:
    """One input series; ``values`` in promtool's notation, one sample every 15 seconds."""
    text = ",".join(f'{key}="{value}"' for key, value in {**rank, **labels}.items())
    return {"series": f"{name}{{{text}}}", "values": values}


def violations(values: str, **labels: str) -> dict[str, str]:
    labels = {"check": "chain", "group": "full", "phase": "verify", **labels}
    return series("kvcanary_violations_total", values, **labels)


def traffic(values: str = "0+30x400", *, rank: Mapping[str, str] = RANK) -> list[dict[str, str]]:
    """A rank whose forwards, verified and written slots all follow ``values``."""
    return [
        series("kvcanary_forwards_total", values, rank, kind="decode", result="checked"),
        series("kvcanary_slots_verified_total", values, rank, group="full"),
        series("kvcanary_slots_written_total", values, rank, group="full"),
        series("kvcanary_group_state", "1x400", rank, group="full", state="guarded"),
        series("kvcanary_group_state", "0x400", rank, group="full", state="blind"),
        series("kvcanary_group_state", "0x400", rank, group="full", state="unsupported"),
        series("kvcanary_mode", "1x400", rank, mode="log"),
        series("kvcanary_mode", "0x400", rank, mode="off"),
    ]


def heartbeat(values: str = "0+15x400", *, rank: Mapping[str, str] = RANK) -> dict[str, str]:
    """Promtool's clock starts at 0: a heartbeat that keeps up with it is 0+15x."""
    return series("kvcanary_last_check_timestamp_seconds", values, rank)


def without(samples: list[dict[str, str]], *parts: str) -> list[dict[str, str]]:
    """The series that contain none of the parts, to be replaced by others."""
    return [sample for sample in samples if not any(part in sample["series"] for part in parts)]


def alert(name: str, severity: str = "page", **labels: str) -> tuple[str, dict[str, str]]:
    return name, {**RANK, "severity": severity, **labels}


def chain_alert() -> tuple[str, dict[str, str]]:
    return alert("KVCanaryViolation", check="chain", group="full")


@dataclass(frozen=True)
class Scenario:
    """Input series, and at each time exactly the alerts that fire; all others must not."""

    name: str
    series: list[dict[str, str]]
    fires: dict[str, list[tuple[str, dict[str, str]]]] = field(default_factory=dict)


HEALTHY = [*traffic(), heartbeat(), violations("0x400")]

SCENARIOS = (
    Scenario("a healthy server under load", HEALTHY, {"20m": [], "60m": []}),
    Scenario(
        "an idle server",
        [*traffic("500x400"), heartbeat("0x400"), violations("0x400")],
        {"20m": [], "60m": []},
    ),
    Scenario("a server without any forward", [*traffic("0x400"), heartbeat("0x400")], {"20m": []}),
    Scenario(
        "a burst that ends leaves nothing behind",
        [*traffic("0+30x40 1200x400"), heartbeat("0+15x40 600x400")],
        {"10m": [], "12m": [], "13m": [], "14m": [], "16m": [], "30m": []},
    ),
    Scenario(
        "the first violation pages with the next evaluation and ends after 15 minutes",
        [*traffic(), heartbeat(), violations("0x79 1x300")],
        {"19m45s": [], "20m": [chain_alert()], "30m": [chain_alert()], "36m": []},
    ),
    Scenario(
        "a later violation pages again",
        [*traffic(), heartbeat(), violations("1x159 2x200")],
        {"39m45s": [], "40m": [chain_alert()]},
    ),
    Scenario(
        "a new series whose first sample is above zero",
        [*traffic(), heartbeat(), violations("_x80 1x200")],
        {"19m45s": [], "20m15s": [chain_alert()], "36m": []},
    ),
    Scenario(
        "a violation that one single scrape saw before the process died",
        [*traffic(), heartbeat(), violations("_x80 1 stale _x200")],
        {"20m15s": [chain_alert()], "25m": [chain_alert()], "36m": []},
    ),
    Scenario(
        "a restart that comes back with the count it had",
        [*traffic("0+30x159 0+30x200"), heartbeat(), violations("1x159 1x200")],
        {"39m45s": [], "40m": [chain_alert()]},
    ),
    Scenario(
        "a restart after an outage longer than the window that comes back with the count it had",
        [*traffic("0+30x79 stale _x80 0+30x200"), heartbeat(), violations("1x79 stale _x80 1x200")],
        {"20m": [], "40m15s": [chain_alert()]},
    ),
    Scenario(
        "a restart of a server with old violations",
        [*traffic("0+30x159 0+30x200"), heartbeat(), violations("5x159 0x200")],
        {"39m45s": [], "40m": [], "45m": []},
    ),
    Scenario(
        "violations of one check seen in two launches are one alert",
        [*HEALTHY[:-1], violations("0x80 3x200"), violations("0x80 2x200", phase="reverify")],
        {"21m": [chain_alert()]},
    ),
    Scenario(
        "dropped rows",
        [*HEALTHY, series("kvcanary_ring_dropped_total", "0x79 7x200")],
        {"19m45s": [], "20m": [alert("KVCanaryRingDropped", "ticket")]},
    ),
    Scenario(
        "dropped rows of a process that is new",
        [*HEALTHY, series("kvcanary_ring_dropped_total", "_x80 7x200")],
        {"20m15s": [alert("KVCanaryRingDropped", "ticket")]},
    ),
    Scenario(
        "forwards that run unchecked",
        [
            *HEALTHY,
            series("kvcanary_forwards_total", "0x80 0+5x200", kind="decode", result="unchecked"),
        ],
        {"20m": [], "24m": [alert("KVCanaryBlind", reason="unchecked-forwards")]},
    ),
    Scenario(
        "dummy forwards may run unchecked, and a forward may lack its oracle",
        [
            *HEALTHY,
            series("kvcanary_forwards_total", "0+5x300", kind="dummy", result="unchecked"),
            series("kvcanary_forwards_total", "0+5x300", kind="prefill", result="partial"),
        ],
        {"20m": []},
    ),
    Scenario(
        "decoding while no slot is verified",
        [
            *without(HEALTHY, "slots_verified"),
            series("kvcanary_slots_verified_total", "0+9x80 720x200", group="full"),
        ],
        {
            "24m": [],
            "28m": [alert("KVCanaryBlind", group="full", reason="nothing-verified")],
        },
    ),
    Scenario(
        "prefill only, without a cached prefix, verifies nothing",
        [
            *without(HEALTHY, "slots_verified", "forwards_total"),
            series("kvcanary_slots_verified_total", "0x400", group="full"),
            series("kvcanary_forwards_total", "0+9x400", kind="prefill", result="checked"),
        ],
        {"20m": []},
    ),
    Scenario(
        "prefill while no record is written",
        [
            *without(HEALTHY, "slots_verified", "slots_written", "forwards_total"),
            series("kvcanary_slots_verified_total", "0x400", group="full"),
            series("kvcanary_slots_written_total", "0x400", group="full"),
            series("kvcanary_forwards_total", "0+9x400", kind="prefill", result="checked"),
        ],
        {"20m": [alert("KVCanaryBlind", group="full", reason="nothing-recorded")]},
    ),
    Scenario(
        "a draft group stands still while the target decodes",
        [
            *HEALTHY,
            series("kvcanary_slots_verified_total", "0x400", group="draft"),
            series("kvcanary_slots_written_total", "0x400", group="draft"),
            series("kvcanary_group_state", "1x400", group="draft", state="guarded"),
        ],
        {"20m": []},
    ),
    Scenario(
        "a canary that stopped, also without traffic",
        [
            *without(traffic("500x400"), 'state="guarded"', 'state="blind"'),
            heartbeat("0x400"),
            series("kvcanary_group_state", "0x80 1x200", group="full", state="blind"),
        ],
        {
            "19m": [],
            "20m30s": [alert("KVCanaryBlind", group="full", state="blind", reason="stopped")],
        },
    ),
    Scenario(
        "mode off is a ticket after 15 minutes and nothing else",
        [
            *without(HEALTHY, "kvcanary_mode", "slots_verified", "last_check", "forwards"),
            series("kvcanary_mode", "1x400", mode="off"),
            series("kvcanary_slots_verified_total", "0x400", group="full"),
            series("kvcanary_forwards_total", "0+9x400", kind="decode", result="unchecked"),
            heartbeat("0x400"),
        ],
        {"14m": [], "20m": [alert("KVCanaryOff", "ticket", mode="off")]},
    ),
    Scenario(
        "switching the canary on again does not page for the time before",
        [
            *without(HEALTHY, "kvcanary_mode", "slots_verified", "last_check", "forwards"),
            series("kvcanary_mode", "1x40 0x200", mode="off"),
            series("kvcanary_slots_verified_total", "0x40 0+30x200", group="full"),
            series("kvcanary_forwards_total", "0+9x40 360x200", kind="decode", result="unchecked"),
            series("kvcanary_forwards_total", "0x40 0+9x200", kind="decode", result="checked"),
            heartbeat("0x40 600+15x200"),
        ],
        {"10m": [], "12m": [], "14m": [], "16m": [], "20m": [], "30m": []},
    ),
    Scenario(
        "forwards go on and the heartbeat stands still",
        [*traffic(), heartbeat("0+15x80 1200x200")],
        {"22m": [], "25m": [alert("KVCanaryHeartbeatStale", reason="no-check")]},
    ),
    Scenario(
        "one rank idles while another works",
        [
            *HEALTHY,
            *traffic("500x400", rank={**RANK, "dp_rank": "1"}),
            heartbeat("0x400", rank={**RANK, "dp_rank": "1"}),
            series("sglang:num_running_reqs", "3x400"),
        ],
        {"25m": []},
    ),
    Scenario(
        "a dead drain looks idle, and the engine's own gauge tells",
        [
            *traffic("0+30x80 2400x300"),
            heartbeat("0+15x80 1200x300"),
            series("sglang:num_running_reqs", "3x400", INSTANCE),
        ],
        {
            "22m": [],
            "30m": [
                (
                    "KVCanaryHeartbeatStale",
                    {**INSTANCE, "severity": "page", "reason": "canary-silent"},
                )
            ],
        },
    ),
    Scenario(
        "the same in vLLM, beside SGLang at work",
        [
            *HEALTHY,
            series("sglang:num_running_reqs", "3x400"),
            *traffic("0+30x80 2400x300", rank=VLLM_RANK),
            heartbeat("0+15x80 1200x300", rank=VLLM_RANK),
            # There this label is a number of its own.
            series("vllm:num_requests_running", "3x400", {**VLLM_INSTANCE, "engine": "0"}),
        ],
        {
            "22m": [],
            "30m": [
                (
                    "KVCanaryHeartbeatStale",
                    {**VLLM_INSTANCE, "severity": "page", "reason": "canary-silent"},
                )
            ],
        },
    ),
    Scenario(
        "a violation in vLLM, beside SGLang at work",
        [
            *HEALTHY,
            *traffic(rank=VLLM_RANK),
            heartbeat(rank=VLLM_RANK),
            series(
                "kvcanary_violations_total",
                "0x79 1x300",
                VLLM_RANK,
                check="chain",
                group="full",
                phase="verify",
            ),
        ],
        {
            "19m45s": [],
            "20m": [alert("KVCanaryViolation", **VLLM_INSTANCE, check="chain", group="full")],
        },
    ),
    Scenario(
        "a group without an adapter",
        [*HEALTHY, series("kvcanary_group_state", "1x400", group="mla", state="unsupported")],
        {
            "4m": [],
            "10m": [alert("KVCanaryGroupUnsupported", "ticket", group="mla", state="unsupported")],
        },
    ),
    Scenario(
        "a scrub that takes too long",
        [*HEALTHY, series("kvcanary_scrub_cycle_seconds", "4000x400", group="full")],
        {"20m": [], "40m": [alert("KVCanaryScrubCycleTooLong", "ticket", group="full")]},
    ),
    Scenario(
        "slots that the scrub does not reach",
        [*HEALTHY, series("kvcanary_scrub_oldest_unchecked_seconds", "4000x400", group="full")],
        {"40m": [alert("KVCanaryScrubCycleTooLong", "ticket", group="full")]},
    ),
    Scenario(
        "an idle server ages",
        [
            *traffic("500x400"),
            heartbeat("0x400"),
            series("kvcanary_scrub_oldest_unchecked_seconds", "4000+15x400", group="full"),
        ],
        {"90m": []},
    ),
    Scenario(
        "an error inside the canary",
        [*HEALTHY, series("kvcanary_internal_errors_total", "0x80 1x200", where="drain")],
        {"20m": [], "20m30s": [alert("KVCanaryInternalErrors", "ticket", where="drain")]},
    ),
    Scenario(
        "a refused configuration",
        [*HEALTHY, series("kvcanary_config_reloads_total", "0x80 1x200", result="refused")],
        {"20m": [], "20m30s": [alert("KVCanaryConfigRefused", "ticket", result="refused")]},
    ),
    Scenario(
        "an accepted configuration",
        [*HEALTHY, series("kvcanary_config_reloads_total", "0x80 1x200", result="ok")],
        {"21m": []},
    ),
    Scenario(
        "the canary is gone after an upgrade while its job is up",
        [
            series("up", "1x400", {"job": "sglang", "instance": "node-1:30000"}),
            series("kvcanary_build_info", "1x79 stale _x300"),
        ],
        {
            "25m": [],
            "35m": [("KVCanaryMissing", {"job": "sglang", "severity": "ticket"})],
        },
    ),
    Scenario(
        "a rolling restart leaves some instances with the canary",
        [
            series("up", "1x400", {"job": "sglang", "instance": "node-1:30000"}),
            series("up", "1x400", {"job": "sglang", "instance": "node-2:30000"}),
            series("kvcanary_build_info", "1x79 stale _x300"),
            series("kvcanary_build_info", "1x400", {**RANK, "instance": "node-2:30000"}),
        ],
        {"35m": []},
    ),
    Scenario(
        "a job that never had the canary",
        [
            *HEALTHY,
            series("kvcanary_build_info", "1x400"),
            series("up", "1x400", {"job": "node", "instance": "node-1:9100"}),
        ],
        {"35m": []},
    ),
)


@pytest.fixture(scope="session")
def rules_without_annotations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the rules: promtool would want every text repeated in every scenario."""
    content = copy.deepcopy(yaml.safe_load(RULES.read_text()))
    for group in content["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    path = tmp_path_factory.mktemp("rules") / "kvcanary.rules.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run_promtool_test(path: Path, rules: Path, test: dict[str, Any]) -> None:
    path.write_text(
        yaml.safe_dump(
            {"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": [test]},
            sort_keys=False,
        )
    )
    result = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_exactly_the_expected_alerts_fire(
    scenario: Scenario, rules_without_annotations: Path, tmp_path: Path
) -> None:
    checks = [
        {
            "eval_time": time,
            "alertname": name,
            "exp_alerts": [{"exp_labels": labels} for fired, labels in expected if fired == name],
        }
        for time, expected in scenario.fires.items()
        for name in alert_names()
    ]
    test = {"interval": "15s", "input_series": scenario.series, "alert_rule_test": checks}
    run_promtool_test(tmp_path / "scenario.yaml", rules_without_annotations, test)


def test_every_alert_fires_in_some_scenario() -> None:
    fired = {name for s in SCENARIOS for alerts in s.fires.values() for name, _ in alerts}
    assert fired == set(alert_names())


@needs_promtool
def test_the_texts_name_check_group_and_rank(tmp_path: Path) -> None:
    _, labels = chain_alert()
    base = "https://runbooks.example.com/kvcanary/docs/runbook.md"
    expected = {
        "exp_labels": labels,
        "exp_annotations": {
            "summary": "KV cache check chain failed on node-1:30000",
            "description": "Check chain failed in group full of sglang on node-1:30000 (tp 0, pp 0,"
            " dp 0), about 3 times in 15 minutes. Requests that read these slots may have returned"
            " wrong output. The server's log and report files name the requests.",
            "runbook_url": f"{base}#kvcanaryviolation",
            "check_runbook_url": f"{base}#check-chain",
        },
    }
    test = {
        "interval": "15s",
        "input_series": [*HEALTHY[:-1], violations("_x80 3x200")],
        "alert_rule_test": [
            {"eval_time": "20m15s", "alertname": "KVCanaryViolation", "exp_alerts": [expected]}
        ],
    }
    run_promtool_test(tmp_path / "texts.yaml", RULES, test)


@needs_promtool
def test_the_rules_pass_promtool() -> None:
    result = subprocess.run(
        ["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_rules_use_only_metrics_and_labels_that_exist() -> None:
    known = {metric.name for metric in METRICS}
    for rule in load_rules():
        used = set(re.findall(r"\bkvcanary_[a-z_]+", rule["expr"]))
        assert used <= known, (rule.get("alert", rule.get("record")), used - known)


def test_every_alert_has_severity_texts_and_a_runbook_section() -> None:
    headings = set(re.findall(r"^#+ (.+)$", (DOCS / "runbook.md").read_text(), re.MULTILINE))
    base = "https://runbooks.example.com/kvcanary/docs/runbook.md#"
    for rule in load_rules():
        if "alert" not in rule:
            continue
        assert rule["labels"]["severity"] in ("page", "ticket")
        annotations = rule["annotations"]
        assert annotations["summary"]
        assert "$labels." in annotations["description"]
        assert annotations["runbook_url"] == base + rule["alert"].lower()
        assert rule["alert"] in headings


def test_every_check_has_a_runbook_section_with_the_words_of_the_table() -> None:
    text = (DOCS / "runbook.md").read_text()
    for check in CHECKS:
        section = text.split(f"### Check {check.label}\n")[1].split("\n#")[0]
        flat = " ".join(section.split())
        for words in (check.meaning, *check.causes, check.do):
            assert words in flat, (check.label, words)
