"""What every rank was doing when a step took longer than it should.

`StepBudget` writes the Python stacks of all threads of this rank, once a step that exceeds its budget, to
`stacks/step_N_rank_R.txt` in the run directory. It only looks: the step goes on, and what ends it is the time-out of the
wait that it may hang in. `parallel.failure` asks it from its watching thread.

The watching thread needs Python's interpreter lock. A rank that is stuck in native code which holds the lock, or that is
stopped (SIGSTOP), writes nothing; `failure` then says that nothing is heard of it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import time
from pathlib import Path


class StepBudget:
    """`seconds` is how long a step may take. `begin(step)` starts the clock, `begin(None)` stops it."""

    def __init__(self, seconds: float, folder: Path, rank: int) -> None:
        self.seconds, self.folder, self.rank = seconds, folder, rank
        self._step: int | None = None
        self._start = 0.0
        self._written = True

    def begin(self, step: int | None) -> None:
        """A step begins, or none is going on."""
        self._start, self._step = time.monotonic(), step
        self._written = step is None

    def exceeded(self, phase: str) -> int | None:
        """Write the stacks if the step has just exceeded its budget. Returns its number then, else None."""
        step, seconds = self._step, time.monotonic() - self._start
        if self._written or step is None or seconds < self.seconds:
            return None
        self._written = True
        # A full disk must not end the run here.
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"step_{step}_rank_{self.rank}.txt").open("w", encoding="utf-8") as file:
                file.write(
                    f"rank {self.rank} (pid {os.getpid()} on {socket.gethostname()}): step {step} has taken {seconds:.0f} s, "
                    f"phase {phase!r}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n\n"
                )
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        return step
