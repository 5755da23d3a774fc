#!/usr/bin/env bash
# Installs the plugin beside an engine and builds its kernels ahead of time, so that the engine needs
# no compiler at run time. The Dockerfile runs it, and so do the tests, without Docker.
#
#   deploy/docker/install.sh WHEEL [ARCH...]
#   deploy/docker/install.sh dist/kvcanary_plugin-0.1.0-py3-none-any.whl 9.0 10.0
#
# ARCH is a CUDA compute capability; it takes nvcc to build for one, and no GPU. The CPU kernels are
# always built and take a C++ compiler. PYTHON names the engine's interpreter (default: python3).
set -euo pipefail

wheel=${1:?usage: install.sh WHEEL [ARCH...]}
shift
python=${PYTHON:-python3}

# What the engine brought stays as it is: the wheel asks for no version of torch.
"$python" -m pip install --no-cache-dir "$wheel"

scripts=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
prebuilt=$("$python" -c 'from kvcanary_plugin.kernels.build import PREBUILT_DIR; print(PREBUILT_DIR)')
arches=()
for arch in "$@"; do arches+=(--arch "$arch"); done
"$scripts/kvcanary" build --output "$prebuilt" "${arches[@]}"

# Nothing of the build is needed any more, and the library loads without a compiler.
rm -rf "${XDG_CACHE_HOME:-$HOME/.cache}/kvcanary"
PATH=/nonexistent "$(command -v "$python")" - <<'CHECK'
import torch

from kvcanary_plugin.kernels.build import load_module_for

load_module_for(torch.device("cpu"))
CHECK
"$scripts/kvcanary" version
