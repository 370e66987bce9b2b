"""The critic's loss and metrics, against loops written a token at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rhymemeg.config import Config
from rhymemeg.errors import ConfigError
from rhymemeg.rl.batching import MicroBatch
from rhymemeg.rl.checks import check_algorithm
from rhymemeg.rl.values import ValueObjective, finish_value_metrics


def batch(seed: int = 0) -> tuple[Tensor, MicroBatch]:
    """Values to judge, and a micro-batch with old values and returns, in float64."""
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, 4, 7, generator=generator, dtype=torch.float64)
    mask = (torch.rand(4, 7, generator=generator) > 0.4).double()
    mask[2] = 0  # a row of which nothing is trained
    tokens = torch.zeros(4, 7, dtype=torch.int64)
    return values.requires_grad_(), MicroBatch(tokens, tokens, mask, {"values": old * mask, "returns": returns * mask})


@pytest.mark.parametrize("clip", [None, 0.1, 0.5, 100.0])
def test_loss_and_gradient(clip: float | None) -> None:
    values, b = batch()
    loss, metrics = ValueObjective(clip, 13)(values, b)
    loss.backward()
    copy = values.detach().clone().requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    clipped = 0
    for at in map(tuple, b.loss_mask.nonzero().tolist()):
        v, old, target = copy[at], b.fields["values"][at], b.fields["returns"][at]
        plain = (v - target) ** 2
        if clip is not None:
            if v > old + clip:
                near = old + clip
            elif v < old - clip:
                near = old - clip
            else:
                near = v
            if (near - target) ** 2 > plain:
                clipped += 1
                plain = (near - target) ** 2
        expected = expected + 0.5 * plain / 13
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(values.grad, copy.grad, rtol=1e-12, atol=1e-12)
    assert float(metrics["critic/vf_clipfrac"]) == pytest.approx(clipped / 13)
    assert (clipped > 0) == (clip in (0.1, 0.5))


def test_parts_add_up_to_the_whole() -> None:
    values, b = batch()
    whole, numbers = ValueObjective(0.2, int(b.loss_mask.sum()))(values, b)
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        fields = {name: value[rows] for name, value in b.fields.items()}
        part = MicroBatch(b.tokens[rows], b.labels[rows], b.loss_mask[rows], fields)
        parts.append(ValueObjective(0.2, int(b.loss_mask.sum()))(values[rows], part))
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    for name, value in numbers.items():
        torch.testing.assert_close(sum(m[name] for _, m in parts), value)


def test_explained_variance() -> None:
    values, b = batch()
    chosen = b.loss_mask > 0
    _, sums = ValueObjective(None, int(chosen.sum()))(values, b)
    done = finish_value_metrics({name: float(value) for name, value in sums.items()})
    returns, old = b.fields["returns"][chosen], b.fields["values"][chosen]
    expected = 1 - (returns - old).var(correction=0) / returns.var(correction=0)
    assert done["critic/explained_variance"] == pytest.approx(float(expected))
    assert done["critic/return_mean"] == pytest.approx(float(returns.mean()))
    assert all(name.startswith("critic/") for name in done)


def test_equal_returns_explain_nothing() -> None:
    values, b = batch()
    b.fields["returns"] = b.loss_mask.clone()
    _, sums = ValueObjective(None, int(b.loss_mask.sum()))(values, b)
    assert finish_value_metrics({k: float(v) for k, v in sums.items()})["critic/explained_variance"] == 0.0


def options(**changes: object) -> Config:
    return Config.from_tree({"train_iters": 10, **changes}, where="test")


def test_options_of_a_critic_that_is_not_there_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="--critic-lr is of the critic, which --advantage-estimator grpo does not have"
    ):
        check_algorithm(options(critic_lr=1e-4))
    with pytest.raises(ConfigError, match="--value-clip is of the critic"):
        check_algorithm(options(value_clip=None))
    check_algorithm(options(advantage_estimator="gae", critic_lr=1e-4, n_samples_per_prompt=1))


def test_a_warmup_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="--critic-warmup-steps 10 is not less than --train-iters 10"):
        check_algorithm(options(advantage_estimator="gae", critic_warmup_steps=10))
