"""History buffer: what goes in comes out, budgets are kept by furthest next use, files and moved bytes are whole or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymemeg.errors import CheckpointError, DataError
from rhymemeg.histospec.history import HistoryBuffer

VOCAB = 300
RESPONSES = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=20), min_size=1, max_size=4)


def content(history: HistoryBuffer) -> dict[int, list[tuple]]:
    return {
        prompt: [
            (v.step, [r.tolist() for r in v.responses()], v.rewards.tolist(), v.versions.tolist())
            for v in history.get(prompt)
        ]
        for prompt in sorted(history)
    }


def filled(prompts: int = 5, *, budget: int | None = None, tokens: int = 100) -> HistoryBuffer:
    history = HistoryBuffer(VOCAB, tokenizer="t", budget_bytes=budget)
    for prompt in range(prompts):
        history.record(prompt, [prompt, 7], [[prompt] * tokens, [1, 2]], [0.5, -1.0], step=3, versions=[3, 2])
    return history


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), RESPONSES), max_size=12), st.integers(1, 3))
def test_keeps_the_last_visits(records: list, visits: int) -> None:
    history = HistoryBuffer(VOCAB, visits=visits)
    expected: dict[int, dict[int, list]] = {}
    for prompt, step, responses in records:
        history.record(prompt, [prompt], responses, [1.0] * len(responses), step=step)
        mine = expected.setdefault(prompt, {})
        mine[step] = mine.get(step, []) + responses  # a second record of a step adds to it
        for old in sorted(mine)[:-visits]:
            del mine[old]
    for prompt, steps in expected.items():
        got = [(v.step, [r.tolist() for r in v.responses()]) for v in history.get(prompt)]
        assert got == [(step, steps[step]) for step in sorted(steps, reverse=True)]
        assert history.lengths(prompt) == [len(r) for r in steps[max(steps)]]
    assert history.num_tokens == sum(len(r) for steps in expected.values() for rs in steps.values() for r in rs)
    again = HistoryBuffer(VOCAB, visits=visits)
    again.merge(history.export(compress=True))
    assert content(again) == content(history)


def test_storage_is_at_most_two_and_a_half_bytes_a_token() -> None:
    rng = np.random.default_rng(0)
    history = HistoryBuffer(151_936)
    for prompt in range(4):
        responses = [rng.integers(0, 151_936, 1000) for _ in range(8)]
        history.record(prompt, [1], responses, [1.0] * 8, step=0)
        assert [r.tolist() for r in history.get(prompt)[0].responses()] == [r.tolist() for r in responses]
    assert history.bytes_per_token <= 2.5


def test_prompts_with_equal_text_stay_apart_and_another_text_is_not_served() -> None:
    history = HistoryBuffer(VOCAB)
    history.record(1, [5, 6], [[10]], [1.0], step=0)
    history.record(2, [5, 6], [[20]], [1.0], step=0)
    assert [history.get(p, [5, 6])[0].tokens.tolist() for p in (1, 2)] == [[10], [20]]
    assert history.get(1, [5, 7]) == [], "the id means another prompt in this run"
    history.record(1, [5, 7], [[30]], [1.0], step=0)
    assert history.get(1)[0].tokens.tolist() == [30], "and its history is replaced"
    assert history.get(99) == [] and history.lengths(99) == []


@settings(max_examples=60)
@given(st.permutations(range(8)), st.integers(1, 8), st.lists(st.integers(0, 7), max_size=4))
def test_drops_what_is_used_furthest_in_the_future(order: list[int], kept: int, never: list[int]) -> None:
    order = [p for p in order if p not in never]
    history = filled(8)
    per_prompt = history.num_bytes // 8
    limited = HistoryBuffer(VOCAB, budget_bytes=per_prompt * kept)
    limited.set_next_uses(order + order[:2])
    for prompt in range(8):
        limited.record(prompt, [prompt, 7], [[prompt] * 100, [1, 2]], [0.5, -1.0], step=3)
        assert limited.num_bytes <= per_prompt * kept
    ranked = order + sorted(set(range(8)) - set(order))  # among those never used again the largest id goes first
    assert sorted(limited) == sorted(ranked[:kept])
    assert limited.evicted == 8 - kept


def test_new_order_and_smaller_budget_evict() -> None:
    history = filled(6)
    history.budget_bytes = history.num_bytes // 2
    history.set_next_uses([5, 4, 3])
    assert sorted(history) == [3, 4, 5]


def test_moves_between_engines() -> None:
    here, there = filled(4), HistoryBuffer(VOCAB, tokenizer="t")
    assert there.merge(here.export([1, 3, 77])) == 2
    assert content(there) == {p: content(here)[p] for p in (1, 3)}
    here.discard(1)
    assert 1 not in here and len(here) == 3


def test_saved_file_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    history, path = filled(), tmp_path / "history.bin"
    history.save(path)
    assert [f.name for f in tmp_path.iterdir()] == ["history.bin"]
    loaded = HistoryBuffer(VOCAB, tokenizer="t")
    assert loaded.load(path) == 5 and content(loaded) == content(history)
    data = path.read_bytes()
    for damaged in (data[:-1], data[:40], data[: len(data) // 2], b"", data[:100] + b"x" + data[101:]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"history\.bin"):
            loaded.load(path)
        assert content(loaded) == content(history), "nothing changed"
    with pytest.raises(CheckpointError, match="cannot read history"):
        loaded.load(tmp_path / "absent")


def test_refuses_history_of_another_tokenizer_or_vocabulary() -> None:
    data = filled().export()
    with pytest.raises(CheckpointError, match="vocabulary of 300 tokens, this run has 512"):
        HistoryBuffer(512, tokenizer="t").merge(data)
    with pytest.raises(CheckpointError, match="tokenizer 't', this run has 'u'"):
        HistoryBuffer(VOCAB, tokenizer="u").merge(data)


def test_bad_records_change_nothing() -> None:
    history = filled(1)
    before = content(history)
    for responses, rewards, message in (
        ([[1], [2, 300]], [1.0, 1.0], "response 1 has token id 300, outside the vocabulary of 300"),
        ([[], [-1]], [1.0, 1.0], "response 1 has token id -1"),
        ([[1]], [float("nan")], "reward of response 0 is not finite"),
        ([[1]], [1.0, 2.0], "1 responses but 2 rewards"),
        ([], [], "no responses"),
    ):
        with pytest.raises(DataError, match=message):
            history.record(0, [0, 7], responses, rewards, step=4)
    assert content(history) == before


def test_empty_response_is_kept_as_a_length() -> None:
    history = HistoryBuffer(VOCAB)
    history.record(0, [1], [[], [4, 5]], [0.0, 1.0], step=0)
    assert history.lengths(0) == [0, 2]
    assert [r.tolist() for r in history.get(0)[0].responses()] == [[], [4, 5]]
