"""What a run that resumes is refused, and what it says."""

from __future__ import annotations

from typing import Any

import pytest

from rhymemeg.config import Config
from rhymemeg.errors import CheckpointError
from rhymemeg.parallel.resume import PLACE, check, describe


def options(**changes: Any) -> dict[str, dict[str, Any]]:
    base = {"train_iters": 10, "rollout_batch_size": 4}
    return Config.from_tree(base | changes, where="test").model_dump(mode="json")


def test_the_same_options_need_no_remark() -> None:
    assert check("c", options(), options()) == []
    assert check("c", options(), options(output_dir="elsewhere", train_iters=20, keep_last=5)) == []


def test_what_loses_the_place_is_refused_and_all_of_it_named() -> None:
    with pytest.raises(CheckpointError, match=r"--seed is 2, was 1234; --rollout-batch-size is 8, was 4"):
        check("c", options(), options(seed=2, rollout_batch_size=8))
    known = options()
    assert all(name in known[section] for section, name in PLACE)


def test_other_changes_are_told() -> None:
    (remark,) = check("c", options(lr=1e-5), options(lr=2e-5, tensor_model_parallel_size=2))
    assert "--lr 2e-05 (was 1e-05)" in remark and "--tensor-model-parallel-size 2 (was 1)" in remark


def test_options_that_an_older_checkpoint_lacks_are_not_compared() -> None:
    saved = options()
    del saved["run"]["seed"], saved["histospec"]
    assert check("c", saved, options(seed=7)) == []


@pytest.mark.parametrize(
    ("steps", "now", "text"),
    [
        (3, {}, "resuming from c: step 3 of 10, epoch 1 after 12 of 20 prompts"),
        (5, {}, "resuming from c: step 5 of 10, epoch 2 begins"),
        (7, {"train_iters": 30}, "resuming from c: step 7 of 30, epoch 2 after 8 of 20 prompts"),
        (10, {"train_iters": 12, "lr_decay_style": "linear"}, "step 10 of 12, epoch 3 begins; the learning rate now"),
        (10, {}, "c is after step 10, and --train-iters is 10: no step to do"),
        (10, {"train_iters": 4}, "c is after step 10, and --train-iters is 4: no step to do"),
    ],
)
def test_what_is_said(steps: int, now: dict[str, Any], text: str) -> None:
    assert text in describe("c", steps, options(), options(**now), num_prompts=20)
