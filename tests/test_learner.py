"""The plan of a training phase, and that the gradient depends neither on the number of data-parallel ranks nor on that of
micro-batches, whatever the algorithm: a small model in float64, each rank's share one after the other. The same on real
layouts of Megatron is in tests/parallel."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from rhymemeg.config import Config
from rhymemeg.learner import Learner, step_rewards, summarise_updates
from rhymemeg.rl.batching import MicroBatch
from rhymemeg.rl.credit import assign_credit
from rhymemeg.rl.exchange import SampleSummary
from rhymemeg.rl.objective import Objective
from rhymemeg.rollout.samples import Sample, SampleId
from tests.test_config import valid

VERSION, VOCAB = 3, 17


def make_samples(seed: int = 0) -> tuple[list[Sample], list[SampleSummary]]:
    """Four groups of four: equal rewards, truncated and empty responses, tokens of an older version, lengths from 0 to
    60."""
    rng = np.random.default_rng(seed)
    samples, summaries = [], []
    for prompt in range(4):
        for k in range(4):
            length = 0 if (prompt, k) == (1, 2) else int(rng.integers(40, 60))
            sample = Sample(
                SampleId(VERSION, prompt, k),
                tuple(rng.integers(1, VOCAB, 4).tolist()),
                rng.integers(1, VOCAB, length).tolist(),
                (-np.log(VOCAB) - rng.normal(size=length) / 4).tolist(),
                [VERSION - int(prompt == 2 and t < 5) for t in range(length)],
                "length" if k == 3 else "stop",
                reward=1.0 if prompt == 0 else float(rng.integers(0, 3)) / 2,
            )
            samples.append(sample)
            oldest = min(sample.versions, default=-1)
            assert sample.reward is not None
            summaries.append(SampleSummary(sample.sample_id, 0, 4, length, sample.reward, sample.truncated, oldest))
    return samples, summaries


class Model(torch.nn.Module):
    """Log-probabilities of the labels from the token before, and entropies."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.table = torch.nn.Parameter(torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64) / 4)

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        log_softmax = self.table[batch.tokens].log_softmax(-1)
        log_probs = log_softmax.gather(-1, batch.labels[..., None]).squeeze(-1)
        return log_probs, -(log_softmax.exp() * log_softmax).sum(-1)


def make_learner(config: Config, dp_size: int, dp_rank: int) -> Learner:
    runtime = SimpleNamespace(dp_size=dp_size, dp_rank=dp_rank, device="cpu")
    unused: Any = None
    arch: Any = SimpleNamespace(hidden_size=8)
    return Learner(config, arch, cast(Any, runtime), unused, unused, None)


def gradients(
    config: Config, dp_size: int, samples: list[Sample], summaries: list[SampleSummary]
) -> tuple[list[Tensor], int]:
    """The gradient of each optimizer step, summed over ranks and micro-batches, and the largest number of micro-batches
    that a rank has in a step."""
    received = {s.sample_id: s for s in samples}
    total: list[Tensor] = []
    most = 0
    for rank in range(dp_size):
        learner = make_learner(config, dp_size, rank)
        plan = learner.plan(summaries)
        batches = [learner._collate(mini, summaries, received, VERSION) for mini in plan]
        step, _ = step_rewards(config, summaries, [])
        batches, _ = assign_credit(config.algorithm, step, batches, [m.plan[rank] for m in plan], list)
        for number, (mini, parts) in enumerate(zip(plan, batches)):
            model = Model()
            objective = Objective(config.algorithm, mini.total_tokens)
            loss = torch.zeros((), dtype=torch.float64)
            for part in parts:
                log_probs, entropy = model(part)
                loss = loss + objective(log_probs, entropy, part)[0]
            loss.backward()
            assert model.table.grad is not None
            if rank == 0:
                total.append(torch.zeros_like(model.table.grad))
            total[number] += model.table.grad
            most = max(most, len(parts))
    return total, most


