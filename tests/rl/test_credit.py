"""From rewards to the advantages of tokens: against loops, and the same on any number of ranks and micro-batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rhymemeg.config import AlgorithmOptions
from rhymemeg.errors import TrainingError
from rhymemeg.rl.advantages import ADVANTAGES
from rhymemeg.rl.batching import MicroBatch, TrainSample, collate
from rhymemeg.rl.credit import StepRewards, assign_credit

RNG = np.random.default_rng(5)
LENGTHS = [3, 1, 4, 2, 5, 3]
GROUPS = [0, 0, 0, 1, 1, 1]
REWARDS = [1.0, 0.0, 0.5, 1.0, 1.0, -2.0]
FIELDS = {
    name: [RNG.normal(-1, 0.5, n).astype(np.float32) for n in LENGTHS]
    for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs", "values")
}
STEP = StepRewards(np.array(REWARDS), np.array(GROUPS), np.array(LENGTHS), [f"0-{g}-{i}" for i, g in enumerate(GROUPS)])


def micro_batch(indices: list[int], fields: list[str]) -> MicroBatch:
    rows = [
        TrainSample(np.arange(2 + LENGTHS[i]), 2, np.ones(LENGTHS[i], np.float32), {f: FIELDS[f][i] for f in fields})
        for i in indices
    ]
    return collate(rows, fields)


def credit(
    layout: list[list[list[list[int]]]], fields: tuple[str, ...] = tuple(FIELDS), **changes: Any
) -> dict[str, dict[int, list[float]]]:
    """Fields by name and sample. `layout` is [rank][optimizer step][micro-batch] -> samples; the ranks run one after the
    other, as often as the sums of all are needed."""
    options = AlgorithmOptions(**changes)
    known: list[list[float]] = []  # sums of all ranks, by call
    while True:
        calls: list[list[list[float]]] = []
        results = []
        for rank in layout:
            mine: list[list[float]] = []

            def reduce_sum(values: Any, mine: list[list[float]] = mine) -> list[float]:
                mine.append(list(values))
                return known[len(mine) - 1] if len(mine) <= len(known) else list(values)

            batches = [[micro_batch(b, list(fields)) for b in mini] for mini in rank]
            results.append(assign_credit(options, STEP, batches, rank, reduce_sum)[0])
            calls.append(mine)
        if len(known) == len(calls[0]):
            break
        k = len(known)
        known.append(np.sum([c[k] for c in calls], axis=0).tolist())
    out: dict[str, dict[int, list[float]]] = {"advantages": {}, "returns": {}}
    for rank, result in zip(layout, results):
        for mini, done in zip(rank, result):
            for indices, batch in zip(mini, done):
                for row, i in enumerate(indices):
                    for name in out:
                        if name in batch.fields:
                            inside = batch.loss_mask[row] > 0
                            out[name][i] = batch.fields[name][row][inside].tolist()
    return out


ONE = [[[[0, 1, 2, 3, 4, 5]]]]
LAYOUTS = [ONE, [[[[0, 1], [2]], [[4], [3, 5]]]], [[[[0, 4]], [[1]]], [[[5, 2]], [[3]]]], [[[[i]]] for i in range(6)]]
KL = [[float(o - r) for o, r in zip(*pair)] for pair in zip(FIELDS["old_log_probs"], FIELDS["ref_log_probs"])]  # k1


def whitened(rows: list[list[float]]) -> list[list[float]]:
    tokens = [x for row in rows for x in row]
    mean = sum(tokens) / len(tokens)
    std = math.sqrt(sum((x - mean) ** 2 for x in tokens) / len(tokens))
    return [[(x - mean) / (std + 1e-8) for x in row] for row in rows]


def assert_rows(got: dict[int, list[float]], expected: list[list[float]]) -> None:
    assert sorted(got) == list(range(len(expected)))
    for i, row in enumerate(expected):
        assert got[i] == pytest.approx(row, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_one_advantage_a_response(name: str, layout: Any) -> None:
    expected = ADVANTAGES[name](np.array(REWARDS), np.array(GROUPS), np.array(LENGTHS))
    got = credit(layout, ("rollout_log_probs",), advantage_estimator=name)
    assert_rows(got["advantages"], [[a] * n for a, n in zip(expected.tolist(), LENGTHS)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp_baseline"])
def test_kl_comes_off_the_reward_of_the_response(name: str, layout: Any) -> None:
    rewards = np.array([r - 0.3 * sum(kl) for r, kl in zip(REWARDS, KL)])
    expected = ADVANTAGES[name](rewards, np.array(GROUPS), np.array(LENGTHS))
    got = credit(layout, advantage_estimator=name, kl_coef=0.3)
    assert_rows(got["advantages"], [[a] * n for a, n in zip(expected.tolist(), LENGTHS)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reinforce_pp_with_kl_has_returns_of_tokens(layout: Any) -> None:
    rows = [
        [
            0.9 ** (len(kl) - 1 - t) * r - sum(0.9 ** (k - t) * 0.2 * kl[k] for k in range(t, len(kl)))
            for t in range(len(kl))
        ]
        for r, kl in zip(REWARDS, KL)
    ]
    got = credit(layout, advantage_estimator="reinforce_pp", kl_coef=0.2, gamma=0.9)
    assert_rows(got["advantages"], whitened(rows))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gae_of_a_critic(layout: Any) -> None:
    gamma, lam = 0.95, 0.8
    advantages, returns = [], []
    for r, kl, value in zip(REWARDS, KL, FIELDS["values"]):
        n, v = len(kl), [*map(float, value), 0.0]
        rewards = [-0.1 * kl[t] + (r if t == n - 1 else 0) for t in range(n)]
        delta = [rewards[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        advantages.append([sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)])
        returns.append([a + b for a, b in zip(advantages[-1], v)])
    got = credit(layout, advantage_estimator="gae", kl_coef=0.1, gamma=gamma, lam=lam)
    assert_rows(got["advantages"], whitened(advantages))
    assert_rows(got["returns"], returns)


def test_without_old_log_probs_the_kl_is_that_of_the_engine() -> None:
    kl = [float((a - b).sum()) for a, b in zip(FIELDS["rollout_log_probs"], FIELDS["ref_log_probs"])]
    expected = ADVANTAGES["dr_grpo"](np.array(REWARDS) - 0.3 * np.array(kl), np.array(GROUPS), np.array(LENGTHS))
    got = credit(ONE, ("ref_log_probs", "rollout_log_probs"), advantage_estimator="dr_grpo", kl_coef=0.3)
    assert_rows(got["advantages"], [[a] * n for a, n in zip(expected.tolist(), LENGTHS)])


def test_samples_that_are_not_trained_count_for_the_others() -> None:
    got = credit([[[[0, 2]]]], ("rollout_log_probs",), advantage_estimator="dr_grpo")
    assert got["advantages"][0] == pytest.approx([0.5] * 3) and sorted(got["advantages"]) == [0, 2]


def test_an_advantage_that_is_not_finite_names_the_sample() -> None:
    step = StepRewards(np.array([1.0, np.inf, 0.0]), np.array([0, 1, 0]), np.array([1, 1, 1]), ["a", "b", "c"])
    batch = [[collate([TrainSample(np.arange(3), 2, np.ones(1, np.float32), {})], [])]]
    with pytest.raises(TrainingError, match="the advantage of sample b is nan"), np.errstate(invalid="ignore"):
        assign_credit(AlgorithmOptions(), step, batch, [[[0]]], list)
    values = MicroBatch(
        batch[0][0].tokens, batch[0][0].labels, batch[0][0].loss_mask, {"values": torch.full((1, 2), torch.nan)}
    )
    with pytest.raises(TrainingError, match="the advantage of sample c is nan"):
        assign_credit(AlgorithmOptions(advantage_estimator="gae"), step, [[values]], [[[2]]], list)
