"""A small part of `tools/fault_matrix.py`; the whole of it takes a quarter of an hour."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchrun import ROOT


def fault_matrix(*words: str, timeout: float = 500) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/fault_matrix.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.engine
@pytest.mark.distributed
def test_a_killed_save_damaged_checkpoints_and_preemption(tmp_path: Path) -> None:
    folder = tmp_path / "faults"
    run = fault_matrix("--rows", "kill:1:checkpoint,damaged,sigterm", "--output-dir", str(folder))
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads((folder / "faults.json").read_text())
    assert [row["name"] for row in rows] == [
        "kill:1:checkpoint", "cut short", "flipped bit", "missing shard", "sigterm",
    ]  # fmt: skip
    assert rows[0]["steps_lost"] == 2 and rows[-1]["steps_lost"] == 0 and not any(row["orphans"] for row in rows)


def test_rows_are_listed_and_unknown_ones_refused() -> None:
    rows = fault_matrix("--list").stdout.split()
    assert sum(row.startswith("kill:") for row in rows) == 10 and {"sigterm", "damaged", "full-disk"} <= set(rows)
    refused = fault_matrix("--rows", "no-such-row")
    assert refused.returncode == 2 and "unknown row no-such-row" in refused.stderr
