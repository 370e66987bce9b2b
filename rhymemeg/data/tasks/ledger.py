"""The ledger task: keep a running total, in writing. Pure (standard library only), and fast.

A prompt is a start value and 2 to 24 changes of one digit, every total between 0 and 99:

    Ledger a=17 b+5 c-3 d+9.

A response works through the changes in order, one sentence each, and ends with the final total:

    Start at 17. b+5: 7+5=12 so 22. c-3: 12-3=9 so 19. Next d+9: 9+9=18 so 28. Answer: 28

The number of changes is lognormal, so the lengths of responses vary widely and belong to the prompt.

`verify` grades a response. The full mark, 1, is for the right total in the right form at the very end. Anything else
gets `PARTIAL` times the share of changes that were worked off correctly, in order, up to the first mistake, so that a
long ledger teaches something long before it is ever solved. Grading is by what is written: a total that appears
without its change does not count.

`write_solution` writes worked solutions to warm a model up on. A good share of them is flawed on purpose, in ways
that a policy can recognise and leave off: `quick` and `plain` arithmetic go wrong more often than the `careful` kind,
changes are skipped, the work stops early, the answer is given in another form. A model that imitates them solves a
part of the tasks and has something general to learn from rewards: habits, rather than the answers of its training
prompts.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rhymemeg.errors import DataError

MIN_TERMS, MAX_TERMS = 2, 24
MEDIAN_TERMS, SIGMA_TERMS = 7.0, 0.75
PARTIAL = 0.3
NAMES = "abcdefghijklmnopqrstuvwxyz"

Style = Literal["quick", "plain", "careful"]


@dataclass(frozen=True)
class Ledger:
    """One task: `start`, then `changes` in order, named a, b, c, ... `totals` has the start first and the answer
    last."""

    start: int
    changes: tuple[int, ...]

    @property
    def prompt(self) -> str:
        terms = " ".join(f"{name}{change:+d}" for name, change in zip(NAMES[1:], self.changes))
        return f"Ledger a={self.start} {terms}.\n"

    @property
    def totals(self) -> list[int]:
        totals = [self.start]
        for change in self.changes:
            totals.append(totals[-1] + change)
        return totals

    @property
    def answer(self) -> int:
        return self.start + sum(self.changes)

    @property
    def label(self) -> dict[str, Any]:
        """What `verify` needs, as plain JSON data."""
        return {"start": self.start, "changes": list(self.changes)}

    @classmethod
    def from_label(cls, label: Any) -> Ledger:
        """Inverse of `label`; raises DataError for anything else."""
        try:
            start, changes = label["start"], tuple(label["changes"])
        except (TypeError, KeyError, IndexError):
            raise DataError(f"not the label of a ledger: {label!r}") from None
        if not all(type(value) is int for value in (start, *changes)) or not changes:
            raise DataError(f"not the label of a ledger: {label!r}")
        return cls(start, changes)


# ----------------------------------------------------------------------------------------------------------- making


def make_ledger(
    rng: random.Random, min_terms: int = MIN_TERMS, max_terms: int = MAX_TERMS, median: float = MEDIAN_TERMS
) -> Ledger:
    """Draw a ledger whose number of changes is lognormal, redrawn until it lies in [min_terms, max_terms]."""
    count = 0
    while not min_terms <= count <= max_terms:
        count = round(math.exp(rng.gauss(math.log(median), SIGMA_TERMS)))
    return random_ledger(rng, count)


def random_ledger(rng: random.Random, count: int) -> Ledger:
    """A ledger of exactly `count` changes in 1..9, either sign, that never leaves 0..99."""
    total = start = rng.randint(10, 89)
    changes = []
    for _ in range(count):
        change = rng.choice([-1, 1]) * rng.randint(1, 9)
        if not 0 <= total + change <= 99:
            change = -change
        changes.append(change)
        total += change
    return Ledger(start, tuple(changes))


def ledgers(seed: int, min_terms: int = MIN_TERMS, max_terms: int = MAX_TERMS) -> Iterator[Ledger]:
    """Different ledgers, as long as there are any more to be found. Raises DataError for limits that make no
    sense."""
    if not 1 <= min_terms <= max_terms <= MAX_TERMS:
        raise DataError(
            f"task:ledger needs 1 <= min_terms <= max_terms <= {MAX_TERMS}, "
            f"got min_terms={min_terms}, max_terms={max_terms}"
        )
    rng = random.Random(f"ledger/{seed}")
    made: set[Ledger] = set()
    in_vain = 0
    while in_vain < 1000:
        ledger = make_ledger(rng, min_terms, max_terms)
        if ledger in made:
            in_vain += 1
        else:
            in_vain = 0
            made.add(ledger)
            yield ledger


# ---------------------------------------------------------------------------------------------------------- grading

# One sentence of a response: a change with the total it leads to (the last number), or a correction of that total.
_STEP = re.compile(r"(?:(?:Then|Next|Now) )?([b-z])([+-][0-9]):.*?([0-9]{1,4})")
_CORRECTION = re.compile(r"Wait, ([0-9]{1,4})")
_ANSWER = re.compile(r"Answer: ([0-9]{1,4})\s*\Z")


def verify(response: str, label: Any) -> dict[str, float]:
    """Grade a response. Returns `score` (the reward, in [0, 1]) and its components: `accuracy` (1: the full mark was
    given), `progress` (share of the changes worked off before the first mistake), `format` (ends in `Answer: N`)."""
    ledger = label if isinstance(label, Ledger) else Ledger.from_label(label)
    answer = _ANSWER.search(response)
    correct = answer is not None and int(answer.group(1)) == ledger.answer
    progress = correct_steps(response, ledger) / len(ledger.changes)
    return {
        "score": 1.0 if correct else PARTIAL * progress,
        "accuracy": float(correct),
        "progress": progress,
        "format": float(answer is not None),
    }


def correct_steps(response: str, ledger: Ledger) -> int:
    """How many changes were worked off, in order and with the right total each, up to the first mistake."""
    written: list[tuple[str, int, int]] = []
    for sentence in response.split("."):
        sentence = sentence.strip()
        if step := _STEP.fullmatch(sentence):
            written.append((step.group(1), int(step.group(2)), int(step.group(3))))
        elif written and (correction := _CORRECTION.fullmatch(sentence)):
            written[-1] = (*written[-1][:2], int(correction.group(1)))
    expected = zip(NAMES[1:], ledger.changes, ledger.totals[1:])
    done = 0
    for got, want in zip(written, expected):
        if got != want:
            break
        done += 1
    return done


# ---------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class Habits:
    """How solutions are written: shares and probabilities, each in [0, 1]. `style` is the share of solutions in each
    style; `slip` the chance, in each step of a style, that the total is wrong; `corrected` that a slip is noticed."""

    style: Mapping[Style, float] = field(default_factory=lambda: {"quick": 0.4, "plain": 0.35, "careful": 0.25})
    slip: Mapping[Style, float] = field(default_factory=lambda: {"quick": 0.07, "plain": 0.035, "careful": 0.005})
    corrected: float = 0.2
    skips_a_term: float = 0.1
    stops_early: float = 0.1
    other_form: float = 0.12
    connective: float = 0.25


FLAWLESS = Habits(
    slip={"quick": 0.0, "plain": 0.0, "careful": 0.0}, corrected=0.0, skips_a_term=0.0, stops_early=0.0, other_form=0.0
)


@dataclass(frozen=True)
class Solution:
    """A written solution, its style, and the flaws in it (`slip`, `skip`, `early`, `form`; a corrected slip is
    none)."""

    text: str
    style: Style
    flaws: frozenset[str]


def write_solution(ledger: Ledger, rng: random.Random, habits: Habits | None = None) -> Solution:
    """Write one solution the way `habits` say."""
    habits = habits or Habits()
    style = rng.choices(list(habits.style), list(habits.style.values()))[0]
    count = len(ledger.changes)
    flaws = set()
    stop = count
    if rng.random() < habits.stops_early:
        stop = rng.randint(max(1, count // 2), count - 1) if count > 1 else count
        flaws |= {"early"} if stop < count else set()
    skipped = -1
    if stop > 1 and rng.random() < habits.skips_a_term:
        skipped = rng.randrange(stop)
        flaws.add("skip")
    sentences = [f"Start at {ledger.start}." if style == "careful" else f"a={ledger.start}."]
    total = ledger.start
    for index in range(stop):
        if index == skipped:
            continue
        before, change = total, ledger.changes[index]
        total = before + change
        if rng.random() < habits.slip[style]:
            wrong = _slip(rng, before, change)
            if rng.random() < habits.corrected:
                sentences += [_step(style, rng, habits, index, before, change, wrong), f"Wait, {total}."]
            else:
                flaws.add("slip")
                sentences.append(_step(style, rng, habits, index, before, change, wrong))
                total = wrong
        else:
            sentences.append(_step(style, rng, habits, index, before, change, total))
    if rng.random() < habits.other_form:
        flaws.add("form")
        sentences.append(rng.choice(["So it is", "That makes"]) + f" {total}.")
    else:
        sentences.append(f"Answer: {total}")
    return Solution(" ".join(sentences), style, frozenset(flaws))


def _slip(rng: random.Random, before: int, change: int) -> int:
    """A wrong total such as haste produces: one off, a carry forgotten, the sign turned."""
    right = before + change
    wrong = [right - 1, right + 1, right - 10, right + 10, before - change]
    return rng.choice([total for total in wrong if 0 <= total <= 99])


def _step(style: Style, rng: random.Random, habits: Habits, index: int, before: int, change: int, after: int) -> str:
    """One sentence. `careful` works in the ones first: `7+5=12 so 22`, and `12-5=7` where a ten is borrowed."""
    words = f"{rng.choice(['Then', 'Next', 'Now'])} " if rng.random() < habits.connective else ""
    words += f"{NAMES[index + 1]}{change:+d}: "
    if style == "quick":
        return words + f"{after}."
    if style == "plain":
        return words + f"{before}{change:+d}={after}."
    ones = before % 10
    if ones + change < 0:
        ones += 10
    return words + f"{ones}{change:+d}={ones + after - before} so {after}."
