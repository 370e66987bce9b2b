"""Windows on real engines: four of one rank, then two of tensor parallelism 2. Under torchrun; prints "passed" on rank 0.

torchrun --standalone --nproc-per-node 4 -m tests.rollout.check_windows FOLDER
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

from rhymemeg.arch import ModelArch
from rhymemeg.histopipe.scheduler import Scheduler, SchedulerOptions
from rhymemeg.parallel.runtime import Runtime
from rhymemeg.rollout.board import open_board
from rhymemeg.rollout.engine import RolloutEngine, SamplingOptions
from rhymemeg.rollout.rollouts import Rollouts, WindowLimits
from rhymemeg.rollout.samples import Prompt, Sample, SampleId
from tests.rollout import tiny

SAMPLES, CAP = 4, 60
# A few tokens end a response, so that lengths differ.
GREEDY = SamplingOptions(temperature=0.0, max_response_len=CAP, stop_token_ids=(5, 6, 7, 8))
SAMPLED = SamplingOptions(max_response_len=CAP, stop_token_ids=(5, 6, 7, 8))
STEPS = [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7]]
ARMS = {
    "random": SchedulerOptions("random"),
    "carry": SchedulerOptions("complement", "spread", carry=0.25),
    "early": SchedulerOptions("pull", carry=0.2, early=0.5),
    "paper": SchedulerOptions("paper", carry=0.25, early=1.0, outliers=True, ranking_groups=2),
}


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    return [
        Prompt(p, "", tuple(torch.randint(2, tiny.VOCAB, (4 + p,), generator=generator).tolist())) for p in range(8)
    ]


def run(
    rollouts: Rollouts, runtime: Runtime, engine: RolloutEngine, options: SchedulerOptions, sampling: SamplingOptions
) -> dict[SampleId, Sample]:
    """All steps, the last one strict; every sample of the run, on every rank."""
    scheduler = Scheduler(
        options, num_engines=engine.num_engines, slots=3, samples_per_prompt=SAMPLES, max_response_len=CAP
    )
    known, everything = prompts(), []
    counts: Counter[str] = Counter()
    for step, ids in enumerate(STEPS):
        last = step + 1 == len(STEPS)
        then = [] if last or not options.early else [known[p] for p in STEPS[step + 1]]
        window = rollouts.window(scheduler, step, [known[p] for p in ids], sampling, 1, next_prompts=then, strict=last)
        r = window.record
        assert r.carried_out <= r.max_unfinished and len(r.idle_seconds) == engine.num_engines
        for name in ("carried_out", "early_started", "stolen", "migrated", "generated_tokens", "tokens"):
            counts[name] += getattr(r, name)
        assert engine.is_leader or not window.finished
        everything += [s for part in runtime.all_gather_object(window.finished) for s in part]
        assert runtime.all_gather_object(scheduler.state())[0] == scheduler.state(), "ranks disagree"
        engine.version += 1  # the same weights under a new number
    assert not rollouts.paused and not rollouts.finished_early
    assert counts["generated_tokens"] == counts["tokens"] == sum(len(s.response_ids) for s in everything)
    expected = Counter(SampleId(t, p, i) for t, ids in enumerate(STEPS) for p in ids for i in range(SAMPLES))
    assert Counter(s.sample_id for s in everything) == expected
    for s in everything:
        assert len(s.versions) == len(s.log_probs) == len(s.response_ids) <= CAP and s.finish_reason
        assert s.versions == sorted(s.versions) and s.versions[-1] - s.versions[0] <= 1
    if runtime.rank == 0:
        print(options.policy, engine.num_engines, dict(counts), flush=True)
    if options.carry and not options.outliers:
        assert counts["carried_out"] > 0
    if options.early:
        assert counts["early_started"] > 0
    return {s.sample_id: s for s in everything}


def main() -> None:
    """Compare the arms."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
    assert group is not None
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    runtime = Runtime(rank, world, rank, "cpu", torch.device("cpu"), "gloo", group, timedelta(seconds=120))
    folder = sys.argv[1]
    arch = ModelArch.from_pretrained(folder)
    results: dict[tuple[int, str], dict[SampleId, Sample]] = {}
    for tp in (1, 2):
        engine = RolloutEngine(tiny.spec(folder, arch, tensor_parallel_size=tp, max_num_seqs=3), runtime)
        board = open_board(runtime, engine)
        rollouts = Rollouts(engine, runtime, board, None, WindowLimits(timeout=100, silence=60))
        for name, options in ARMS.items():
            engine.version = 0
            results[tp, name] = run(rollouts, runtime, engine, options, GREEDY)
        results[tp, "sampled"] = run(rollouts, runtime, engine, ARMS["random"], SAMPLED)
        engine.close()
    plain = results[1, "random"]
    for key, samples in results.items():
        if key[1] != "sampled":
            # Greedy responses do not depend on where they run, nor on being paused, moved and continued.
            assert all(samples[sid].response_ids == s.response_ids for sid, s in plain.items()), key
    one, two = results[1, "sampled"], results[2, "sampled"]
    assert all(two[sid].response_ids == s.response_ids for sid, s in one.items()), "seeds belong to samples"
    runtime.barrier("the end")
    dist.destroy_process_group()
    if rank == 0:
        print("passed")


if __name__ == "__main__":
    main()
