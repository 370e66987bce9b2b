"""Running untrusted Python programs in isolated subprocesses.

`run(program, stdin, limits)` starts the program in a process of its own without network, other processes or files (see
`rhymemeg.rl.rewards.jail` for how) and returns what it wrote to standard output and how it ended. Raises SandboxError where
this machine cannot isolate it: then nothing is run.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

JAIL = Path(__file__).with_name("jail.py")
REFUSED = 97


class SandboxError(RuntimeError):
    """The program cannot be isolated on this machine."""


@dataclass(frozen=True)
class Limits:
    """Of one program: wall-clock and processor seconds, MiB of address space, MiB of files (in memory, gone with the
    program), open files, processes of this user, and bytes of output that are read."""

    wall_seconds: float = 5.0
    cpu_seconds: int = 5
    memory_mib: int = 1024
    disk_mib: int = 16
    open_files: int = 64
    processes: int = 256
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """`status` is the exit status (-1: ended for taking too long or writing too much); `output` what it wrote to standard
    output, at most `output_bytes`, and `errors` the end of what it wrote to standard error."""

    status: int
    output: bytes
    errors: bytes
    timed_out: bool


def run(program: str, stdin: bytes = b"", limits: Limits = Limits()) -> Outcome:
    """See the module."""
    with tempfile.TemporaryDirectory(prefix="rhymemeg-") as folder:
        setup = {"folder": folder, "program": program, "limits": asdict(limits), "readable": _readable()}
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(JAIL), json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            start_new_session=True,
        )
        try:
            output, errors, timed_out = _talk(process, stdin, limits)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its first process, the whole namespace
            status = process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream is not None
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
    if status == REFUSED:
        raise SandboxError(f"cannot isolate a program on this machine: {errors.decode(errors='replace').strip()}")
    return Outcome(-1 if timed_out else status, output, errors[-2000:], timed_out)


def _talk(process: subprocess.Popen[bytes], stdin: bytes, limits: Limits) -> tuple[bytes, bytes, bool]:
    """Feed and read until the program closes its output; True if it ran out of time or of output."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    deadline = time.monotonic() + limits.wall_seconds
    outputs = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    reading, pending = set(outputs), memoryview(stdin)
    source = process.stdin.fileno()
    os.set_blocking(source, False)
    writing = {source}
    while reading:
        left = deadline - time.monotonic()
        if left <= 0 or any(len(data) > limits.output_bytes for data in outputs.values()):
            break
        readable, writable, _ = select.select(reading, writing, [], left)
        for fd in readable:
            data = os.read(fd, 1 << 16)
            outputs[fd] += data
            if not data:
                reading.discard(fd)
        if writable:
            try:
                pending = pending[os.write(source, pending[: 1 << 16]) :] if len(pending) else pending
            except BrokenPipeError:
                pending = pending[:0]
            if not len(pending):
                writing.clear()
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
    out, err = (bytes(data[: limits.output_bytes]) for data in outputs.values())
    return out, err, bool(reading)


def _readable() -> list[str]:
    """What a Python program has to read: interpreter, standard library, shared libraries."""
    paths = sysconfig.get_paths()
    own = {
        sys.prefix,
        sys.base_prefix,
        paths["stdlib"],
        paths["platstdlib"],
        os.path.dirname(os.path.realpath(sys.executable)),
    }
    system = [
        "/usr/lib",
        "/usr/lib64",
        "/lib",
        "/lib64",
        "/usr/local/lib",
        "/etc/ld.so.cache",
        "/dev/urandom",
        "/dev/null",
    ]
    return sorted({os.path.realpath(p) for p in own} | set(system))
