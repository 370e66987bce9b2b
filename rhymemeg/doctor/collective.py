"""Latency and bandwidth of all-reduces between all ranks, and how far the hosts' clocks are apart.

    latency     seconds of an all-reduce of 8 bytes, the median of `TIMES`
    bandwidth   bytes of the buffer a second, times 2 (n - 1) / n: what each rank sends and receives ("bus bandwidth")

Each takes well under a minute. A wait that exceeds the time-out is an error that the caller reports.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

from rhymemeg.doctor.finding import Finding, Level

TIMES = 20
CLOCK_SKEW = 1.0
"""Seconds that hosts may differ before logs cannot be compared."""
SLOW = {"gloo": 50e6, "nccl in a node": 50e9, "nccl": 5e9}
"""Bytes a second below which something is wrong: TCP instead of NVLink or InfiniBand, a link that runs at a fraction."""
SLOWEST_SHARE = 0.5
"""A rank whose own part takes so much less time than the slowest's waits for it."""


@dataclass(frozen=True)
class Measured:
    """Of one backend over all ranks."""

    backend: str
    ranks: int
    hosts: int
    latency: float
    bandwidth: float
    megabytes: int


def measure(backend: str, device: Any, group: Any, world: int, hosts: int, megabytes: int) -> Measured:
    """All ranks of `group` call this. `device` is where the buffers live."""
    import torch
    import torch.distributed as dist

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def seconds(tensor: Any, times: int) -> list[float]:
        found = []
        for _ in range(times):
            wait()
            start = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            wait()
            found.append(time.perf_counter() - start)
        return found

    small = torch.ones(2, dtype=torch.float32, device=device)
    large = torch.ones(megabytes << 18, dtype=torch.float32, device=device)
    seconds(small, 3)
    latency = statistics.median(seconds(small, TIMES))
    seconds(large, 1)
    each = statistics.median(seconds(large, 5))
    return Measured(backend, world, hosts, latency, (megabytes << 20) / each * 2 * (world - 1) / world, megabytes)


def judge(measured: list[Measured]) -> list[Finding]:
    """Findings about the measurements. Pure."""
    found = []
    for m in measured:
        text = (
            f"{m.backend}: all-reduce over {m.ranks} ranks on {m.hosts} host{'s' if m.hosts > 1 else ''}, "
            f"{1e6 * m.latency:.0f} us, {m.bandwidth / 1e9:.2f} GB/s ({m.megabytes} MiB)"
        )
        kind = "nccl in a node" if m.backend == "nccl" and m.hosts == 1 else m.backend
        slow = m.bandwidth < SLOW[kind]
        found.append(Finding(Level.WARNING if slow else Level.OK, "collective", text + (": slow" if slow else "")))
    return found


def judge_clocks(times: list[float], hosts: list[str]) -> list[Finding]:
    """`times[rank]` read right after a barrier. Pure."""
    by_host: dict[str, float] = {}
    for host, at in zip(hosts, times):
        by_host.setdefault(host, at)
    if len(by_host) < 2:
        return []
    middle = statistics.median(by_host.values())
    off = {host: at - middle for host, at in by_host.items() if abs(at - middle) > CLOCK_SKEW}
    if not off:
        return [Finding(Level.OK, "clocks", f"{len(by_host)} hosts within {CLOCK_SKEW:g} s")]
    worst = max(off, key=lambda host: abs(off[host]))
    return [Finding(Level.WARNING, "clocks", f"{len(off)} hosts are off, {worst} by {off[worst]:+.1f} s (NTP?)")]
