"""Building and loading the compiled kernels: one function, a cache, an ahead-of-time directory.

A library's name carries everything that decides whether it fits: kind, machine, CUDA
architectures, and a key over the source bytes, the flags and the tvm-ffi version. An
ahead-of-time library is used wherever its name matches. The cache keeps one directory per compiler
version beside that, so that a new compiler builds anew.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import tvm_ffi
from tvm_ffi import libinfo

logger = logging.getLogger(__name__)

SOURCE_DIR: Final = Path(__file__).parent / "csrc"
PREBUILT_DIR: Final = Path(__file__).parent / "prebuilt"

_CPU_FLAGS: Final = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall")
_CUDA_FLAGS: Final = (
    "-std=c++17",
    "-O3",
    "-shared",
    "--compiler-options=-fPIC,-fvisibility=hidden",
    "--expt-relaxed-constexpr",
)
_CPU_SOURCES: Final = ("*.h", "cpu.cc")
_CUDA_SOURCES: Final = ("*.h", "*.cuh", "cuda.cu")


class KernelBuildError(RuntimeError):
    """The compiler refused the kernels, or built something that does not load."""


class CompilerNotFoundError(KernelBuildError):
    """There is neither a compiler nor an ahead-of-time library."""


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/kvcanary``, or ``~/.cache/kvcanary``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvcanary"


def build_cpu(*, output: Path | None = None, cache_dir: Path | None = None) -> Path:
    """Build the CPU kernels (or find them in the cache) and return the library.

    Args:
        output: directory that receives the library, for use ahead of time. None: the cache.
        cache_dir: root of the cache; None: :func:`default_cache_dir`.

    CompilerNotFoundError without a C++ compiler, KernelBuildError when it fails.
    """
    compiler = find_compiler("cpu")
    if compiler is None:
        raise CompilerNotFoundError(
            "kvcanary: no C++ compiler found (looked for c++, g++ and clang++ on PATH). Install "
            "one, or put a library that `kvcanary build` made elsewhere into "
            f"{PREBUILT_DIR} or the configured directory."
        )
    command = [compiler, *_CPU_FLAGS, *_include_flags(), str(SOURCE_DIR / "cpu.cc"), *_link_flags()]
    return _build(_cpu_name(), compiler, command, output=output, cache_dir=cache_dir)


def build_cuda(
    *, arches: Sequence[str], output: Path | None = None, cache_dir: Path | None = None
) -> Path:
    """Build the CUDA kernels (or find them in the cache) and return the library. Needs no GPU.

    Args:
        arches: compute capabilities such as ``("8.0", "9.0", "10.0")``. PTX of the highest one is
            included, so that newer GPUs work as well.
        output: directory that receives the library, for use ahead of time. None: the cache.
        cache_dir: root of the cache; None: :func:`default_cache_dir`.

    ValueError for a malformed architecture, CompilerNotFoundError without nvcc, KernelBuildError
    when it fails.
    """
    capabilities = _parse_arches(arches)
    compiler = find_compiler("cuda")
    if compiler is None:
        raise CompilerNotFoundError(
            f"kvcanary: nvcc not found (looked on PATH and in {_cuda_home() / 'bin'}). Install the "
            "CUDA toolkit, or put a library that `kvcanary build --arch "
            f"{arches[0]}` made elsewhere into {PREBUILT_DIR} or the configured directory."
        )
    command = [
        compiler,
        *_CUDA_FLAGS,
        "--threads=0",
        *_gencode_flags(capabilities),
        *_include_flags(),
        str(SOURCE_DIR / "cuda.cu"),
        *_link_flags(),
    ]
    return _build(_cuda_name(capabilities), compiler, command, output=output, cache_dir=cache_dir)


def load_module_for(
    device: torch.device, *, cache_dir: Path | None = None, prebuilt_dir: Path | None = None
) -> Any:
    """The tvm-ffi module of the kernels for ``device``: ahead-of-time, else cached, else built.

    Args:
        device: a CPU or CUDA device; the latter decides the architecture.
        cache_dir: root of the cache; None: :func:`default_cache_dir`.
        prebuilt_dir: looked into before the package's own ``prebuilt`` directory.

    CompilerNotFoundError when nothing fits and nothing can be built.
    """
    library = find_prebuilt(device, prebuilt_dir=prebuilt_dir)
    if library is None and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        library = build_cuda(arches=[f"{capability[0]}.{capability[1]}"], cache_dir=cache_dir)
    elif library is None:
        library = build_cpu(cache_dir=cache_dir)
    logger.info("kvcanary: kernels for %s from %s", device.type, library)
    try:
        return tvm_ffi.load_module(str(library))
    except Exception as error:
        raise KernelBuildError(
            f"kvcanary: {library} does not load ({error}); delete it, so that it is built anew"
        ) from error


def find_prebuilt(device: torch.device, *, prebuilt_dir: Path | None = None) -> Path | None:
    """The ahead-of-time library that fits ``device``, or None; arguments as above."""
    directories = [path for path in (prebuilt_dir, PREBUILT_DIR) if path is not None]
    if device.type == "cuda":
        return _find_prebuilt_cuda(directories, torch.cuda.get_device_capability(device))
    return _find_prebuilt_cpu(directories)


def find_compiler(device_type: str) -> str | None:
    """Path of the compiler for the kernels of ``cpu`` or ``cuda``, or None."""
    if device_type == "cuda":
        return _find_compiler(("nvcc",), (_cuda_home() / "bin",))
    return _find_compiler(("c++", "g++", "clang++"), ())


# ---- names and keys ------------------------------------------------------------------------------


def _cpu_name() -> str:
    return f"kvcanary_cpu-{platform.machine()}-{_source_key(_CPU_SOURCES, _CPU_FLAGS)}.so"


def _cuda_name(capabilities: Sequence[tuple[int, int]]) -> str:
    arches = "-".join(f"sm{major}{minor}" for major, minor in capabilities)
    key = _source_key(_CUDA_SOURCES, _CUDA_FLAGS)
    return f"kvcanary_cuda-{platform.machine()}-{arches}-{key}.so"


@functools.cache
def _source_key(patterns: tuple[str, ...], flags: tuple[str, ...]) -> str:
    """16 hex digits over source names and bytes, flags and the tvm-ffi version."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for pattern in patterns for path in SOURCE_DIR.glob(pattern)):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode())
        digest.update(content)
    digest.update(" ".join((*flags, tvm_ffi.__version__)).encode())
    return digest.hexdigest()


