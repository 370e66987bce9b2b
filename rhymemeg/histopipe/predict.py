"""Predicted response lengths, from the lengths of last epoch. Pure.

In: `history` [P, H] float, the lengths in tokens of last epoch's responses to each prompt, in any order, NaN where
there is none. Lengths that are not finite or not positive count as missing; longer ones than the cap count as the cap.
Out: arrays [P]. Nothing raises on bad lengths: a bad prediction costs time, never a sample.

About two thirds of the variance of log-length belong to the prompt and a quarter to sampling noise, so predictions rank
prompts well and single samples less so; nothing here pretends to tell the samples of one prompt apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.signedinteger[Any]]

GROWTH_RANGE = (0.25, 4.0)
"""Bounds of the growth factor: one odd window must not throw every prediction to the cap."""
FEEDBACK_WEIGHT = 0.5
"""Weight of the last window in the running averages of growth and trust."""


def history_matrix(prompt_ids: Sequence[int] | Ints, lengths: Mapping[int, Sequence[float]]) -> Floats:
    """[P, H] from lists of lengths by prompt id; prompts that are not in the mapping get a row of NaN."""
    rows = [lengths.get(int(prompt_id), ()) for prompt_id in prompt_ids]
    width = max((len(row) for row in rows), default=0)
    matrix = np.full((len(rows), width), np.nan)
    for i, row in enumerate(rows):
        matrix[i, : len(row)] = row
    return matrix


def usable(history: npt.ArrayLike, cap: int) -> Floats:
    """The history as floats with what is not a length replaced by NaN and the rest cut at the cap."""
    lengths = np.array(history, dtype=np.float64, ndmin=2)
    bad = ~((lengths > 0) & (lengths < np.inf))
    if bad.any():
        lengths[bad] = np.nan
    return np.minimum(lengths, float(cap), out=lengths)


@dataclass(frozen=True, eq=False)
class Prediction:
    """Per prompt [P], in tokens: `mean` (the work of one sample), `median` (what the paper ranks by), `longest`;
    `known` is False where there was no history and the step's median stands in."""

    mean: Floats
    median: Floats
    longest: Floats
    known: npt.NDArray[np.bool_]


