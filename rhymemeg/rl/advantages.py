"""Advantages of the samples of a step. Pure (numpy only), in float64.

An *outcome* estimator is a function `(rewards [n], groups [n], lengths [n]) -> advantages [n]`: `rewards` are the scalar
rewards of the samples, `groups` the prompt of each (equal numbers form a group), `lengths` their response tokens. All
tokens of a response get its advantage. Estimators are registered by name for `--advantage-estimator`; rewards that are
not finite are refused by the caller (`rhymemeg.rl.rewards`), so none of them checks again.

Where tokens of a response differ, arrays are [b, s], a response a row, with a `mask` that is 1 on its tokens, which lie
next to each other: `token_rewards` puts the reward on the last token and the KL penalty on each, `returns_to_go` and
`gae` (with a critic's values) turn rewards of tokens into advantages.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Advantage = Callable[[Array, Ints, Ints], Array]
ADVANTAGES: dict[str, Advantage] = {}
# Compare the samples of a prompt, and know nothing of a prompt with one.
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
# Need the values of a critic.
VALUE_ESTIMATORS = ("gae",)


def register(name: str) -> Callable[[Advantage], Advantage]:
    """Add an estimator to the registry under `name`."""

    def add(function: Advantage) -> Advantage:
        ADVANTAGES[name] = function
        return function

    return add


def _group_sums(values: Array, groups: Ints) -> tuple[Array, Array]:
    """For every sample: the sum of `values` over its group, and the size of its group."""
    _, index = np.unique(groups, return_inverse=True)
    sums: Array = np.bincount(index, weights=values).astype(np.float64)
    sizes: Array = np.bincount(index).astype(np.float64)
    return sums[index], sizes[index]


@register("grpo")
def grpo(rewards: Array, groups: Ints, lengths: Ints, eps: float = 1e-6) -> Array:
    """A_i = (r_i - mean) / (std + eps), mean and sample standard deviation (n - 1) over the group; a group of one or of
    equal rewards has advantage 0. DeepSeekMath (arXiv 2402.03300), section 4.1."""
    centred = dr_grpo(rewards, groups, lengths)
    squares, size = _group_sums(centred**2, groups)
    std = np.sqrt(squares / np.maximum(size - 1, 1))
    return centred / (std + eps)


@register("dr_grpo")
def dr_grpo(rewards: Array, groups: Ints, lengths: Ints) -> Array:
    """A_i = r_i - mean over the group: GRPO without the division by the standard deviation, which weights easy and hard
    prompts up. Understanding R1-Zero-Like Training (arXiv 2503.20783), section 3."""
    total, size = _group_sums(rewards, groups)
    return rewards - total / size


@register("rloo")
def rloo(rewards: Array, groups: Ints, lengths: Ints) -> Array:
    """A_i = r_i - mean of the other samples of the group (leave one out); 0 for a group of one.
    Back to Basics (arXiv 2402.14740), section 3.3."""
    total, size = _group_sums(rewards, groups)
    others = np.maximum(size - 1, 1)
    return np.where(size > 1, rewards - (total - rewards) / others, 0.0)


def whiten(values: Array, counts: npt.NDArray, eps: float = 1e-8) -> Array:
    """(values - mean) / (std + eps), where value i counts `counts[i]` times; a mask of tokens, or lengths."""
    total = max(float(counts.sum()), 1.0)
    mean = float((values * counts).sum()) / total
    variance = float(((values - mean) ** 2 * counts).sum()) / total
    return (values - mean) / (np.sqrt(variance) + eps)


@register("reinforce_pp")
def reinforce_pp(rewards: Array, groups: Ints, lengths: Ints) -> Array:
    """A_i = (r_i - mean) / (std + eps) over all *tokens of the whole step*, without a baseline a prompt. With --kl-coef
    or --gamma the tokens of a response differ: A_t is the return from t on, normalised alike.
    REINFORCE++ (arXiv 2501.03262), section 3.2."""
    return whiten(rewards, lengths)


@register("reinforce_pp_baseline")
def reinforce_pp_baseline(rewards: Array, groups: Ints, lengths: Ints) -> Array:
    """The group's mean as baseline, then the scale of all tokens of the step: A = whiten(r - mean of the group).
    REINFORCE++ (arXiv 2501.03262), section 3.3."""
    return whiten(dr_grpo(rewards, groups, lengths), lengths)


# ---------------------------------------------------------------------------------------------------- advantages of tokens


def token_rewards(scores: Array, kl: Array, mask: Array, kl_coef: float) -> Array:
    """[b, s]: r_t = -kl_coef * kl_t, and the score of the response on its last token besides. `scores` [b], `kl` [b, s].
    Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593), section 2. A response
    without tokens has no reward."""
    rewards = -kl_coef * kl * mask
    rows = np.flatnonzero(mask.any(axis=1))
    last = mask.shape[1] - 1 - np.argmax(mask[rows, ::-1] > 0, axis=1)
    rewards[rows, last] += scores[rows]
    return rewards


def returns_to_go(rewards: Array, mask: Array, gamma: float) -> Array:
    """[b, s]: G_t = r_t + gamma G_{t+1}; 0 outside of the mask."""
    out, following = np.zeros_like(rewards), np.zeros(len(rewards))
    for t in range(rewards.shape[1] - 1, -1, -1):
        following = (rewards[:, t] + gamma * following) * mask[:, t]
        out[:, t] = following
    return out


def gae(rewards: Array, values: Array, mask: Array, gamma: float, lam: float) -> tuple[Array, Array]:
    """Advantages and returns (the critic's targets), both [b, s] and 0 outside of the mask:

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1},    R_t = A_t + V_t

    with V = A = 0 after the last token. Generalized Advantage Estimation (arXiv 1506.02438), equation 16. The advantages
    are not normalised; see `whiten`."""
    advantages = np.zeros_like(rewards)
    value, advantage = np.zeros(len(rewards)), np.zeros(len(rewards))
    for t in range(rewards.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * value - values[:, t]
        advantage = (delta + gamma * lam * advantage) * mask[:, t]
        value = values[:, t] * mask[:, t]
        advantages[:, t] = advantage
    return advantages, (advantages + values) * mask
