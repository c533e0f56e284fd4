#!/usr/bin/env bash
# The first thing to run on a GPU machine that has no cargo: carried binaries of the op suite and of drafthorse itself, then a compact table.
#
# usage: bench/lab/cuda_first_run.sh FOLDER   with FOLDER as bench/lab/cuda_pack.sh makes it
# Full logs go to $OUT (or a temporary folder). Exit code 1 when a test failed; the bench runs all the same.
set -uo pipefail
bin=$(cd "$1" && pwd)
log=${OUT:-$(mktemp -d)}
export DRAFTHORSE_DEVICE_REQUIRED=1
failed=0

# part SECONDS NAME COMMAND...: runs it with a limit, logs it, prints how it ended.
part() {
    local limit=$1 name=$2 begun=$SECONDS code
    shift 2
    timeout "$limit" "$@" >"$log/$name.log" 2>&1
    code=$?
    [ "$code" -eq 0 ] || failed=1
    printf '%-22s exit %-3s %4s s\n' "$name" "$code" "$((SECONDS - begun))"
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
part 60 op_suite_common "$bin/op_suite" --test-threads=1 --nocapture every_case
for dim in 64 128 256; do part 30 "attention_$dim" "$bin/op_suite" --test-threads=1 --nocapture "attention_with_heads_of_$dim"; done
part 40 attention_mma "$bin/op_suite" --test-threads=1 --nocapture attention_without_wgmma
part 60 capture "$bin/op_suite" --test-threads=1 --nocapture captured_graphs
for name in executor concurrent_capture memory_volatile missing_kernel; do part 60 $name "$bin/$name" --test-threads=1 --nocapture; done
part 90 doctor "$bin/drafthorse" doctor
if [ -z "${TESTS_ONLY:-}" ]; then
for micro in 512 344 256; do part 90 "step_8b_$micro" "$bin/drafthorse" bench step --shape qwen3-8b --device cuda:0 --micro-blocks $micro --repeats 8; done
part 90 step_27b "$bin/drafthorse" bench step --shape qwen3.6-27b --device cuda:0 --repeats 5
part 90 target_8b "$bin/drafthorse" bench target --shape qwen3-8b --device cuda:0 --repeats 6
part 90 target_llama "$bin/drafthorse" bench target --shape llama-3.1-8b --device cuda:0 --repeats 6
fi
for name in op_suite_common attention_64 attention_128 attention_256 attention_mma capture executor concurrent_capture memory_volatile missing_kernel; do
    if grep -qE 'panicked|FAILED|error' "$log/$name.log"; then
        echo "-- $name"
        grep -vE '^(running|test result|failures:|$)' "$log/$name.log" | cut -c1-400 | head -25
    fi
done
for name in doctor step_8b_512 step_8b_344 step_8b_256 step_27b target_8b target_llama; do
    [ -e "$log/$name.log" ] || continue
    echo "-- $name"
    cut -c1-160 "$log/$name.log" | head -${LINES_EACH:-24}
done
exit "$failed"
