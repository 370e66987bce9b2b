"""Replacements for what vLLM does wrongly on CPU, installed through the entry point `vllm.general_plugins`.

`register()` may be called any number of times; it does nothing on GPU and nothing on versions that are not listed in
`vllm_compat`.

Sampling. vLLM's CPU build replaces Triton kernels by functions of `vllm.utils.cpu_triton_utils`, looked up when a
worker starts. In three of them speculative decoding at a temperature above 0 draws from the wrong distribution:

* `expand` (one value a request -> one value a token) casts its output, writes to the copy and drops it, so that
  temperature (float32), top-p (float32) and top-k (int32) of the draft positions are whatever the memory held;
* the two kernels of rejection sampling index with a draft token of -1, the placeholder that the scheduler puts where it
  has no draft, and then accept it.

The replacements follow "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192, algorithm 1) for
a deterministic draft, q = one-hot(x): accept x with probability p(x), otherwise draw from p without x; all accepted:
the bonus token. A placeholder has p = 0, so it is refused and nothing is taken out of p: the token after it is drawn
from p. Drafts that come with probabilities (draft models) have no placeholders and keep vLLM's kernels.

Weight updates. The packed layout of a mixture-of-experts layer is made on the first load only; a later one leaves the
plain layout in its place and the outputs wrong (`vllm_compat.replace_cpu_expert_update`).

Two more replacements change no result. The function that ranks a sampled token in the vocabulary loses its compilation,
which costs seconds at the first token. And tensor-parallel ranks on CPU meet in shared memory, under a name that is the
same for every job on the machine when the launcher is torchrun; the port of the job's store makes it unique.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from rhymemeg.rollout import vllm_compat


def counts(cumulative: Tensor) -> Tensor:
    """[B] cumulative counts -> [B] counts, int64."""
    cumulative = cumulative.long()
    return torch.diff(cumulative, prepend=cumulative.new_zeros(1))


def expand(output: Tensor, input: Tensor, cu_num_tokens: Tensor, replace_from: float, replace_to: float) -> None:
    """output[t] = input[r] for every token t of request r, with `replace_from` replaced by `replace_to`."""
    value = torch.where(input == replace_from, torch.full_like(input, replace_to), input)
    output.copy_(torch.repeat_interleave(value, counts(cu_num_tokens), output_size=output.shape[0]))


def random_sample(
    output: Tensor, cu_num_draft: Tensor, draft: Tensor, target_probs: Tensor, bonus: Tensor, recovered: Tensor,
    uniform: Tensor, is_greedy: Tensor,
) -> None:  # fmt: skip
    """Rejection sampling of B requests with n_r <= S drafts each, T in all.

    output [B, S + 1] int32, -1 where nothing is emitted; rows of greedy requests are left alone
    draft, recovered, uniform [T]; target_probs [T, V]; bonus [B]
    """
    batch, width = output.shape
    n = counts(cu_num_draft)
    row = torch.repeat_interleave(torch.arange(batch), n, output_size=draft.shape[0])
    column = torch.arange(draft.shape[0]) - (cu_num_draft.long() - n)[row]
    p = target_probs.gather(1, draft.long().clamp(min=0).unsqueeze(1)).squeeze(1)
    accepted = torch.zeros(batch, width, dtype=torch.bool)
    accepted[row, column] = (draft >= 0) & (p > uniform)
    length = accepted.cumprod(1, dtype=torch.int64).sum(1)  # accepted drafts before the first refusal
    tokens = torch.zeros(2, batch, width, dtype=output.dtype)  # drafts, and what follows a refusal
    tokens[0, row, column] = draft.to(output.dtype)
    tokens[1, row, column] = recovered.to(output.dtype)
    tokens[1, torch.arange(batch), n] = bonus.view(-1).to(output.dtype)
    at = torch.arange(width)
    emitted = torch.where(at < length[:, None], tokens[0], output.new_full((), -1))
    emitted.scatter_(1, length[:, None], tokens[1].gather(1, length[:, None]))
    torch.where(is_greedy[:, None], output, emitted, out=output)


def sample_recovered(output: Tensor, cu_num_draft: Tensor, draft: Tensor, target_probs: Tensor, inv_q: Tensor) -> None:
    """output[t] ~ p_t without draft[t] (p_t itself where the draft is a placeholder), by the exponential race
    argmax p / q. inv_q [B, V] holds 1 / q, one row a request: at most one position of a request uses its draw."""
    row = torch.repeat_interleave(torch.arange(inv_q.shape[0]), counts(cu_num_draft), output_size=draft.shape[0])
    score = target_probs * inv_q[row]
    real = (draft >= 0).nonzero().squeeze(1)
    score[real, draft[real].long()] = -1
    output.copy_(score.argmax(-1))


def shared_memory_name(name: str) -> str:
    """The name with what distinguishes this job from others on the machine."""
    job = os.environ.get("MASTER_PORT", "0") + "-" + os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return f"rhymemeg-{os.getuid()}-{job}-{name}".replace("/", "_")


def register() -> None:
    """Install the replacements in this process, where they are needed."""
    if vllm_compat.is_cpu_build(vllm_compat.FAULTY_CPU_SAMPLING):
        vllm_compat.replace_cpu_sampling(expand, random_sample, sample_recovered)
        vllm_compat.replace_cpu_compiled_ranks()
        vllm_compat.replace_cpu_shared_memory_name(shared_memory_name)
    if vllm_compat.is_cpu_build(vllm_compat.FAULTY_CPU_EXPERTS):
        vllm_compat.replace_cpu_expert_update()
