"""Time of an engine step, T(c, q): c running requests, q query tokens in all (c for a plain decode step, more with drafts).

A profile is a grid: for some batch sizes and some numbers of query tokens a request, the seconds of a step. Between grid
points T is bilinear in (c, q / c); above the grid it goes on with the last slope. Profiles come from three places: a file
that `python -m rhymemeg.histospec.profile` measured on this machine, built-in figures (`BUILT_IN`) for a machine without
one, and the running engine itself: `observe` corrects the grid by what steps really took.

The correction keeps two things apart. The *scale*, one factor for all figures, follows the observations quickly: machines
slow down and speed up as a whole, when contexts grow or others use them, which says nothing about what drafts cost. What
the scale leaves unexplained moves the grid points next to the observation, slowly. The first observation of relative
figures sets the scale. Nothing here reads a clock. ConfigError names file and field of a bad profile.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rhymemeg.errors import ConfigError

FORMAT = "rhymemeg step times 1"

_CPU_BATCHES, _CPU_QUERIES = [1, 8, 16, 32, 64, 128, 256], [1, 2, 3, 5, 9, 17]

# Relative cost of a step by batch size and query tokens a request.
# gpu: in plain steps of the same batch: 7B model on an A100, sequences of 2,048 tokens, batch 1 to 64, 4 to 16 query tokens
# (published sweep of https://github.com/furiosa-ai/EfficientRollout, arXiv 2606.18967).
# cpu: in units of the fixed cost of a step, a request adding 0.023 and a drafted token 0.012: a fit to what
# `python -m rhymemeg.histospec.profile --hf-checkpoint launch/quickstart_model` measures on one core.
BUILT_IN: dict[str, tuple[list[int], list[int], list[list[float]]]] = {
    "gpu": (
        [1, 8, 16, 32, 64],
        [1, 4, 8, 12, 16],
        [
            [1.0, 1.10, 1.10, 1.10, 1.10],
            [1.0, 1.19, 1.32, 1.39, 1.41],
            [1.0, 1.28, 1.36, 1.71, 1.88],
            [1.0, 1.20, 1.65, 2.37, 2.95],
            [1.0, 1.53, 2.71, 3.61, 4.86],
        ],
    ),
    "cpu": (
        _CPU_BATCHES,
        _CPU_QUERIES,
        [[1 + 0.023 * n + 0.012 * n * (q - 1) for q in _CPU_QUERIES] for n in _CPU_BATCHES],
    ),
}
_SCALE_RATE = 0.1  # share of a residual that the scale takes up
_RATE = 0.02  # slowest share of the rest that a grid point takes up; faster while it has few observations
_DRAFTING_RATE = 0.05
_PRIOR = 4  # observations that the figure which a grid point starts with counts for
_OUTLIER = 1.2  # residuals are clipped to a factor of e**1.2 = 3.3: a garbage collection must not teach anything


class CostModel:
    """See the module. `seconds[i][j]` is the step time for batches[i] requests of queries[j] query tokens each;
    queries[0] must be 1. With `relative` the figures are ratios, not seconds, until steps are observed."""

    def __init__(
        self,
        batches: Sequence[int],
        queries: Sequence[int],
        seconds: Sequence[Sequence[float]],
        *,
        relative: bool = False,
        source: str = "cost model",
    ) -> None:
        grid = np.asarray(seconds, dtype=np.float64)
        self.batches = np.asarray(batches, dtype=np.float64)
        self.queries = np.asarray(queries, dtype=np.float64)
        if grid.shape != (len(self.batches), len(self.queries)) or grid.size == 0:
            raise ConfigError(f"{source}: seconds must have a row a batch size and a column a query count")
        if (np.diff(self.batches) <= 0).any() or (np.diff(self.queries) <= 0).any():
            raise ConfigError(f"{source}: batches and queries_per_request must rise")
        if self.batches[0] < 1 or self.queries[0] != 1:
            raise ConfigError(f"{source}: batches start at 1 or more, queries_per_request at 1")
        if not (np.isfinite(grid).all() and (grid > 0).all()):
            raise ConfigError(f"{source}: seconds must be positive and finite")
        self.relative, self.source = relative, source
        self.observations = 0
        self.drafting = 0.0
        """Seconds that looking for drafts takes a request, contained in all step times that were observed."""
        self._scale = 0.0
        self._grid = np.log(grid)
        self._seen = np.zeros_like(grid)

    @classmethod
    def built_in(cls, device: str) -> CostModel:
        """Start figures for "gpu" or "cpu"."""
        batches, queries, ratios = BUILT_IN[device]
        return cls(batches, queries, ratios, relative=True, source=f"built-in {device} figures")

    # ---------------------------------------------------------------------------------------------------------- predict

    def predict(self, requests: int, query_tokens: ArrayLike) -> NDArray[np.float64]:
        """T(requests, q) for each q; requests >= 1, q >= requests."""
        each = np.asarray(query_tokens, dtype=np.float64) / requests
        row, share = _locate(self.batches, float(requests))
        curves = [_curve(self.queries, np.maximum.accumulate(np.exp(self._scale + self._grid[r])), each) for r in row]
        return np.maximum((1 - share) * curves[0] + share * curves[1], 1e-9)

    # ------------------------------------------------------------------------------------------------------------ learn

    def observe(self, requests: int, query_tokens: int, seconds: float) -> None:
        """A step of `requests` requests and `query_tokens` tokens, none of them prefill, took `seconds`."""
        if requests < 1 or query_tokens < requests or not seconds > 0 or not math.isfinite(seconds):
            return
        residual = math.log(seconds / float(self.predict(requests, query_tokens)))
        if self.observations == 0 and self.relative:
            self._scale += residual
            self.relative, residual = False, 0.0
        self.observations += 1
        residual = min(max(residual, -_OUTLIER), _OUTLIER)
        share = max(1 / (1 + self.observations), _SCALE_RATE)
        self._scale += share * residual
        rows, columns = _weights(self.batches, requests), _weights(self.queries, query_tokens / requests)
        for row, row_weight in rows:
            for column, column_weight in columns:
                weight, seen = row_weight * column_weight, self._seen[row, column]
                self._grid[row, column] += weight * (1 - share) * residual * max(1 / (_PRIOR + seen), _RATE)
                self._seen[row, column] += weight

    def observe_drafting(self, requests: int, seconds: float) -> None:
        """Looking for the drafts of `requests` requests took `seconds`."""
        if requests > 0 and 0 <= seconds < math.inf:
            self.drafting += (seconds / requests - self.drafting) * (_DRAFTING_RATE if self.drafting else 1.0)

    def plain_steps_seen(self, requests: int) -> float:
        """How many plain steps near this batch size have been observed; their time is a guess while it is below 1."""
        return float(sum(weight * self._seen[row, 0] for row, weight in _weights(self.batches, requests)))

    def state(self) -> dict[str, Any]:
        """All that was learnt, as plain data: to agree on among tensor-parallel ranks, and for `save`."""
        return {
            "scale": self._scale,
            "drafting": self.drafting,
            "grid": self._grid.tolist(),
            "seen": self._seen.tolist(),
            "observations": self.observations,
            "relative": self.relative,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Inverse of `state`, for a model of the same grid."""
        self._scale, self.drafting = state["scale"], state["drafting"]
        self._grid = np.asarray(state["grid"])
        self._seen = np.asarray(state["seen"])
        self.observations, self.relative = state["observations"], state["relative"]

    # ------------------------------------------------------------------------------------------------------------ files

    def save(self, path: str | Path, **about: Any) -> None:
        """Write the grid as it is now; `about` is kept beside it (device, model, ...)."""
        from rhymemeg.observe.files import write_atomically

        seconds = np.exp(self._scale + self._grid)
        data = {
            "format": FORMAT,
            "about": about,
            "relative": self.relative,
            "batches": [int(b) for b in self.batches],
            "queries_per_request": [int(q) for q in self.queries],
            "seconds": [[round(float(s), 9) for s in row] for row in seconds],
        }
        write_atomically(path, json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read a profile. ConfigError names the file and what is wrong with it."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read profile {path}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"profile {path} is not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ConfigError(f"profile {path}: not a profile of step times (format {FORMAT!r})")
        try:
            return cls(
                data["batches"],
                data["queries_per_request"],
                data["seconds"],
                relative=bool(data.get("relative", False)),
                source=str(path),
            )
        except KeyError as error:
            raise ConfigError(f"profile {path}: field {error} is missing") from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"profile {path}: {error}") from None


def _locate(grid: NDArray[np.float64], x: float) -> tuple[tuple[int, int], float]:
    """The two grid points around x and the weight of the second; above the grid the last two, with a weight over 1."""
    if len(grid) == 1 or x <= grid[0]:
        return (0, 0), 0.0
    high = min(int(np.searchsorted(grid, x, side="left")), len(grid) - 1)
    return (high - 1, high), (x - grid[high - 1]) / (grid[high] - grid[high - 1])


def _weights(grid: NDArray[np.float64], x: float) -> list[tuple[int, float]]:
    """Grid points around x with their shares of it; x is clipped to the grid."""
    (low, high), share = _locate(grid, min(max(x, grid[0]), grid[-1]))
    return [(i, w) for i, w in ((low, 1 - share), (high, share)) if w > 0]


def _curve(grid: NDArray[np.float64], values: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Piecewise linear, going on with the last slope (not below zero) above the grid."""
    inside = np.interp(x, grid, values)
    if len(grid) == 1:
        return inside
    slope = max(0.0, (values[-1] - values[-2]) / (grid[-1] - grid[-2]))
    return inside + np.maximum(x - grid[-1], 0.0) * slope
