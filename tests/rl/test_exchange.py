"""The all-to-all brings each to the ranks that asked for it."""

from __future__ import annotations

import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch.distributed as dist
import torch.multiprocessing as mp

from rhymemeg.rl.exchange import exchange, exchange_bytes, share_summaries
from rhymemeg.rollout.samples import Sample, SampleId


def make_sample(step: int, prompt: int, index: int, length: int) -> Sample:
    rng = np.random.default_rng([step, prompt, index])
    return Sample(
        SampleId(step, prompt, index),
        tuple(rng.integers(0, 1000, 5).tolist()),
        rng.integers(0, 1000, length).tolist(),
        rng.normal(size=length).tolist(),
        rng.integers(0, 3, length).tolist(),
        finish_reason="stop",
        engine=prompt % 2,
        reward=float(prompt),
    )


def _rank(rank: int, world: int, file: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60)
    )
    fabric = SimpleNamespace(rank=rank, world_size=world, control_group=dist.group.WORLD)
    mine = [make_sample(0, p, 0, 3 + p) for p in range(7) if p % world == rank] if rank != 2 else []
    summaries = share_summaries(mine, fabric)
    assert [s.sample_id.prompt_id for s in summaries] == [p for p in range(7) if p % world != 2]
    assert all(s.reward == s.sample_id.prompt_id and s.response_len == 3 + s.sample_id.prompt_id for s in summaries)
    # Rank r wants the prompts whose number is at least 2 r, wherever they are.
    wanted = [[s for s in mine if s.sample_id.prompt_id >= 2 * r] for r in range(world)]
    got = exchange(wanted, fabric)
    assert sorted(i.prompt_id for i in got) == [p for p in range(7) if p % world != 2 and p >= 2 * rank]
    assert all(s.response_ids == make_sample(0, i.prompt_id, 0, 3 + i.prompt_id).response_ids for i, s in got.items())
    letters = exchange_bytes([bytes([rank, r]) * (rank + r) for r in range(world)], fabric)
    assert letters == [bytes([r, rank]) * (rank + r) for r in range(world)]
    dist.destroy_process_group()


def test_exchange_between_processes(tmp_path: Path) -> None:
    mp.spawn(_rank, (3, str(tmp_path / "store")), nprocs=3)
