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
from rhymemeg.parallel.failure import PREEMPTED, TERMINATED, _alive, _is_consequence
from tests.parallel.failure_worker import MODES, RANKS
from tests.parallel.launch import environment, torchrun

KILLED = r"rhymemeg: error: rank 1 \(pid \d+ on \S+\) has died .* in phase 'rollout'; the run stops"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("failure")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Every mode on three ranks: the exit status of each rank, what they wrote, and how long the longest took."""
    out = folder
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
def test_preemption_lets_the_step_end_and_all_ranks_save(runs: dict[str, dict[str, Any]]) -> None:
    """One rank gets SIGTERM during step 1."""
    run = runs["preempted"]
    assert run["status"] == [PREEMPTED] * RANKS, run["log"]
    assert messages(run["log"]) == ["rhymemeg: SIGTERM: saving after step 1 if it ends within 3 s"]
    assert sorted(line for line in run["log"].splitlines() if "saves" in line) == [
        f"rank {rank} saves after 2 steps" for rank in range(RANKS)
    ]


@pytest.mark.distributed
def test_preemption_does_not_wait_for_ever(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["preempted-late"]
    assert run["status"][1] == TERMINATED, run
    assert all(status not in (0, PREEMPTED) for status in run["status"])
    assert "saves" not in run["log"]
    assert any("step 1 did not end within 3 s, nothing is saved" in line for line in messages(run["log"])), run["log"]


@pytest.mark.distributed
def test_a_rank_that_dies_during_a_step_is_no_preemption(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["killed-in-step"]
    assert run["status"][1] == -9 and all(status not in (0, PREEMPTED) for status in run["status"])
    assert len(messages(run["log"])) == 1 and "has died" in messages(run["log"])[0], run["log"]


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["slow", "stopped"])
def test_a_step_over_its_budget_leaves_stacks(mode: str, runs: dict[str, dict[str, Any]], folder: Path) -> None:
    """Rank 1 takes 6 s, or is stopped for 8 s, in a step that may take 3 s: the run goes on."""
    run = runs[mode]
    assert run["status"] == [0] * RANKS, run["log"]
    warning = r"rhymemeg: warning: step 1 takes longer than 3 s; the ranks are in .*; their stacks are in .*"
    assert len(messages(run["log"])) == 1 and re.fullmatch(warning, messages(run["log"])[0]), run["log"]
    assert ("nothing is heard of rank 1;" in run["log"]) == (mode == "stopped")
    stacks = {p.name: p.read_text() for p in (folder / f"stacks-{mode}").iterdir()}
    assert {f"step_1_rank_{rank}.txt" for rank in (0, 2)} <= set(stacks)
    assert "all_reduce" in stacks["step_1_rank_0.txt"] and "phase 'rollout'" in stacks["step_1_rank_0.txt"]
    if mode == "slow":
        assert "in do_steps" in stacks["step_1_rank_1.txt"] and "phase 'slow'" in stacks["step_1_rank_1.txt"]


@pytest.mark.distributed
def test_under_torchrun_the_dead_rank_is_named_too(tmp_path: Path) -> None:
    """Torchrun sends SIGTERM to the survivors at once, which must not be taken for the cause."""
    run = torchrun(2, "failure_worker.py", "killed", str(tmp_path), timeout=120)
    assert run.returncode != 0
    assert len(messages(run.stderr)) == 1 and re.fullmatch(KILLED, messages(run.stderr)[0]), run.stderr
    assert "terminate called" not in run.stderr


@pytest.mark.distributed
def test_torchrun_restarts_after_a_rank_has_died() -> None:
    run = torchrun(2, "restart_worker.py", timeout=180, max_restarts=1)
    assert run.returncode == 0, run.stderr[-3000:]
    assert sorted(run.stdout.splitlines()) == ["rank 0 ends attempt 1", "rank 1 ends attempt 1"]
    said = messages(run.stderr)
    assert len(said) == 1 and re.search(r"rank 1 \(pid \d+ on \S+\) has died .* in phase 'attempt 0'", said[0]), said


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
