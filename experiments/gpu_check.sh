#!/usr/bin/env bash
# Parity of attention, the weight swap and the generation benchmark on one GPU, as one table.
#
#     experiments/gpu_check.sh [DIR]        results go to DIR (runs/gpu_check)
#
# Needs what a CUDA image of JAX has: python3 (3.11), pip, jax with its CUDA plugin at the version of requirements.txt
# (`pip install "jax[cuda13]>=0.10,<0.11"` where there is none), one NVIDIA GPU. Exits with 1 when a check fails.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/gpu_check}
mkdir -p "$out"

python3 -m pip install --quiet -r requirements.txt
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
export JAX_PLATFORMS=cuda
python3 -c 'import jax; print("jax", jax.__version__, "on", jax.devices()[0].device_kind)'

# Without the part that needs torch and transformers.
python3 -m experiments.bench_generation --out="$out/bench" --dtype=bfloat16 --parts=static,bound,swap,curves 2>&1 | tee "$out/bench.log"
python3 -m experiments.gpu_check --out="$out" --bench="$out/bench/results.json"
