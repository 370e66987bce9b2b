"""Predictions: what counts as history, what stands in for it, and what is learned from past windows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.histopipe.predict import CarryControl, Feedback, history_matrix, predict, rank_correlation, remaining

NAN = float("nan")


def test_history_becomes_mean_median_longest():
    p = predict([[10, 30, 20], [5, NAN, 7]], cap=100)
    assert p.mean.tolist() == [20, 6] and p.median.tolist() == [20, 6] and p.longest.tolist() == [30, 7]
    assert p.known.all()


def test_growth_is_applied_and_cut_at_the_cap():
    assert predict([[10, 60]], cap=100, growth=2.0).longest.tolist() == [100]
    assert predict([[10.0, 60.0]], cap=100, growth=2.0).mean.tolist() == [60]


def test_unknown_prompts_get_the_median_of_the_step():
    p = predict([[10, 10], [NAN, NAN], [30, 30], [50, 50]], cap=100)
    assert p.mean.tolist() == [10, 30, 30, 50] and p.known.tolist() == [True, False, True, True]


@pytest.mark.parametrize("bad", [NAN, 0.0, -3.0, math.inf, -math.inf])
def test_what_is_not_a_length_is_missing(bad):
    assert predict([[bad, 8.0]], cap=100).mean.tolist() == [8]
    assert not predict([[bad, bad]], cap=100).known.any()


def test_without_any_history_or_trust_all_prompts_are_alike():
    for p in (predict(np.zeros((3, 0)), 100), predict([[NAN]] * 3, 100), predict([[1], [2], [90]], 100, trust=False)):
        assert len(set(p.mean.tolist())) == 1 and not p.known.any()
    assert predict(np.zeros((0, 4)), 100).mean.shape == (0,)


@given(st.lists(st.lists(st.floats(allow_nan=True), min_size=3, max_size=3), min_size=1, max_size=6), st.randoms())
def test_predictions_are_finite_within_the_cap_and_do_not_depend_on_column_order(rows, random):
    p = predict(rows, cap=50)
    for column in (p.mean, p.median, p.longest):
        assert ((column >= 1) & (column <= 50)).all()
    assert (p.mean <= p.longest + 1e-9).all()
    shuffled = [random.sample(row, len(row)) for row in rows]
    assert predict(shuffled, cap=50).mean.tobytes() == p.mean.tobytes()


def test_history_matrix_pads_with_nan():
    matrix = history_matrix([3, 1, 2], {1: [5, 6], 3: [7]})
    assert np.array_equal(matrix, [[7, NAN], [5, 6], [NAN, NAN]], equal_nan=True)
    assert history_matrix([1], {}).shape == (1, 0)


def test_remaining_is_the_mean_of_longer_references_minus_what_is_there():
    rest = remaining(np.array([10, 10, 40, 99]), [[5, 20], [NAN, 8], [60, 80], [100, 100]], cap=100)
    assert rest.tolist() == [10, 2.5, 30, 1]  # none longer: a quarter of what is there
    assert remaining(np.zeros(0, np.int64), np.zeros((0, 3)), 100).shape == (0,)


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(allow_nan=True)), min_size=1))
def test_remaining_is_between_one_and_what_the_cap_leaves(entries):
    tokens = np.array([t for t, _ in entries])
    rest = remaining(tokens, [[r] for _, r in entries], cap=100)
    assert ((rest >= 1) & (rest <= np.maximum(100 - tokens, 1))).all()


def test_rank_correlation_is_spearmans():
    assert rank_correlation([1, 2, 3], [10, 20, 90]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: covariance 4.5, variances 4.5 and 5
    assert rank_correlation([1, 2, 2, 5], [1, 3, 2, 9]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(rank_correlation([1, 1], [1, 2])) and math.isnan(rank_correlation([], []))


def test_feedback_learns_growth_and_trust():
    f = Feedback().after([10, 20, 30], [20, 40, 60])
    assert f.growth == pytest.approx(1.5) and f.rank_correlation == pytest.approx(1) and f.trusted
    assert Feedback().trusted, "before the first window history is trusted"
    assert not Feedback().after([10, 20, 30], [60, 40, 20]).trusted
    assert f.after([NAN, NAN], [1, 2]) is f
    assert 0.25 <= Feedback().after([1], [10**9]).growth <= 4


@given(st.builds(Feedback, *(st.floats(0.3, 3) | st.just(NAN) for _ in range(3))))
def test_feedback_survives_json(feedback):
    assert repr(Feedback.from_dict(feedback.as_dict())) == repr(feedback)


def test_carry_share_exceeds_the_share_of_capped_responses_up_to_the_limit():
    control = CarryControl(limit=0.1).after([100] * 3 + [5] * 97, cap=100)
    assert control.capped < control.share <= 0.1
    assert CarryControl(limit=0.01).after([100], cap=100).share == 0.01
    assert CarryControl(limit=0.0).after([100], cap=100).share == 0.0, "strict stays strict"
