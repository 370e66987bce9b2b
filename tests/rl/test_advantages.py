"""Advantages against loop-written references, and their edge cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.rl.advantages import (
    ADVANTAGES,
    GROUP_ESTIMATORS,
    gae,
    returns_to_go,
    token_rewards,
    whiten,
)


def reference(name: str, rewards: list[float], groups: list[int], lengths: list[int]) -> list[float]:
    """Straight from the formulas, one sample (for REINFORCE++, one token) at a time."""
    out: list[float] = []
    if name.startswith("reinforce_pp"):
        centred = reference("dr_grpo", rewards, groups, lengths) if name.endswith("baseline") else rewards
        tokens = [c for c, n in zip(centred, lengths) for _ in range(n)]
        mean = sum(tokens) / max(len(tokens), 1)
        std = math.sqrt(sum((c - mean) ** 2 for c in tokens) / max(len(tokens), 1))
        return [(c - mean) / (std + 1e-8) for c in centred]
    for i, r in enumerate(rewards):
        members = [rewards[j] for j in range(len(rewards)) if groups[j] == groups[i]]
        mean = sum(members) / len(members)
        if name == "grpo":
            variance = sum((m - mean) ** 2 for m in members) / max(len(members) - 1, 1)
            out.append((r - mean) / (math.sqrt(variance) + 1e-6))
        elif name == "dr_grpo":
            out.append(r - mean)
        elif name == "rloo":
            others = [rewards[j] for j in range(len(rewards)) if groups[j] == groups[i] and j != i]
            out.append(r - sum(others) / len(others) if others else 0.0)
    return out


rewards_of = st.integers(-40, 40).map(lambda k: k / 4)  # multiples: a spread of rounding errors is no spread
scored = st.lists(st.tuples(rewards_of, st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=40)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@given(data=scored)
def test_matches_the_formula(name: str, data: list[tuple[float, int, int]]) -> None:
    rewards, groups, lengths = [r for r, _, _ in data], [g for _, g, _ in data], [n for _, _, n in data]
    got = ADVANTAGES[name](np.array(rewards), np.array(groups), np.array(lengths))
    used = np.array(lengths) > 0 if name.startswith("reinforce_pp") else np.ones(len(data), bool)
    expected = np.array(reference(name, rewards, groups, lengths))
    np.testing.assert_allclose(got[used], expected[used], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted(GROUP_ESTIMATORS))
def test_equal_rewards_and_groups_of_one_have_no_advantage(name: str) -> None:
    got = ADVANTAGES[name](np.array([0.5, 0.5, 0.5, 2.0]), np.array([7, 7, 7, 9]), np.array([3, 1, 4, 1]))
    np.testing.assert_array_equal(got, np.zeros(4))


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_no_samples_and_samples_without_tokens(name: str) -> None:
    nothing = np.zeros(0)
    assert len(ADVANTAGES[name](nothing, nothing.astype(int), nothing.astype(int))) == 0
    assert np.isfinite(ADVANTAGES[name](np.array([1.0, 0.0]), np.array([0, 0]), np.array([0, 0]))).all()


# ---------------------------------------------------------------------------------------------------- advantages of tokens


def random_rows(seed: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """A mask of up to five rows of which each has some tokens next to each other, and their first and end."""
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(1, 6)), int(rng.integers(1, 9))
    spans = []
    for _ in range(rows):
        first, end = sorted(rng.integers(0, width + 1, 2))
        spans.append((int(first), int(end)))
    mask = np.zeros((rows, width))
    for i, (first, end) in enumerate(spans):
        mask[i, first:end] = 1
    return mask, spans


@given(seed=st.integers(0, 10_000), gamma=st.floats(0.5, 1), lam=st.floats(0, 1), coef=st.floats(0, 1))
def test_rewards_returns_and_gae_match_loops(seed: int, gamma: float, lam: float, coef: float) -> None:
    mask, spans = random_rows(seed)
    rng = np.random.default_rng(seed + 1)
    scores, kl, values = rng.normal(size=len(mask)), rng.normal(size=mask.shape), rng.normal(size=mask.shape)
    rewards = token_rewards(scores, kl, mask, coef)
    returns, (advantages, targets) = returns_to_go(rewards, mask, gamma), gae(rewards, values, mask, gamma, lam)
    for i, (first, end) in enumerate(spans):
        n = end - first
        r = [-coef * kl[i, first + t] + (scores[i] if t == n - 1 else 0.0) for t in range(n)]
        v = [*values[i, first:end], 0.0]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        expected_returns = [sum(gamma ** (k - t) * r[k] for k in range(t, n)) for t in range(n)]
        expected = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
        for got, want in (
            (rewards, r),
            (returns, expected_returns),
            (advantages, expected),
            (targets, [a + b for a, b in zip(expected, v)]),
        ):
            np.testing.assert_allclose(got[i, first:end], want, rtol=1e-9, atol=1e-9)
            assert not got[i, :first].any() and not got[i, end:].any()


def test_gae_with_lambda_one_is_return_minus_value() -> None:
    mask, _ = random_rows(3)
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=mask.shape) * mask, rng.normal(size=mask.shape)
    advantages, targets = gae(rewards, values, mask, 0.9, 1.0)
    np.testing.assert_allclose(advantages, (returns_to_go(rewards, mask, 0.9) - values) * mask)
    np.testing.assert_allclose(targets, returns_to_go(rewards, mask, 0.9))


def test_whitened_values_have_mean_zero_and_spread_one() -> None:
    values, counts = np.array([3.0, -1.0, 4.0]), np.array([2, 5, 1])
    tokens = np.repeat(whiten(values, counts), counts)
    assert tokens.mean() == pytest.approx(0) and tokens.std() == pytest.approx(1)
    assert not whiten(np.full(3, 0.5), counts).any()
