"""One rank of the failure tests: torchrun failure_worker.py MODE. Needs no Megatron."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rhymemeg.errors import TrainingError
from rhymemeg.parallel import failure


def misbehave(mode: str) -> None:
    """What rank 1 does."""
    if mode == "error":
        raise TrainingError("the loss is nan")
    if mode == "defect":
        raise KeyError("not there")
    if mode in ("killed", "killed-idle"):
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "hangs":
        failure.phase("stuck")
        time.sleep(600)
    if mode == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)


def main() -> None:
    mode = sys.argv[1]
    dist.init_process_group("gloo", timeout=timedelta(seconds=5 if mode == "hangs" else 300))
    runtime: Any = SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size())
    with failure.guard(runtime):
        failure.phase("rollout")
        dist.all_reduce(torch.ones(1))
        time.sleep(1.5)  # a heartbeat with the phase
        if mode == "everyone":
            raise TrainingError("the loss is nan")
        if runtime.rank == 1:
            misbehave(mode)
        elif mode == "killed-idle":
            time.sleep(600)  # busy on its own: no collective tells it
        dist.all_reduce(torch.ones(1))
    print(f"rank {runtime.rank} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
