# Environment of every rank, each setting with its reason. Sourced by node.sh; what is already set is kept.
# shellcheck shell=bash

# ---- everywhere

# torch starts a thread a core in every rank unless told otherwise; eight ranks would fight for the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# The last lines before a crash are the ones that matter: no buffering.
export PYTHONUNBUFFERED=${PYTHONUNBUFFERED:-1}
# Reward workers are forked after the tokenizer has been used; its threads do not survive a fork.
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
# Models and data are folders: no rank of thousands may ask a server on the internet, or wait for one.
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export VLLM_NO_USAGE_STATS=${VLLM_NO_USAGE_STATS:-1}
# Compiled kernels go to the node's own disk: a shared home directory would be written by every rank at once.
cache=${RHYMEMEG_CACHE:-${TMPDIR:-/tmp}/rhymemeg-$(id -u)}
export VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$cache/vllm}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
# Hosts with several networks: which one ranks talk over. Unset, every library guesses for itself, not always alike.
if [ -n "${RHYMEMEG_INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$RHYMEMEG_INTERFACE NCCL_SOCKET_IFNAME=$RHYMEMEG_INTERFACE
fi
# Every rank opens sockets to many others, and the files of a checkpoint; the usual soft limit is 1,024.
ulimit -Sn "$(ulimit -Hn)"

# ---- GPU only; without effect elsewhere

# Megatron overlaps communication and GEMMs of tensor parallelism by the order of their launches: one hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# vLLM switches this off for its own communicators. Ours share the ranks with them and must not differ, or NCCL can hang.
export NCCL_CUMEM_ENABLE=${NCCL_CUMEM_ENABLE:-0}
# A link that flaps for a few seconds must not end a run: 4 us x 2^22 = 17 s a try, seven tries.
export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# Set on purpose nowhere: PYTORCH_CUDA_ALLOC_CONF=expandable_segments, which vLLM's sleep mode cannot work with.
case ${PYTORCH_CUDA_ALLOC_CONF:-} in
*expandable_segments:True*)
    echo "launch: PYTORCH_CUDA_ALLOC_CONF has expandable_segments, which vLLM's sleep mode cannot work with: unset it" >&2
    exit 2
    ;;
esac
