"""SGLang's own canary kernels, taken from an installed or unpacked copy, for a side-by-side run.

Nothing of SGLang is imported but the launchers of its canary and their kernels: the packages above
them stay empty, and its build helper is replaced by one nvcc call.
"""

from __future__ import annotations

import functools
import hashlib
import subprocess
import sys
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
from tvm_ffi import libinfo


def load_sglang_canary(kernels_dir: Path) -> types.SimpleNamespace:
    """The launchers, data types and constants of SGLang's canary.

    Args:
        kernels_dir: the folder ``sglang/kernels`` with ``jit/csrc/kv_canary``, ``jit/include`` and
            ``ops/kv_canary`` in it.
    """
    for name, path in (
        ("sglang", None),
        ("sglang.kernels", kernels_dir),
        ("sglang.kernels.jit", kernels_dir / "jit"),
        ("sglang.kernels.ops", kernels_dir / "ops"),
        ("sglang.kernels.ops.kv_canary", kernels_dir / "ops" / "kv_canary"),
    ):
        package = types.ModuleType(name)
        package.__path__ = [str(path)] if path is not None else []
        sys.modules[name] = package
    helper: Any = types.ModuleType("sglang.kernels.jit.utils")
    helper.cache_once = functools.cache
    helper.make_cpp_args = _template_arguments
    helper.load_jit = functools.partial(_load, kernels_dir / "jit")
    sys.modules["sglang.kernels.jit.utils"] = helper

    from sglang.kernels.ops.kv_canary import consts, verify, write
    from sglang.kernels.ops.kv_canary.plan import entries_kernel
    from sglang.kernels.ops.kv_canary.plan.api import launch_canary_plan_kernels

    with ThreadPoolExecutor() as pool:  # a compiler run each
        builds = (
            pool.submit(write._jit_canary_write_module),
            pool.submit(verify._jit_canary_verify_module, False),
            pool.submit(entries_kernel._jit_plan_entries_module, False, False),
        )
        for build in builds:
            build.result()

    return types.SimpleNamespace(
        consts=consts,
        RealKvSource=verify.RealKvSource,
        VerifyOrWriteContext=verify.VerifyOrWriteContext,
        VerifyPlan=verify.VerifyPlan,
        WritePlan=write.WritePlan,
        plan=launch_canary_plan_kernels,
        verify=verify.launch_canary_verify_kernel,
        write=write.launch_canary_write_kernel,
    )


class _template_arguments(list[str]):
    def __init__(self, *values: bool) -> None:
        super().__init__("true" if value else "false" for value in values)

    def __str__(self) -> str:
        return ", ".join(self)


def _load(
    jit_dir: Path, *_names: str, cuda_files: list[str], cuda_wrappers: list[tuple[str, str]]
) -> Any:
    """Compile a kernel header with exports for its launchers, and load it."""
    source = "\n".join(
        [
            "#include <tvm/ffi/extra/c_env_api.h>",
            "#include <tvm/ffi/tvm_ffi.h>",
            *(f'#include "{jit_dir / "csrc" / name}"' for name in cuda_files),
            "namespace sglang {",
            *(
                f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({export}, ({function}));"
                for export, function in cuda_wrappers
            ),
            "}",
        ]
    )
    major, minor = _capability()
    digest = hashlib.blake2b(f"{source}{major}{minor}".encode(), digest_size=8).hexdigest()
    library = Path(tempfile.gettempdir()) / f"kvcanary-sglang-{digest}.so"
    if not library.is_file():
        unit = library.with_suffix(".cu")
        unit.write_text(source)
        suffix = "a" if major >= 9 else ""
        target = f"{major}{minor}{suffix}"
        subprocess.run(
            [
                "nvcc",
                *("-std=c++20", "-O3", "-shared", "--compiler-options=-fPIC"),
                f"-gencode=arch=compute_{target},code=sm_{target}",
                *("--expt-relaxed-constexpr", f"-DSGL_CUDA_ARCH={major}{minor}0"),
                f"-I{jit_dir / 'include'}",
                f"-I{libinfo.find_include_path()}",
                f"-I{libinfo.find_dlpack_include_path()}",
                *(str(unit), "-o", str(library)),
                *(f"-L{Path(libinfo.find_libtvm_ffi()).parent}", "-ltvm_ffi"),
            ],
            check=True,
        )
    return tvm_ffi.load_module(str(library))


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
