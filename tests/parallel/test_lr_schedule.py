"""The learning-rate schedule, as its module states it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.config import OptimizerOptions
from rhymemeg.errors import ConfigError
from rhymemeg.parallel.lr_schedule import check_schedule, learning_rate


def test_warmup_then_constant() -> None:
    options = OptimizerOptions(lr=1.0, lr_warmup_iters=2)
    assert [learning_rate(options, k, 2, 10) for k in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_reaches_the_minimum_and_stays() -> None:
    options = OptimizerOptions(lr=1.0, min_lr=0.2, lr_decay_style="linear", lr_decay_iters=4)
    rates = [learning_rate(options, k, 1, 10) for k in range(6)]
    assert rates == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_is_half_way_in_the_middle() -> None:
    options = OptimizerOptions(lr=1.0, min_lr=0.5, lr_decay_style="cosine", lr_warmup_iters=2)
    assert learning_rate(options, 6, 1, 10) == pytest.approx(0.75)
    assert learning_rate(options, 10, 1, 10) == pytest.approx(0.5)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 5), st.integers(6, 20), st.integers(1, 4))
def test_rises_then_falls_within_bounds(style: str, warmup: int, iters: int, updates: int) -> None:
    options = OptimizerOptions(lr=2.0, min_lr=0.5, lr_decay_style=style, lr_warmup_iters=warmup)  # type: ignore[arg-type]
    rates = [learning_rate(options, k, updates, iters) for k in range(iters * updates + 3)]
    top = warmup * updates
    assert all(math.isfinite(r) and 0 < r <= 2.0 for r in rates)
    assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[top] == 2.0


def test_warmup_longer_than_the_decay_is_refused() -> None:
    with pytest.raises(ConfigError, match="--lr-warmup-iters 10 must be less than --train-iters 10"):
        check_schedule(OptimizerOptions(lr_warmup_iters=10, lr_decay_style="cosine"), 10)
    with pytest.raises(ConfigError, match="--lr-decay-iters 5"):
        check_schedule(OptimizerOptions(lr_warmup_iters=10, lr_decay_style="linear", lr_decay_iters=5), 100)
    check_schedule(OptimizerOptions(lr_warmup_iters=10), 5)
