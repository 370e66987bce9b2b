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

ONE = torch.ones(1, 1, dtype=torch.float64)


def slow_ppo(log_ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """Loss of one token and its derivative by the log-ratio, from the definition of PPO's clipped objective."""
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 1 - low), 1 + high)
    plain, bounded = -ratio * advantage, -clipped * advantage
    if plain >= bounded:
        return plain, -ratio * advantage
    return bounded, 0.0


@given(
    log_ratio=st.floats(-3, 3).filter(
        lambda x: abs(abs(math.exp(x) - 1) - 0.2) > 1e-3 and abs(math.exp(x) - 1.4) > 1e-3
    ),
    advantage=st.floats(-5, 5).filter(lambda a: abs(a) > 1e-3),
)
def test_ppo_clip_matches_the_definition(log_ratio: float, advantage: float) -> None:
    options = AlgorithmOptions(eps_clip=0.2, eps_clip_high=0.4)
    x = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    loss, clipped = POLICY_LOSSES["ppo_clip"](x, torch.tensor([[advantage]], dtype=torch.float64), ONE, options)
    loss.sum().backward()
    value, gradient = slow_ppo(log_ratio, advantage, 0.2, 0.4)
    assert loss.item() == pytest.approx(value, rel=1e-6)
    assert x.grad is not None and x.grad.item() == pytest.approx(gradient, rel=1e-6)
    assert clipped.item() == (gradient == 0.0)


def test_reinforce_gradient_is_minus_the_advantage() -> None:
    x = torch.tensor([[0.3, -0.2]], dtype=torch.float64, requires_grad=True)
    loss, clipped = POLICY_LOSSES["reinforce"](
        x, torch.tensor([[2.0, -1.0]], dtype=torch.float64), ONE, AlgorithmOptions()
    )
    loss.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([[-2.0, 1.0]], dtype=torch.float64))
    assert not clipped.any()


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_ratio_does_not_overflow(name: str) -> None:
    ratio, advantages = torch.tensor([[500.0, -500.0]]), torch.tensor([[-1.0, 1.0]])
    loss, _ = POLICY_LOSSES[name](ratio, advantages, torch.ones(1, 2), AlgorithmOptions())
    assert torch.isfinite(loss).all()


def test_dual_clip_bounds_negative_advantages() -> None:
    x = torch.tensor([[2.0, 2.0, 0.1]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[-1.0, 1.0, -1.0]], dtype=torch.float64)
    loss, clipped = POLICY_LOSSES["ppo_clip"](x, advantages, torch.ones(1, 3), AlgorithmOptions(eps_clip_c=3.0))
    loss.sum().backward()
    # exp(2) > 3: bounded at 3 with no gradient; positive advantage: PPO's own clip; exp(.1) < 1.2: as it is.
    torch.testing.assert_close(loss.detach(), torch.tensor([[3.0, -1.2, math.exp(0.1)]], dtype=torch.float64))
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([[0.0, 0.0, math.exp(0.1)]], dtype=torch.float64))
    assert clipped.tolist() == [[True, True, False]]


def test_gspo_is_ppo_on_the_geometric_mean_of_ratios() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        length = int(rng.integers(1, 6))
        values, advantage = rng.normal(0, 0.3, length), float(rng.normal())
        x = torch.zeros(1, 6, dtype=torch.float64)
        x[0, :length] = torch.from_numpy(values)
        x.requires_grad_()
        mask = torch.zeros(1, 6, dtype=torch.float64)
        mask[0, :length] = 1
        loss, _ = POLICY_LOSSES["gspo"](x, torch.full((1, 6), advantage, dtype=torch.float64), mask, AlgorithmOptions())
        ((loss * mask).sum() / length).backward()
        value, gradient = slow_ppo(float(values.mean()), advantage, 0.2, 0.2)
        assert (loss * mask).sum().item() / length == pytest.approx(value)
        assert x.grad is not None
        # d/d log_ratio_t of f(exp(mean log r)) = f' / length for each token.
        expected = torch.zeros(1, 6, dtype=torch.float64)
        expected[0, :length] = gradient / length
        torch.testing.assert_close(x.grad, expected)


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    x = torch.tensor([[2.0, -2.0, 0.05]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    loss, clipped = POLICY_LOSSES["cispo"](x, advantages, torch.ones(1, 3), AlgorithmOptions(eps_clip_high=0.4))
    loss.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([[-1.4, 1.6, -0.5 * math.exp(0.05)]], dtype=torch.float64))
    assert clipped.tolist() == [[True, True, False]]


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


@given(d=st.floats(-4, 4), ref=st.floats(-5, 0))
def test_kl_estimates_and_their_gradients(d: float, ref: float) -> None:
    """Value and derivative by log pi, of each estimator, from its definition."""
    expected = {"k1": (d, 1.0), "k2": (d * d / 2, d), "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d))}
    for kind, (value, gradient) in expected.items():
        x = torch.tensor([ref + d], dtype=torch.float64, requires_grad=True)
        kl = kl_estimate(x, torch.tensor([ref], dtype=torch.float64), kind)
        kl.sum().backward()
        assert x.grad is not None
        assert kl.item() == pytest.approx(value, rel=1e-6, abs=1e-9)
        assert x.grad.item() == pytest.approx(gradient, rel=1e-6, abs=1e-9)


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
