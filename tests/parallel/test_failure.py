"""How a run ends when a rank fails: one message that names it, everyone stops, nobody hangs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rhymemeg.errors import CheckpointError, TrainingError
from rhymemeg.parallel.failure import _alive, _is_consequence
from tests.parallel.failure_worker import MODES, RANKS
from tests.parallel.launch import environment, torchrun

KILLED = r"rhymemeg: error: rank 1 \(pid \d+ on \S+\) has died .* in phase 'rollout'; the run stops"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every mode on three ranks: the exit status of each rank, what they wrote, and how long the longest took."""
    out = tmp_path_factory.mktemp("failure")
    command = [sys.executable, str(Path(__file__).parent / "failure_worker.py"), "--all", str(out)]
    subprocess.run(command, check=True, timeout=120, env=environment())
    return {mode: json.loads((out / f"{mode}.json").read_text()) for mode in MODES}


def messages(log: str) -> list[str]:
    """What the program itself said (torchrun adds a report of its own)."""
    return [line for line in log.splitlines() if line.startswith("rhymemeg:")]


@pytest.mark.distributed
def test_a_run_that_ends_well_says_nothing(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["fine"]
    assert run["status"] == [0] * RANKS and messages(run["log"]) == []
    assert sorted(run["log"].splitlines()) == [f"rank {rank} is done" for rank in range(RANKS)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mode", "pattern"),
    [
        ("error", r"rhymemeg: error: rank 1 failed during phase 'rollout': the loss is nan"),
        ("everyone", r"rhymemeg: error: rank \d failed during phase 'rollout': the loss is nan"),
        ("defect", r"rhymemeg: rank 1 failed during phase 'rollout':"),
        ("killed", KILLED),
        ("killed-idle", KILLED),
        ("terminated", r"rhymemeg: rank 1 was told to stop \(SIGTERM\) in phase 'rollout'"),
    ],
)
def test_one_message_names_the_rank_and_all_stop(mode: str, pattern: str, runs: dict[str, dict[str, Any]]) -> None:
    run = runs[mode]
    log = run["log"]
    assert all(status != 0 for status in run["status"]), run["status"]
    assert run["status"][1] == {"terminated": 143, "killed": -9, "killed-idle": -9}.get(mode, 1)
    assert len(messages(log)) == 1 and re.fullmatch(pattern, messages(log)[0]), log
    assert "is done" not in log and "terminate called" not in log
    # A sentence for an error that the user can act on, a traceback once for a defect.
    assert log.count("Traceback") == (1 if mode == "defect" else 0), log
    assert log.count("KeyError: 'not there'") == (1 if mode == "defect" else 0)
    # Collectives give up after 300 s here: nobody has waited for that.
    assert run["seconds"] < 60


@pytest.mark.distributed
def test_a_time_out_says_where_the_ranks_are(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["hangs"]
    assert all(status != 0 for status in run["status"])
    last = [line for line in messages(run["log"]) if "where the ranks were last" in line]
    assert len(last) == 1, run["log"]
    assert "'stuck': rank 1" in last[0] and re.search(r"'rollout': rank (0|2)", last[0])


@pytest.mark.distributed
def test_under_torchrun_the_dead_rank_is_named_too() -> None:
    """Torchrun sends SIGTERM to the survivors at once, which must not be taken for the cause."""
    run = torchrun(2, "failure_worker.py", "killed", timeout=120)
    assert run.returncode != 0
    assert len(messages(run.stderr)) == 1 and re.fullmatch(KILLED, messages(run.stderr)[0]), run.stderr
    assert "terminate called" not in run.stderr


def test_what_counts_as_a_consequence() -> None:
    assert _is_consequence(RuntimeError("[...]/pair.cc:553] Connection closed by peer [127.0.0.1]:14229"))
    assert _is_consequence(RuntimeError("Timed out waiting 6000ms for recv operation to complete"))
    assert not _is_consequence(RuntimeError("shape '[2]' is invalid for input of size 3"))
    assert not _is_consequence(CheckpointError("saving x: [Errno 28] No space left on device"))
    waited = TrainingError("rank 0 waited 10 s for all ranks (start)")
    waited.__cause__ = RuntimeError("monitoredBarrier failed: Rank 1 failed to pass")
    assert _is_consequence(waited)


def test_a_process_is_alive_until_it_ends() -> None:
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
