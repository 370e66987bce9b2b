#!/usr/bin/env bash
# A run on several hosts without a scheduler: checks all ranks, then trains. Give the same command on every host:
#
#   RHYMEMEG_NODES=2 RHYMEMEG_HEAD=host1 launch/multi_host.sh --config launch/configs/qwen3_14b.yaml
#
# Options are those of rhymemeg.train; variables are those of launch/node.sh. RHYMEMEG_CHECK=0 leaves the check out.
#
# A host that was lost: start the same command there again (with RHYMEMEG_RESTARTS > 0 everywhere, and RHYMEMEG_CHECK=0, as
# the others are past the check). The others wait for it, and the run goes on from its newest checkpoint if the options
# have --load auto. If the head was lost, start all again.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

if [ "${RHYMEMEG_CHECK:-1}" != 0 ]; then
    RHYMEMEG_RUN_ID=${RHYMEMEG_RUN_ID:-rhymemeg}-check RHYMEMEG_RESTARTS=0 \
        "$here/node.sh" rhymemeg.doctor --allow-warnings ||
        { echo "launch: the check found errors (table above, on the first host); RHYMEMEG_CHECK=0 starts anyway" >&2; exit 2; }
fi
exec "$here/node.sh" rhymemeg.train "$@"
