"""Building, caching and finding libraries. A stand-in compiler keeps most of these tests fast."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import tvm_ffi

from kvcanary_plugin.kernels import build
from kvcanary_plugin.kernels.build import (
    CompilerNotFoundError,
    KernelBuildError,
    build_cpu,
    build_cuda,
    default_cache_dir,
    load_module_for,
)
from tests.kernels import scenes

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "stand-in {version}"; exit 0; fi
sleep {seconds}
echo "$@" >> {log}
for last; do :; done
echo compiled > "$last"
"""


class StandIn:
    """A compiler on an otherwise empty PATH that notes how it was called."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "calls"

    def install(self, name: str, *, version: str = "1", seconds: float = 0) -> None:
        script = self.directory / name
        script.write_text(COMPILER.format(version=version, seconds=seconds, log=self.log))
        script.chmod(0o755)

    def install_broken(self, name: str) -> None:
        script = self.directory / name
        script.write_text("#!/bin/sh\necho 'cpu.cc:1: no such luck' >&2\nexit 3\n")
        script.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    directory = tmp_path / "bin"
    directory.mkdir()
    for tool in ("sh", "sleep"):
        found = shutil.which(tool)
        assert found is not None
        (directory / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no-cuda"))
    return StandIn(directory)


@pytest.fixture(autouse=True)
def forget_keys() -> None:
    build._source_key.cache_clear()
    build._toolchain_key.cache_clear()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# ---- the cache -----------------------------------------------------------------------------------


def test_library_is_built_once_and_found_again(stand_in: StandIn, cache: Path) -> None:
    stand_in.install("c++")
    first = build_cpu(cache_dir=cache)
    assert first.read_text() == "compiled\n"
    assert build_cpu(cache_dir=cache) == first
    assert len(stand_in.calls) == 1


def test_builders_of_one_library_wait_for_each_other(stand_in: StandIn, cache: Path) -> None:
    stand_in.install("c++", seconds=0.2)
    with ThreadPoolExecutor(4) as threads:
        built = {
            future.result()
            for future in [threads.submit(build_cpu, cache_dir=cache) for _ in range(4)]
        }
    assert len(built) == 1
    assert len(stand_in.calls) == 1


def copy_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sources = tmp_path / "csrc"
    shutil.copytree(build.SOURCE_DIR, sources)
    monkeypatch.setattr(build, "SOURCE_DIR", sources)
    return sources


@pytest.mark.parametrize("changed", ["header", "main", "flags", "tvm-ffi", "compiler", "machine"])
def test_whatever_decides_the_code_is_part_of_the_key(
    changed: str,
    stand_in: StandIn,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in.install("c++")
    sources = copy_sources(tmp_path, monkeypatch)
    before = build_cpu(cache_dir=cache)
    if changed == "header":
        (sources / "hash.h").open("a").write("// changed\n")
    elif changed == "main":
        (sources / "cpu.cc").open("a").write("// changed\n")
    elif changed == "flags":
        monkeypatch.setattr(build, "_CPU_FLAGS", (*build._CPU_FLAGS, "-g"))
    elif changed == "tvm-ffi":
        monkeypatch.setattr(tvm_ffi, "__version__", "9.9")
    elif changed == "compiler":
        stand_in.install("c++", version="2")
    else:
        monkeypatch.setattr("platform.machine", lambda: "riscv64")
    build._source_key.cache_clear()
    build._toolchain_key.cache_clear()
    assert build_cpu(cache_dir=cache) != before


def test_cuda_sources_do_not_rebuild_the_cpu_kernels(
    stand_in: StandIn, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.install("c++")
    sources = copy_sources(tmp_path, monkeypatch)
    before = build_cpu(cache_dir=cache)
    (sources / "write.cuh").open("a").write("// changed\n")
    build._source_key.cache_clear()
    assert build_cpu(cache_dir=cache) == before


def test_failed_build_says_what_the_compiler_said_and_leaves_nothing(
    stand_in: StandIn, cache: Path
) -> None:
    stand_in.install_broken("c++")
    with pytest.raises(KernelBuildError, match=r"(?s)exit status 3.*cpu\.cc.*no such luck"):
        build_cpu(cache_dir=cache)
    assert not list(cache.rglob("*.so"))


def test_unwritable_cache_names_the_setting(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in.install("c++")
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(KernelBuildError, match=r"cannot be written .* build\.cache_directory"):
        build_cpu(cache_dir=occupied)


def test_default_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "kvcanary"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "kvcanary"


# ---- compilers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["c++", "g++", "clang++"])
def test_any_usual_compiler_will_do(stand_in: StandIn, cache: Path, name: str) -> None:
    stand_in.install(name)
    assert build_cpu(cache_dir=cache).is_file()


def test_missing_compiler_says_what_to_do(stand_in: StandIn, cache: Path) -> None:
    with pytest.raises(CompilerNotFoundError, match=r"no C\+\+ compiler .* `kvcanary build`"):
        build_cpu(cache_dir=cache)
    with pytest.raises(CompilerNotFoundError, match=r"nvcc not found .* --arch 9\.0`"):
        build_cuda(arches=["9.0"], cache_dir=cache)


def test_nvcc_is_also_found_below_cuda_home(
    stand_in: StandIn, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    stand_in.install("nvcc")
    (stand_in.directory / "nvcc").rename(home / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert build_cuda(arches=["9.0"], cache_dir=cache).is_file()


def test_cuda_library_holds_every_architecture_and_ptx_of_the_newest(
    stand_in: StandIn, cache: Path
) -> None:
    stand_in.install("nvcc")
    library = build_cuda(arches=["10.0", "8.0", "9.0", "8.0"], cache_dir=cache)
    assert "-sm80-sm90-sm100-" in library.name
    (call,) = stand_in.calls
    assert [word for word in call.split() if word.startswith("-gencode")] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]


@pytest.mark.parametrize("arches", [[], ["9"], ["sm_90"], ["9.0a"], ["8.0", "latest"]])
def test_malformed_architectures_are_refused(arches: Sequence[str], cache: Path) -> None:
    with pytest.raises(ValueError, match=r"^kvcanary: arches must "):
        build_cuda(arches=arches, cache_dir=cache)


# ---- ahead of time -------------------------------------------------------------------------------


def test_output_receives_a_copy_under_the_same_name(
    stand_in: StandIn, cache: Path, tmp_path: Path
) -> None:
    stand_in.install("c++")
    cached = build_cpu(cache_dir=cache)
    copied = build_cpu(output=tmp_path / "image" / "kernels", cache_dir=cache)
    assert copied == tmp_path / "image" / "kernels" / cached.name
    assert copied.read_bytes() == cached.read_bytes()
    assert [path.name for path in copied.parent.iterdir()] == [cached.name]


def test_library_built_ahead_of_time_runs_without_a_compiler(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prebuilt = tmp_path / "prebuilt"
    build_cpu(output=prebuilt)
    monkeypatch.setenv("PATH", "")
    module = load_module_for(scenes.CPU, cache_dir=cache, prebuilt_dir=prebuilt)
    output = torch.zeros(1, dtype=torch.int64)
    module.canary_translate(torch.tensor([1]), torch.tensor([0, 7]), output)
    assert output.item() == 7
    assert not cache.exists()


def test_library_of_other_sources_is_not_used(
    stand_in: StandIn, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.install("c++")
    prebuilt = tmp_path / "prebuilt"
    build_cpu(output=prebuilt, cache_dir=cache)
    sources = copy_sources(tmp_path, monkeypatch)
    (sources / "cpu.cc").open("a").write("// a newer release\n")
    (stand_in.directory / "c++").unlink()
    build._source_key.cache_clear()
    with pytest.raises(CompilerNotFoundError):
        load_module_for(scenes.CPU, cache_dir=cache, prebuilt_dir=prebuilt)


def test_library_that_does_not_load_is_named(stand_in: StandIn, cache: Path) -> None:
    stand_in.install("c++")  # what it "compiles" is no library
    with pytest.raises(KernelBuildError, match=r"kvcanary_cpu-.*\.so does not load .* delete it"):
        load_module_for(scenes.CPU, cache_dir=cache)


@pytest.mark.parametrize(
    ("available", "device", "chosen"),
    [
        ([["8.0", "9.0"]], (9, 0), 0),
        ([["8.0"], ["9.0"]], (9, 0), 1),
        ([["8.0"]], (8, 6), 0),  # binaries run on later minors of their generation
        ([["9.0"], ["8.0"]], (8, 6), 1),
        ([["8.0", "9.0"]], (12, 0), 0),  # through the PTX of 9.0
        ([["9.0"]], (8, 0), None),  # nothing runs on an older device
        ([["8.6", "9.0"]], (8, 0), None),
    ],
)
def test_library_that_fits_the_gpu_best_is_used(
    available: list[list[str]],
    device: tuple[int, int],
    chosen: int | None,
    stand_in: StandIn,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in.install("nvcc")
    prebuilt = tmp_path / "prebuilt"
    libraries = [
        build_cuda(arches=arches, output=prebuilt, cache_dir=cache) for arches in available
    ]
    (prebuilt / "kvcanary_cuda-other-sm90-0123456789abcdef.so").write_text("of another machine")
    (stand_in.directory / "nvcc").unlink()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: device)
    monkeypatch.setattr(tvm_ffi, "load_module", Path)
    if chosen is None:
        with pytest.raises(CompilerNotFoundError):
            load_module_for(torch.device("cuda:0"), cache_dir=cache, prebuilt_dir=prebuilt)
    else:
        loaded = load_module_for(torch.device("cuda:0"), cache_dir=cache, prebuilt_dir=prebuilt)
        assert loaded == libraries[chosen]
