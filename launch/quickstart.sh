#!/usr/bin/env bash
# Sets up (once) and trains the quickstart model on this machine's CPU: two ranks, actor TP 2, two vLLM engines.
# Options are passed on: launch/quickstart.sh --train-iters 10, or --config launch/configs/recipes/gspo.yaml
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/setup_env.sh

# One OpenMP thread a rank: the small model gains nothing from more, and two ranks would fight for the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
[[ " $* " == *" --config"[\ =]* ]] || set -- --config launch/configs/quickstart.yaml "$@"
exec torchrun --standalone --nproc-per-node 2 --module rhymemeg.train "$@"
