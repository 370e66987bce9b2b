"""Which groups a step trains, how many prompts it asks for, and when it stops asking."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.rl.dynamic_sampling import GroupFilter, replacement_indices
from rhymemeg.rl.exchange import SampleSummary
from rhymemeg.rollout.samples import SampleId


def group(prompt_id: int, *rewards: float) -> list[SampleSummary]:
    return [SampleSummary(SampleId(4, prompt_id, k), 0, 3, 5, r, False, 4) for k, r in enumerate(rewards)]


def ids(summaries: list[SampleSummary]) -> list[int]:
    return sorted({s.sample_id.prompt_id for s in summaries})


def test_equal_groups_are_replaced_until_the_batch_is_full() -> None:
    groups = GroupFilter(target=3, max_rounds=4)
    groups.add([*group(1, 0, 0), *group(2, 0, 1), *group(3, 1, 1)])
    assert groups.wanted() == 3  # two are missing, one in three was kept: six would be needed, a batch is three
    groups.add([*group(4, 1, 0), *group(5, 0, 0), *group(6, 0, 0.5)])
    assert groups.wanted() == 0 and groups.shortage() == ""
    assert ids(groups.kept()) == [2, 4, 6] and len(groups.kept()) == 6
    assert groups.metrics() == {
        "dynamic_sampling/rounds": 2,
        "dynamic_sampling/sampled_groups": 6,
        "dynamic_sampling/kept_groups": 3,
        "dynamic_sampling/surplus_groups": 0,
        "dynamic_sampling/all_lowest": 2 / 6,
        "dynamic_sampling/all_highest": 1 / 6,
        "dynamic_sampling/full": 1,
    }


def test_the_limit_ends_the_step_with_what_there_is_and_says_so() -> None:
    groups = GroupFilter(target=2, max_rounds=2)
    groups.add([*group(1, 0, 1), *group(2, 1, 1)])
    assert groups.wanted() == 2
    groups.add([*group(3, 0, 0), *group(4, 0, 0)])
    assert groups.wanted() == 0 and ids(groups.kept()) == [1]
    assert groups.shortage() == "trains on 1 of 2 groups: the others of 4 sampled in 2 rollout(s) have equal rewards"


def test_nothing_that_teaches_is_no_error() -> None:
    groups = GroupFilter(target=2, max_rounds=1)
    groups.add([*group(1, 1, 1), *group(2, 1, 1)])
    assert groups.wanted() == 0 and groups.kept() == [] and "trains on nothing" in groups.shortage()
    assert groups.metrics()["dynamic_sampling/all_highest"] == 1


def test_surplus_groups_are_dropped() -> None:
    groups = GroupFilter(target=1, max_rounds=3)
    groups.add([*group(2, 0, 1), *group(1, 1, 0)])
    assert ids(groups.kept()) == [1] and groups.metrics()["dynamic_sampling/surplus_groups"] == 1


@given(
    target=st.integers(1, 6),
    rounds=st.integers(1, 5),
    data=st.lists(st.lists(st.tuples(*[st.integers(0, 2)] * 2), min_size=1, max_size=8), min_size=5, max_size=5),
)
def test_never_too_many_groups_or_rounds(target: int, rounds: int, data: list[list[tuple[int, int]]]) -> None:
    groups, number = GroupFilter(target, rounds), 0
    for rewards in data:
        groups.add([s for k, pair in enumerate(rewards) for s in group(number + k, *pair)])
        number += len(rewards)
        wanted = groups.wanted()
        assert 0 <= wanted <= target
        if not wanted:
            break
    assert groups.rounds <= rounds
    kept = groups.kept()
    assert len(ids(kept)) <= target
    assert bool(groups.shortage()) == (len(ids(kept)) < target)
    assert all(len({s.reward for s in kept if s.sample_id.prompt_id == p}) > 1 for p in ids(kept))


@given(count=st.integers(1, 40), wanted=st.integers(1, 10), step=st.integers(0, 5), data=st.data())
def test_replacements_are_new_and_repeatable(count: int, wanted: int, step: int, data: st.DataObject) -> None:
    used = data.draw(st.sets(st.integers(0, count - 1)))
    got = replacement_indices(7, step, 1, wanted, count, used)
    assert got == replacement_indices(7, step, 1, wanted, count, sorted(used))
    assert len(set(got)) == len(got) == min(wanted, count - len(used)) and not used & set(got)


def test_rounds_and_steps_draw_differently() -> None:
    draws = {tuple(replacement_indices(7, s, r, 5, 1000, ())) for s in range(3) for r in (1, 2)}
    assert len(draws) == 6
