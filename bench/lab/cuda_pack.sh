#!/usr/bin/env bash
# Builds and strips what bench/lab/cuda_first_run.sh carries to a GPU machine. Needs cargo and nvcc 13, no GPU.
#
# usage: bench/lab/cuda_pack.sh FOLDER
set -euo pipefail
out=$1
mkdir -p "$out"
export DRAFTHORSE_KERNELS=required
# pick NAME: the executable among the messages of cargo on standard input that belongs to the test or program NAME.
pick() { python3 -c '
import json, sys
for line in sys.stdin:
    m = json.loads(line)
    if m.get("executable") and m["target"]["name"] == sys.argv[1]: print(m["executable"])' "$1" | tail -1; }
messages=$(cargo build ${PACK_FLAGS:---release} --package drafthorse-cuda --package drafthorse-seed --tests --message-format=json
    cargo build ${PACK_FLAGS:---release} --package drafthorse --features cuda --message-format=json)
for name in op_suite executor concurrent_capture memory_volatile missing_kernel drafthorse; do
    cp "$(echo "$messages" | pick "$name")" "$out/$name"
    strip "$out/$name"
done
du -sh "$out"/*
