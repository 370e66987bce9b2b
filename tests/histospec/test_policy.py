"""Draft lengths, branch weights, budgets and the cost model against their definitions."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymemeg.errors import ConfigError
from rhymemeg.histospec.branch import document_weights, live_weight
from rhymemeg.histospec.budget import Remaining, token_weights
from rhymemeg.histospec.cost_model import CostModel
from rhymemeg.histospec.index import AcceptanceModel
from rhymemeg.histospec.policy import LengthPolicy, Proposals, make_policy

SLOT = np.array([0], np.int32)


def windows(policy: LengthPolicy, outcomes: list[tuple[int, int]]) -> list[int]:
    """Lengths that a request may draft, first and after each (drafted, accepted)."""
    policy.start(0, 0)
    lengths = [int(policy.limits(SLOT, np.array([1000]), 1)[0])]
    for drafted, accepted in outcomes:
        policy.observe(SLOT, np.array([drafted]), np.array([accepted]))
        lengths.append(int(policy.limits(SLOT, np.array([1000]), 1)[0]))
    return lengths


def test_paper_window_adds_two_and_resets() -> None:
    policy = make_policy("paper", CostModel.built_in("gpu"))
    assert windows(policy, [(2, 2), (4, 4), (3, 3), (0, 0), (8, 7), (2, 0)]) == [2, 4, 6, 8, 8, 2, 2]
    assert windows(policy, [(n, n) for n in range(2, 40)])[-1] == 32
    assert (policy.match.min_match, policy.match.max_match) == (3, 7)


def test_published_window_doubles_and_halves() -> None:
    policy = make_policy("published", CostModel.built_in("gpu"))
    assert windows(policy, [(2, 2), (4, 4), (8, 8), (16, 16), (16, 3), (8, 0), (4, 0), (2, 0)]) == [
        2,
        4,
        8,
        16,
        16,
        8,
        4,
        2,
        2,
    ]


def test_room_and_fixed_length_bound_drafts() -> None:
    policy = make_policy("fixed:6", CostModel.built_in("gpu"))
    assert policy.limits(np.array([0, 1], np.int32), np.array([3, 9]), 2).tolist() == [3, 6]
    for name in ("fixed:0", "fixed:x", "fixed:128", "adaptive", "fixed"):
        with pytest.raises(ConfigError, match="known are goodput, paper, published and fixed:K"):
            make_policy(name, CostModel.built_in("gpu"))


@st.composite
def proposals(draw: st.DrawFn) -> Proposals:
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    shares = [draw(st.lists(st.sampled_from([1.0, 0.75, 0.5]), min_size=n, max_size=n)) for n in lengths]
    return Proposals(
        np.cumsum([0, *lengths]),
        np.array([draw(st.integers(1, 40)) if n else 0 for n in lengths], np.int32),
        np.array([draw(st.integers(1, 16)) if n else 0 for n in lengths], np.int32),
        np.array([p for row in shares for p in np.cumprod(row)], np.float32),
    )


@settings(max_examples=150)
@given(proposals(), st.data())
def test_goodput_is_the_best_of_all_choices(proposal: Proposals, data: st.DataObject) -> None:
    """Tokens per second of the chosen lengths equal the best over every combination of lengths."""
    rows = len(proposal.matches)
    total = int(proposal.offsets[-1])
    model = AcceptanceModel()
    slots = np.arange(rows, dtype=np.int32)
    for slot in slots.tolist():
        model.start(slot, slot % 2)
    arrays = (slots, proposal.offsets, proposal.matches, proposal.occurrences, proposal.probabilities)
    weights = np.array(data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=rows, max_size=rows)))
    times = 1 + np.cumsum([0.0, *data.draw(st.lists(st.floats(0, 0.6), min_size=total, max_size=total))])
    survival = model.survival(*arrays)

    def rate(lengths: tuple[int, ...]) -> float:
        gain = weights.sum() + sum(
            weights[i] * survival[proposal.offsets[i] : proposal.offsets[i] + n].sum() for i, n in enumerate(lengths)
        )
        return float(gain / times[sum(lengths)])

    chosen = tuple(model.choose(*arrays, weights=weights, base=weights.sum(), times=times).tolist())
    best = max(rate(lengths) for lengths in itertools.product(*(range(n + 1) for n in proposal.lengths())))
    assert rate(chosen) == pytest.approx(best, rel=1e-12)


def test_acceptance_is_learnt_from_what_was_verified() -> None:
    """A class of tokens that is always accepted, and one never, move towards 1 and 0; a bad request lowers its own odds."""
    model = AcceptanceModel()
    for slot in range(3):
        model.start(slot, slot)
    row = (np.array([0, 2], np.int64), np.array([20], np.int32), np.array([1], np.int32), np.ones(2, np.float32))
    before = model.survival(SLOT, *row)
    for slot, accepted in ((0, 2), (1, 0)) * 30:
        slots = np.array([slot], np.int32)
        model.choose(slots, *row, weights=[1.0], base=1.0, times=[1.0, 1.0, 1.0])
        model.observe(slots, [2], [accepted])
    good, bad, fresh = (model.survival(np.array([slot], np.int32), *row) for slot in range(3))
    assert (good > fresh).all() and (fresh > bad).all()
    assert good[1] > before[1] and bad[0] < before[0]
    assert ((good > 0) & (good < 1)).all()
    model.start(1, 7)
    assert (model.survival(np.array([1], np.int32), *row) == fresh).all(), (
        "a new request of another prompt starts afresh"
    )


def test_goodput_stops_where_drafts_cannot_pay_and_grows_in_the_tail() -> None:
    """The same proposals: many tokens with one request running, none where every query token costs a whole step."""
    free = CostModel([1, 64], [1, 32], [[1.0, 1.01], [1.0, 1.01]])
    dear = CostModel([1, 64], [1, 32], [[1.0, 32.0], [1.0, 32.0]])
    proposal = Proposals(np.array([0, 16]), np.array([9], np.int32), np.array([3], np.int32), np.ones(16, np.float32))
    for cost, expected in ((free, 16), (dear, 0)):
        policy = make_policy("goodput", cost)
        policy.start(0, 0)
        assert policy.choose(SLOT, proposal, 1, None).tolist() == [expected]


def test_goodput_counts_the_time_of_looking_for_drafts() -> None:
    """A draft that would pay a little, if looking for it took no time."""
    proposal = Proposals(np.array([0, 2]), np.array([20], np.int32), np.array([8], np.int32), np.ones(2, np.float32))
    lengths = []
    for drafting in (0.0, 0.4):
        cost = CostModel([1], [1, 3], [[1.0, 2.2]])
        cost.observe_drafting(1, drafting)
        policy = make_policy("goodput", cost)
        policy.start(0, 0)
        lengths.append(int(policy.choose(SLOT, proposal, 1, None)[0]))
    assert lengths[0] > 0 and lengths[1] == 0


def test_goodput_rests_where_drafts_cannot_pay_and_tries_again() -> None:
    """Ever longer rests, each begun with a try; a shrunken batch ends one; a draft that pays starts over."""
    cost = CostModel([1, 64], [1, 32], [[1.0, 32.0], [1.0, 32.0]])
    policy = make_policy("goodput", cost)
    policy.start(0, 0)
    proposal = Proposals(np.array([0, 4]), np.array([9], np.int32), np.array([3], np.int32), np.ones(4, np.float32))
    tried, looked = [], []
    for step in range(1000):
        if not policy.rests(40):
            looked.append(step)
            if policy.choose(SLOT, proposal, 40, None)[0]:
                tried.append(step)
    assert len(looked) < 40 and 3 <= len(tried) <= 10
    gaps = np.diff(tried)
    assert (np.diff(gaps) >= 0).all() and gaps[-1] > 4 * gaps[0]
    assert policy.rests(40) and not policy.rests(35)


# ------------------------------------------------------------------------------------------------------------ cost model


def test_cost_model_interpolates_and_extrapolates() -> None:
    model = CostModel([10, 20], [1, 5], [[1.0, 3.0], [2.0, 8.0]])
    np.testing.assert_allclose(model.predict(10, [10, 30, 50]), [1.0, 2.0, 3.0])
    np.testing.assert_allclose(model.predict(15, [15, 75]), [1.5, 5.5])
    np.testing.assert_allclose(model.predict(10, 90), 5.0)  # beyond the last column with its slope
    np.testing.assert_allclose(model.predict(30, 30), 3.0)  # beyond the last row likewise
    np.testing.assert_allclose(model.predict(1, 1), 1.0)


def test_cost_model_learns_a_machine_from_wrong_figures() -> None:
    """After observing another machine, predictions at the observed sizes are within 10 % of it."""

    def truth(requests: int, queries: int) -> float:
        return 0.010 + 0.0002 * requests + 0.0005 * (queries - requests)

    model = CostModel.built_in("gpu")
    rng = np.random.default_rng(0)
    for _ in range(600):
        requests = int(rng.choice([8, 16, 32]))
        queries = requests * int(rng.choice([1, 1, 4, 8]))
        model.observe(requests, queries, truth(requests, queries) * float(rng.lognormal(0, 0.05)))
    for requests in (8, 16, 32):
        for each in (1, 4, 8):
            assert model.predict(requests, requests * each) == pytest.approx(truth(requests, requests * each), rel=0.1)
    model.observe(8, 8, float("nan"))
    model.observe(0, 0, 1.0)
    before = float(model.predict(8, 8))
    model.observe(8, 8, 1e6)
    assert float(model.predict(8, 8)) < 1.2 * before, "one hiccup teaches little"


def test_ranks_that_share_the_state_decide_alike() -> None:
    one, other = CostModel.built_in("gpu"), CostModel.built_in("gpu")
    for step in range(50):
        one.observe(16, 16 + step, 0.01 + step * 1e-4)
    other.set_state(json.loads(json.dumps(one.state())))
    queries = np.arange(16, 200)
    assert (one.predict(16, queries) == other.predict(16, queries)).all()


def test_profiles_are_saved_and_bad_ones_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    model = CostModel([1, 8], [1, 4], [[0.01, 0.02], [0.02, 0.05]])
    model.save(path, device="test")
    again = CostModel.load(path)
    np.testing.assert_allclose(again.predict(8, [8, 32]), [0.02, 0.05])
    data = json.loads(path.read_text())
    for change, message in (
        ({"seconds": [[1, 2]]}, "a row a batch size"),
        ({"batches": [8, 1]}, "must rise"),
        ({"queries_per_request": [2, 4]}, "queries_per_request at 1"),
        ({"seconds": [[1, 2], [0, 1]]}, "positive and finite"),
        ({"seconds": [[1, 2], [1]]}, "profile"),
        ({"format": "?"}, "not a profile of step times"),
    ):
        path.write_text(json.dumps(data | change))
        with pytest.raises(ConfigError, match=message):
            CostModel.load(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        CostModel.load(path)
    with pytest.raises(ConfigError, match="cannot read profile"):
        CostModel.load(tmp_path / "absent")


# --------------------------------------------------------------------------------------------------- branches and budgets


def test_branch_weights() -> None:
    rewards = np.array([1.0, -0.5], np.float32)
    assert document_weights("count", rewards, 0).tolist() == [1.0, 1.0]
    assert document_weights("paper", rewards, 0).tolist() == [1.0, -0.5]
    assert document_weights("recency", rewards, 2).tolist() == [0.25, 0.25]
    assert document_weights("reward_recency", rewards, 1).tolist() == [0.5, -0.25]
    assert live_weight("count", rewards) == 1.0 and live_weight("paper", rewards) == 0.25
    with pytest.raises(ConfigError, match="branch choice 'best'"):
        document_weights("best", rewards, 0)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=10), st.integers(0, 120))
def test_expected_remaining_length(lengths: list[int], generated: int) -> None:
    remaining = Remaining(lengths[:-1])
    remaining.add(lengths[-1])
    above = [length for length in lengths if length > generated]
    expected = sum(above) / len(above) - generated if above else generated / 4
    assert remaining.expect(generated) == pytest.approx(expected)


def test_token_weights_prefer_what_lasts_longest() -> None:
    assert np.isnan(Remaining().expect(3))
    weights = token_weights(np.array([200.0, 300.0, 400.0, np.nan]))
    assert weights[0] < weights[1] < weights[2] and weights.min() >= 0.5 and weights.max() <= 2.0
    assert weights[3] == pytest.approx(1.0)
    assert token_weights(np.array([np.nan, np.nan])).tolist() == [1.0, 1.0]
