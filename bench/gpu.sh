#!/usr/bin/env bash
# All that a machine with an NVIDIA GPU has to say, within 8 minutes: bench/gpu.sh FOLDER
# Python is that of PYTHON, with attnfast installed. A log of every step, bench.json, and the report
# as gpu.md and gpu.png lie in FOLDER; what fails does not stop what follows, and a step that is out of
# time is interrupted: a benchmark then still writes what it has. Every shape: make bench.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/gpu} python=${PYTHON:-.venv/bin/python} failed=0
export PYTHONSAFEPATH=1  # attnfast as installed, not the sources in this folder
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem --format=csv \
  > "$out/gpu.csv" 2> /dev/null || { echo "there is no NVIDIA GPU"; exit 1; }

step() {  # name, seconds at most, command
  local name=$1 limit=$2 begin=$SECONDS code=0
  shift 2
  timeout -s INT -k 5 "$limit" "$@" > "$out/$name.log" 2>&1 || code=$?
  echo "$name: exit $code, $((SECONDS - begin)) s: $(grep -v '^$' "$out/$name.log" | tail -n 1)"
  [ "$code" = 0 ] || failed=1
}

"$python" -m attnfast info | tee "$out/info.txt"
[ "$(grep -c -E '^(triton|cuda) +on$' "$out/info.txt")" = 2 ] || exit 1
step gpu 60 "$python" -m pytest -q tests/test_gpu.py
step cuda 50 "$python" -m pytest -q tests -k "cuda and not test_cuda and not compile"
few="cuda and (empty_rows or not_seen or half_inputs or frozen_keys)"  # past a tile's end
for tool in memcheck racecheck initcheck synccheck; do
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 step "$tool" 25 compute-sanitizer --tool "$tool" \
    --error-exitcode 9 --kernel-regex kns=attnfast \
    "$python" -m pytest -q tests/test_attention.py tests/test_span.py tests/test_coverage.py -k "$few"
done
step triton 80 "$python" -m pytest -q tests -k "triton and not compile and not fuzz"
step bench 125 "$python" -m pytest -q bench/test_coverage.py bench/test_attention.py \
  -k "translation or summarisation or speech or long" --benchmark-json="$out/bench.json"
step report 20 "$python" bench/report.py "$out/bench.json" --out "$out/gpu"
exit $failed
