#!/usr/bin/env bash
# Builds (or brings up to date) a development environment that holds a real engine for CPU-only machines.
#
#   requirements/build_venv.sh VENV ENGINE        e.g.  requirements/build_venv.sh .venv sglang-cpu
#
# ENGINE names the pinned list requirements/ENGINE.txt. One environment holds one engine, since their
# pins differ. Nothing to do: well under a second. Environment variables:
#   PYTHON           interpreter to build from, 3.11 to 3.13; unset or empty: keep the one that VENV
#                    was built from, for a new one take python3
#   TORCH_INDEX_URL  package index for torch alone, for machines where the default one has the CUDA build
set -euo pipefail

venv=$1
engine=$2

cd "$(dirname "${BASH_SOURCE[0]}")/.."
pins=requirements
log=$venv.log

say() { printf 'kvcanary: %s\n' "$*"; }
die() { say "$*" >&2; exit 1; }

[ -f "$pins/$engine.txt" ] || die "engine ... got $engine; there is no $pins/$engine.txt"

exec 9>"$venv.lock"
flock 9

# What an environment depends on; its scripts hold absolute paths, so that a moved checkout counts too.
engine_key=$({
    echo "$PWD/$venv ${TORCH_INDEX_URL:-}"
    cat "$pins/torch-cpu.txt" "$pins/$engine.txt" "$pins/dev.txt" "$pins/cpu_engine_stubs.py" "$pins/build_venv.sh"
    [ ! -x "$pins/finish_$engine.sh" ] || cat "$pins/finish_$engine.sh" "$pins/triton_cpu/"*.py
} | sha256sum)
package_key=$({ echo "$engine_key"; cat pyproject.toml kvcanary_plugin/__init__.py; } | sha256sum)

# A stamp is written last, after the imports were tried: without it the step is done anew.
is_done() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }
mark_done() { printf '%s\n' "$2" >"$1"; }

logged() {
    if ! "$@" >>"$log" 2>&1; then
        # On some machines pip names each package it did not find in a local index, in hundreds of lines.
        grep -v 'is ignored: it is neither a file nor a directory' "$log" | tail -n 40 >&2
        die "failed: $*  (whole log: $log)"
    fi
}
pip_install() { logged "$venv/bin/python" -m pip install --quiet --no-input "$@"; }

version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])'; }
is_from_wanted_python() {
    [ -z "${PYTHON:-}" ] || [ "$(version_of "$PYTHON" 2>/dev/null)" = "$(version_of "$venv/bin/python")" ]
}

if ! is_done "$venv/engine.stamp" "$engine_key" || ! is_from_wanted_python; then
    python=${PYTHON:-python3}
    python_version=$(version_of "$python") || die "PYTHON ... got $python, which does not run; set it to a Python 3.11 to 3.13"
    case $python_version in
        3.11.* | 3.12.* | 3.13.*) ;;
        *) die "PYTHON ... got $python ($python_version); allowed 3.11 to 3.13; do: make venv PYTHON=python3.11" ;;
    esac
    say "building $venv for $engine with Python $python_version (a few minutes; log: $log)"
    rm -rf "$venv"
    : >"$log"
    logged "$python" -m venv "$venv"
    pip_install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} \
        -c "$pins/$engine.txt" -c "$pins/dev.txt" -r "$pins/torch-cpu.txt"
    pip_install --no-deps -r "$pins/$engine.txt" -r "$pins/dev.txt"
    site_packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    if [ "$engine" = sglang-cpu ]; then
        cp "$pins/cpu_engine_stubs.py" "$site_packages/"
        echo 'import cpu_engine_stubs' >"$site_packages/cpu_engine_stubs.pth"
    fi
    if [ -x "$pins/finish_$engine.sh" ]; then
        logged "$pins/finish_$engine.sh" "$venv"
    fi
    logged "$venv/bin/python" -c "import torch, tvm_ffi, pytest, ${engine%-cpu}"
    mark_done "$venv/engine.stamp" "$engine_key"
fi

if ! is_done "$venv/package.stamp" "$package_key"; then
    pip_install --no-deps --no-build-isolation --editable .
    logged "$venv/bin/python" -c 'import kvcanary_plugin'
    mark_done "$venv/package.stamp" "$package_key"
    say "$venv is ready"
fi
