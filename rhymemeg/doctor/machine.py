"""The machine around the GPUs: facts, then findings."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from rhymemeg.doctor.finding import Finding, Level

GIB = 1 << 30
OPEN_FILES = 4096
"""A rank opens a socket to many others, and shards of a checkpoint; 1,024 (a usual default) is too little at scale."""
SHARED_MEMORY = GIB
"""NCCL's and vLLM's segments of a rank."""
DISK = 20 * GIB
SLOW_DISK = 100e6
"""Bytes a second below which checkpoints take their time."""


def gather(folder: str, local_world: int, test_disk: bool = True) -> dict[str, Any]:
    """`folder`: where the run would write; `local_world`: ranks of this host. With `test_disk` 64 MiB are written there
    and removed."""
    import psutil

    place = _existing(Path(folder).absolute())
    rates = {}
    devices = Path("/sys/class/infiniband")
    for port in sorted(devices.glob("*/ports/*")) if devices.is_dir() else ():
        state = _read(port / "state")
        if "ACTIVE" in state:
            rates[port.parent.parent.name] = _read(port / "rate").partition(" (")[0]
    return {
        "host": socket.gethostname(),
        "address": _address(),
        "local_world": local_world,
        "cores": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
        "memory_free": psutil.virtual_memory().available,
        "cgroup_memory": _cgroup_limit(),
        "shm_free": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "nproc": resource.getrlimit(resource.RLIMIT_NPROC)[0],
        "folder": str(place),
        "disk_free": shutil.disk_usage(place).free,
        "disk_write": _write_speed(place) if test_disk else None,
        "infiniband": rates,
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "compiler": shutil.which("g++") or shutil.which("c++"),
        "time": time.time(),
    }


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _address() -> str | None:
    """What this host's name resolves to: what other hosts would be told to connect to."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _cgroup_limit() -> int | None:
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(Path(file))
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _write_speed(folder: Path, size: int = 64 << 20) -> float | str:
    """Bytes a second of a file that is written and flushed; the error where that fails."""
    file = folder / f".doctor.{os.getpid()}"
    block = os.urandom(1 << 20)
    try:
        start = time.perf_counter()
        with open(file, "wb") as out:
            for _ in range(size >> 20):
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
        return size / (time.perf_counter() - start)
    except OSError as error:
        return str(error.strerror)
    finally:
        file.unlink(missing_ok=True)


def judge(facts: dict[str, Any], gpu: bool) -> list[Finding]:
    """Findings about the machine. `gpu`: limits that only GPU runs need are checked."""
    found: list[Finding] = []
    ranks = facts["local_world"]

    def say(condition: Any, level: Level, check: str, text: str) -> None:
        if condition:
            found.append(Finding(level, check, text))

    soft, hard = facts["nofile"]
    fix = "ulimit -n " + str(OPEN_FILES if hard < 0 or hard >= OPEN_FILES else hard)
    say(0 <= soft < OPEN_FILES, Level.WARNING, "limits", f"at most {soft} open files: {fix}")
    if gpu:
        text = f"locked memory is limited to {facts['memlock'] // 1024} KiB: RDMA cannot register buffers (ulimit -l unlimited)"
        say(facts["memlock"] >= 0, Level.ERROR if facts["infiniband"] else Level.WARNING, "limits", text)
        say(not facts["infiniband"], Level.UNKNOWN, "network", "no active InfiniBand or RoCE port: NCCL would use TCP")
        rates = sorted(set(facts["infiniband"].values()))
        say(len(rates) > 1, Level.WARNING, "network", f"ports of different speed: {', '.join(rates)}")
    shm = facts["shm_free"]
    say(shm is None, Level.UNKNOWN, "limits", "/dev/shm is not there")
    if shm is not None:
        text = f"/dev/shm has {shm / GIB:.1f} GiB free for {ranks} ranks (containers: --shm-size or --ipc=host)"
        say(shm < ranks * SHARED_MEMORY // (1 if gpu else 4), Level.WARNING, "limits", text)
    say(facts["cores"] < ranks, Level.WARNING, "cpu", f"{facts['cores']} cores for {ranks} ranks")
    say(gpu and facts["cores"] < 4 * ranks, Level.WARNING, "cpu", f"fewer than 4 cores a GPU ({facts['cores']})")
    limit = facts["cgroup_memory"]
    if limit is not None and limit < facts["memory"]:
        say(True, Level.OK, "memory", f"a cgroup limits this process to {limit / GIB:.0f} GiB")
    say(
        facts["memory_free"] < 2 * GIB * ranks,
        Level.WARNING,
        "memory",
        f"{facts['memory_free'] / GIB:.1f} GiB are free",
    )
    say(facts["disk_free"] < DISK, Level.WARNING, "disk", f"{facts['folder']}: {facts['disk_free'] / GIB:.1f} GiB free")
    speed = facts["disk_write"]
    if isinstance(speed, str):
        say(True, Level.ERROR, "disk", f"{facts['folder']} cannot be written: {speed}")
    elif speed is not None:
        say(speed < SLOW_DISK, Level.WARNING, "disk", f"{facts['folder']}: writes {speed / 1e6:.0f} MB/s")
    say(facts["address"] is None, Level.ERROR, "network", f"the host's own name {facts['host']!r} does not resolve")
    loopback = (facts["address"] or "").startswith("127.") and facts.get("hosts", 1) > 1
    text = f"{facts['host']!r} resolves to {facts['address']}, which other hosts cannot reach (see /etc/hosts)"
    say(loopback, Level.WARNING, "network", text)
    say(facts["omp"] is None, Level.WARNING, "cpu", "OMP_NUM_THREADS is not set: every rank may start a thread a core")
    if not any(f.level >= Level.WARNING for f in found):
        rate = f" at {speed / 1e6:.0f} MB/s" if isinstance(speed, float) else ""
        text = (
            f"{facts['cores']} cores, {facts['memory'] / GIB:.0f} GiB, {facts['disk_free'] / GIB:.0f} GiB of disk{rate}"
        )
        found.append(Finding(Level.OK, "machine", text))
    return found
