"""Corrections against loop-written references: weights, what stays, and the loss with its gradient, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.config import AlgorithmOptions
from rhymemeg.rl.batching import MicroBatch
from rhymemeg.rl.corrections import correct, finish_metrics
from rhymemeg.rl.objective import Objective

Rows = list[list[float]]


def exp(x: float) -> float:
    return math.exp(min(max(x, -20.0), 20.0))


def slow_weights(rows: Rows, o: AlgorithmOptions, stale: Rows | None) -> tuple[Rows, list[bool]]:
    """Weights of the tokens of each response, and whether the response stays."""
    weights, kept = [], []
    for i, row in enumerate(rows):
        product = exp(sum(row))
        geometric = exp(sum(row) / max(len(row), 1))
        out = []
        for t, x in enumerate(row):
            w = 1.0
            if o.rollout_is != "none":
                w = {"token": exp(x), "sequence": product, "geometric": geometric}[o.rollout_is]
                if w > o.rollout_is_threshold:
                    w = o.rollout_is_threshold if o.rollout_is_bound == "truncate" else 0.0
                elif o.rollout_is_bound == "icepop" and w < o.rollout_is_threshold_lower:
                    w = 0.0
            elif o.decoupled_ppo and stale and stale[i][t]:
                w = exp(x) if exp(x) <= o.behav_imp_weight_cap else 0.0
            out.append(w)
        stays = True
        if o.rollout_rs != "none":
            low = o.rollout_rs_threshold_lower
            low = 1 / o.rollout_rs_threshold if low is None else low
            ratio = {"sequence": product, "geometric": geometric}[o.rollout_rs]
            stays = low <= ratio <= o.rollout_rs_threshold
        if o.rollout_token_veto_threshold is not None:
            stays = stays and all(exp(x) >= o.rollout_token_veto_threshold for x in row)
        weights.append(out)
        kept.append(stays)
    return weights, kept


def padded(rows: Rows, width: int, before: int = 1) -> torch.Tensor:
    out = torch.zeros(len(rows), width, dtype=torch.float64)
    for i, row in enumerate(rows):
        out[i, before : before + len(row)] = torch.tensor(row, dtype=torch.float64)
    return out


def mask_of(rows: Rows, width: int) -> torch.Tensor:
    return padded([[1.0] * len(row) for row in rows], width)


OPTIONS: list[dict[str, Any]] = [
    *({"rollout_is": level, "rollout_is_bound": bound}
      for level in ("token", "sequence", "geometric") for bound in ("truncate", "mask", "icepop")),
    {"rollout_rs": "sequence"},
    {"rollout_rs": "geometric", "rollout_rs_threshold": 1.1, "rollout_rs_threshold_lower": 0.95},
    {"rollout_token_veto_threshold": 0.2},
    {"decoupled_ppo": True, "behav_imp_weight_cap": 1.5},
    {"decoupled_ppo": True, "rollout_is": "token", "rollout_rs": "sequence", "rollout_rs_threshold": 8.0},
    {},
]  # fmt: skip
names = [",".join(f"{k}={v}" for k, v in o.items()) or "none" for o in OPTIONS]
# Thresholds are no values of these: a comparison of equal numbers would depend on rounding.
log_ratios = st.lists(st.lists(st.floats(-3, 3).map(lambda x: round(x, 3) + 3e-4), max_size=5), min_size=1, max_size=4)


@pytest.mark.parametrize("changes", OPTIONS, ids=names)
@given(rows=log_ratios, flags=st.integers(0, 2**20))
def test_weights_match_the_definition(changes: dict[str, Any], rows: Rows, flags: int) -> None:
    options = AlgorithmOptions(**changes)
    stale = [[float(flags >> (5 * i + t) & 1) for t in range(len(row))] for i, row in enumerate(rows)]
    got = correct(padded(rows, 7), mask_of(rows, 7), options, padded(stale, 7))
    weights, kept = slow_weights(rows, options, stale)
    torch.testing.assert_close(got.weights, padded(weights, 7), rtol=1e-6, atol=0)
    torch.testing.assert_close(got.kept, padded([[float(k)] * len(row) for k, row in zip(kept, rows)], 7))


@pytest.mark.parametrize("changes", OPTIONS, ids=names)
def test_overflow_empty_responses_and_padding(changes: dict[str, Any]) -> None:
    """Ratios of e**(+-1000), a response without tokens, and numbers in the padding that must not matter."""
    rows: Rows = [[1000.0, 0.0], [-1000.0], [], [0.0, 0.0, 0.0]]
    log_rho, mask = padded(rows, 5), mask_of(rows, 5)
    got = correct(torch.where(mask > 0, log_rho, 77.0), mask, AlgorithmOptions(**changes), mask)
    assert torch.isfinite(got.weights).all() and not got.weights[mask == 0].any()
    assert (got.weights[3, 1:4] == 1).all() and (got.kept[3, 1:4] == 1).all()
    assert not got.high[mask == 0].any() and not got.low[mask == 0].any()


def batch_of(rows: Rows, **fields: Rows) -> MicroBatch:
    mask = mask_of(rows, 7)
    tokens = torch.zeros_like(mask, dtype=torch.int64)
    return MicroBatch(tokens, tokens, mask, {name: padded(value, 7) for name, value in fields.items()})


def slow_loss(
    o: AlgorithmOptions, new: Rows, old: Rows, engine: Rows, stale: Rows, advantages: Rows, weight: float
) -> tuple[float, Rows]:
    """PPO's clip under every correction, token by token, and its derivative by each of the new log-probabilities."""
    log_rho = [
        [0.0 if s and not o.decoupled_ppo else a - e for a, e, s in zip(*rows)] for rows in zip(old, engine, stale)
    ]
    weights, kept = slow_weights(log_rho, o, stale)
    total, gradient = 0.0, []
    for i, row in enumerate(new):
        gradient.append([0.0] * len(row))
        for t, x in enumerate(row):
            denominator = engine[i][t] if stale[i][t] and not o.decoupled_ppo else old[i][t]
            ratio, a = math.exp(x - denominator), advantages[i][t]
            clipped = min(max(ratio, 0.8), 1.2)
            plain, bounded = -ratio * a, -clipped * a
            scale = weights[i][t] * weight * kept[i]
            total += scale * max(plain, bounded)
            gradient[i][t] = scale * plain if plain >= bounded else 0.0
    return total, gradient


