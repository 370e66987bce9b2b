"""The benchmark runs and reports every figure; how fast anything is, is not asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rhymemeg.histospec import bench


def test_reports_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    with open(trace, "w") as file:
        for step in (0, 1):
            line = {"prompt_id": 0, "output_token_ids": [1, 2, 3, 4, 5, 6, 7, 8, step], "score": 1.0, "step": step}
            file.write(json.dumps(line) + "\n")
    sizes = ["--lengths", "64", "--batches", "1", "4", "--steps", "2", "--repeats", "1", "--memory-prompts", "1"]
    assert bench.main([*sizes, "--only", "rhymemeg", "--trace", str(trace), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    timed = [row for row in rows if "batch" in row and row["name"] == "rhymemeg"]
    assert [row["batch"] for row in timed] == [1, 4]
    assert all(row["draft_us_per_request"] > 0 and row["append_us_per_token"] > 0 for row in timed)
    assert any("bytes_per_token" in row for row in rows)
    (on_trace,) = [row for row in rows if row.get("trace") and row["name"] == "rhymemeg"]
    assert on_trace["tokens_per_request_step"] == 8, "after the first token, 7 drafted and accepted, and the new one"


def test_groups_share_their_text() -> None:
    """The synthetic data is like responses to one prompt: runs of earlier responses, and the same for the same seed."""
    first, again = bench.group(3, 500, 4), bench.group(3, 500, 4)
    assert all((a == b).all() for a, b in zip(first, again)) and all(len(r) == 500 for r in first)
    runs = {tuple(first[0][i : i + 4]) for i in range(497)}
    shared = sum(tuple(first[1][i : i + 4]) in runs for i in range(497)) / 497
    assert 0.3 < shared < 0.95
