"""Weighted sums of rewards by source, in this process and in workers, and every mistake in their description."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rhymemeg.config import DataOptions
from rhymemeg.errors import RewardError
from rhymemeg.rl.rewards import Scorer
from rhymemeg.rl.rewards.format import format_match
from rhymemeg.rl.rewards.length import length_penalty, overlong_penalty
from rhymemeg.rollout.samples import Prompt, Sample, SampleId

USER = "tests.rl.rewards.user_rewards"
LENGTH, DETAILED = f"{USER}:length", f"{USER}:detailed"


def judged(rewards: dict[str, Any], *, source: str = "a.jsonl", workers: int = 0, tokens: int = 3) -> Sample:
    sample = Sample(SampleId(0, 7, 0), (1, 2), [5] * tokens, finish_reason="stop", text="Answer: 4")
    options = DataOptions(rewards=rewards, reward_workers=workers)
    with Scorer.from_options(options, "exact_match") as scorer:
        scorer.score([sample], [Prompt(7, "What?", (1, 2), "4", source)])
    return sample


SUM = {
    "*": ["auto", {"reward": LENGTH, "weight": -2.0, "name": "long"}],
    "b.jsonl": [{"reward": DETAILED, "weight": 0.5, "args": {"weight": 2.0}}],
}


@pytest.mark.parametrize("workers", [0, 1])
def test_weights_names_and_components(workers: int) -> None:
    sample = judged(SUM, workers=workers)
    assert sample.reward == pytest.approx(1.0 - 2.0 * 0.09)
    assert sample.reward_components == pytest.approx({"exact_match": 1.0, "long": 0.09})
    other = judged(SUM, source="b.jsonl", workers=workers)
    assert other.reward == pytest.approx(0.5 * 2.0 * len("What?"))
    assert other.reward_components == {DETAILED: 10.0, f"{DETAILED}/short": 1.0}


def test_a_part_that_needs_a_process_of_its_own_takes_all_there() -> None:
    sample = judged({"*": ["auto", {"reward": "format_match", "weight": 0.1, "args": {"pattern": "Answer: \\d+"}}]})
    assert sample.reward == pytest.approx(1.1)
    assert sample.reward_components == {"exact_match": 1.0, "format_match": 1.0, "timeout": 0.0}


def test_length_in_tokens_is_known() -> None:
    sum_of = {"*": ["auto", {"reward": "length_penalty", "weight": 0.5, "args": {"free": 4, "longest": 8}}]}
    assert [judged(sum_of, tokens=n).reward for n in (3, 4, 6, 8, 20)] == [1.0, 1.0, 0.75, 0.5, 0.5]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({"*": "ledger"}, r"rewards: '\*' must have a list of rewards"),
        ({"*": []}, r"rewards: '\*' must have a list of rewards"),
        ({"*": ["ledgr"]}, "unknown reward 'ledgr', did you mean ledger"),
        ({"*": [{"weight": 1}]}, r"rewards of '\*': each entry is a name or has `reward`"),
        ({"*": [{"reward": "ledger", "wieght": 1}]}, "unknown key 'wieght', did you mean weight"),
        ({"*": [{"reward": "ledger", "weight": "big"}]}, "the weight of 'ledger' must be a number, got 'big'"),
        ({"*": [{"reward": "ledger", "weight": float("inf")}]}, "must be a number, got inf"),
        ({"*": [{"reward": "ledger", "args": 3}]}, "args of 'ledger' must be names and values"),
        ({"*": [{"reward": "exact_match", "args": {"ignorecase": True}}]}, "takes no argument 'ignorecase'"),
        ({"*": [{"reward": "ledger", "range": [1, 0]}]}, "range of 'ledger' must be two numbers, the smaller first"),
        ({"*": ["ledger", "ledger"]}, "the name 'ledger' is taken"),
    ],
)
def test_mistakes_are_told_before_anything_is_judged(rewards: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        Scorer.from_options(DataOptions(rewards=rewards), "exact_match")


def test_a_source_without_rewards_and_a_part_out_of_range() -> None:
    with pytest.raises(RewardError, match=r"nothing for the source 'a\.jsonl' \(there are 'b\.jsonl'\).*on prompt 7"):
        judged({"b.jsonl": ["auto"]})
    with pytest.raises(
        RewardError, match=r"length' returned 0\.09, which is outside of its range \[0, 0\.05\].*on prompt 7"
    ):
        judged({"*": [{"reward": LENGTH, "range": [0, 0.05]}]})
    with pytest.raises(RewardError, match=r"raised KeyError"):
        judged({"*": [f"{USER}:raises"]})
    with pytest.raises(RewardError, match=r"returned or raised str instead of a number"):
        judged({"*": [f"{USER}:text"]})


def test_format_match() -> None:
    pattern = r"<think>.*</think>\s*<answer>[^<]*</answer>"
    assert format_match(" <think>a\nb</think> <answer>4</answer>\n", None, pattern=pattern) == 1.0
    assert format_match("so <think>a</think><answer>4</answer>", None, pattern=pattern) == 0.0
    assert format_match("so <think>a</think><answer>4</answer>", None, pattern=pattern, whole=False) == 1.0
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression"):
        format_match("x", None, pattern="(")


def test_overlong_penalty_is_that_of_its_equation() -> None:
    longest, buffer = 20, 8
    lengths = np.array([0, 11, 12, 13, 16, 20, 25])
    expected = [0.0 if n <= 12 else max(-1.0, (12 - n) / 8) for n in lengths]
    np.testing.assert_allclose(overlong_penalty(lengths, longest, buffer, 1.0), expected)
    np.testing.assert_allclose(overlong_penalty(lengths, longest, buffer, 0.5), np.array(expected) / 2)
    with pytest.raises(ValueError, match="free=5 must be less than longest=5"):
        length_penalty("", None, response_len=3, free=5, longest=5)
