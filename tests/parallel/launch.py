"""Starts a script of this folder under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """This process's environment, with the package and the tests importable and one thread a process."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def torchrun(
    ranks: int, script: str, *arguments: str, timeout: float = 240, max_restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run `tests/parallel/<script>` on `ranks` processes and return what it wrote; a hang is a failure of the test."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(max_restarts)]
    return subprocess.run(
        [*command, str(Path(__file__).parent / script), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env=environment(),
        check=False,
    )
