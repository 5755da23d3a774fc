"""What is shipped: the wheel and the source distribution, built and installed for real."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from kvcanary_plugin import __version__

ROOT = Path(__file__).parents[2]
# One process for each: setuptools keeps state between builds.
BUILD = "import sys; from setuptools import build_meta as m; getattr(m, sys.argv[1])(sys.argv[2])"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel), built from a copy of what git tracks."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    for step in ("build_sdist", "build_wheel"):
        done = subprocess.run(
            [sys.executable, "-c", BUILD, step, str(output)],
            cwd=source,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    return next(output.glob("*.tar.gz")), next(output.glob("*.whl"))


def test_the_version_comes_from_one_place(built: tuple[Path, Path]):
    sdist, wheel = built
    assert __version__ in sdist.name
    assert __version__ in wheel.name


def test_the_wheel_has_kernel_sources_models_types_licence_and_entry_points(
    built: tuple[Path, Path],
):
    with zipfile.ZipFile(built[1]) as archive:
        names = set(archive.namelist())
        entry_points = next(n for n in names if n.endswith("entry_points.txt"))
        points = archive.read(entry_points).decode()
    csrc = {f"kvcanary_plugin/kernels/csrc/{p.name}" for p in SOURCES}
    assert csrc <= names
    assert "kvcanary_plugin/py.typed" in names
    assert "kvcanary_plugin/drill/models/tiny-llama/config.json" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for line in (
        "kvcanary = kvcanary_plugin.cli:main",
        "kvcanary = kvcanary_plugin.hooks.sglang.plugin:register",
        "kvcanary = kvcanary_plugin.hooks.vllm.plugin:register",
    ):
        assert line in points
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)


SOURCES = sorted((ROOT / "kvcanary_plugin/kernels/csrc").iterdir())


def test_the_source_distribution_has_the_kernel_sources(built: tuple[Path, Path]):
    with tarfile.open(built[0]) as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {path.name for path in SOURCES} <= names


def test_the_wheel_installs_into_a_clean_environment_and_doctor_runs(
    built: tuple[Path, Path], tmp_path: Path
):
    # Dependencies are lent by this environment: nothing is downloaded.
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(built[1])], check=True, capture_output=True, timeout=400)
    lent = next(p for p in sys.path if p.endswith("site-packages"))
    # Behind the clean environment's own packages, so that the installed wheel wins.
    site_packages = next((tmp_path / "venv/lib").glob("python*")) / "site-packages"
    (site_packages / "lent.pth").write_text(f"import site; site.addsitedir({lent!r})\n")
    done = subprocess.run(
        [str(tmp_path / "venv/bin/kvcanary"), "doctor"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert f"kvcanary_plugin {__version__}" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    where = subprocess.run(
        [str(python), "-c", "import kvcanary_plugin; print(kvcanary_plugin.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert where.startswith(str(tmp_path))
