#!/usr/bin/env bash
# Sets up (once) and checks the project: linters, types, shell scripts, tests.
#   launch/test.sh                everything
#   launch/test.sh --fast         without the tests that start vLLM or torchrun
#   launch/test.sh ARGS...        pytest with these arguments
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/setup_env.sh dev

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ $# -gt 0 ] && [ "$1" != --fast ]; then
    exec python -m pytest "$@"
fi
ruff check .
ruff format --check .
mypy
shellcheck -x launch/*.sh launch/slurm.sbatch .ci/run
if [ "${1:-}" = --fast ]; then
    exec python -m pytest -m "not engine and not distributed" -q
fi
exec python -m pytest -q --durations 15
