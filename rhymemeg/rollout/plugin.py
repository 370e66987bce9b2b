"""Replacements for what vLLM does wrongly or slowly on CPU, installed through the entry point `vllm.general_plugins`.

`register()` may be called any number of times; it does nothing on GPU and nothing on versions that are not listed in
`vllm_compat`.

Sampling. vLLM's CPU build replaces Triton kernels by functions of `vllm.utils.cpu_triton_utils`, looked up when a
worker starts. In three of them speculative decoding at a temperature above 0 draws from the wrong distribution:

* `expand` (one value a request -> one value a token) casts its output, writes to the copy and drops it, so that
  temperature (float32), top-p (float32) and top-k (int32) of the draft positions are whatever the memory held;
* the two kernels of rejection sampling index with a draft token of -1, the placeholder that the scheduler puts where it
  has no draft, and then accept it.

Right ones are in `cpu_sampling`. Drafts that come with probabilities (draft models) have no placeholders and keep vLLM's
kernels. Besides, a whole step of the common kind of request is verified by `cpu_sampling.verify`, which draws from the
same distribution in a fraction of the time: vLLM draws twice for every drafted token and once more for every request,
and ranks and normalises all positions up to the longest draft of the batch.

Weight updates. The packed layout of a mixture-of-experts layer is made on the first load only; a later one leaves the
plain layout in its place and the outputs wrong (`vllm_compat.replace_cpu_expert_update`).

Two more replacements change no result. The function that ranks a sampled token in the vocabulary loses its compilation,
which costs seconds at the first token. And tensor-parallel ranks on CPU meet in shared memory, under a name that is the
same for every job on the machine when the launcher is torchrun; the port of the job's store makes it unique.
"""

from __future__ import annotations

import os

from rhymemeg.rollout import cpu_sampling, vllm_compat


def shared_memory_name(name: str) -> str:
    """The name with what distinguishes this job from others on the machine."""
    job = os.environ.get("MASTER_PORT", "0") + "-" + os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return f"rhymemeg-{os.getuid()}-{job}-{name}".replace("/", "_")


def register() -> None:
    """Install the replacements in this process, where they are needed."""
    if vllm_compat.is_cpu_build(vllm_compat.FAULTY_CPU_SAMPLING):
        vllm_compat.replace_cpu_sampling(cpu_sampling.expand, cpu_sampling.random_sample, cpu_sampling.sample_recovered)
        vllm_compat.replace_cpu_verification(cpu_sampling.verify)
        vllm_compat.replace_cpu_compiled_ranks()
        vllm_compat.replace_cpu_shared_memory_name(shared_memory_name)
    if vllm_compat.is_cpu_build(vllm_compat.FAULTY_CPU_EXPERTS):
        vllm_compat.replace_cpu_expert_update()
