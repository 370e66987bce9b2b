"""`rhymemeg doctor`: one table about this machine, or about every rank of an allocation.

    rhymemeg doctor
    torchrun --nnodes ... --nproc-per-node 8 --module rhymemeg.doctor

Exit status: 0 nothing wrong, 1 warnings (0 with --allow-warnings), 2 errors. What could not be looked at here, such as a
GPU on a machine without one, is listed as not checked and changes nothing. Under torchrun rank 0 prints, and every rank
ends with the same status; torchrun itself turns any of them but 0 into 1.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from rhymemeg.doctor import agreement, collective, gpu, machine, packages
from rhymemeg.doctor.finding import Finding, Level, exit_status, merge, table


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="rhymemeg doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--output-dir", default="runs", help="where the run would write; its disk is tested (runs)")
    p.add_argument("--megabytes", type=int, default=0, help="size of the all-reduce, MiB (GPU 256, CPU 8)")
    p.add_argument("--timeout-seconds", type=float, default=120.0, help="of every wait for another rank (120)")
    p.add_argument("--allow-warnings", action="store_true", help="exit status 0 if there is nothing worse")
    p.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Check and print; returns the exit status."""
    options = parser().parse_args(argv)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    facts = gather(options.output_dir)
    if world > 1:
        findings = _with_others(facts, options, rank, world)
    else:
        findings = merge([judge(facts)])
        text = "collectives and agreement of ranks: start it under torchrun"
        findings.append(Finding(Level.UNKNOWN, "collective", text))
    if rank == 0:
        if options.json:
            rows = [asdict(f) | {"level": f.level.name.lower()} for f in findings]
            print(
                json.dumps(
                    {"ranks": world, "status": exit_status(findings), "findings": rows, "rank 0": facts}, indent=1
                )
            )
        else:
            print(table(findings, world))
            print(_summary(findings))
    sys.stdout.flush()
    return exit_status(findings, options.allow_warnings)


def gather(folder: str) -> dict[str, Any]:
    """The facts of this rank's machine. The disk is written to by one rank a host."""
    local_world, local_rank = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    return {
        "packages": packages.gather(),
        "gpu": gpu.gather(),
        "machine": machine.gather(folder, local_world, test_disk=local_rank == 0),
        "local_rank": local_rank,
        "environment": agreement.compared(os.environ),
    }


def judge(facts: dict[str, Any]) -> list[Finding]:
    """Everything that one rank can say alone. Pure."""
    cuda = facts["packages"]["torch_cuda"]
    return [
        *packages.judge(facts["packages"]),
        *gpu.judge(facts["gpu"], cuda),
        *(machine.judge(facts["machine"], cuda is not None) if facts["local_rank"] == 0 else ()),
        *_enough_gpus(facts),
    ]


def _enough_gpus(facts: dict[str, Any]) -> list[Finding]:
    devices, ranks = facts["gpu"].get("devices"), facts["machine"]["local_world"]
    if facts["packages"]["torch_cuda"] is None or devices is None or len(devices) >= ranks:
        return []
    return [Finding(Level.ERROR, "gpu", f"{ranks} ranks on this host but {len(devices)} GPUs")]


def _with_others(facts: dict[str, Any], options: argparse.Namespace, rank: int, world: int) -> list[Finding]:
    """Gather all ranks' facts, compare them, measure. The same list on every rank; a rank that is missing is an error."""
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=options.timeout_seconds)
    cuda = facts["packages"]["torch_cuda"] is not None and torch.cuda.is_available()
    try:
        dist.init_process_group("gloo", timeout=timeout)
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, facts)
        hosts = len({f["machine"]["host"] for f in everyone})
        for f in everyone:
            f["machine"]["hosts"] = hosts
        dist.barrier()
        times: list[Any] = [None] * world
        dist.all_gather_object(times, time.time())
        size = options.megabytes or (256 if cuda else 8)
        measured = [collective.measure("gloo", torch.device("cpu"), None, world, hosts, min(size, 8))]
        if cuda:
            device = torch.device("cuda", facts["local_rank"])
            torch.cuda.set_device(device)
            group = dist.new_group(backend="nccl", timeout=timeout)
            measured.append(collective.measure("nccl", device, group, world, hosts, size))
        # Rank 0's measurement for all: they must print and return the same.
        box = [measured]
        dist.broadcast_object_list(box, src=0)
        measured = box[0]
        dist.destroy_process_group()
    except Exception as error:
        text = f"rank {rank} on {socket.gethostname()}: {str(error).splitlines()[0]}"
        print(f"rhymemeg doctor: {text}", file=sys.stderr, flush=True)
        return [*judge(facts), Finding(Level.ERROR, "collective", text, (rank,))]
    same = agreement.judge([agreement.flatten(f["packages"], f["gpu"], f["environment"]) for f in everyone])
    clocks = collective.judge_clocks(times, [f["machine"]["host"] for f in everyone])
    both = tuple(range(world))
    general = [
        Finding(f.level, f.check, f.text, f.ranks or both) for f in (*same, *collective.judge(measured), *clocks)
    ]
    return sorted([*merge([judge(f) for f in everyone]), *general], key=lambda f: -int(f.level))


def _summary(findings: list[Finding]) -> str:
    counts = {level: sum(f.level == level for f in findings) for level in Level}
    if counts[Level.ERROR] or counts[Level.WARNING]:
        return f"{counts[Level.ERROR]} errors, {counts[Level.WARNING]} warnings, {counts[Level.UNKNOWN]} not checked"
    return f"nothing wrong; {counts[Level.UNKNOWN]} not checked"
