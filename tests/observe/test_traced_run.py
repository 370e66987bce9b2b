"""A real run of two ranks: its trace, its phases and its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rhymemeg.observe.read_run import read_run
from rhymemeg.observe.trace import WINDOW
from rhymemeg.report.command import write_report
from tests.torchrun import torchrun


@pytest.mark.engine
@pytest.mark.distributed
def test_trace_phases_and_page_of_a_run(tmp_path: Path) -> None:
    words = (
        "--module", "rhymemeg.train", "--config", "launch/configs/quickstart.yaml", "--display", "lines",
        "--train-iters", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--max-response-len", "96",
        "--num-prompts", "8", "--eval-interval", "0", "--save-final", "False", "--export-hf", "False", "--histospec",
        "--trace-steps", "1", "--output-dir", str(tmp_path),
    )  # fmt: skip
    said = torchrun(2, *words, timeout=400).check()
    assert "trace of step 1" in said
    assert [p.name for p in (tmp_path / "traces").iterdir()] == ["step_1.json"]
    events = json.loads((tmp_path / "traces" / "step_1.json").read_text())["traceEvents"]
    run = read_run(tmp_path)
    row = next(row for row in run.rows if row["step"] == 1)
    phases = {k: v for k, v in row.items() if k.startswith("timing_s/")}
    assert sum(phases.values()) == pytest.approx(row["perf/step_time"], abs=1e-9)
    spans = [e for e in events if e["ph"] == "X"]
    for rank in (0, 1):
        mine = [e for e in spans if e["pid"] == rank]
        assert {"rollout", "train", "sync"} <= {e["name"] for e in mine if e["tid"] == 0}
        assert {"engine step", "draft", "optimizer step", "weight update"} <= {e["name"] for e in mine}
    rollout = next(e for e in spans if e["pid"] == 0 and e["name"] == "rollout")
    assert rollout["dur"] / 1e6 == pytest.approx(row["timing_s/rollout"], rel=0.01)
    # All tokens of the window were made in engine steps of the trace, each engine being one rank.
    made = sum(e["args"]["tokens"] for e in spans if e["name"] == "engine step")
    assert made == row["rollout/tokens"] == sum(e["args"]["tokens"] for e in spans if e["pid"] >= WINDOW)
    assert row["perf/train_tflops_per_gpu"] > 0 and "perf/mfu" not in row
    _, size = write_report(str(tmp_path), None, str(tmp_path / "report.html"))
    assert size > 10_000 and "Window of step 1, the last" in (tmp_path / "report.html").read_text()