ALGORITHMS: list[dict[str, Any]] = [
    {"advantage_estimator": "grpo", "loss_agg_mode": "seq_mean_token_mean", "entropy_coef": 0.01},
    {"advantage_estimator": "dr_grpo", "loss_agg_mode": "dr_grpo"},
    {"loss_agg_mode": "token_mean", "overlong_buffer_len": 20, "overlong_filtering": True, "eps_clip_high": 0.28},
    {"policy_loss": "gspo", "loss_agg_mode": "seq_mean_token_mean", "old_log_probs": "engine", "num_minibatches": 2},
    {"advantage_estimator": "rloo", "policy_loss": "reinforce", "loss_agg_mode": "seq_mean_token_sum"},
    {"advantage_estimator": "reinforce_pp", "policy_loss": "cispo", "old_log_probs": "engine"},
    {"rollout_is": "sequence", "rollout_rs": "geometric", "rollout_rs_threshold": 50.0, "decoupled_ppo": True},
    {"rollout_is": "token", "rollout_is_bound": "icepop", "num_minibatches": 3},
]


@pytest.mark.parametrize("changes", ALGORITHMS, ids=lambda c: ",".join(map(str, c.values())))
def test_gradient_invariance(changes: dict[str, Any]) -> None:
    samples, summaries = make_samples()
    counts = set()
    expected: list[Tensor] | None = None
    for dp_size, budget in ((1, 4096), (1, 400), (1, 128), (2, 4096), (2, 128), (4, 4096), (4, 128)):
        config = valid(max_tokens_per_microbatch=budget, n_samples_per_prompt=4, **changes)
        config.check()
        got, most = gradients(config, dp_size, samples, summaries)
        counts.add(most)
        if expected is None:
            expected = got
            norms = [float(g.norm()) for g in got]
            assert min(norms) > 1e-5, norms
        for one, other in zip(got, expected, strict=True):
            assert (one - other).norm() <= 1e-5 * other.norm(), (dp_size, budget)
    assert min(counts) == 1 and max(counts) >= (4 if {"num_minibatches", "overlong_filtering"} & set(changes) else 8)


def test_all_truncated_under_filtering_trains_nothing() -> None:
    samples, summaries = make_samples()
    summaries = [replace(s, truncated=True) for s in summaries]
    config = valid(n_samples_per_prompt=4, overlong_filtering=True)
    (mini,) = make_learner(config, 2, 0).plan(summaries)
    assert mini.members == [] and mini.total_tokens == 0
    (total,), _ = gradients(config, 2, samples, summaries)
    assert not total.any()


def test_equal_rewards_train_nothing() -> None:
    samples, summaries = make_samples()
    one = [s for s in summaries if s.sample_id.prompt_id == 0]
    (total,), _ = gradients(valid(n_samples_per_prompt=4), 1, samples, one)
    assert not total.any()


def test_filtered_samples_count_for_their_group() -> None:
    _, summaries = make_samples()
    config = valid(n_samples_per_prompt=4, overlong_filtering=True, advantage_estimator="dr_grpo")
    step, _ = step_rewards(config, summaries, [])
    assert len(step.rewards) == 16
    (mini,) = make_learner(config, 1, 0).plan(summaries)
    assert len(mini.members) == 12 and all(not summaries[i].truncated for i in mini.members)
    assert sum(mini.weights[i] * summaries[i].response_len for i in mini.members) == pytest.approx(1.0)


def test_overlong_penalty_is_in_the_rewards_that_are_compared() -> None:
    _, summaries = make_samples()
    config = valid(overlong_buffer_len=32, overlong_penalty_factor=0.5)  # the longest response: 64 tokens
    step, metrics = step_rewards(config, summaries, [])
    expected = [s.reward - 0.5 * min(max((s.response_len - 32) / 32, 0), 1) for s in summaries]
    np.testing.assert_allclose(step.rewards, expected)
    assert metrics["reward/overlong_penalty"] == pytest.approx(
        np.mean(expected) - np.mean([s.reward for s in summaries])
    )


def test_numbers_of_a_phase() -> None:
    name, largest = "rollout_corr/kl", "training/rollout_probs_diff_max"
    updates = [{"actor/loss": float(i), name: float(i), largest: float(i)} for i in range(4)]
    assert summarise_updates(updates, 1) == {"actor/loss": 1.5, name: 0.0, largest: 0.0}
    assert summarise_updates(updates, 2) == {"actor/loss": 1.5, name: 0.5, largest: 1.0}
    assert summarise_updates([]) == {}
