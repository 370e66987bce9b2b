"""One engine of two ranks that drafts: both ranks draft the same tokens. Run under torchrun; prints "passed" on rank 0.

torchrun --standalone --nproc-per-node 2 -m tests.histospec.check_ranks FOLDER

The clocks of the ranks disagree wildly on purpose, so that drafts would differ if anything were decided by a rank's own.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rhymemeg.arch import ModelArch
from rhymemeg.histospec.cost_model import CostModel
from rhymemeg.histospec.drafter import Drafter, DrafterOptions
from rhymemeg.histospec.history import HistoryBuffer
from rhymemeg.histospec.proposer import SYNC_EVERY, WORKER_EXTENSION, attach, speculative_config
from rhymemeg.rollout.engine import RolloutEngine, SamplingOptions
from rhymemeg.rollout.samples import Sample, SampleId, sample_seed
from tests.rollout import tiny
from tests.rollout.check_engines import Ranks

MAX_DRAFT, GROUP = 8, 4
PROMPTS = {1: (3, 4, 5, 6), 2: (10, 11, 12), 3: (3, 4, 5, 6)}


class Clock:
    """Jumps between calls by amounts that are another rank's no more than by chance."""

    def __init__(self, rank: int) -> None:
        self.now, self.state = 0.0, rank + 1

    def __call__(self) -> float:
        self.state = self.state * 48271 % 0x7FFFFFFF
        self.now += self.state / 0x7FFFFFFF
        return self.now


def main() -> None:
    """See the module."""
    ranks = Ranks()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    spec = tiny.spec(
        sys.argv[1], ModelArch.from_pretrained(sys.argv[1]), stop_token_ids=(),
        speculative=speculative_config(MAX_DRAFT, 32), worker_extension=WORKER_EXTENSION,
    )  # fmt: skip
    engine = RolloutEngine(replace(spec, tensor_parallel_size=2), ranks)
    proposer = engine.vllm.model_runner.drafter
    propose, drafts = proposer.propose, []

    def recorded(*args: Any, **kwargs: Any) -> list[list[int]]:
        drafts.append(propose(*args, **kwargs))
        return drafts[-1]

    proposer.propose = recorded
    history = HistoryBuffer(tiny.VOCAB)
    costs = []
    for epoch in range(3):
        drafter = Drafter(
            DrafterOptions(policy="goodput", max_draft=MAX_DRAFT),
            history,
            CostModel.built_in("cpu"),
            clock=Clock(ranks.rank),
        )
        drafter.load(PROMPTS)
        attach(engine.vllm.model_runner, drafter)
        queue = [Sample(SampleId(epoch, p, i), ids) for p, ids in PROMPTS.items() for i in range(GROUP)]
        for sample in queue:
            # The last epoch repeats the one before, so that drafts are accepted.
            seed = sample_seed(0, replace(sample.sample_id, step=min(epoch, 1)))
            engine.add(sample, SamplingOptions(temperature=0.7, max_response_len=96), seed)
        while engine.has_unfinished():
            engine.step()
        for p, ids in PROMPTS.items():
            group = [s.response_ids for s in queue if s.sample_id.prompt_id == p]
            history.record(p, ids, group, [1.0] * GROUP, step=epoch)
        costs.append(drafter.learner.state())
    assert sum(len(draft) for step in drafts for draft in step) > 100
    assert len(drafts) > 2 * SYNC_EVERY
    everything = ranks.all_gather_object((drafts, costs))
    if ranks.rank == 0:
        assert everything[0][0] == everything[1][0], "the ranks drafted differently"
        assert everything[0][1] != everything[1][1], "the clocks were meant to disagree"
        print("passed", flush=True)
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
