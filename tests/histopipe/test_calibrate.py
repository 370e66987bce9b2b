"""The comparison of simulated and measured windows, on a run that was itself simulated: then both are the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from rhymemeg.config import Config
from rhymemeg.errors import DataError
from rhymemeg.histopipe.calibrate import compare, main, read_steps, setting_of
from rhymemeg.histopipe.cost import CostModel
from rhymemeg.histopipe.record import write_windows
from rhymemeg.histopipe.simulator import Simulator

COST = CostModel("test", (1.0, 8.0), (1.0,), ((0.01,), (0.02,)), 0.0005)
STEPS, PROMPTS, SAMPLES = 6, 4, 4


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run of six steps, three a epoch."""
    config = Config()
    config.rollout.n_samples_per_prompt, config.engine.vllm_max_num_seqs = SAMPLES, 3
    rng = np.random.default_rng(0)
    folder = tmp_path / "run"
    (folder / "samples").mkdir(parents=True)
    (folder / "config.yaml").write_text(config.to_yaml())
    metrics = {
        "step": 0,
        "rollout/prompt_tokens": 50.0 * PROMPTS * SAMPLES,
        "rollout/samples": float(PROMPTS * SAMPLES),
    }
    (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    for step in range(STEPS):
        lines = [
            {"step": step, "prompt_id": step % 3 * PROMPTS + p, "length": int(rng.integers(5, 400))}
            for p in range(PROMPTS)
            for _ in range(SAMPLES)
        ]
        (folder / "samples" / f"step_{step}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    COST.save(folder / "engine_profile.json")
    setting = setting_of(yaml.safe_load(config.to_yaml()), COST, 2, 50)
    steps = read_steps(folder / "samples", SAMPLES)
    simulator = Simulator(setting)
    write_windows(
        folder / "windows.jsonl",
        [simulator.run_window(now, steps[min(i + 1, STEPS - 1)]) for i, now in enumerate(steps)],
    )
    return folder


def test_a_simulated_run_is_predicted_exactly(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    assert (
        "6 windows: median error +0.0 %, median absolute error 0.0 %, all windows together +0.0 %"
        in capsys.readouterr().out
    )


def test_a_slower_machine_shows(run: Path) -> None:
    """Twice the step times: twice the window, but for prefill."""
    steps = read_steps(run / "samples", SAMPLES)
    config = yaml.safe_load((run / "config.yaml").read_text())
    fast, slow = setting_of(config, COST, 2, 50), setting_of(config, COST.scaled(2.0), 2, 50)
    simulator = Simulator(slow)
    records = [simulator.run_window(now, steps[min(i + 1, STEPS - 1)]) for i, now in enumerate(steps)]
    assert all(row.error == pytest.approx(-0.5) for row in compare(fast, steps, records))


def test_history_is_that_of_the_last_visit(run: Path) -> None:
    steps = read_steps(run / "samples", SAMPLES)
    assert np.isnan(steps[2].history).all()
    assert (steps[4].prompt_ids == steps[1].prompt_ids).all() and (steps[4].history == steps[1].actual).all()


def test_bad_runs_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run / "none")]) == 1 and "none" in capsys.readouterr().err
    for name in ("config.yaml", "metrics.jsonl"):
        before = (run / name).read_bytes()
        for content in (b"[]\n", b"\xff\n", b"[" * 5000 + b"\n"):
            (run / name).write_bytes(content)
            assert main([str(run)]) == 1 and name in capsys.readouterr().err
        (run / name).write_bytes(before)
    file = run / "samples" / "step_2.jsonl"
    file.write_text(file.read_text().splitlines()[0] + "\n")
    with pytest.raises(DataError, match="step 2 are not complete"):
        read_steps(run / "samples", SAMPLES)
    file.write_text("{}\n")
    assert main([str(run)]) == 1 and "step_2.jsonl, line 1" in capsys.readouterr().err
