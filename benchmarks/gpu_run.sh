#!/usr/bin/env bash
# Builds, tests and measures the CUDA kernels on a machine with a GPU; every step is bounded in time.
#
#   benchmarks/gpu_run.sh [build] [tests] [ring] [sanitize] [bench]     default: all of them
#
# OUT      directory for logs and results (default: /tmp/kvcanary-gpu)
# WHEELS   directory of wheels to install first, for a machine without an index (default: .whl)
# SGLANG   folder sglang/kernels to measure beside ours (default: none)
# PYTHON   interpreter with torch for CUDA (default: python3)
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-/tmp/kvcanary-gpu}
WHEELS=${WHEELS:-.whl}
SGLANG=${SGLANG:-}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export PATH="/usr/local/cuda/bin:$PATH" PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=0

# step NAME SECONDS COMMAND...: runs the command, keeps its output in OUT/NAME.log, shows the end.
step() {
  local name=$1 seconds=$2 begin=$SECONDS status
  shift 2
  timeout --kill-after=10 "$seconds" "$@" >"$OUT/$name.log" 2>&1
  status=$?
  echo "== $name: exit $status after $((SECONDS - begin)) s"
  tail -n "${TAIL:-12}" "$OUT/$name.log"
  [ "$status" -eq 0 ] || failed=1
}

sanitize() {
  local tool=$1 choice=$2
  # Without torch's allocator every tensor is an allocation of its own, with bounds to check.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 step "$tool" 75 compute-sanitizer --tool "$tool" \
    --kernel-regex kns=kvcanary --error-exitcode 9 --target-processes all \
    "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider tests/kernels/test_cuda_shapes.py -k "$choice"
}

if compgen -G "$WHEELS/*.whl" >/dev/null; then
  step wheels 60 "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
    --upgrade --target /tmp/kvcanary-site "$WHEELS"/*.whl
  export PYTHONPATH="/tmp/kvcanary-site:$PYTHONPATH"
fi

for name in ${*:-build tests ring sanitize bench}; do
  case $name in
    build)
      step build 120 "$PYTHON" -c "
import torch
from kvcanary_plugin.kernels import load_kernels
print(torch.cuda.get_device_name(), torch.__version__, load_kernels('cuda'))"
      ;;
    tests)
      step tests 200 "$PYTHON" -m pytest -q -m gpu tests/kernels --durations=8 \
        --ignore=tests/kernels/test_cuda_ring.py
      ;;
    ring) # on its own: it watches the clock
      step ring 90 "$PYTHON" -m pytest -q -m gpu tests/kernels/test_cuda_ring.py --durations=6
      ;;
    sanitize)
      sanitize memcheck "not pinned and (tile or width or different or flipped or inside_the_batch)"
      sanitize racecheck "not pinned and (write_at or many_sources or flipped or inside_the_batch)"
      ;;
    bench)
      options=()
      [ -z "$SGLANG" ] || options=(--sglang-kernels "$SGLANG")
      TAIL=70 step bench 240 "$PYTHON" -m benchmarks.gpu --out "$OUT" "${options[@]}"
      ;;
    *)
      echo "unknown step: $name (allowed: build tests ring sanitize bench)" >&2
      failed=2
      ;;
  esac
done
exit "$failed"
