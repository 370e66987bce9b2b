#!/usr/bin/env bash
# Starts the ranks of this host and, together with the other hosts that run the same command, a run.
#
#   RHYMEMEG_NODES=4 RHYMEMEG_HEAD=host1 launch/node.sh rhymemeg.train --config launch/configs/qwen3_32b.yaml
#
# The first word is a Python module (rhymemeg.train, rhymemeg.doctor), the rest are its options. On one host nothing needs
# to be set. All hosts need the same project, Python environment (activated) and files.
#
#   RHYMEMEG_NODES      hosts (1)
#   RHYMEMEG_HEAD       name or address of one of them, which all can reach; the meeting point lives there
#   RHYMEMEG_PORT       its port (29500); two runs that share the head need different ones
#   RHYMEMEG_RUN_ID     the same on all hosts, different for each run (rhymemeg)
#   RHYMEMEG_RANKS      ranks a host (its GPUs; 1 without any)
#   RHYMEMEG_RESTARTS   how often the ranks are started again after one was lost (0)
#   RHYMEMEG_GRACE      seconds that ranks have after SIGTERM to finish the step and save (120)
#   RHYMEMEG_JOIN       seconds to wait for all hosts, at the start and after a host was lost (900)
#   RHYMEMEG_ADDRESS    this host's address, where its name does not resolve everywhere
#   RHYMEMEG_IS_HEAD    1 or 0: whether the meeting point is here, where several of these share a host (else by name)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/env.sh
source "$here/env.sh"

if [ $# -lt 1 ]; then
    echo "usage: launch/node.sh MODULE [options]   (see the head of this file)" >&2
    exit 2
fi
nodes=${RHYMEMEG_NODES:-1}
head=${RHYMEMEG_HEAD:-}
if [ -z "$head" ]; then
    if [ "$nodes" -gt 1 ]; then
        echo "launch: RHYMEMEG_NODES=$nodes needs RHYMEMEG_HEAD, a host that all can reach" >&2
        exit 2
    fi
    head=127.0.0.1
fi
gpus() { nvidia-smi --list-gpus 2>/dev/null | grep -c ^GPU || true; }
ranks=${RHYMEMEG_RANKS:-$(gpus)}
[ "$ranks" -gt 0 ] || ranks=1

# torchrun keeps one store for all attempts and tells its address in the first only, so a host that comes back waits for it
# in vain (torch 2.13). Without sharing, each attempt has a store of its own, kept by rank 0.
[ "$nodes" -eq 1 ] || export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}

# c10d: the hosts find each other in any order, and one that was lost can come back. The grace should exceed the run's own
# (--preemption-grace-seconds and a checkpoint), so that torchrun does not kill a rank that is still writing.
words=(
    --nnodes "$nodes" --nproc-per-node "$ranks"
    --rdzv-backend c10d --rdzv-endpoint "$head:${RHYMEMEG_PORT:-29500}" --rdzv-id "${RHYMEMEG_RUN_ID:-rhymemeg}"
    --rdzv-conf "join_timeout=${RHYMEMEG_JOIN:-900}${RHYMEMEG_IS_HEAD:+,is_host=$RHYMEMEG_IS_HEAD}"
    --max-restarts "${RHYMEMEG_RESTARTS:-0}" --shutdown-timeout "${RHYMEMEG_GRACE:-120}"
)
[ -z "${RHYMEMEG_ADDRESS:-}" ] || words+=(--local-addr "$RHYMEMEG_ADDRESS")
exec python -m torch.distributed.run "${words[@]}" --module "$@"
