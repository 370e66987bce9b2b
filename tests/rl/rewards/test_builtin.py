"""The built-in rewards, each against answers whose worth is plain."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.data.sources import task_source
from rhymemeg.data.tasks.ledger import Ledger
from rhymemeg.rl.rewards import Scorer
from rhymemeg.rl.rewards.exact_match import exact_match
from rhymemeg.rl.rewards.extract import boxed, final_answer
from rhymemeg.rollout.samples import Prompt, Sample, SampleId


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so <answer>no</answer> or rather <answer> 42 </answer>.", "42"),
        (r"thus \boxed{\frac{1}{2}} holds", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2", "1"),
        ("Adding up.\nThe answer is 42.", "42"),
        ("Answer: 41\nFinal answer: 42", "42"),
        ("a=1. b+2: 3. Answer: 3", "3"),
        ("6 * 7 = 42\n#### 42", "42"),
        ("  42\n", "42"),
    ],
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@given(st.text("{}\\boxed{1", max_size=60))
def test_a_box_is_found_or_not_but_never_fails(text: str) -> None:
    inner = boxed(text)
    assert inner is None or inner in text


@given(st.text("ab12 +", max_size=20).map(str.strip))
def test_what_is_boxed_comes_out(inner: str) -> None:
    assert boxed(rf"text \boxed{{{inner}}} more") == inner


@pytest.mark.parametrize(
    ("response", "label", "options", "reward"),
    [
        ("Answer: Paris", "paris", {}, 1),
        ("Answer: Paris", "paris", {"ignore_case": False}, 0),
        ("the  answer\tis\n", "the answer is", {"extract": "none"}, 1),
        ("1,000.0", 1000, {}, 1),
        ("-0", "0", {}, 1),
        ("007", 7, {}, 1),
        ("007", "7", {"numbers": False}, 0),
        ("1,00", "100", {}, 0),
        ("42", ["41", 42.0], {}, 1),
        ("yes!", "yes", {}, 0),
        ("yes!", "yes", {"ignore_punctuation": True}, 1),
        ("true", True, {}, 1),
        ("42", "42", {"extract": "boxed"}, 0),
        ("9" * 400, "9" * 400, {}, 1),
        ("9" * 400, "9" * 399 + "8", {}, 0),
        ("", "", {}, 1),
    ],
)
def test_exact_match(response: str, label: Any, options: dict[str, Any], reward: float) -> None:
    assert exact_match(response, label, **options) == reward


def test_exact_match_refuses_what_it_cannot_compare() -> None:
    with pytest.raises(ValueError, match="this label is dict"):
        exact_match("x", {"a": 1})
    with pytest.raises(ValueError, match="extract='boks'"):
        exact_match("x", "x", extract="boks")


def rewards(reward: str, label: Any, *texts: str, timeout: float = 30.0) -> list[float | None]:
    prompt = Prompt(1, "?", (1,), label)
    samples = [Sample(SampleId(0, 1, i), (1,), text=text) for i, text in enumerate(texts)]
    with Scorer(reward, timeout=timeout) as scorer:
        scorer.score(samples, [prompt])
    return [sample.reward for sample in samples]


def test_ledger() -> None:
    label = Ledger(17, (5, -3)).label
    assert rewards("ledger", label, "a=17. b+5: 22. c-3: 19. Answer: 19", "Answer: 18") == [1.0, 0.0]


def test_reasoning_gym_judges_by_the_task_itself() -> None:
    for task, arguments in (("basic_arithmetic", {}), ("leg_counting", {"max_animals": 3}), ("zebra_puzzles", {})):
        for row in task_source(task, 3, 11, arguments).rows():
            answer = row.label["entry"]["answer"]
            right, wrong = rewards("reasoning_gym", row.label, f"Hm. <answer>{answer}</answer>", "<answer>?</answer>")
            assert right == 1.0 and wrong is not None and wrong < 0.5


def test_math_verify() -> None:
    """Several labels in one test: each scorer starts a worker, which imports sympy."""
    prompts = {
        0: Prompt(0, "?", (1,), r"\frac{1}{2}"),
        1: Prompt(1, "?", (1,), ["x+1", 5]),
        2: Prompt(2, "?", (1,), "$\\sqrt{8}$"),
    }
    cases = [
        (0, r"so \boxed{0.5}", 1.0),
        (0, r"so \boxed{\dfrac{2}{4}}", 1.0),
        (0, r"so \boxed{2}", 0.0),
        (0, "0.5, but in no box", 0.0),
        (0, r"\boxed{", 0.0),
        (1, r"\boxed{1+x}", 1.0),
        (1, r"\boxed{5}", 1.0),
        (2, r"\boxed{2\sqrt{2}}", 1.0),
        (2, r"\boxed{\text{who knows}}", 0.0),
    ]
    samples = [Sample(SampleId(0, i, k), (1,), text=text) for k, (i, text, _) in enumerate(cases)]
    with Scorer("math_verify") as scorer:
        scorer.score(samples, prompts)
    assert [sample.reward for sample in samples] == [reward for _, _, reward in cases]


def test_math_verify_gives_up_on_a_response_that_takes_too_long() -> None:
    slow, fine = r"\boxed{9^{9^{9^{9}}}}", r"\boxed{1}"
    assert rewards("math_verify", "1", slow, fine, timeout=4.0) == [0.0, 1.0]