@functools.cache
def _toolchain_key(compiler: str) -> str:
    """16 hex digits over what the compiler says about its version."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    return hashlib.blake2b(compiler.encode() + version, digest_size=8).hexdigest()


def _find_prebuilt_cpu(directories: Sequence[Path]) -> Path | None:
    candidates = (directory / _cpu_name() for directory in directories)
    return next((path for path in candidates if path.is_file()), None)


def _find_prebuilt_cuda(directories: Sequence[Path], device: tuple[int, int]) -> Path | None:
    """The library whose architectures run on ``device``, an exact match before any other."""
    pattern = re.compile(
        rf"kvcanary_cuda-{re.escape(platform.machine())}-(?P<arches>sm\d+(?:-sm\d+)*)"
        rf"-{_source_key(_CUDA_SOURCES, _CUDA_FLAGS)}\.so"
    )
    best: tuple[int, Path] | None = None
    for directory in directories:
        for path in sorted(directory.glob("kvcanary_cuda-*.so")):
            match = pattern.fullmatch(path.name)
            if match is None:
                continue
            arches = [_parse_sm(arch) for arch in match["arches"].split("-")]
            rank = _fitness(arches, device)
            if rank > 0 and (best is None or rank > best[0]):
                best = (rank, path)
    return None if best is None else best[1]


def _fitness(arches: Sequence[tuple[int, int]], device: tuple[int, int]) -> int:
    """3 exact, 2 binary of the same generation, 1 through the PTX of the highest, 0 unusable."""
    if device in arches:
        return 3
    if any(major == device[0] and minor < device[1] for major, minor in arches):
        return 2
    return 1 if max(arches) < device else 0


def _parse_sm(text: str) -> tuple[int, int]:
    digits = text.removeprefix("sm")
    return int(digits[:-1]), int(digits[-1])


def _parse_arches(arches: Sequence[str]) -> list[tuple[int, int]]:
    if not arches:
        raise ValueError("kvcanary: arches must name at least one architecture such as 9.0, got []")
    for arch in arches:
        if re.fullmatch(r"\d{1,2}\.\d", arch) is None:
            raise ValueError(
                f"kvcanary: arches must be compute capabilities such as 8.0, 9.0 or 10.0, "
                f"got {arch!r}"
            )
    return sorted({(int(arch.split(".")[0]), int(arch.split(".")[1])) for arch in arches})


# ---- compiling -----------------------------------------------------------------------------------


def _cuda_home() -> Path:
    return Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))


def _find_compiler(names: Sequence[str], directories: Sequence[Path]) -> str | None:
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
        for directory in directories:
            if (directory / name).is_file():
                return str(directory / name)
    return None


def _include_flags() -> list[str]:
    directories = {libinfo.find_include_path(), libinfo.find_dlpack_include_path()}
    return [flag for path in sorted(directories) for flag in ("-isystem", path)]


def _link_flags() -> list[str]:
    """No path is recorded: the running process has loaded this library already."""
    return [f"-L{Path(libinfo.find_libtvm_ffi()).parent}", "-ltvm_ffi"]


def _gencode_flags(capabilities: Sequence[tuple[int, int]]) -> list[str]:
    flags = [
        f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}"
        for major, minor in capabilities
    ]
    major, minor = capabilities[-1]
    return [*flags, f"-gencode=arch=compute_{major}{minor},code=compute_{major}{minor}"]


def _build(
    name: str,
    compiler: str,
    command: list[str],
    *,
    output: Path | None,
    cache_dir: Path | None,
) -> Path:
    """Run ``command`` unless its library is in the cache; copy it to ``output`` if given."""
    cached = (cache_dir or default_cache_dir()) / _toolchain_key(compiler) / name
    with _locked(cached.with_suffix(".lock")):
        if not cached.is_file():
            _compile(command, cached)
    if output is None:
        return cached
    output.mkdir(parents=True, exist_ok=True)
    copied = output / name
    with tempfile.NamedTemporaryFile(dir=output, suffix=".so", delete=False) as temporary:
        shutil.copyfile(cached, temporary.name)
    _publish(Path(temporary.name), copied)
    return copied


def _compile(command: list[str], library: Path) -> None:
    """The library appears under its name only when it is complete."""
    logger.info("kvcanary: building %s", library)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        unfinished = Path(scratch) / library.name
        full = [*command, "-o", str(unfinished)]
        result = subprocess.run(full, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise KernelBuildError(
                f"kvcanary: building the kernels failed (exit status {result.returncode}).\n"
                f"{' '.join(full)}\n{(result.stdout + result.stderr)[-4000:]}"
            )
        _publish(unfinished, library)


def _publish(unfinished: Path, library: Path) -> None:
    unfinished.chmod(0o755)
    os.replace(unfinished, library)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One builder at a time, across processes; the lock goes with the process that holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("w")
    except OSError as error:
        raise KernelBuildError(
            f"kvcanary: the build cache {path.parent} cannot be written ({error}); choose another "
            "directory (setting build.cache_directory), or build ahead of time"
        ) from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
