"""The failure tests: how ranks end that run into trouble. Needs no Megatron.

torchrun failure_worker.py MODE OUT_FOLDER one rank, as in production
failure_worker.py --all OUT_FOLDER         three ranks of every mode at once, forked from one process (importing torch
                                           is what takes long); writes OUT_FOLDER/MODE.json
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rhymemeg.errors import TrainingError
from rhymemeg.parallel import failure
from rhymemeg.parallel.runtime import Runtime
from rhymemeg.parallel.watchdog import StepBudget

RANKS = 3
# Those in which steps are done: SIGTERM lets one end.
STEPPING = ("preempted", "preempted-late", "killed-in-step", "slow", "stopped")
MODES = ("fine", "error", "defect", "killed", "killed-idle", "hangs", "terminated", "everyone", *STEPPING)


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


def do_steps(mode: str, runtime: Runtime) -> None:
    """Five steps of a second; in the second one, rank 1 gets into trouble."""
    for step in range(5):
        failure.begin_step(step)
        if step == 1 and runtime.rank == 1:
            if mode.startswith("preempted"):
                os.kill(os.getpid(), signal.SIGTERM)
            if mode == "killed-in-step":
                os.kill(os.getpid(), signal.SIGKILL)
            if mode in ("slow", "preempted-late"):
                failure.phase("slow")
                time.sleep(6)
            if mode == "stopped":  # as an engine that no longer answers
                subprocess.Popen(["sh", "-c", f"sleep 8; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)
        dist.all_reduce(torch.ones(1))
        if failure.stop_requested(runtime):
            print(f"rank {runtime.rank} saves after {step + 1} steps", flush=True)
            raise SystemExit(failure.PREEMPTED)
    failure.begin_step(None)


def run(mode: str, out: Path) -> None:
    """One rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=15 if mode == "hangs" else 300))
    rank, world_size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    runtime = Runtime(rank, world_size, rank, "cpu", torch.device("cpu"), "gloo", group, timedelta(seconds=300))
    budget = StepBudget(3.0, out / f"stacks-{mode}", rank)
    with failure.guard(runtime, grace=3.0 if mode in STEPPING else 0.0, budget=budget):
        failure.phase("rollout")
        dist.all_reduce(torch.ones(1))
        time.sleep(1.5)  # a heartbeat with the phase
        if mode in STEPPING:
            do_steps(mode, runtime)
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
        run(chosen, Path(sys.argv[-1]))
