"""How a run ends when a rank fails: one message that names it, everyone stops, nobody hangs."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from subprocess import CompletedProcess

import pytest

from rhymemeg.errors import CheckpointError, TrainingError
from rhymemeg.parallel.failure import _alive, _is_consequence
from tests.parallel.launch import torchrun

MODES = ("fine", "error", "defect", "killed", "killed-idle", "hangs", "terminated", "everyone")


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[CompletedProcess[str], float]]:
    """Every mode on three ranks, and how long it took. Two at a time: they mostly wait."""

    def run(mode: str) -> tuple[CompletedProcess[str], float]:
        start = time.monotonic()
        return torchrun(3, "failure_worker.py", mode, timeout=120), time.monotonic() - start

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(MODES, pool.map(run, MODES)))


def messages(run: CompletedProcess[str]) -> list[str]:
    """What the program itself said (torchrun adds a report of its own)."""
    return [line for line in run.stderr.splitlines() if line.startswith("rhymemeg:")]


@pytest.mark.distributed
def test_a_run_that_ends_well_says_nothing(runs: dict[str, tuple[CompletedProcess[str], float]]) -> None:
    run, _ = runs["fine"]
    assert run.returncode == 0 and messages(run) == []
    assert sorted(re.findall(r"rank \d is done", run.stdout)) == [f"rank {rank} is done" for rank in range(3)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mode", "pattern"),
    [
        ("error", r"rhymemeg: error: rank 1 failed during phase 'rollout': the loss is nan"),
        ("everyone", r"rhymemeg: error: rank \d failed during phase 'rollout': the loss is nan"),
        ("defect", r"rhymemeg: rank 1 failed during phase 'rollout':"),
        ("killed", r"rhymemeg: error: rank 1 \(pid \d+ on \S+\) has died .* in phase 'rollout'; the run stops"),
        ("killed-idle", r"rhymemeg: error: rank 1 \(pid \d+ on \S+\) has died .* in phase 'rollout'; the run stops"),
        ("terminated", r"rhymemeg: rank 1 was told to stop \(SIGTERM\) in phase 'rollout'"),
    ],
)
def test_one_message_names_the_rank_and_all_stop(
    mode: str, pattern: str, runs: dict[str, tuple[CompletedProcess[str], float]]
) -> None:
    run, seconds = runs[mode]
    assert run.returncode != 0
    assert len(messages(run)) == 1 and re.fullmatch(pattern, messages(run)[0]), run.stderr[-3000:]
    assert "is done" not in run.stdout
    assert "terminate called" not in run.stderr
    # A sentence for an error that the user can act on, a traceback once for a defect. Torchrun's own is not counted.
    ours = run.stderr.count('failure_worker.py", line')
    assert ours > 0 if mode == "defect" else ours == 0
    assert run.stderr.count("KeyError: 'not there'") == (1 if mode == "defect" else 0)
    assert seconds < 100, "far beyond start-up: a rank has waited for a time-out"


@pytest.mark.distributed
def test_a_time_out_says_where_the_ranks_are(runs: dict[str, tuple[CompletedProcess[str], float]]) -> None:
    run, _ = runs["hangs"]
    assert run.returncode != 0
    last = [line for line in messages(run) if "where the ranks were last" in line]
    assert len(last) == 1 and "'stuck': rank 1" in last[0] and re.search(r"'rollout': rank (0|2)", last[0])


def test_what_counts_as_a_consequence() -> None:
    assert _is_consequence(RuntimeError("[...]/pair.cc:553] Connection closed by peer [127.0.0.1]:14229"))
    assert _is_consequence(RuntimeError("Timed out waiting 6000ms for recv operation to complete"))
    assert not _is_consequence(RuntimeError("shape '[2]' is invalid for input of size 3"))
    assert not _is_consequence(CheckpointError("saving x: [Errno 28] No space left on device"))
    waited = TrainingError("rank 0 waited 10 s for all ranks (start)")
    waited.__cause__ = RuntimeError("monitoredBarrier failed: Rank 1 failed to pass")
    assert _is_consequence(waited)


def test_a_process_is_alive_until_it_ends() -> None:
    import os
    import subprocess
    import sys

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert _alive(os.getpid()) and _alive(child.pid)
    assert child.stdin is not None
    child.stdin.close()
    deadline = time.monotonic() + 30
    while _alive(child.pid) and time.monotonic() < deadline:  # a zombie is not alive, though not yet waited for
        time.sleep(0.05)
    assert not _alive(child.pid)
    child.wait()
    assert not _alive(child.pid)
