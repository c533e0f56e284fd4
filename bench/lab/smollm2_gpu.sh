#!/usr/bin/env bash
# SmolLM2-135M on a GPU beside the CPU: loss step by step, two equal runs, then a run of given length with acceptance on three prompt sets.
#
# usage: bench/lab/smollm2_gpu.sh PROGRAM TARGET DATA PROMPTS SECONDS   PROMPTS holds gsm8k_test.jsonl, HumanEval.jsonl and mt_bench.jsonl
# STAGE=parity or STAGE=long runs one half (the long one times 50 steps first). Prints a table of each part; logs and reports go to $OUT (or a temporary folder). LIMIT (48) bounds the prompts of a set.
set -uo pipefail
program=$1 target=$2 data=$3 prompts=$4 seconds=$5
log=${OUT:-$(mktemp -d)}
work=$(mktemp -d)
cat >"$work/run.toml" <<TOML
target = "$target"
data = "$data"
out = "$work/runs"
[batch]
max_length = 2048
[eval]
every = 0
held_out = "none"
[checkpoint]
every = 0
TOML
small=(batch.token_budget=4096 batch.max_blocks=192 batch.micro_blocks=192)
train() { "$program" train "$work/run.toml" "$@"; }
# losses NAME: step and loss of a run, a line each.
losses() { python3 - "$work/runs/$1/events.jsonl" <<'PY'
import json, sys
for line in open(sys.argv[1]):
    e = json.loads(line)
    if e["kind"] == "step": print(e["step"], e["loss"], e["step_ms"])
PY
}

if [ "${STAGE:-all}" != long ]; then
echo "-- 20 steps, CPU in f32 beside CUDA in bf16"
train name=gpu20 optimizer.steps=20 pipeline.device=cuda:0 "${small[@]}" >"$log/gpu20.log" 2>&1 || tail -3 "$log/gpu20.log"
(time train name=cpu20 optimizer.steps=20 "${small[@]}") >"$log/cpu20.log" 2>&1 || tail -3 "$log/cpu20.log"
paste <(losses cpu20) <(losses gpu20) | awk '{d=($5-$2)/$2; a=d<0?-d:d; if(a>m)m=a; printf "step %2d cpu %.5f gpu %.5f difference %+.4f %%\n",$1,$2,$5,100*d} END {printf "largest difference %.4f %%\n",100*m}' | tee "$log/parity.txt" | tail -8

fi
echo "-- 50 steps twice"
for i in 1 2; do
    train name="twice$i" optimizer.steps=50 pipeline.device=cuda:0 batch.token_budget=16384 >"$log/twice$i.log" 2>&1 || tail -3 "$log/twice$i.log"
done
find "$work"/runs/twice*/checkpoints -name 'state.safetensors' -o -name '*.safetensors' -path '*twice*' | sort | xargs sha256sum | awk '{print substr($1,1,16), $2}' | sed "s|$work/||"
rate=$(losses twice2 | awk 'NR>10 {n++; ms+=$3} END {print n ? ms/n : 0}')
echo "mean step of run 2: $rate ms"
if [ "${STAGE:-all}" = parity ]; then exit; fi

steps=$(python3 -c "print(int($seconds*1000/max($rate,1)))")
echo "-- $steps steps, aimed at $seconds s"
begun=$SECONDS
train name=long optimizer.steps="$steps" optimizer.lr="${LR:-1e-3}" pipeline.device=cuda:0 batch.token_budget=16384 >"$log/long.log" 2>&1 || tail -3 "$log/long.log"
echo "took $((SECONDS - begun)) s"
losses long | awk '{l[NR]=$2; ms[NR]=$3} END {for (i=1;i<=NR;i+=int(NR/12)+1) printf "step %d loss %.4f, %.1f ms\n",i,l[i],ms[i]; printf "step %d loss %.4f\n",NR,l[NR]}'
grep -E 'tokens/s' "$log/long.log" | tail -1
for set in gsm8k_test HumanEval mt_bench; do
    for temperature in 0 0.8; do
        timeout 90 "$program" eval "$work/runs/long" --prompts "$prompts/$set.jsonl" --limit "${LIMIT:-48}" --device cuda:0 --temperature $temperature --json >"$log/eval-$set-$temperature.json" 2>"$log/eval-$set-$temperature.err" || tail -2 "$log/eval-$set-$temperature.err"
        python3 -c 'import json,sys; r=json.load(open(sys.argv[1]))["report"]; print(sys.argv[2], "tau %.3f (mean of prompts %.3f) looping %.0f %%, %d tokens in %d passes, %.1f s" % (r["tau"], r["tau_mean"], 100*r["looping_share"], r["tokens"], r["target_passes"], r["elapsed_s"]))' "$log/eval-$set-$temperature.json" "$set T=$temperature"
    done
done
