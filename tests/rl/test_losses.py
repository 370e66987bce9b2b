"""Losses, KL estimators and aggregation against loop-written references, values and gradients in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.config import AlgorithmOptions
from rhymemeg.rl.losses import AGGREGATIONS, POLICY_LOSSES, aggregation_weights, kl_estimate


def slow_ppo(log_ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """Loss of one token and its derivative by the log-ratio, from the definition of PPO's clipped objective."""
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 1 - low), 1 + high)
    plain, bounded = -ratio * advantage, -clipped * advantage
    if plain >= bounded:
        return plain, -ratio * advantage
    return bounded, 0.0


@given(
    log_ratio=st.floats(-3, 3).filter(lambda x: abs(abs(math.exp(x) - 1) - 0.2) > 1e-3 and abs(math.exp(x) - 1.4) > 1e-3),
    advantage=st.floats(-5, 5).filter(lambda a: abs(a) > 1e-3),
)
def test_ppo_clip_matches_the_definition(log_ratio: float, advantage: float) -> None:
    options = AlgorithmOptions(eps_clip=0.2, eps_clip_high=0.4)
    x = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    loss, clipped = POLICY_LOSSES["ppo_clip"](x, torch.tensor([[advantage]], dtype=torch.float64), options)
    loss.sum().backward()
    value, gradient = slow_ppo(log_ratio, advantage, 0.2, 0.4)
    assert loss.item() == pytest.approx(value, rel=1e-6)
    assert x.grad is not None and x.grad.item() == pytest.approx(gradient, rel=1e-6)
    assert clipped.item() == (gradient == 0.0)


def test_reinforce_gradient_is_minus_the_advantage() -> None:
    x = torch.tensor([[0.3, -0.2]], dtype=torch.float64, requires_grad=True)
    loss, clipped = POLICY_LOSSES["reinforce"](x, torch.tensor([[2.0, -1.0]], dtype=torch.float64), AlgorithmOptions())
    loss.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([[-2.0, 1.0]], dtype=torch.float64))
    assert not clipped.any()


def test_ratio_does_not_overflow() -> None:
    loss, _ = POLICY_LOSSES["ppo_clip"](torch.tensor([[500.0, -500.0]]), torch.tensor([[-1.0, 1.0]]), AlgorithmOptions())
    assert torch.isfinite(loss).all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimators_average_to_the_exact_kl(kind: str) -> None:
    """k1 and k3 are unbiased; k2 is only accurate for close distributions, so the two policies are close."""
    p = torch.softmax(torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=torch.float64), 0)
    q = torch.softmax(torch.tensor([0.32, -0.21, 0.88, 0.01], dtype=torch.float64), 0)
    exact = (p * (p.log() - q.log())).sum()
    expected = (p * kl_estimate(p.log(), q.log(), kind)).sum()
    assert expected.item() == pytest.approx(exact.item(), rel=1e-9 if kind != "k2" else 0.05)
    if kind != "k1":
        assert (kl_estimate(p.log(), q.log(), kind) >= 0).all()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(lambda lengths: sum(lengths) > 0))
def test_aggregations_match_their_names(lengths: list[int]) -> None:
    """Each mode, as the weighted sum of random token losses, against the plain average it stands for."""
    rng = np.random.default_rng(len(lengths))
    losses = [rng.normal(size=n) for n in lengths]
    n, max_len = len(lengths), 64
    expected = {
        "token_mean": np.concatenate(losses).mean(),
        "seq_mean_token_mean": sum(x.mean() if len(x) else 0.0 for x in losses) / n,
        "seq_mean_token_sum": sum(x.sum() for x in losses) / n,
        "dr_grpo": sum(x.sum() for x in losses) / (n * max_len),
    }
    assert set(expected) == set(AGGREGATIONS)
    for mode, value in expected.items():
        weights = aggregation_weights(mode, np.array(lengths), max_len)
        assert sum(w * x.sum() for w, x in zip(weights, losses)) == pytest.approx(value, abs=1e-12)
