"""Calling a reward and reading what it returns. Shared by the training process and the workers, and light for their
sake."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rhymemeg.rl.rewards.registry import RewardFunction, describe_error

# What a reward is called with: response, label, infos.
Request = tuple[str, Any, dict[str, Any]]


def check_range(score: float, limits: tuple[float, float] | None) -> str:
    """`returned 3, which is outside of its range [0, 1],` or nothing."""
    if limits is None or limits[0] <= score <= limits[1]:
        return ""
    return f"returned {score:g}, which is outside of its range [{limits[0]:g}, {limits[1]:g}],"


@dataclass(frozen=True)
class Verdict:
    """What a reward said of one response: `components` (with `score`), or `problem`, as `raised ...` or `returned
    ...`, or neither: its time was up. `cause` is the exception, where it was raised in this process."""

    components: dict[str, float] | None = None
    problem: str = ""
    cause: BaseException | None = None

    @property
    def timed_out(self) -> bool:
        return self.components is None and not self.problem


def judge(function: RewardFunction, request: Request) -> Verdict:
    """Call `function`; never raises."""
    response, label, info = request
    try:
        value = function(response, label, **info)
    except BaseException as error:  # sys.exit in a reward is a failure like any other
        return Verdict(problem=f"raised {describe_error(error)}", cause=error)
    try:
        return Verdict(read_value(value))
    except ValueError as error:
        return Verdict(problem=f"returned {error}")


def read_value(value: Any) -> dict[str, float]:
    """A reward's return value as a dict of finite floats with `score`. Raises ValueError saying what it is
    instead."""
    if not isinstance(value, Mapping):
        return {"score": _finite(value, "")}
    if "score" not in value:
        raise ValueError(f"a dict without 'score' (it has {', '.join(map(repr, value)) or 'nothing'})")
    for name in value:
        if not isinstance(name, str):
            raise ValueError(f"a dict with the key {name!r}, which is not a name")
    return {name: _finite(part, f" for {name!r}") for name, part in value.items()}


def _finite(value: Any, what: str) -> float:
    if not isinstance(value, numbers.Real) and hasattr(
        value, "item"
    ):  # NumPy's bool, an array or tensor of one element
        with contextlib.suppress(ValueError, RuntimeError, TypeError):
            value = value.item()
    if not isinstance(value, numbers.Real):
        raise ValueError(f"{type(value).__name__} instead of a number{what}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{number}{what}, which is not finite,")
    return number
