"""The manifests: rendered by Kustomize, valid by their schemas, in step with their sources."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcanary_plugin.config import load_config
from tests.deploy.paths import DEPLOY, ENGINES, ROOT, RULES

KUBERNETES = DEPLOY / "kubernetes"
COMPONENT = KUBERNETES / "component"
EXAMPLE = KUBERNETES / "example"
# The oldest and the newest that kubernetes-validate carries and a cluster of today may run.
VERSIONS = ("1.29", "1.34")

Manifest = dict[str, Any]


def render(directory: Path) -> dict[str, Manifest]:
    """What Kustomize makes of an example, by kind."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    result = subprocess.run(
        ["kubectl", "kustomize", str(directory)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    documents = list(yaml.safe_load_all(result.stdout))
    assert len({document["kind"] for document in documents}) == len(documents)
    return {document["kind"]: document for document in documents}


@pytest.fixture(scope="module")
def examples() -> dict[str, dict[str, Manifest]]:
    """Every example, by engine and kind."""
    return {engine: render(EXAMPLE / engine) for engine in ENGINES}


@pytest.fixture(params=ENGINES)
def rendered(
    request: pytest.FixtureRequest, examples: dict[str, dict[str, Manifest]]
) -> dict[str, Manifest]:
    """One example after the other, by kind."""
    return examples[request.param]


def test_the_generated_manifests_are_up_to_date() -> None:
    generated = runpy.run_path(str(KUBERNETES / "generate.py"))["manifests"]()
    for path, text in generated.items():
        assert path.read_text() == text, "run python deploy/kubernetes/generate.py"


def test_the_prometheus_rule_holds_the_rules_of_the_rules_file() -> None:
    rule = yaml.safe_load((COMPONENT / "prometheus-rule.yaml").read_text())
    assert rule["spec"] == yaml.safe_load(RULES.read_text())


def test_the_config_map_holds_a_configuration_that_loads(tmp_path: Path) -> None:
    config_map = yaml.safe_load((COMPONENT / "config-map.yaml").read_text())
    file = tmp_path / "kvcanary.yaml"
    file.write_text(config_map["data"]["kvcanary.yaml"])
    assert load_config(file, {}) == load_config(ROOT / "configs" / "production.yaml", {})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["ConfigMap", "Deployment", "Service"])
def test_the_manifest_is_valid(rendered: dict[str, Manifest], kind: str, version: str) -> None:
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    validator.validate(rendered[kind], version, strict=True)


def test_the_operator_resources_have_the_fields_that_their_schema_wants(
    rendered: dict[str, Manifest],
) -> None:
    for kind in ("ServiceMonitor", "PrometheusRule"):
        assert rendered[kind]["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(rendered["ServiceMonitor"]["spec"]) == {"selector", "endpoints"}
    for group in rendered["PrometheusRule"]["spec"]["groups"]:
        assert set(group) <= {"name", "interval", "rules"}
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "record", "expr", "for", "labels", "annotations"}
            assert ("alert" in rule) != ("record" in rule)


def test_the_engine_is_given_the_mounted_configuration(rendered: dict[str, Manifest]) -> None:
    pod = rendered["Deployment"]["spec"]["template"]["spec"]
    (engine,) = pod["containers"]
    (variable,) = engine["env"]
    mounts = {mount["name"]: mount for mount in engine["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    path = Path(variable["value"])
    assert variable["name"] == "KVCANARY_CONFIG"
    assert mounts["kvcanary"]["mountPath"] == str(path.parent)
    assert "subPath" not in mounts["kvcanary"], "a subPath does not follow the ConfigMap"
    name = volumes["kvcanary"]["configMap"]["name"]
    assert rendered["ConfigMap"]["metadata"]["name"] == name
    assert path.name in rendered["ConfigMap"]["data"]
    assert {"models", "shared-memory"} <= mounts.keys(), "the Deployment's own mounts stay"


def test_prometheus_finds_the_metrics_of_the_engine(rendered: dict[str, Manifest]) -> None:
    monitor, service = rendered["ServiceMonitor"], rendered["Service"]
    pod = rendered["Deployment"]["spec"]["template"]
    selected = monitor["spec"]["selector"]["matchLabels"]
    assert selected.items() <= service["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    (service_port,) = service["spec"]["ports"]
    (engine,) = pod["spec"]["containers"]
    (container_port,) = engine["ports"]
    assert endpoint["port"] == service_port["name"]
    assert service_port["targetPort"] == container_port["name"]
    assert service_port["port"] == container_port["containerPort"]
    assert f"--port={container_port['containerPort']}" in engine["args"]


def test_each_engine_serves_metrics(examples: dict[str, dict[str, Manifest]]) -> None:
    (sglang,), (vllm,) = (
        examples[engine]["Deployment"]["spec"]["template"]["spec"]["containers"]
        for engine in ("sglang", "vllm")
    )
    assert "--enable-metrics" in sglang["args"]
    assert vllm["command"] == ["vllm", "serve"]
    assert "--disable-log-stats" not in vllm["args"]


def test_both_engines_may_be_in_one_namespace(examples: dict[str, dict[str, Manifest]]) -> None:
    sglang, vllm = examples["sglang"], examples["vllm"]
    for kind in ("ConfigMap", "PrometheusRule", "ServiceMonitor"):
        assert sglang[kind] == vllm[kind]
    for kind in ("Deployment", "Service"):
        assert sglang[kind]["metadata"]["name"] != vllm[kind]["metadata"]["name"]


def test_no_service_sets_a_variable_that_stops_vllm(
    examples: dict[str, dict[str, Manifest]],
) -> None:
    for engine in ENGINES:
        # It would set VLLM_PORT to a URL in the pods of the namespace that have service links.
        assert examples[engine]["Service"]["metadata"]["name"] != "vllm"
    pod = examples["vllm"]["Deployment"]["spec"]["template"]["spec"]
    assert pod["enableServiceLinks"] is False


def test_a_deployment_without_the_label_is_left_alone(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    deployment = tmp_path / "kubernetes" / "example" / "vllm" / "deployment.yaml"
    deployment.write_text(deployment.read_text().replace('kvcanary.io/guard: "true"', "a: b"))
    (engine,) = render(deployment.parent)["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert "env" not in engine
    assert {mount["name"] for mount in engine["volumeMounts"]} == {"models", "shared-memory"}
