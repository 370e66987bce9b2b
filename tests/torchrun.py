"""Start torchrun from a test, with a time limit that kills the whole process group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Result:
    status: int
    output: str

    def check(self) -> str:
        """The output of a run that must have succeeded."""
        assert self.status == 0, self.output[-6000:]
        return self.output


def start(ranks: int, words: Sequence[str], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """`torchrun --nproc-per-node ranks words...` from the repository root, stdout and stderr together."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *words]
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=clean | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float) -> Result:
    """Wait; past the limit, kill everything that was started and fail with the output so far."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{output[-6000:]}") from None
    return Result(process.returncode, output)


def torchrun(ranks: int, *words: str, timeout: float = 240, env: dict[str, str] | None = None) -> Result:
    """Run to the end."""
    return finish(start(ranks, words, env), timeout)
