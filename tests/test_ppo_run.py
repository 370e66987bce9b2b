"""PPO with a critic as a user would start it: a warm-up of the critic, a checkpoint of both, a resumed run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import torchrun

pytestmark = [pytest.mark.engine, pytest.mark.distributed]

RUN = (
    "--module", "rhymemeg.train", "--config", "launch/configs/quickstart.yaml", "--display", "lines",
    "--advantage-estimator", "gae", "--lam", "0.95", "--critic-lr", "4e-4", "--critic-warmup-steps", "1",
    "--num-minibatches", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--max-response-len", "64",
    "--num-prompts", "16", "--eval-interval", "0", "--save-interval", "2", "--export-hf", "False",
)  # fmt: skip


def steps(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "reward/mean" in row]


def test_a_run_with_a_critic_and_its_continuation(tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    torchrun(2, *RUN, "--train-iters", "3", "--output-dir", str(straight)).check()
    rows = steps(straight)
    assert [("actor/grad_norm" in row, "critic/grad_norm" in row) for row in rows] == [
        (False, True),
        (True, True),
        (True, True),
    ]
    assert rows[0]["critic/value_mean"] == 0 and rows[1]["critic/value_mean"] != 0
    saved = straight / "checkpoints"
    assert {p.name for p in saved.iterdir()} >= {"step_00000002", "step_00000002.critic"}

    # From step 2 on, the same numbers again.
    for name in ("step_00000002", "step_00000002.critic"):
        shutil.copytree(saved / name, resumed / "checkpoints" / name)
    torchrun(2, *RUN, "--train-iters", "3", "--output-dir", str(resumed), "--load", "auto").check()
    (last,) = steps(resumed)
    for name in (
        "reward/mean",
        "critic/loss",
        "critic/value_mean",
        "critic/grad_norm",
        "actor/loss",
        "actor/grad_norm",
    ):
        assert last[name] == pytest.approx(rows[2][name], rel=1e-4, abs=1e-7), name

    # Without the critic's part there is nothing to go on from.
    shutil.rmtree(resumed / "checkpoints" / "step_00000003")
    shutil.rmtree(resumed / "checkpoints" / "step_00000002.critic")
    lost = torchrun(2, *RUN, "--train-iters", "3", "--output-dir", str(resumed), "--load", "auto")
    assert lost.status != 0 and "step_00000002.critic does not exist" in lost.output
