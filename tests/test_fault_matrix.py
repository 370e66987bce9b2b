"""A small part of `tools/fault_matrix.py`; the whole of it takes a quarter of an hour."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.fault_matrix import KILLS, ROWS, main


@pytest.mark.engine
@pytest.mark.distributed
def test_a_killed_save_damaged_checkpoints_and_preemption(tmp_path: Path) -> None:
    status = main(["--rows", "kill:1:checkpoint,damaged,sigterm", "--output-dir", str(tmp_path / "faults")])
    rows = json.loads((tmp_path / "faults/faults.json").read_text())
    assert status == 0, rows
    assert [row["name"] for row in rows] == [
        "kill:1:checkpoint", "cut short", "flipped bit", "missing shard", "sigterm",
    ]  # fmt: skip
    assert rows[0]["steps_lost"] == 2 and rows[-1]["steps_lost"] == 0 and not any(row["orphans"] for row in rows)


def test_rows_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.split() == list(ROWS) and len(KILLS) == 10
    with pytest.raises(SystemExit):
        main(["--rows", "no-such-row"])
    assert "unknown row no-such-row" in capsys.readouterr().err
