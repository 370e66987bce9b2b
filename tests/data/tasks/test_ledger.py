"""The ledger task: what is made, what is graded, what is written."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.data.tasks.ledger import (
    FLAWLESS,
    MAX_TERMS,
    MIN_TERMS,
    PARTIAL,
    Habits,
    Ledger,
    correct_steps,
    ledgers,
    random_ledger,
    verify,
    write_solution,
)
from rhymemeg.errors import DataError

seeds = st.integers(0, 2**32)
some_ledgers = st.builds(
    lambda seed, count: random_ledger(random.Random(seed), count), seeds, st.integers(1, MAX_TERMS)
)
EXAMPLE = Ledger(17, (5, -3, 9))


@given(some_ledgers)
def test_totals_stay_in_range_and_the_prompt_says_what_the_label_says(ledger: Ledger) -> None:
    assert all(0 <= total <= 99 for total in ledger.totals) and ledger.answer == ledger.totals[-1]
    assert all(1 <= abs(change) <= 9 for change in ledger.changes)
    assert Ledger.from_label(ledger.label) == ledger
    numbers = [int(number) for number in re.findall(r"[=+-]([0-9]+|(?<=-)[0-9]+)", ledger.prompt)]
    signs = [-1 if sign == "-" else 1 for sign in re.findall(r"[=+-]", ledger.prompt)]
    assert [sign * number for sign, number in zip(signs, numbers)] == [ledger.start, *ledger.changes]
    assert re.findall(r"[b-z](?=[+-])", ledger.prompt) == list("bcdefghijklmnopqrstuvwxyz")[: len(ledger.changes)]


def test_prompt_in_the_words_of_the_contract() -> None:
    assert EXAMPLE.prompt == "Ledger a=17 b+5 c-3 d+9.\n"
    assert EXAMPLE.totals == [17, 22, 19, 28]


def test_streams_are_repeatable_distinct_and_independent() -> None:
    first = list(itertools.islice(ledgers(3), 300))
    assert first == list(itertools.islice(ledgers(3), 300))
    assert len(set(first)) == 300
    assert len(set(first) & set(itertools.islice(ledgers(4), 300))) < 15  # only short ones can coincide


def test_number_of_terms_varies_widely() -> None:
    counts = np.array([len(ledger.changes) for ledger in itertools.islice(ledgers(0), 4000)])
    assert counts.min() == MIN_TERMS and counts.max() == MAX_TERMS
    p10, p50, p90 = np.percentile(counts, [10, 50, 90])
    assert p10 <= 3 and 6 <= p50 <= 8 and 13 <= p90 <= 19


def test_limits() -> None:
    assert {len(ledger.changes) for ledger in itertools.islice(ledgers(0, 4, 6), 100)} == {4, 5, 6}
    for low, high in ((0, 5), (6, 5), (2, MAX_TERMS + 1)):
        with pytest.raises(DataError, match="min_terms"):
            next(ledgers(0, low, high))


def test_a_stream_of_few_possible_ledgers_ends() -> None:
    assert len(list(ledgers(0, 1, 1))) <= 80 * 18


@given(some_ledgers, seeds)
def test_a_flawless_solution_gets_the_full_mark(ledger: Ledger, seed: int) -> None:
    text = write_solution(ledger, random.Random(seed), FLAWLESS).text
    assert verify(text, ledger.label) == {"score": 1.0, "accuracy": 1.0, "progress": 1.0, "format": 1.0}


@given(some_ledgers, seeds)
def test_flaws_are_what_costs_marks(ledger: Ledger, seed: int) -> None:
    solution = write_solution(ledger, random.Random(seed), Habits(corrected=0.5, skips_a_term=0.3, stops_early=0.3))
    grade = verify(solution.text, ledger)
    if not solution.flaws:
        assert grade["score"] == 1.0
    if "form" in solution.flaws:
        assert grade["format"] == 0.0 and grade["score"] <= PARTIAL
    if solution.flaws & {"slip", "skip", "early"}:
        assert grade["progress"] < 1.0
    assert 0.0 <= grade["score"] <= 1.0


@given(some_ledgers, seeds, st.integers(0, MAX_TERMS))
def test_a_solution_that_stops_gets_its_share(ledger: Ledger, seed: int, kept: int) -> None:
    kept = min(kept, len(ledger.changes))
    sentences = write_solution(ledger, random.Random(seed), FLAWLESS).text.split(". ")
    grade = verify(". ".join(sentences[: kept + 1]) + ".", ledger)
    assert grade["progress"] == kept / len(ledger.changes)
    assert grade["score"] == PARTIAL * grade["progress"] and grade["format"] == 0.0


@pytest.mark.parametrize(
    ("response", "steps", "accuracy", "format_"),
    [
        ("a=17. b+5: 22. c-3: 19. d+9: 28. Answer: 28", 3, 1, 1),
        ("a=17. Then b+5: 17+5=22. Next c-3: 22-3=19. Now d+9: 19+9=28. Answer: 28\n", 3, 1, 1),
        ("Start at 17. b+5: 7+5=12 so 22. c-3: 12-3=9 so 19. d+9: 9+9=18 so 28. Answer: 28", 3, 1, 1),
        ("a=17. b+5: 23. Wait, 22. c-3: 19. d+9: 28. Answer: 28", 3, 1, 1),
        ("a=17. b+5: 22. Wait, 23. c-3: 19. d+9: 28. Answer: 28", 0, 1, 1),
        ("a=17. b+5: 22. d+9: 31. Answer: 31", 1, 0, 1),
        ("a=17. b+5: 22. c-3: 19. d+9: 28. So it is 28.", 3, 0, 0),
        ("a=17. b+5: 22. c-3: 19. d+9: 28. Answer: 28. Answer: 29", 3, 0, 1),
        ("Answer: 28", 0, 1, 1),
        ("Answer: 28 or so", 0, 0, 0),
        ("22. 19. 28. b: 22. c: 19.", 0, 0, 0),
        ("b+5: 22. c-3: 19. b+5: 22.", 2, 0, 0),
        ("Answer: " + "9" * 10_000, 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_grading(response: str, steps: int, accuracy: float, format_: float) -> None:
    assert correct_steps(response, EXAMPLE) == steps
    grade = verify(response, EXAMPLE.label)
    assert (grade["accuracy"], grade["format"]) == (accuracy, format_)
    assert grade["score"] == pytest.approx(1.0 if accuracy else PARTIAL * steps / 3)


@given(st.text(max_size=40) | st.text("ab+-: 0123456789.=", max_size=60))
def test_any_text_can_be_graded(response: str) -> None:
    assert 0.0 <= verify(response, EXAMPLE)["score"] <= 1.0


@pytest.mark.parametrize("label", [None, 28, "28", {}, {"start": 1}, {"start": 1, "changes": ["5"]}, [1, 2]])
def test_a_label_of_another_kind_is_refused(label: object) -> None:
    with pytest.raises(DataError, match="label of a ledger"):
        verify("Answer: 28", label)


def test_habits_are_kept() -> None:
    rng = random.Random(0)
    tasks = list(itertools.islice(ledgers(0), 4000))
    solutions = [write_solution(task, rng) for task in tasks]
    habits = Habits()
    for style, share in habits.style.items():
        assert np.mean([s.style == style for s in solutions]) == pytest.approx(share, abs=0.03)
    for flaw, share in (("early", habits.stops_early), ("form", habits.other_form)):
        assert np.mean([flaw in s.flaws for s in solutions]) == pytest.approx(share, abs=0.02)
    # A policy that keeps to the careful style and leaves the flaws off would solve nearly everything.
    careful = [verify(s.text, t)["accuracy"] for s, t in zip(solutions, tasks) if s.style == "careful" and not s.flaws]
    assert np.mean(careful) == 1.0
