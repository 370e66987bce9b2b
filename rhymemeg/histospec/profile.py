"""Measure T(batch, query tokens) of an engine and save it for the goodput policy.

    python -m rhymemeg.histospec.profile --hf-checkpoint MODEL --output profile.json
    torchrun --standalone --nproc-per-node 4 -m rhymemeg.histospec.profile --vllm-tensor-parallel-size 4 ...

For each batch size, that many requests run at once, with drafts of a forced length: random tokens, so nearly all are
rejected, which costs a step as much as accepting them. The figure is the lower quartile over `--repeats` steps: other load
on the machine only ever adds; on CPU it is the CPU time of the engine's thread. The context length is `--context`: use
about half the response length that the run will see.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config, EngineOptions, ModelOptions, RolloutOptions, RunOptions
from rhymemeg.errors import ConfigError, RhymeMegError
from rhymemeg.histospec.cost_model import CostModel
from rhymemeg.histospec.drafter import Drafter, DrafterOptions, Rows, step_clock
from rhymemeg.histospec.proposer import WORKER_EXTENSION, attach, speculative_config
from rhymemeg.rollout.samples import Sample, SampleId


class ForcedDrafter(Drafter):
    """Drafts `length` tokens for every row, whatever it says."""

    def __init__(self, max_draft: int, vocab_size: int) -> None:
        super().__init__(
            DrafterOptions(policy=f"fixed:{max_draft}", max_draft=max_draft), None, CostModel.built_in("cpu")
        )
        self.length, self.vocab_size, self._state = 0, vocab_size, 1

    def step(self, rows: Rows) -> list[list[int]]:
        """See the class."""
        drafts = []
        for new, room in zip(rows.new_tokens, rows.rooms):
            draft = []
            for _ in range(min(self.length, int(room)) if new else 0):
                self._state = (self._state * 48271) % 0x7FFFFFFF  # the same on all ranks
                draft.append(self._state % self.vocab_size)
            drafts.append(draft)
        return drafts


@dataclass
class Ranks:
    """This process among those that torchrun started, or alone."""

    rank: int
    local_rank: int
    world_size: int
    device_type: str


def start_ranks() -> Ranks:
    """Join torchrun's process group, or make one of this process."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, local, world = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))
    )
    if device == "cuda":
        torch.cuda.set_device(local)
    backend = "nccl" if device == "cuda" else "gloo"
    if world > 1:
        torch.distributed.init_process_group(backend)
    else:
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    return Ranks(rank, local, world, device)


def measure(
    model: str,
    batches: Sequence[int],
    queries: Sequence[int],
    *,
    context: int,
    repeats: int,
    tensor_parallel_size: int,
    kv_cache_gib: float,
) -> CostModel:
    """Start an engine and time its steps. Raises what the engine raises."""
    from rhymemeg.rollout.engine import RolloutEngine, SamplingOptions
    from rhymemeg.rollout.spec import EngineSpec

    arch = ModelArch.from_pretrained(model)
    steps = len(queries) * (repeats + 2) + 4
    config = Config(
        run=RunOptions(),
        model=ModelOptions(hf_checkpoint=model),
        rollout=RolloutOptions(max_prompt_len=context, max_response_len=steps * (max(queries) + 1)),
        engine=EngineOptions(
            vllm_max_num_seqs=max(batches),
            vllm_tensor_parallel_size=tensor_parallel_size,
            vllm_kv_cache_memory_gib=kv_cache_gib,
        ),
    )
    if config.max_model_len > arch.max_position_embeddings:
        config.rollout.max_response_len = arch.max_position_embeddings - context
    ranks = start_ranks()
    spec = EngineSpec.from_config(
        config,
        arch,
        ranks.device_type,
        speculative=speculative_config(max(queries) - 1, max(batches)),
        worker_extension=WORKER_EXTENSION,
    )
    engine = RolloutEngine(replace(spec, stop_token_ids=()), ranks)
    drafter = ForcedDrafter(max(queries) - 1, arch.vocab_size)
    attach(engine.vllm.model_runner, drafter)
    sampling = SamplingOptions(max_response_len=config.rollout.max_response_len)
    seconds: list[list[float]] = []
    clock = step_clock(ranks.device_type)
    for number, batch in enumerate(batches):
        drafter.length = 0
        for i in range(batch):
            prompt = tuple((i * 7919 + j * 104729) % arch.vocab_size for j in range(context))
            engine.add(Sample(SampleId(number, i, 0), prompt), sampling, seed=i)
        while engine.step().tokens < batch:  # until every request has left its prefill
            pass
        row = []
        for query in queries:
            drafter.length = query - 1
            engine.step()  # drafts
            engine.step()  # verifies for the first time: buffers grow
            times = []
            for _ in range(repeats):
                begin = clock()
                engine.step()
                times.append(clock() - begin)
            row.append(sorted(times)[repeats // 4])
        if engine.num_running != batch:
            raise ConfigError(
                f"--batches: only {engine.num_running} of {batch} requests kept running; give more KV cache"
            )
        engine.abort()
        seconds.append(row)
    engine.close()
    return CostModel(batches, queries, seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="rhymemeg.histospec.profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hf-checkpoint", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument(
        "--queries", type=int, nargs="+", default=[1, 2, 3, 5, 9, 17], help="query tokens a request: draft + 1"
    )
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--vllm-tensor-parallel-size", type=int, default=1)
    parser.add_argument("--vllm-kv-cache-memory-gib", type=float, default=1.0)
    a = parser.parse_args(argv)
    try:
        cost = measure(
            a.hf_checkpoint,
            a.batches,
            a.queries,
            context=a.context,
            repeats=a.repeats,
            tensor_parallel_size=a.vllm_tensor_parallel_size,
            kv_cache_gib=a.vllm_kv_cache_memory_gib,
        )
        if int(os.environ.get("RANK", "0")) == 0:
            cost.save(
                a.output, model=a.hf_checkpoint, context=a.context, tensor_parallel_size=a.vllm_tensor_parallel_size
            )
            print("milliseconds a step    " + "".join(f"{q:>9} q" for q in a.queries))
            for batch in a.batches:
                row = cost.predict(batch, [batch * q for q in a.queries])
                print(f"{batch:>6} requests        " + "".join(f"{1000 * t:>11.2f}" for t in row))
    except RhymeMegError as error:
        print(f"rhymemeg.histospec.profile: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
