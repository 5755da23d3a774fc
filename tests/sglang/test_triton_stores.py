"""The tests of pool bytes once more, with the engine's Triton stores in Triton's interpreter.

In a process of its own: an SGLang for CPUs runs with a stand-in for Triton, and what it finds at
import it keeps.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A Triton in a directory of its own; the vLLM environment has one.
TRITON = Path(os.environ.get("TRITON_FOR_TESTS", ROOT / ".venv-vllm" / "triton-interpreter"))


def test_what_the_kernels_store_is_what_the_sources_hold():
    if not (TRITON / "triton").is_dir():
        pytest.skip(f"needs a Triton in {TRITON}: make venv-vllm, or TRITON_FOR_TESTS=DIRECTORY")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rfE", "tests/sglang/test_pool_bytes.py"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(TRITON)]),
            "TRITON_INTERPRET": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
