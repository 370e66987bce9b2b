"""Two ranks: two engines of TP 1, then one of TP 2. Run under torchrun; prints "passed" on rank 0.

torchrun --standalone --nproc-per-node 2 -m tests.rollout.check_engines FOLDER
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rhymemeg.arch import ModelArch
from rhymemeg.rollout.engine import RolloutEngine, SamplingOptions
from rhymemeg.rollout.samples import Sample, SampleId
from rhymemeg.rollout.window import assign_samples, gather_samples, run_samples
from tests.rollout import tiny


@dataclass
class Ranks:
    """This process under torchrun."""

    rank: int = int(os.environ.get("RANK", "0"))
    local_rank: int = int(os.environ.get("LOCAL_RANK", "0"))
    world_size: int = int(os.environ.get("WORLD_SIZE", "1"))
    device_type: str = "cpu"

    def all_gather_object(self, value: Any) -> list[Any]:
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, value)
        return parts


GREEDY = SamplingOptions(temperature=0.0, max_response_len=60)
SAMPLED = SamplingOptions(max_response_len=60)


def samples() -> list[Sample]:
    """Five groups of two."""
    generator = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(2, tiny.VOCAB, (4 + p,), generator=generator).tolist()) for p in range(5)]
    return [Sample(SampleId(0, p, i), prompts[p]) for p in range(5) for i in range(2)]


def run(engine: RolloutEngine, ranks: Ranks, sampling: SamplingOptions) -> list[Sample]:
    queue = assign_samples(samples(), engine.num_engines)[engine.engine_index]
    done = run_samples(engine, queue, sampling, 1, timeout=100)
    assert bool(done) == engine.is_leader
    gathered = gather_samples(done, ranks)
    assert [s.sample_id for s in gathered] == [s.sample_id for s in samples()]
    return gathered


def near(a: list[Sample], b: list[Sample]) -> bool:
    return all(
        x.response_ids == y.response_ids
        and torch.allclose(torch.tensor(x.log_probs), torch.tensor(y.log_probs), atol=1e-4)
        for x, y in zip(a, b)
    )


def paused_in_the_middle(engine: RolloutEngine, ranks: Ranks, weights: dict[str, Tensor]) -> list[Sample]:
    """Greedy, with an update to the same weights after a few steps and a resumption in another order."""
    queue = assign_samples(samples(), engine.num_engines)[engine.engine_index]
    for sample in queue:
        engine.add(sample, GREEDY, 0)
    for _ in range(7):
        engine.step()
    paused = engine.pause()
    engine.load_weights(weights.items(), 1, weights)
    done = [s for s in queue if s.finish_reason is not None]
    finished = run_samples(engine, paused[::-1], GREEDY, 1, timeout=100)
    return gather_samples([*done, *finished] if engine.is_leader else [], ranks)


def main() -> None:
    """Compare."""
    from safetensors.torch import load_file

    ranks = Ranks()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    folder = sys.argv[1]
    arch = ModelArch.from_pretrained(folder)
    weights = load_file(f"{folder}/model.safetensors")
    results = {}
    for tp in (1, 2):
        engine = RolloutEngine(tiny.spec(folder, arch, tensor_parallel_size=tp), ranks)
        assert engine.num_engines == 2 // tp and engine.engine_ranks == ([0, 1] if tp == 2 else [ranks.rank])
        assert engine.is_leader == (tp == 1 or ranks.rank == 0)
        if ranks.rank == 1:
            torch.rand(3)  # the trainer's draws differ from rank to rank
        results[tp] = [run(engine, ranks, GREEDY), run(engine, ranks, SAMPLED)]
        assert engine.step().tokens == 0  # an idle engine steps without waiting for anyone
        results[tp].append(paused_in_the_middle(engine, ranks, weights))
        first = results[tp][1][0]
        (score,) = engine.score([[*first.prompt_ids, *first.response_ids]], [len(first.prompt_ids)])
        assert torch.allclose(torch.tensor(score), torch.tensor(first.log_probs), atol=1e-4)
        engine.close()
        assert {s.engine for s in results[tp][0]} == set(range(2 // tp))
    assert near(results[1][0], results[2][0]), "greedy"
    assert near(results[1][1], results[2][1]), "sampled"
    assert near(results[1][0], results[1][2]) and near(results[2][0], results[2][2]), "paused"
    versions = {v for s in results[2][2] for v in s.versions}
    assert versions == {0, 1}
    dist.barrier()
    dist.destroy_process_group()
    if ranks.rank == 0:
        print("passed")


if __name__ == "__main__":
    main()
