"""Plans: every sample once, the same on every rank, balanced, and what is refused."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.errors import ConfigError
from rhymemeg.histopipe.cost import A100_7B
from rhymemeg.histopipe.explain import explain
from rhymemeg.histopipe.plan import PlanRequest, Requests
from rhymemeg.histopipe.planner import max_unfinished, plan
from rhymemeg.histopipe.policies.base import splitmix64
from rhymemeg.rollout.samples import SampleId
from tests.histopipe.strategies import POLICIES, plan_requests

NAN = float("nan")


def started(decided):
    """All that the plan starts, over all engines."""
    parts = range(1 if decided.shared else decided.num_engines)
    new = [s for e in parts for s in decided.queue_of(e)]
    return new, [s for e in range(decided.num_engines) for s in decided.resumed_of(e).sample_ids()]


@given(plan_requests())
def test_every_sample_exactly_once(request):
    decided = plan(request)
    new, resumed = started(decided)
    assert Counter(resumed) == Counter(request.resumed.sample_ids())
    done = {(int(p), int(s)) for p, s in request.finished_early}
    own = {(s.prompt_id, s.sample_index) for s in resumed if s.step == request.step}
    everything = {(int(p), s) for p in request.prompt_ids for s in range(request.samples_per_prompt)}
    assert Counter((s.prompt_id, s.sample_index) for s in new) == Counter(everything - done - own)


@given(plan_requests(), st.randoms(use_true_random=False))
def test_same_bytes_under_permutation_of_the_input(request, random):
    def order(n):
        return np.array(random.sample(range(n), n), np.intp)

    p, following = order(len(request.prompt_ids)), order(len(request.next_prompt_ids))
    permuted = replace(
        request,
        prompt_ids=request.prompt_ids[p],
        history=request.history[p][:, order(request.history.shape[1])],
        resumed=request.resumed.take(order(len(request.resumed))),
        finished_early=request.finished_early[order(len(request.finished_early))],
        next_prompt_ids=request.next_prompt_ids[following],
        next_history=request.next_history[following],
    )
    assert plan(permuted).to_bytes() == plan(request).to_bytes()


@given(plan_requests())
def test_resumed_responses_keep_their_engine_if_they_are_to(request):
    decided = plan(replace(request, keep_place=True))
    at = dict(zip(request.resumed.sample_ids(), request.resumed.engine.tolist()))
    for engine in range(request.num_engines):
        for sample in decided.resumed_of(engine).sample_ids():
            assert at[sample] == engine or not 0 <= at[sample] < request.num_engines
    spread = plan(replace(request, keep_place=False))
    assert np.ptp(np.diff(spread.resumed_offsets)) <= 1


@given(plan_requests())
def test_early_samples_are_of_the_next_step_and_no_more_than_allowed(request):
    decided = plan(request)
    parts = range(1 if decided.shared else decided.num_engines)
    early = [s for e in parts for s in decided.early_of(e)]
    assert (
        len(set(early)) == len(early) <= request.early_share * len(request.next_prompt_ids) * request.samples_per_prompt
    )
    assert {s.step for s in early} <= {request.step + 1}
    assert {s.prompt_id for s in early} <= set(request.next_prompt_ids.tolist())


def test_the_shortest_with_a_history_start_early():
    following = {"next_prompt_ids": np.arange(10, 16), "next_history": np.array([[9.0], [NAN], [3], [5], [NAN], [7]])}
    decided = plan(request_of(early_share=0.5, **following))
    early = [s for e in range(4) for s in decided.early_of(e)]
    assert Counter(s.prompt_id for s in early) == {12: 2, 13: 2, 15: 2}
    unknown = following | {"next_history": np.full((6, 1), NAN)}
    assert len(plan(request_of(early_share=0.5, **unknown)).early) == 0
    assert len(plan(request_of(early_share=1.0, **unknown)).early) == 12


@given(plan_requests())
def test_even_counts_for_random_and_complement(request):
    for policy in ("random", "complement"):
        counts = np.diff(plan(replace(request, policy=policy, layout="spread")).queue.offsets)
        assert np.ptp(counts) <= 1


@given(plan_requests(resumed=False))
def test_groups_stay_together_with_layout_group(request):
    decided = plan(replace(request, policy="complement", layout="group"))
    homes = {}
    for engine in range(request.num_engines):
        for sample in decided.queue_of(engine):
            assert homes.setdefault(sample.prompt_id, engine) == engine


@given(plan_requests())
def test_engines_start_their_longest_first(request):
    for policy in ("complement", "pull"):
        decided = plan(replace(request, policy=policy))
        for part in range(1 if decided.shared else request.num_engines):
            lengths = decided.prediction.mean[decided.queue.part(part)[0]]
            assert (np.diff(lengths) <= 0).all()


@given(plan_requests())
def test_explanations_name_every_engine(request):
    text = explain(plan(request), request)
    if request.policy != "pull":
        assert all(f"engine {e}:" in text for e in range(request.num_engines))
    assert plan(request).digest in text and "nan" not in text.lower()


def by_hand(lengths, n, engines, carried, slots, cost):
    """`complement` with layout spread, one sample at a time: the reference for the vectorised deal."""
    load, result = list(carried), [[] for _ in range(engines)]
    items = sorted(((-m, p, s) for p, m in enumerate(lengths) for s in range(n)))
    for first in range(0, len(items), engines):
        free = [float(cost.engine_seconds(w, c, slots)) for w, c in zip(load, carried)]
        order = sorted(range(engines), key=lambda e: (free[e], load[e], e))
        for (m, p, s), e in zip(items[first : first + engines], order):
            result[e].append((p, s))
            load[e] -= m
    return result


@given(st.data())
def test_complement_is_what_its_description_says(data):
    engines, n = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(1, 500), min_size=1, max_size=10))
    carried = data.draw(st.lists(st.integers(4, 400), min_size=engines, max_size=engines))
    ids = [SampleId(6, 100 + e, 0) for e in range(engines)]
    request = PlanRequest(
        step=7,
        num_engines=engines,
        slots=4,
        samples_per_prompt=n,
        prompt_ids=np.arange(len(lengths)),
        history=np.array(lengths, float)[:, None],
        max_response_len=1000,
        cost=A100_7B,
        # One carried response an engine: it has 100 tokens, and its reference says how many more come.
        resumed=Requests.of((s, e, 100, [100.0 + carried[e]]) for e, s in enumerate(ids)),
        keep_place=True,
    )
    decided = plan(request)
    expected = by_hand(lengths, n, engines, [float(c) for c in carried], 4, A100_7B)
    assert [[(s.prompt_id, s.sample_index) for s in decided.queue_of(e)] for e in range(engines)] == expected


def request_of(**changes):
    values = dict(
        step=1,
        num_engines=4,
        slots=8,
        samples_per_prompt=2,
        prompt_ids=np.arange(6),
        history=np.arange(1.0, 7.0)[:, None],
        max_response_len=100,
    )
    return PlanRequest(**(values | changes))


@pytest.mark.parametrize("policy", POLICIES)
def test_extreme_shapes(policy):
    for prompts, engines, slots in ((1, 8, 4), (6, 1, 1), (0, 3, 4), (3, 64, 1)):
        history = np.ones((prompts, 2))
        decided = plan(
            request_of(policy=policy, prompt_ids=np.arange(prompts), history=history, num_engines=engines, slots=slots)
        )
        assert len(decided.queue) == 2 * prompts


def test_new_long_work_goes_where_little_old_work_is_left():
    busy = Requests.of((SampleId(0, 50 + i, 0), 0, 10, [90.0]) for i in range(4))
    decided = plan(request_of(resumed=busy, keep_place=True))
    work = [sum(decided.prediction.mean[decided.queue.part(e)[0]]) for e in range(4)]
    assert work[0] == min(work) and decided.queue_of(0)[0].prompt_id != 5


def test_distrusted_history_is_not_used():
    from rhymemeg.histopipe.predict import Feedback

    blind = plan(request_of(history=np.full((6, 1), np.nan)))
    assert plan(request_of(feedback=Feedback(rank_correlation=-0.3))).to_bytes() == blind.to_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": "fastest"},
        {"layout": "diagonal"},
        {"num_engines": 0},
        {"slots": 0},
        {"carry_share": 1.5},
        {"early_share": math.nan},
    ],
)
def test_options_out_of_range_are_named(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        plan(request_of(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": np.array([1, 1, 2, 3, 4, 5])}, "twice"),
        ({"history": np.ones((5, 1))}, r"\[P, H\]"),
        ({"finished_early": np.array([[99, 0]])}, "not in the step"),
        ({"finished_early": np.array([[1, 2]])}, "sample index"),
        ({"finished_early": np.array([[1, 1], [1, 1]])}, "twice"),
        ({"resumed": Requests.of([(SampleId(0, 1, 1), 0, 5, [])] * 2)}, "twice"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(request_of(**changes))


@given(st.integers(0, 1000), st.integers(0, 100))
def test_max_unfinished_is_the_floor(samples, percent):
    assert max_unfinished(percent / 100, samples) == samples * percent // 100


def test_random_order_is_uniform_and_seeded():
    keys = splitmix64(np.arange(100_000), 1, 2)
    assert len(np.unique(keys)) == len(keys)
    assert abs((keys >> np.uint64(63)).mean() - 0.5) < 0.01
    a, b = (plan(request_of(policy="random", seed=seed)).queue.row.tolist() for seed in (1, 2))
    assert a != b


def test_thousands_of_engines_are_planned_in_bounded_memory():
    """65,536 prompts x 16 samples on 4,096 engines: well under 200 MB beyond the request."""
    import tracemalloc

    rng = np.random.default_rng(0)
    request = request_of(
        num_engines=4096,
        slots=256,
        samples_per_prompt=16,
        prompt_ids=rng.permutation(65536),
        history=np.exp(rng.normal(7, 1, (65536, 16))),
        max_response_len=16384,
        cost=A100_7B,
    )
    tracemalloc.start()
    decided = plan(request)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6
    assert np.diff(decided.queue.offsets).tolist() == [256] * 4096
    assert np.ptp(decided.engine_work) < 0.01 * decided.engine_work.mean()
