#!/usr/bin/env bash
# Parity of attention and the weight swap, and the benchmarks of generation and of the trainer, on one GPU, as one table.
#
#     experiments/gpu_check.sh [DIR]        results go to DIR (runs/gpu_check), what the benchmarks print to DIR/*.log
#
# Needs what a CUDA image of JAX has: python3 (3.11), pip, jax with its CUDA plugin at the version of requirements.txt
# (`pip install "jax[cuda13]>=0.10,<0.11"` where there is none), one NVIDIA GPU of 80 GB or more. Exits with 1 when a
# check fails.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/gpu_check}
mkdir -p "$out"

python3 -m pip install --quiet -r requirements.txt
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
export JAX_PLATFORMS=cuda
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92} # JAX would leave a quarter unused
python3 -c 'import jax; print("jax", jax.__version__, "on", jax.devices()[0].device_kind)'

# A benchmark, whose output is shown only when it fails: `logged NAME ARGUMENTS`.
logged() {
    echo "experiments.$1: see $out/$1.log"
    python3 -m "experiments.$1" --out="$out/$1" "${@:2}" >"$out/$1.log" 2>&1 || { cat "$out/$1.log" && return 1; }
}

# Without the parts that need torch and transformers.
logged bench_generation --dtype=bfloat16 --parts=static,bound,swap,curves
logged bench_trainer --model=configs/shapes/qwen2.5-1.5b-instruct.json --dtype=bfloat16 --rows=4096,8192,16384 \
    --remat=auto --vocab_block=8192 --parts=lengths,utilisation,prox
python3 -m experiments.gpu_check --out="$out" --bench="$out/bench_generation/results.json" \
    --trainer="$out/bench_trainer/results.json"
