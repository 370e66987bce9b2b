"""The failure tests: how ranks end that run into trouble. Needs no Megatron.

torchrun failure_worker.py MODE            one rank, as in production
failure_worker.py --all OUT_FOLDER         three ranks of every mode at once, forked from one process (importing torch
                                           is what takes long); writes OUT_FOLDER/MODE.json
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rhymemeg.errors import TrainingError
from rhymemeg.parallel import failure

RANKS = 3
MODES = ("fine", "error", "defect", "killed", "killed-idle", "hangs", "terminated", "everyone")


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


def run(mode: str) -> None:
    """One rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=15 if mode == "hangs" else 300))
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


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def fork_all(out: Path) -> str | None:
    """Fork the ranks of all modes. In a rank returns its mode; in the parent None, after all have ended. The parent
    itself starts nothing of torch's, so that it has no threads when it forks."""
    children, agents = {}, []
    for mode in MODES:
        port = free_port()
        agents.append(os.fork())
        if agents[-1] == 0:
            # Holds the store, as torchrun's own process does, so that it outlives every rank.
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            signal.pause()
            os._exit(int(store is None))
        for rank in range(RANKS):
            pid = os.fork()
            if pid == 0:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
                os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
                os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
                log = os.open(out / f"{mode}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                return mode
            children[pid] = (mode, rank, time.monotonic())
    results: dict[str, dict[str, Any]] = {mode: {"status": [0] * RANKS, "seconds": 0.0} for mode in MODES}
    while children:
        pid, status = os.wait()
        mode, rank, start = children.pop(pid)
        results[mode]["status"][rank] = os.waitstatus_to_exitcode(status)
        results[mode]["seconds"] = max(results[mode]["seconds"], time.monotonic() - start)
    for agent in agents:
        os.kill(agent, signal.SIGKILL)
    for mode, result in results.items():
        result["log"] = (out / f"{mode}.log").read_text()
        (out / f"{mode}.json").write_text(json.dumps(result))
    return None


if __name__ == "__main__":
    chosen = fork_all(Path(sys.argv[2])) if sys.argv[1] == "--all" else sys.argv[1]
    if chosen is not None:
        run(chosen)
