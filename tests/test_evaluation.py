"""Held-out sets by name, and the estimates made of their samples."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rhymemeg.config import DataOptions
from rhymemeg.data.tokenizer import load_tokenizer
from rhymemeg.errors import ConfigError, RhymeMegError
from rhymemeg.evaluation import combine, load_held_out, set_options
from rhymemeg.observe.statistics import evaluation_metrics, pass_at_k
from rhymemeg.rl.exchange import SampleSummary
from rhymemeg.rollout.samples import SampleId
from tests.test_config import valid

MODEL = Path(__file__).parents[1] / "launch/quickstart_model"


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_counts_subsets(n: int) -> None:
    """The share of the subsets of k samples that hold one that passes, by counting them."""
    for passed, k in itertools.product(range(n + 1), range(1, n + 1)):
        flags = [i < passed for i in range(n)]
        subsets = list(itertools.combinations(flags, k))
        assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError, match="pass@7 of 6"):
        pass_at_k(6, 1, 7)


def summaries(rewards: list[list[float]]) -> list[SampleSummary]:
    return [
        SampleSummary(SampleId(0, p, k), 0, 3, 10, r, False, 0)
        for p, row in enumerate(rewards)
        for k, r in enumerate(row)
    ]


def test_standard_errors_are_over_prompts() -> None:
    rewards = [[1.0, 0.0, 1.0], [0.0, 0.0, 0.5], [1.0, 1.0, 1.0]]
    got = evaluation_metrics(summaries(rewards), prefix="eval/x/")
    shares = np.array([2 / 3, 0.0, 1.0])
    assert got["eval/x/mean@3"] == pytest.approx(shares.mean())
    assert got["eval/x/mean@3_se"] == pytest.approx(shares.std(ddof=1) / np.sqrt(3))
    assert got["eval/x/pass@1"] == pytest.approx(shares.mean())
    assert got["eval/x/pass@2"] == pytest.approx(2 / 3) and got["eval/x/pass@3"] == pytest.approx(2 / 3)
    assert {k for k in got if "pass@" in k and "_se" not in k} == {f"eval/x/pass@{k}" for k in (1, 2, 3)}
    lenient = evaluation_metrics(summaries(rewards), pass_score=0.5)
    assert lenient["eval/pass@3"] == 1.0 and lenient["eval/reward"] == pytest.approx(np.mean(rewards))


def test_options_of_the_sets() -> None:
    data = DataOptions(
        prompt_data="task:ledger", eval_n_samples=2, reward="exact_match", reward_args={"extract": "boxed"},
        eval_sets={
            "math": {"prompt_data": "math.jsonl", "reward": "math_verify", "n_samples": 8, "label_key": "answer"},
            "greedy": {"prompt_data": "task:ledger", "temperature": 0, "n_samples": 1, "data_seed": 5},
        },
    )  # fmt: skip
    sets = set_options(data)
    assert list(sets) == ["", "math", "greedy"] and sets[""] is data
    math, greedy = sets["math"], sets["greedy"]
    assert (math.eval_prompt_data, math.eval_n_samples, math.label_key) == ("math.jsonl", 8, "answer")
    assert (math.reward, math.reward_args) == ("math_verify", {})
    assert (greedy.eval_temperature, greedy.reward, greedy.eval_data_seed) == (0, "exact_match", 5)
    assert math.prompt_data == "task:ledger"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("x.jsonl", "eval_sets, 'a': needs prompt_data"),
        ({"n_samples": 2}, "eval_sets, 'a': needs prompt_data"),
        ({"prompt_data": "x", "n_sample": 2}, "unknown option 'n_sample', did you mean n_samples"),
        ({"prompt_data": "x", "n_samples": 0}, "eval_sets, 'a': --eval-n-samples: Input should be greater"),
        ({"prompt_data": "x", "n_samples": 2, "temperature": 0}, "temperature 0 and n_samples 2: greedy"),
    ],
)
def test_mistakes_in_a_set_are_named(entry: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        set_options(DataOptions(prompt_data="task:ledger", eval_sets={"a": entry}))


def test_names_and_greedy_samples() -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        set_options(DataOptions(eval_sets={"a/b": {"prompt_data": "x"}}))
    with pytest.raises(ConfigError, match="--eval-temperature 0 and --eval-n-samples 2"):
        set_options(DataOptions(eval_temperature=0, eval_n_samples=2))


def test_several_sets_are_loaded_judged_and_combined(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(MODEL))
    for name in ("train", "held"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    config = valid(
        prompt_data=str(tmp_path / "train.jsonl"), eval_interval=1,
        eval_sets={
            "file": {"prompt_data": str(tmp_path / "held.jsonl")},
            "task": {"prompt_data": "task:ledger", "num_prompts": 3},
        },
    )  # fmt: skip
    file, task = load_held_out(config, tokenizer)
    assert (file.name, len(file.prompts), file.scorer.reward.name) == ("file", 1, "exact_match")
    assert (task.name, len(task.all_prompts()), task.scorer.reward.name) == ("task", 3, "ledger")
    assert not {p.prompt_id for p in task.all_prompts()} & {1}
    parts = [
        (file, file.metrics(summaries([[1.0]]), {"reward/part": 0.5})),
        (task, task.metrics(summaries([[0.0], [1.0], [0.5]]), {})),
    ]
    numbers = combine(parts)
    assert numbers["eval/file/part"] == 0.5 and numbers["eval/task/pass@1"] == pytest.approx(1 / 3)
    assert numbers["eval/reward"] == pytest.approx(0.75)
    assert numbers["eval/reward_se"] == pytest.approx(numbers["eval/task/reward_se"] / 2)
    config.data.eval_sets = {"file": {"prompt_data": "nowhere.jsonl"}}
    with pytest.raises(RhymeMegError, match=r"eval_sets, 'file': .*nowhere"):
        load_held_out(config, tokenizer)
    config.data.eval_interval = 0
    assert load_held_out(config, tokenizer) == []
