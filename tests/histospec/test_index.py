"""The draft index against an exhaustive matcher, and what it refuses."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymemeg.histospec.index import MAX_DOCUMENT_LENGTH, DraftIndex, pack, unpack
from tests.histospec.brute_force import BruteForce

PROMPT = 3


def texts(alphabet: int, longest: int) -> st.SearchStrategy[list[int]]:
    """Token lists with many repeats: random ones, and runs of a short pattern."""
    token = st.integers(0, alphabet - 1)
    random = st.lists(token, max_size=longest)
    periodic = st.tuples(st.lists(token, min_size=1, max_size=3), st.integers(1, longest)).map(
        lambda pair: (pair[0] * pair[1])[: pair[1]]
    )
    return st.one_of(random, periodic, st.tuples(random, periodic).map(lambda pair: pair[0] + pair[1]))


WEIGHTS = st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0, 2.0])


def load(
    index: DraftIndex, context: list[int], responses: list[list[int]], weights: list[float], prompt: list[int]
) -> None:
    index.load(
        PROMPT,
        context=context,
        tokens=[token for response in responses for token in response],
        lengths=[len(response) for response in responses],
        weights=weights,
        prompt_tokens=prompt,
        prompt_weight=0.5,
    )


@settings(max_examples=300)
@given(st.data())
def test_equals_exhaustive_search(data: st.DataObject) -> None:
    alphabet = data.draw(st.sampled_from([1, 2, 4, 50]))
    context = data.draw(texts(alphabet, 5))
    responses = data.draw(st.lists(texts(alphabet, 150), max_size=4))
    weights = data.draw(st.lists(WEIGHTS, min_size=len(responses), max_size=len(responses)))
    prompt = data.draw(st.one_of(st.just([]), texts(alphabet, 20)))
    index, reference = DraftIndex(), BruteForce()
    load(index, context, responses, weights, prompt)
    if prompt:
        reference.add([], prompt, 0.5)
    for response, weight in zip(responses, weights):
        reference.add(context, response, weight)
    requests = []
    for _ in range(data.draw(st.integers(1, 3))):
        weight, searchable = data.draw(WEIGHTS), data.draw(st.booleans())
        requests.append(
            (
                index.open(PROMPT, context=context, weight=weight, searchable=searchable),
                reference.add(context, [], weight, searchable),
            )
        )
    for _ in range(data.draw(st.integers(1, 4))):
        new = [data.draw(texts(alphabet, 70)) for _ in requests]
        offsets = np.cumsum([0] + [len(tokens) for tokens in new])
        index.append([slot for slot, _ in requests], offsets, [token for tokens in new for token in tokens])
        for (_, document), tokens in zip(requests, new):
            reference.append(document, tokens)
        min_match = data.draw(st.integers(1, 4))
        options: dict[str, Any] = {
            "min_match": min_match,
            "max_match": data.draw(st.sampled_from([min_match, 7, 64])),
            "max_occurrences": data.draw(st.sampled_from([1, 3, 64, 100_000])),
            "min_path_probability": data.draw(st.sampled_from([0.0, 0.1, 0.5])),
        }
        if options["max_match"] < min_match:
            options["max_match"] = min_match
        limits = [data.draw(st.integers(0, 20)) for _ in requests]
        drafted, starts, matches, occurrences, probabilities = index.draft(
            [slot for slot, _ in requests], limits, **options
        )
        for row, (_, document) in enumerate(requests):
            span = slice(starts[row], starts[row + 1])
            expected, match, path, votes = reference.draft(document, limits[row], **options)
            assert drafted[span].tolist() == expected
            assert matches[row] == match and occurrences[row] == votes
            np.testing.assert_allclose(probabilities[span], path, rtol=1e-6)


@settings(max_examples=50)
@given(st.data())
def test_loaded_or_appended_is_the_same(data: st.DataObject) -> None:
    """Bulk load and token-by-token append of the same documents give the same drafts."""
    responses = data.draw(st.lists(texts(3, 200), min_size=1, max_size=3))
    loaded, appended = DraftIndex(), DraftIndex()
    load(loaded, [1], responses, [1.0] * len(responses), [])
    for response in responses:
        slot = appended.open(PROMPT, context=[1])
        for token in response:
            appended.append([slot], [0, 1], [token])
        appended.close(slot)
    query = data.draw(texts(3, 30))
    drafts = []
    for index in (loaded, appended):
        slot = index.open(PROMPT, context=[1])
        index.append([slot], [0, len(query)], query)
        drafts.append([part.tolist() for part in index.draft([slot], [16])])
    assert drafts[0] == drafts[1]
    assert loaded.num_tokens == appended.num_tokens


def test_siblings_are_drafted_from_as_they_grow() -> None:
    index = DraftIndex()
    first, second = (index.open(PROMPT, context=[9]) for _ in range(2))
    index.append([first, second], [0, 4, 6], [1, 2, 3, 4, 1, 2])
    tokens, offsets, matches, _, _ = index.draft([first, second], [8, 8])
    assert offsets.tolist() == [0, 0, 2] and tokens.tolist() == [3, 4] and matches.tolist() == [0, 3]
    index.append([first], [0, 1], [5])
    assert index.draft([second], [8])[0].tolist() == [3, 4, 5]
    index.close(first)
    assert index.draft([second], [8])[0].tolist() == [3, 4, 5], "a finished sibling stays"


def test_prompts_with_equal_text_stay_apart() -> None:
    index = DraftIndex()
    for prompt, answer in ((1, 10), (2, 20)):
        index.load(prompt, context=[5, 6], tokens=[7, answer], lengths=[2], weights=[1.0])
    slots = [index.open(prompt, context=[5, 6]) for prompt in (1, 2)]
    index.append(slots, [0, 1, 2], [7, 7])
    assert index.draft(slots, [4, 4])[0].tolist() == [10, 20]


def test_release_frees_the_prompt_only() -> None:
    index = DraftIndex()
    for prompt in (1, 2):
        index.load(prompt, context=[], tokens=[1, 2, 3], lengths=[3], weights=[1.0])
    slot, other = index.open(1, context=[]), index.open(2, context=[])
    index.release(1)
    index.release(1)
    assert 1 not in index and 2 in index and index.num_open == 1 and index.num_prompts == 1
    with pytest.raises(IndexError, match=f"slot {slot} is not open"):
        index.draft([slot], [4])
    index.append([other], [0, 1], [1])
    assert index.draft([other], [4])[0].tolist() == [2, 3]
    assert index.open(1, context=[]) == slot, "slots are reused"


def test_bad_calls_change_nothing() -> None:
    index = DraftIndex()
    slot = index.open(PROMPT, context=[])
    index.append([slot], [0, 3], [1, 2, 1])
    for error, call in (
        (ValueError, lambda: index.append([slot], [0, 2], [1, -1])),
        (ValueError, lambda: index.append([slot], [0, 1], [2**21 - 1])),
        (ValueError, lambda: index.append([slot], [0, 2], [1])),
        (ValueError, lambda: index.append([slot, slot], [0, 2, 1], [1])),
        (IndexError, lambda: index.append([slot, 99], [0, 1, 2], [1, 1])),
        (IndexError, lambda: index.draft([-1], [1])),
        (ValueError, lambda: index.draft([slot], [1], min_match=0)),
        (ValueError, lambda: index.load(PROMPT, context=[], tokens=[1], lengths=[1], weights=[1.0])),
        (ValueError, lambda: index.load(8, context=[], tokens=[1], lengths=[2], weights=[1.0])),
        (ValueError, lambda: index.load(8, context=[], tokens=[1], lengths=[1], weights=[])),
        (ValueError, lambda: index.append([slot], [0, MAX_DOCUMENT_LENGTH], np.zeros(MAX_DOCUMENT_LENGTH, np.int32))),
    ):
        with pytest.raises(error):
            call()
    assert index.num_tokens == 3 and index.num_prompts == 1
    assert index.draft([slot], [8])[0].tolist() == [2, 1]


def test_many_threads_do_not_disturb_each_other() -> None:
    """Loads from threads while the main thread appends and drafts; every draft is right."""
    index = DraftIndex()
    rng = np.random.default_rng(0)
    histories = {prompt: rng.integers(0, 50, 5000, dtype=np.int32) for prompt in range(1, 9)}
    threads = [
        threading.Thread(
            target=index.load, args=(p,), kwargs={"context": [], "tokens": t, "lengths": [len(t)], "weights": [1.0]}
        )
        for p, t in histories.items()
    ]
    slot = index.open(0, context=[])
    for thread in threads:
        thread.start()
    pattern = list(range(100, 120))
    for _ in range(50):
        index.append([slot], [0, 20], pattern)
    assert index.draft([slot], [5])[0].tolist() == pattern[:5]
    for thread in threads:
        thread.join(timeout=60)
    for prompt, history in histories.items():
        request = index.open(prompt, context=[])
        index.append([request], [0, 40], history[1000:1040])
        assert index.draft([request], [8])[0].tolist() == history[1040:1048].tolist()


@given(st.integers(1, 31), st.data())
def test_packing_is_exact(bits: int, data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, 2**bits))
    tokens = data.draw(st.lists(st.integers(0, min(limit, 2**31) - 1), max_size=40))
    packed = pack(tokens, bits, limit)
    assert len(packed) == (len(tokens) * bits + 7) // 8
    assert unpack(packed, len(tokens), bits).tolist() == tokens


def test_packing_refuses_ids_outside_the_vocabulary() -> None:
    for tokens in ([0, 100], [0, -1]):
        with pytest.raises(ValueError, match="at position 1 is outside the vocabulary of 100"):
            pack(tokens, 7, 100)
    with pytest.raises(ValueError, match="need more than"):
        unpack(b"ab", 3, 8)
