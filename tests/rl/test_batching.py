"""The invariants of micro-batch planning, and collation against a loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.rl.batching import TrainSample, collate, plan_micro_batches, sample_cost


@given(
    lengths=st.lists(st.integers(2, 500), max_size=120),
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
    budget=st.integers(500, 4000),
)
def test_plan_invariants(lengths: list[int], ranks: int, budget: int) -> None:
    plan = plan_micro_batches(lengths, ranks, budget, hidden_size=64)
    assert len(plan) == ranks
    assert sorted(i for rank in plan for batch in rank for i in batch) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1, "every rank has the same number of micro-batches"
    for rank in plan:
        for batch in rank:
            assert len(batch) * max((lengths[i] for i in batch), default=0) <= budget
            # Four samples too long to share a micro-batch cannot be spread evenly over three ranks.
            assert batch or all(len(other) <= 1 for r in plan for other in r)
    assert plan == plan_micro_batches(lengths, ranks, budget, hidden_size=64)


def test_ranks_get_about_the_same_work() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(5, 1, 512), 4000).astype(int).tolist()
    plan = plan_micro_batches(lengths, 8, 8192, hidden_size=1024)
    work = [sum(sample_cost(lengths[i], 1024) for batch in rank for i in batch) for rank in plan]
    assert max(work) / (sum(work) / 8) < 1.15


def test_a_sample_over_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="600 tokens exceeds the budget of 500"):
        plan_micro_batches([3, 600], 1, 500, hidden_size=8)


def test_collate_aligns_labels_mask_and_fields() -> None:
    rng = np.random.default_rng(1)
    rows = []
    for prompt_len, response_len in ((3, 4), (5, 1), (1, 6)):
        tokens = rng.integers(1, 90, prompt_len + response_len)
        rows.append(
            TrainSample(
                tokens, prompt_len, np.ones(response_len, np.float32), {"a": rng.normal(size=response_len).astype("f4")}
            )
        )
    batch = collate(rows, ["a"])
    assert batch.shape == (3, 6)
    for i, row in enumerate(rows):
        for t in range(batch.shape[1]):
            inside = t + 1 < len(row.tokens)
            assert batch.labels[i, t] == (row.tokens[t + 1] if inside else 0)
            assert batch.tokens[i, t] == (row.tokens[t] if inside else 0)
            k = t + 1 - row.prompt_len  # index of the response token that is the label here
            assert batch.loss_mask[i, t] == float(inside and k >= 0)
            expected = float(row.fields["a"][k]) if inside and k >= 0 else 0.0
            assert batch.fields["a"][i, t].item() == pytest.approx(expected)


def test_no_rows_give_a_batch_outside_the_loss() -> None:
    batch = collate([], ["a"])
    assert batch.shape == (1, 1) and not batch.loss_mask.any() and torch.equal(batch.fields["a"], torch.zeros(1, 1))
