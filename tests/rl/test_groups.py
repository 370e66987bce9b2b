"""Every sample is trained exactly once, and its group's advantages see what the mode promises."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.rl.exchange import SampleSummary
from rhymemeg.rl.groups import GroupBuffer, GroupMode
from rhymemeg.rollout.samples import SampleId

N = 3


def summary(step: int, prompt: int, index: int, holder: int = 0) -> SampleSummary:
    return SampleSummary(SampleId(step, prompt, index), holder, 5, 7, float(index), False, step)


@st.composite
def windows(draw: st.DrawFn) -> list[list[SampleSummary]]:
    """Steps of four prompts whose samples end in the window of their step or in the next; a prompt may come in any step."""
    steps = draw(st.integers(1, 4))
    result: list[list[SampleSummary]] = [[] for _ in range(steps + 1)]
    for step in range(steps):
        for prompt in range(4):
            for index in range(N):
                late = draw(st.booleans())
                result[step + late].append(summary(step, prompt, index))
    return [draw(st.permutations(window)) for window in result]


@given(windows(), st.sampled_from(["complete", "available"]), st.integers(0, 4))
def test_every_sample_once(given_windows: list[list[SampleSummary]], mode: GroupMode, restart: int) -> None:
    buffer, trained = GroupBuffer(N, mode), []
    for w, window in enumerate(given_windows):
        if w == restart:  # as from a checkpoint, on other ranks
            state, buffer = json.loads(json.dumps(buffer.state())), GroupBuffer(N, mode)
            buffer.restore(state, {})
        ready, siblings = buffer.add(window)
        assert ready == sorted(ready)
        ids = {s.sample_id for s in ready}
        assert len(ids) == len(ready) and not ids & {s.sample_id for s in siblings}
        for key in {(i.step, i.prompt_id) for i in ids}:
            members = sum((s.sample_id.step, s.sample_id.prompt_id) == key for s in (*ready, *siblings))
            assert members == N if mode == "complete" else members <= N
        if mode == "complete":
            assert not siblings
        else:
            assert ids == {s.sample_id for s in window}
        trained += ready
    everything = [s.sample_id for window in given_windows for s in window]
    assert sorted(s.sample_id for s in trained) == sorted(everything)
    assert buffer.waiting == 0


def test_a_late_sample_meets_its_siblings() -> None:
    early, late = [summary(0, 7, 0), summary(0, 7, 1)], summary(0, 7, 2)
    waits = GroupBuffer(N)
    assert waits.add(early) == ([], []) and waits.waiting == 2
    assert waits.add([late]) == ([*early, late], [])
    goes = GroupBuffer(N, "available")
    assert goes.add(early) == (early, []) and goes.waiting == 0
    assert goes.add([late]) == ([late], early)


def test_restored_summaries_know_who_holds_the_tokens() -> None:
    before = GroupBuffer(N)
    before.add([summary(0, 7, 0, holder=3), summary(0, 7, 1, holder=5)])
    after = GroupBuffer(N)
    after.restore(before.state(), {SampleId(0, 7, 0): 1})
    ready, _ = after.add([summary(0, 7, 2)])
    assert [s.holder for s in ready] == [1, -1, 0]