def predict(history: npt.ArrayLike, cap: int, growth: float = 1.0, trust: bool = True) -> Prediction:
    """h = min(cap, growth x length of last epoch), summarised per prompt. Without `trust` (see `Feedback`) history is
    ignored. Where nothing at all is known every prompt gets a quarter of the cap: any constant plans alike."""
    lengths = usable(history, cap)
    if not trust:
        lengths = np.full((lengths.shape[0], 1), np.nan)
    np.clip(lengths * bounded_growth(growth), 1.0, float(cap), out=lengths)
    # Sorted rows (NaN last) make sums independent of the order in which last epoch's samples were listed.
    lengths.sort(axis=1)
    missing = np.isnan(lengths)
    count = lengths.shape[1] - missing.sum(axis=1)
    known: npt.NDArray[np.bool_] = count > 0
    if not known.any():
        constant = np.full(lengths.shape[0], cap / 4)
        return Prediction(constant, constant, constant, known)
    row, most = np.arange(len(lengths)), np.maximum(count, 1)
    lengths[missing] = 0.0
    columns = (
        lengths.sum(axis=1) / most,
        (lengths[row, (most - 1) // 2] + lengths[row, most // 2]) / 2,
        lengths[row, most - 1],
    )
    mean, median, longest = (np.where(known, column, np.median(column[known])) for column in columns)
    return Prediction(mean, median, longest, known)


def bounded_growth(growth: float) -> float:
    """The growth in use: within `GROWTH_RANGE`, 1 for what is no number."""
    low, high = GROWTH_RANGE
    return min(max(growth, low), high) if math.isfinite(growth) else 1.0


def remaining(tokens: Ints, references: npt.ArrayLike, cap: int) -> Floats:
    """Tokens that requests with `tokens` [K] tokens so far still need. `references` [K, R]: lengths of finished
    siblings and of last epoch, NaN where there are fewer. Mean of the references above what the request has, minus what
    it has; none above: a quarter of what it has. Between 1 and what the cap leaves."""
    made = np.asarray(tokens, dtype=np.float64)
    if made.size == 0:
        return np.zeros(0)
    lengths = usable(np.reshape(np.asarray(references, dtype=np.float64), (len(made), -1)), cap)
    above = np.where(lengths > made[:, None], lengths, 0.0)
    count = (above > 0).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        rest = np.where(count > 0, above.sum(axis=1) / count - made, made / 4)
    return np.clip(rest, 1.0, np.maximum(cap - made, 1.0))


def rank_correlation(predicted: npt.ArrayLike, actual: npt.ArrayLike) -> float:
    """Spearman's rank correlation, ties at their mean rank; NaN when either side is constant or shorter than 2."""
    a, b = _ranks(np.asarray(predicted, np.float64)), _ranks(np.asarray(actual, np.float64))
    if len(a) < 2 or a.std() == 0 or b.std() == 0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Floats) -> Floats:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[group]


@dataclass(frozen=True)
class Feedback:
    """What past windows say about the predictions; goes into the next plan and into the checkpoint.

    growth              mean actual length / mean of the same prompts' lengths of last epoch
    rank_correlation    of predicted and actual lengths of the window's samples; NaN before the first
    error               mean |predicted - actual| / mean actual; NaN before the first
    """

    growth: float = 1.0
    rank_correlation: float = math.nan
    error: float = math.nan

    @property
    def trusted(self) -> bool:
        """History that ranks no better than chance is left alone: the plan is then the one without history."""
        return not self.rank_correlation <= 0.0

    def after(self, last_epoch: npt.ArrayLike, actual: npt.ArrayLike) -> Feedback:
        """Once a window's samples are complete: `actual` [N] their lengths, `last_epoch` [N] the mean length of the
        same prompt in last epoch (without growth; NaN: unknown, left out). A window without any known pair changes
        nothing."""
        before, now = np.asarray(last_epoch, np.float64), np.asarray(actual, np.float64)
        both = np.isfinite(before) & np.isfinite(now) & (before > 0) & (now > 0)
        if not both.any():
            return self
        before, now = before[both], now[both]
        predicted = before * self.growth
        return Feedback(
            growth=bounded_growth(_blend(self.growth, float(now.mean() / before.mean()))),
            rank_correlation=_blend(self.rank_correlation, rank_correlation(before, now)),
            error=_blend(self.error, float(np.abs(predicted - now).mean() / now.mean())),
        )

    def as_dict(self) -> dict[str, float | None]:
        """For JSON: NaN as null."""
        return {name: (value if math.isfinite(value) else None) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, float | None]) -> Feedback:
        """Inverse of `as_dict`."""
        return cls(**{name: (math.nan if value is None else float(value)) for name, value in values.items()})


def _blend(old: float, new: float) -> float:
    if not math.isfinite(new):
        return old
    return new if not math.isfinite(old) else (1 - FEEDBACK_WEIGHT) * old + FEEDBACK_WEIGHT * new


@dataclass(frozen=True)
class CarryControl:
    """How large a share of a step's samples a window may leave unfinished.

    A window can only close early if what is still running is more than what runs to the cap anyway: if 2 % of the
    responses reach the cap and 1 % may be carried, every window waits for a response of full length. So the share in
    use is `margin` plus twice the recent share of capped responses, at most `limit`, which is the user's staleness
    setting; limit = 0 is the strict mode."""

    limit: float
    margin: float = 0.02
    capped: float = 0.0

    @property
    def share(self) -> float:
        """rho of the next window."""
        return min(self.limit, self.margin + 2 * self.capped)

    def after(self, lengths: Iterable[float] | Floats, cap: int) -> CarryControl:
        """Once a window's samples are complete: `lengths` of all of them."""
        values = np.asarray(list(lengths) if not isinstance(lengths, np.ndarray) else lengths, np.float64)
        if values.size == 0:
            return self
        return CarryControl(self.limit, self.margin, _blend(self.capped, float((values >= cap).mean())))
