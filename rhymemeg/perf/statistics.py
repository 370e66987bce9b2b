"""Whether repeated times differ from others, and by how much. Pure.

A measurement is a list of *rounds*, each a list of repeats in seconds (any positive number): repeats of one round share a
process, rounds do not. In logarithms, since what disturbs a time multiplies it.

    location      the `QUANTILE` quantile of all repeats. Other work on a machine only ever makes a time longer, often by half
                  and for a whole round, so the mean and the median tell how busy the machine was; the low quantile is
                  what the work takes where it is left alone, and moves when the work itself does
    interval      two-level bootstrap: rounds are drawn with replacement, then the repeats in each; percentiles of the
                  difference of locations
    error         standard error of that difference: the standard deviation of the bootstrap, widened by sqrt(R / (R - 1)) as
                  R drawn rounds vary less than R new ones would
    band          max(`smallest`, `sigmas` x error): a ratio of the reference's own value, the same to both sides; what
                  stays inside counts as unchanged

Two that were measured in turns (repeat i of one right before or after repeat i of the other) are compared pair by pair: what
disturbs both alike cancels, so the location is that of the ratios, the mean of their middle, and it is the ratios that are drawn.

The steps of a run are a series in time with work of its own at each step: there the location is the mean of the middle (`TRIM`
cut off at either end), of the ratios step by step where both runs had the same work, and blocks of neighbouring steps are
drawn together (moving-block bootstrap), as what slows one step is often still there in the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Rounds = Sequence[Sequence[float]]
Verdict = Literal["slower", "faster", "unchanged", "noisy", "too few"]

QUANTILE = 0.2
TRIM = 0.25
DRAWS = 1000
FEWEST = 5
"""Repeats in all below which nothing is judged."""


@dataclass(frozen=True)
class Rule:
    """When a difference counts. `smallest`: relative difference below which nothing is reported, whatever its error.
    `sigmas`: standard errors that it must exceed. `confidence` of the printed interval. A comparison whose band is wider
    than `blind` says that it could not have seen that much."""

    smallest: float = 0.025
    sigmas: float = 4.0
    confidence: float = 0.99
    blind: float = 0.1


@dataclass(frozen=True)
class Change:
    """`ratio` of the new location to the reference's (above 1: slower), its interval, and the band (relative)."""

    ratio: float
    low: float
    high: float
    band: float
    verdict: Verdict

    @property
    def moved(self) -> bool:
        return self.verdict in ("slower", "faster")


TOO_FEW = Change(math.nan, math.nan, math.nan, math.nan, "too few")


def trimmed_mean(values: Floats, trim: float = TRIM) -> Floats:
    """Mean along the last axis of what is left after `trim` of the values is cut off at either end."""
    count = values.shape[-1]
    cut = min(int(trim * count), (count - 1) // 2)
    part = np.sort(values, axis=-1)[..., cut : count - cut]
    return part.mean(axis=-1)


def location(rounds: Rounds) -> float:
    """The location of all repeats, as a logarithm."""
    return float(np.quantile(np.log(np.concatenate([np.asarray(r, np.float64) for r in rounds])), QUANTILE))


def compare(reference: Rounds, new: Rounds, rule: Rule, *, between_runs: float = 0.0) -> Change:
    """`between_runs`: standard deviation of the logarithm of a whole result's location about that of other results of
    the same thing, where a history tells it."""
    if min(sum(map(len, reference)), sum(map(len, new))) < FEWEST:
        return TOO_FEW
    rng = np.random.default_rng(0)
    parts = [np.quantile(_draw([np.log(r) for r in rounds], rng), QUANTILE, axis=1) for rounds in (reference, new)]
    drawn = parts[1] - parts[0]
    error = float(drawn.std()) * _widen(min(len(reference), len(new)))
    difference = location(new) - location(reference)
    return judge(difference, math.hypot(error, between_runs), drawn, rule)


def compare_turns(reference: Rounds, new: Rounds, rule: Rule) -> Change:
    """Rounds and repeats that were measured in turns, of the same shape."""
    pairs = [np.log(b) - np.log(a) for a, b in zip(reference, new, strict=True)]
    if sum(map(len, pairs)) < FEWEST:
        return TOO_FEW
    drawn = trimmed_mean(_draw(pairs, np.random.default_rng(0)))
    error = float(drawn.std()) * _widen(len(pairs))
    return judge(float(trimmed_mean(np.concatenate(pairs))), error, drawn, rule)


def compare_series(reference: Floats, new: Floats, rule: Rule, *, paired: bool) -> Change:
    """Two series of values a step (of the same steps, where `paired`). See the module for blocks."""
    if min(len(reference), len(new)) < FEWEST:
        return TOO_FEW
    rng = np.random.default_rng(0)
    a, b = np.log(reference), np.log(new)
    if paired:
        ratios = b - a
        drawn = trimmed_mean(ratios[_blocks(len(ratios), rng)])
        return judge(float(trimmed_mean(ratios)), float(drawn.std()) * _widen(len(ratios)), drawn, rule)
    drawn = trimmed_mean(b[_blocks(len(b), rng)]) - trimmed_mean(a[_blocks(len(a), rng)])
    error = float(drawn.std()) * _widen(min(len(a), len(b)))
    return judge(float(trimmed_mean(b) - trimmed_mean(a)), error, drawn, rule)


def judge(difference: float, error: float, drawn: Floats, rule: Rule) -> Change:
    """The verdict on a difference of logarithms. `drawn`: its bootstrap, which is widened to `error` about the
    difference for the printed interval."""
    band = max(math.log1p(rule.smallest), rule.sigmas * error)
    spread = float(drawn.std())
    scale = error / spread if spread > 0 else 1.0
    outside = (1 - rule.confidence) / 2
    low, high = np.quantile(difference + (drawn - drawn.mean()) * scale, [outside, 1 - outside])
    verdict: Verdict = "unchanged"
    if abs(difference) > band:
        verdict = "slower" if difference > 0 else "faster"
    elif band > math.log1p(rule.blind):
        verdict = "noisy"
    return Change(math.exp(difference), math.exp(float(low)), math.exp(float(high)), math.expm1(band), verdict)


def between_runs(histories: Sequence[Rounds]) -> float:
    """Standard deviation of the locations of several results, for the comparison of one more with their mean; 0 for
    fewer than three, which do not tell."""
    if len(histories) < 3:
        return 0.0
    values = np.array([location(rounds) for rounds in histories])
    return float(values.std(ddof=1)) * math.sqrt(1 + 1 / len(values))


def _widen(count: int) -> float:
    return math.sqrt(count / (count - 1)) if count > 1 else 1.0


def _draw(rounds: Sequence[Floats], rng: np.random.Generator) -> Floats:
    """[draws, repeats in all]: rounds drawn with replacement, and the repeats in each."""
    each = round(sum(map(len, rounds)) / len(rounds))
    order = rng.integers(len(rounds), size=(DRAWS, len(rounds)))
    values = np.empty((*order.shape, each))
    for number, repeats in enumerate(rounds):
        at = order == number
        values[at] = repeats[rng.integers(len(repeats), size=(int(at.sum()), each))]
    return values.reshape(DRAWS, -1)


def _blocks(count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Indices [draws, count] of neighbouring rows in blocks of about the cube root of their number, circular."""
    length = max(1, round(count ** (1 / 3)))
    starts = rng.integers(count, size=(DRAWS, math.ceil(count / length)))
    return ((starts[:, :, None] + np.arange(length)) % count).reshape(DRAWS, -1)[:, :count]
