#!/usr/bin/env bash
# Checks and benchmarks for a machine with an NVIDIA GPU, within 8 minutes: bench/gpu.sh FOLDER [checks|timings]
# Python is that of PYTHON, with attnfast installed. FOLDER gets a log of every step, and of what was
# timed the JSON, a report and a chart; what fails does not stop what follows, and a step that is out
# of time is interrupted: a benchmark then still writes what it has. Every shape: make bench.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/gpu} only=${2:-checks timings} python=${PYTHON:-.venv/bin/python} failed=0
# A new warning must not fail a test, and a run that is stopped must have printed the names of failures.
pytest=("$python" -m pytest -v -W default)
export PYTHONSAFEPATH=1  # attnfast as installed, not the sources in this folder
mkdir -p "$out"
exec > >(tee "$out/report.txt") 2>&1  # a line for each step
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem --format=csv \
  > "$out/gpu.csv" 2> /dev/null || { echo "there is no NVIDIA GPU"; exit 1; }
"$python" -m attnfast info | tee "$out/info.txt"
timeout 60 "$python" -m attnfast check > "$out/check.txt" 2>&1 || failed=1
tail -n 3 "$out/check.txt"
[ "$(grep -c -E '^(triton|cuda) +on$' "$out/info.txt")" = 2 ] || exit 1

step() {  # name, seconds at most, command
  local name=$1 limit=$2 begin=$SECONDS code=0
  shift 2
  timeout -s INT -k 8 "$limit" "$@" > "$out/$name.log" 2>&1 || code=$?
  echo "$name: exit $code, $((SECONDS - begin)) s: $(grep -v '^$' "$out/$name.log" | tail -n 1)"
  return "$code"
}

# What is checked is checked side by side; what is timed is alone.
checks=()
check() {
  OMP_NUM_THREADS=1 step "$@" &
  checks+=($!)
}

if [[ $only = *checks* ]]; then
  check check-all 150 "$python" -m attnfast check --all  # every dtype, which Triton compiles for
  check gpu 110 "${pytest[@]}" tests/test_gpu.py
  check cuda 110 "${pytest[@]}" -n 4 tests -k "cuda and not test_cuda and not compile"
  check triton 150 "${pytest[@]}" -n 10 tests -k "triton and not compile and not fuzz"
  few="cuda and (empty_rows or not_seen or half_inputs or frozen_keys or no_step_reads or 9000)"
  for tool in memcheck racecheck initcheck synccheck; do
    # What torch's kernels have written is initialized too.
    [ "$tool" = initcheck ] && ours=() || ours=(--kernel-name kns=attnfast)
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 check "$tool" 110 compute-sanitizer --tool "$tool" \
      --error-exitcode 9 "${ours[@]}" \
      "${pytest[@]}" tests/test_{attention,span,coverage,copying,recurrent}.py -k "$few"
  done
  for job in "${checks[@]}"; do wait "$job" || failed=1; done
fi
if [[ $only = *timings* ]]; then
  for what in attention:75 coverage:40 copying:20 recurrent:40 topk:14 search:40; do
    name=${what%:*} select="(translation or summarisation or speech or long or topk) and not statistics"
    # Of searches one model, for one sentence and for 64.
    [ "$name" = search ] && select="general and not 8 and not words"
    step "bench-$name" "${what#*:}" "${pytest[@]}" "bench/test_$name.py" -k "$select" \
      --benchmark-json="$out/$name.json" || failed=1
    step "report-$name" 8 "$python" bench/report.py "$out/$name.json" --out "$out/gpu" || failed=1
  done
fi
exit $failed
