"""How much a request has left to generate, and what an accepted token of it is worth. Pure.

A batch drains at the pace of its longest requests: a token saved there saves a step, a token saved in a request that ends
early anyway saves little. So a request's tokens weigh (expected remaining length / mean of the batch) ** power, within
[1/2, 2]. The expectation is that of the lengths of the prompt's last visit and finished siblings that are above what the
request already has, minus it; with none above, a quarter of what it has.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Remaining:
    """Expected remaining length from a set of known lengths; `add` as siblings finish."""

    def __init__(self, lengths: Sequence[int] = ()) -> None:
        self._sorted = sorted(lengths)
        self._suffix: list[int] | None = None

    def add(self, length: int) -> None:
        bisect.insort(self._sorted, length)
        self._suffix = None

    def expect(self, generated: int) -> float:
        """Mean of the lengths above `generated`, minus it; generated / 4 if none is above; NaN if nothing is known."""
        if not self._sorted:
            return float("nan")
        if self._suffix is None:
            totals = np.cumsum(self._sorted[::-1])[::-1]
            self._suffix = [*totals.tolist(), 0]
        first = bisect.bisect_right(self._sorted, generated)
        above = len(self._sorted) - first
        return self._suffix[first] / above - generated if above else generated / 4


def token_weights(remaining: NDArray[np.float64], power: float = 1.0) -> NDArray[np.float64]:
    """Weight of each request's accepted tokens; unknown (NaN) remaining lengths count as the mean."""
    known = remaining[np.isfinite(remaining)]
    mean = float(known.mean()) if len(known) else 1.0
    filled = np.where(np.isfinite(remaining), remaining, mean)
    return np.clip((np.maximum(filled, 1.0) / max(mean, 1.0)) ** power, 0.5, 2.0)
