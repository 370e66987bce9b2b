"""Tier 1 and tier 2 of the paper's plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.histopipe.cost import A100_7B
from rhymemeg.histopipe.plan import PlanRequest
from rhymemeg.histopipe.planner import plan
from rhymemeg.histopipe.policies.paper import engines_of_groups


def seconds(work, length, k, slots):
    b, a = A100_7B.affine
    return b * max(length, work / k / slots) + a * work / k


def fits(slope, t0, work, length, slots, engines):
    """Fewest engines group by group, in plain Python."""
    position, n = 0, len(work)
    for g in range(n):
        for k in range(1, engines - position - (n - 1 - g) + 1):
            if seconds(work[g], length[g], k, slots) <= (t0 + slope * (position + (k - 1) / 2)) * (1 + 1e-12):
                position += k
                break
        else:
            return False
    return True


@given(st.data())
def test_tier_two_finds_the_flattest_targets_that_fit(data):
    n = data.draw(st.integers(1, 5))
    engines = data.draw(st.integers(n, 16))
    slots = data.draw(st.integers(1, 64))
    length = np.sort(data.draw(st.lists(st.floats(1, 8000), min_size=n, max_size=n)))
    work = length * data.draw(st.integers(1, 300))
    k, slope = engines_of_groups(A100_7B, work, length, slots, engines)
    assert k.sum() == engines and (k >= 1).all() and slope >= 0
    t0 = seconds(work[0], length[0], engines - n + 1, slots)
    assert fits(slope, t0, work, length, slots, engines)
    if slope > 1e-9:
        assert not fits(0.99 * slope, t0, work, length, slots, engines)


def request_of(step, prompts=32, engines=8, **changes):
    rng = np.random.default_rng(0)
    values = dict(
        step=step,
        num_engines=engines,
        slots=64,
        samples_per_prompt=4,
        prompt_ids=np.arange(prompts),
        history=np.exp(rng.normal(7, 1, (prompts, 4))),
        max_response_len=16384,
        policy="paper",
        cost=A100_7B,
        ranking_groups=4,
    )
    return PlanRequest(**(values | changes))


def test_groups_are_equal_in_count_and_ranked_by_median():
    decided = plan(request_of(1))
    groups = decided.groups
    assert np.bincount(groups.of_prompt).tolist() == [8] * 4
    medians = [decided.prediction.median[groups.of_prompt == g] for g in range(4)]
    assert all(a.max() <= b.min() for a, b in pairwise(medians))


def test_long_groups_get_more_engines_than_short_ones():
    k = plan(request_of(1, engines=16)).groups.engines
    assert k[0] < k[-1] and k.sum() == 16


def test_even_steps_mirror_the_engines():
    odd, even = plan(request_of(1)), plan(request_of(2))
    for e in range(8):
        assert [(s.prompt_id, s.sample_index) for s in odd.queue_of(e)] == [
            (s.prompt_id, s.sample_index) for s in even.queue_of(7 - e)
        ]


def test_fewer_prompts_than_engines_split_their_samples():
    counts = np.diff(plan(request_of(1, prompts=2, engines=8, two_tier=False)).queue.offsets)
    assert counts.sum() == 8 and (counts == 1).all()


def test_samples_that_started_early_do_not_move_the_others():
    whole = plan(request_of(1))
    gone = np.array([[p, s] for p in range(32) for s in (0, 2)])
    rest = plan(replace(request_of(1), finished_early=gone))
    for e in range(8):
        assert [s for s in whole.queue_of(e) if s.sample_index in (1, 3)] == rest.queue_of(e)
