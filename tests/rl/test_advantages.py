"""Advantages against loop-written references, and their edge cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.rl.advantages import ADVANTAGES


def reference(name: str, rewards: list[float], groups: list[int]) -> list[float]:
    """Straight from the formulas, one sample at a time."""
    out: list[float] = []
    if name.startswith("reinforce_pp"):
        centred = reference("dr_grpo", rewards, groups) if name.endswith("baseline") else rewards
        mean = sum(centred) / len(centred)
        std = math.sqrt(sum((c - mean) ** 2 for c in centred) / len(centred))
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


scored = st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 4)), min_size=1, max_size=40)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@given(data=scored)
def test_matches_the_formula(name: str, data: list[tuple[float, int]]) -> None:
    rewards, groups = [r for r, _ in data], [g for _, g in data]
    got = ADVANTAGES[name](np.array(rewards), np.array(groups))
    np.testing.assert_allclose(got, reference(name, rewards, groups), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"reinforce_pp"}))  # which has no groups
def test_equal_rewards_and_groups_of_one_have_no_advantage(name: str) -> None:
    got = ADVANTAGES[name](np.array([0.5, 0.5, 0.5, 2.0]), np.array([7, 7, 7, 9]))
    np.testing.assert_array_equal(got, np.zeros(4))
