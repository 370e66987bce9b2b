"""What an engine step costs. Pure.

`CostModel.step_seconds(c, q)`: seconds of one step of an engine that runs c requests with q query tokens each (1
without speculation, 1 + draft length with it). Measured on a grid, interpolated linearly between its points and
continued beyond them with the affine form b + a c that fits the grid best.

The affine form also prices a whole engine: with W tokens to make, the longest response M and C slots it is busy for
about b x max(M, W / C) + a x W.

Profiles are JSON, never code: {"name", "concurrency": [...], "query": [...], "seconds": [[...]],
"prefill_seconds_per_token"}. `load_profile` raises ConfigError naming the file and the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rhymemeg.errors import ConfigError
from rhymemeg.observe.files import write_atomically

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CostModel:
    """`seconds[i][j]`: a step with `concurrency[i]` requests of `query[j]` query tokens each. Both grids ascend."""

    name: str
    concurrency: tuple[float, ...]
    query: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]
    prefill_seconds_per_token: float = 0.0

    def __post_init__(self) -> None:
        def ascending(values: tuple[float, ...]) -> bool:
            return len(values) > 0 and all(v > 0 for v in values) and all(a < b for a, b in pairwise(values))

        if not ascending(self.concurrency) or not ascending(self.query):
            raise ValueError("concurrency and query must be positive and ascending")
        if len(self.seconds) != len(self.concurrency) or any(len(row) != len(self.query) for row in self.seconds):
            raise ValueError("seconds must have a row for each concurrency and a column for each query length")
        if not all(math.isfinite(s) and s > 0 for row in self.seconds for s in row):
            raise ValueError("seconds must be finite and positive")
        if not (math.isfinite(self.prefill_seconds_per_token) and self.prefill_seconds_per_token >= 0):
            raise ValueError("prefill_seconds_per_token must be finite and not negative")

    @cached_property
    def affine(self) -> tuple[float, float]:
        """(b, a): least squares of b + a c through the first column; both at least 0, and b + a > 0."""
        c, s = np.array(self.concurrency), np.array(self.seconds)[:, 0]
        if len(c) == 1:
            return float(s[0]), 0.0
        a = float(((c - c.mean()) * (s - s.mean())).sum() / ((c - c.mean()) ** 2).sum())
        a = max(a, 0.0)
        b = float(s.mean() - a * c.mean())
        return (b, a) if b >= 0 else (0.0, float((c * s).sum() / (c * c).sum()))

    def step_seconds(self, running: npt.ArrayLike, query: float = 1.0) -> Floats:
        """Seconds of a step; `running` is a number or an array. Zero requests cost nothing."""
        c = np.asarray(running, dtype=np.float64)
        table = np.array(self.seconds)
        grid = np.array(self.concurrency)
        columns = [float(np.interp(query, self.query, row)) for row in table]
        if query > self.query[-1]:  # beyond the grid: every further query token costs what a further request costs
            columns = [v + self.affine[1] * g * (query - self.query[-1]) for v, g in zip(columns, self.concurrency)]
        seconds = np.interp(c, grid, columns)
        slope = self.affine[1] * max(query, 1.0)
        seconds = np.where(c > grid[-1], columns[-1] + slope * (c - grid[-1]), seconds)
        return np.where(c <= 0, 0.0, seconds)

    def engine_seconds(self, work: npt.ArrayLike, longest: npt.ArrayLike, slots: int) -> Floats:
        """b x max(M, W / C) + a x W: how long an engine is busy with `work` tokens and the longest of `longest`."""
        b, a = self.affine
        w = np.asarray(work, dtype=np.float64)
        return b * np.maximum(np.asarray(longest, dtype=np.float64), w / slots) + a * w

    def scaled(self, factor: float) -> CostModel:
        """The same shape on a machine that takes `factor` times as long (the correction while running)."""
        rows = tuple(tuple(s * factor for s in row) for row in self.seconds)
        return CostModel(self.name, self.concurrency, self.query, rows, self.prefill_seconds_per_token * factor)

    def save(self, path: str | Path) -> None:
        """Write the profile, whole or not at all."""
        write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")


def load_profile(path: str | Path) -> CostModel:
    """Read what `CostModel.save` wrote."""
    try:
        raw: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cost profile {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"cost profile {path}: not JSON: {error}") from None
    try:
        return CostModel(
            name=str(raw["name"]),
            concurrency=tuple(float(c) for c in raw["concurrency"]),
            query=tuple(float(q) for q in raw["query"]),
            seconds=tuple(tuple(float(s) for s in row) for row in raw["seconds"]),
            prefill_seconds_per_token=float(raw.get("prefill_seconds_per_token", 0.0)),
        )
    except KeyError as error:
        raise ConfigError(f"cost profile {path}: field {error.args[0]!r} is missing") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"cost profile {path}: {error}") from None


@dataclass(frozen=True)
class StepTiming:
    """Measured engine steps: `running` requests, `tokens` query tokens in all, `seconds` on the clock."""

    running: int
    tokens: int
    seconds: float


def correction(model: CostModel, steps: Iterable[StepTiming]) -> float:
    """Factor by which `model` is off on measured steps: total measured over total predicted time; 1 without steps.
    Prefill tokens (more than 64 query tokens a request) would distort it, so such steps are left out."""
    measured = predicted = 0.0
    for step in steps:
        if step.running <= 0 or step.tokens <= 0 or step.tokens > 64 * step.running or not step.seconds > 0:
            continue
        measured += step.seconds
        predicted += float(model.step_seconds(step.running, step.tokens / step.running))
    return measured / predicted if predicted > 0 and math.isfinite(measured) else 1.0


def profile_from_steps(name: str, steps: Iterable[StepTiming], prefill_seconds_per_token: float = 0.0) -> CostModel:
    """Profile from measured decode steps (one query token a request): the median of each power-of-two bucket of
    concurrency, made non-decreasing. Raises ValueError without a usable step."""
    buckets: dict[int, list[tuple[int, float]]] = {}
    for step in steps:
        if step.running > 0 and step.tokens == step.running and math.isfinite(step.seconds) and step.seconds > 0:
            buckets.setdefault(step.running.bit_length(), []).append((step.running, step.seconds))
    if not buckets:
        raise ValueError("no decode steps to make a cost profile from")
    concurrency: list[float] = []
    seconds: list[float] = []
    for _, entries in sorted(buckets.items()):
        concurrency.append(float(np.median([c for c, _ in entries])))
        seconds.append(max(float(np.median([s for _, s in entries])), seconds[-1] if seconds else 0.0))
    return CostModel(name, tuple(concurrency), (1.0,), tuple((s,) for s in seconds), prefill_seconds_per_token)


A100_7B = CostModel(
    # Qwen2.5-7B on one A100, 2,048 tokens of context, means of the sweep that EfficientRollout (arXiv 2606.18967)
    # published; columns with drafts are its verification steps. Prefill: 15.2 GFLOP a token at half of the peak rate.
    name="a100-7b",
    concurrency=(1, 8, 16, 32, 64),
    query=(1, 4, 8, 12, 16),
    seconds=(
        (0.00966, 0.0106, 0.0106, 0.0106, 0.0106),
        (0.01009, 0.0120, 0.0133, 0.0140, 0.0142),
        (0.01064, 0.0136, 0.0145, 0.0182, 0.0200),
        (0.01236, 0.0148, 0.0204, 0.0293, 0.0365),
        (0.01369, 0.0209, 0.0371, 0.0494, 0.0665),
    ),
    prefill_seconds_per_token=0.0001,
)
ENGINE_STEPS = CostModel("steps", (1.0,), (1.0,), ((1.0,),))
"""Every step costs one: time counted in engine steps, which noise does not touch."""
BUILT_IN = {model.name: model for model in (A100_7B, ENGINE_STEPS)}


def cost_model(name_or_path: str) -> CostModel:
    """A built-in model by name, or a profile file."""
    return BUILT_IN[name_or_path] if name_or_path in BUILT_IN else load_profile(name_or_path)