@pytest.mark.parametrize("changes", OPTIONS, ids=names)
@given(seed=st.integers(0, 1000))
def test_loss_and_gradient_match_a_loop(changes: dict[str, Any], seed: int) -> None:
    options = AlgorithmOptions(**changes)
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (3,), generator=generator).tolist()

    def draw(scale: float, shift: float = 0.0) -> Rows:
        return [(torch.randn(n, generator=generator, dtype=torch.float64) * scale + shift).tolist() for n in lengths]

    old, advantages = draw(0.5, -2.0), draw(1.0)
    new = [[x + d for x, d in zip(*pair)] for pair in zip(old, draw(0.3))]
    engine = [[x + d for x, d in zip(*pair)] for pair in zip(old, draw(0.6))]
    stale = [[float(x > 0) for x in row] for row in draw(1.0)]
    batch = batch_of(
        new, advantages=advantages, old_log_probs=old, rollout_log_probs=engine, stale=stale,
        weights=[[0.25] * n for n in lengths],
    )  # fmt: skip
    x = padded(new, 7).requires_grad_()
    loss, _ = Objective(options, sum(lengths))(x, None, batch)
    loss.backward()
    value, gradient = slow_loss(options, new, old, engine, stale, advantages, 0.25)
    assert loss.item() == pytest.approx(value, rel=1e-6, abs=1e-12)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, padded(gradient, 7), rtol=1e-6, atol=1e-12)


def test_a_rejected_response_has_no_kl_or_entropy_term_either() -> None:
    options = AlgorithmOptions(rollout_rs="sequence", kl_loss_coef=0.1, entropy_coef=0.1)
    far, near = [-9.0, -9.0], [-1.0, -1.0]
    engine, ones = [[-1.0, -1.0]] * 2, [[1.0, 1.0]] * 2
    batch = batch_of([far, near], advantages=ones, rollout_log_probs=engine, ref_log_probs=engine, weights=ones)
    x = padded([far, near], 7).requires_grad_()
    loss, metrics = Objective(options, 4)(x, torch.ones_like(x) * x, batch)
    loss.backward()
    assert x.grad is not None and not x.grad[0].any() and x.grad[1, 1:3].all()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.5


@given(seed=st.integers(0, 1000))
def test_mismatch_metrics_match_a_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [[float(-x) for x in torch.rand(n, generator=generator, dtype=torch.float64) * 3] for n in (3, 1, 4)]
    engine = [[x + float(torch.randn(1, generator=generator)) * 0.3 for x in row] for row in rows]
    stale = [[0.0, 1.0, 0.0], [0.0], [1.0, 0.0, 0.0, 1.0]]
    ones = [[1.0] * len(row) for row in rows]
    batch = batch_of(rows, advantages=ones, rollout_log_probs=engine, stale=stale, weights=ones)
    objective = Objective(AlgorithmOptions(rollout_is="token"), 8)
    _, sums = objective(padded(rows, 7), None, batch)
    got = finish_metrics({name: float(value) for name, value in sums.items()})
    fresh = [(a, e) for r in zip(rows, engine, stale) for a, e, s in zip(*r) if not s]
    n = len(fresh)
    expected = {
        "actor/train_rollout_logprob_abs_diff": sum(abs(a - e) for a, e in fresh) / n,
        "rollout_corr/kl": sum(e - a for a, e in fresh) / n,
        "rollout_corr/k3_kl": sum(math.exp(a - e) - 1 - (a - e) for a, e in fresh) / n,
        "rollout_corr/chi2_token": sum(math.exp(2 * (a - e)) for a, e in fresh) / n - 1,
        "training/rollout_probs_diff_mean": sum(abs(math.exp(a) - math.exp(e)) for a, e in fresh) / n,
    }
    weights = [1.0 if s else min(math.exp(a - e), 2.0) for r in zip(rows, engine, stale) for a, e, s in zip(*r)]
    expected["rollout_corr/rollout_is_mean"] = sum(weights) / 8
    expected["rollout_corr/rollout_is_eff_sample_size"] = sum(weights) ** 2 / (8 * sum(w * w for w in weights))
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    assert objective.maxima["actor/train_rollout_logprob_abs_diff_max"] == pytest.approx(
        max(abs(a - e) for a, e in fresh)
    )
    assert objective.maxima["rollout_corr/rollout_is_max"] == pytest.approx(max(weights))
    assert "fresh_share" not in got
