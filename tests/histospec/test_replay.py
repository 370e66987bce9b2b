"""Trace replay: with the index as with exhaustive search, and its control."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

spec = importlib.util.spec_from_file_location("replay", Path(__file__).parents[2] / "tools" / "replay.py")
assert spec is not None and spec.loader is not None
replay = importlib.util.module_from_spec(spec)
sys.modules["replay"] = replay  # dataclasses look their module up
spec.loader.exec_module(replay)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three prompts, two steps, four responses each; the second step's are the first's with some words replaced."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    with open(path, "w") as file:
        for prompt in range(3):
            base = [f"w{rng.integers(60)}" for _ in range(80)]
            for step in (4, 8):
                for _ in range(4):
                    words = [word if rng.random() > 0.1 else f"w{rng.integers(60)}" for word in base]
                    line = {
                        "prompt_id": prompt,
                        "input": f"q{prompt}",
                        "output": " ".join(words),
                        "score": 1.0,
                        "step": step,
                    }
                    file.write(json.dumps(line) + "\n")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict]:
    assert replay.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_index_equals_exhaustive_search(trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "replay.png"
    common = [trace, "--group", 4, "--batch", 4, "--policy", "paper", "fixed:4"]
    fast = run(capsys, *common, "--plot", picture)
    slow = run(capsys, *common, "--exhaustive")
    for a, b in zip(fast, slow):
        assert a["tokens_per_request_step"] == pytest.approx(b["tokens_per_request_step"], rel=0.02)
        assert 1.2 < a["tokens_per_request_step"] <= 5
        assert a["request_steps"] * a["tokens_per_request_step"] == pytest.approx(3 * 4 * 80), (
            "all but the first token of each"
        )
    assert picture.stat().st_size > 1000


def test_another_prompts_history_does_not_help(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [trace, "--group", 4, "--policy", "fixed:4", "--sources", "history"]
    (own,), (other,) = run(capsys, *common), run(capsys, *common, "--shift-prompts")
    assert other["tokens_per_request_step"] < 1.3 < own["tokens_per_request_step"]


def test_goodput_is_at_least_as_fast_as_fixed_lengths(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(
        capsys,
        trace,
        "--group",
        4,
        "--batch",
        4,
        "--sources",
        "both",
        "--policy",
        "goodput",
        "fixed:2",
        "fixed:4",
        "fixed:8",
    )
    speed = {row["policy"]: row["predicted_tokens_per_second"] for row in rows}
    assert speed.pop("goodput") >= 0.97 * max(speed.values()), "960 tokens: little time to learn"


def test_epochs_and_errors(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(capsys, trace, "--epochs", "--policy", "fixed:4", "--sources", "history")
    assert [(r["history_step"], r["live_step"]) for r in rows] == [(None, 4), (4, 8)]
    assert rows[0]["coverage"] == 0 and rows[0]["predicted_speedup"] == pytest.approx(1.0)
    assert replay.main([str(trace), "--live-step", "5"]) == 2
    assert "has no step 5 (it has [4, 8])" in capsys.readouterr().err


def test_oracle_reuse() -> None:
    assert replay.oracle_reuse([[1, 2, 3, 4, 5, 6]], [1, 2, 3, 4, 5, 9]) == 2
    assert replay.oracle_reuse([[1, 2, 3, 4]], [7, 7, 7, 7]) == 0
    assert replay.oracle_reuse([[1, 2, 3, 4, 9], [1, 2, 3, 4, 5]], [1, 2, 3, 4, 5]) == 2
