"""Advantages of the samples of a step. Pure (numpy only).

An estimator is a function `(rewards [n], groups [n]) -> advantages [n]`, in float64: `rewards` are the scalar rewards of
the samples, `groups` the prompt of each (equal numbers form a group). All tokens of a response get its advantage.
Estimators are registered by name for `--advantage-estimator`; rewards that are not finite are refused by the caller
(`rhymemeg.rl.rewards`), so none of them checks again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Advantage = Callable[[Array, npt.NDArray[np.int64]], Array]
ADVANTAGES: dict[str, Advantage] = {}


def register(name: str) -> Callable[[Advantage], Advantage]:
    """Add an estimator to the registry under `name`."""

    def add(function: Advantage) -> Advantage:
        ADVANTAGES[name] = function
        return function

    return add


def _group_sums(values: Array, groups: npt.NDArray[np.int64]) -> tuple[Array, Array]:
    """For every sample: the sum of `values` over its group, and the size of its group."""
    _, index = np.unique(groups, return_inverse=True)
    sums: Array = np.bincount(index, weights=values).astype(np.float64)
    sizes: Array = np.bincount(index).astype(np.float64)
    return sums[index], sizes[index]


@register("grpo")
def grpo(rewards: Array, groups: npt.NDArray[np.int64], eps: float = 1e-6) -> Array:
    """A_i = (r_i - mean) / (std + eps), mean and sample standard deviation (n - 1) over the group; a group of one or of
    equal rewards has advantage 0. DeepSeekMath (arXiv 2402.03300), section 4.1."""
    centred = dr_grpo(rewards, groups)
    squares, size = _group_sums(centred**2, groups)
    std = np.sqrt(squares / np.maximum(size - 1, 1))
    return centred / (std + eps)


@register("dr_grpo")
def dr_grpo(rewards: Array, groups: npt.NDArray[np.int64]) -> Array:
    """A_i = r_i - mean over the group: GRPO without the division by the standard deviation, which weights easy and hard
    prompts up. Understanding R1-Zero-Like Training (arXiv 2503.20783), section 3."""
    total, size = _group_sums(rewards, groups)
    return rewards - total / size


@register("rloo")
def rloo(rewards: Array, groups: npt.NDArray[np.int64]) -> Array:
    """A_i = r_i - mean of the other samples of the group (leave one out); 0 for a group of one.
    Back to Basics (arXiv 2402.14740), section 3.3."""
    total, size = _group_sums(rewards, groups)
    others = np.maximum(size - 1, 1)
    return np.where(size > 1, rewards - (total - rewards) / others, 0.0)


def _whiten(values: Array, eps: float = 1e-8) -> Array:
    return (values - values.mean()) / (values.std() + eps)


@register("reinforce_pp")
def reinforce_pp(rewards: Array, groups: npt.NDArray[np.int64]) -> Array:
    """A_i = (r_i - mean) / (std + eps) over the *whole step*, without a baseline a prompt.
    REINFORCE++ (arXiv 2501.03262), section 3.2 (its per-token KL is --kl-loss-coef here)."""
    return _whiten(rewards)


@register("reinforce_pp_baseline")
def reinforce_pp_baseline(rewards: Array, groups: npt.NDArray[np.int64]) -> Array:
    """The group's mean as baseline, then the scale of the whole step: A = whiten(r - mean of the group).
    REINFORCE++ (arXiv 2501.03262), section 3.3."""
    return _whiten(dr_grpo(rewards, groups))
