"""The drafter driven as an engine drives it, on known responses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymemeg.histospec.cost_model import CostModel
from rhymemeg.histospec.drafter import Drafter, DrafterOptions, Rows
from rhymemeg.histospec.history import HistoryBuffer
from rhymemeg.histospec.metrics import Counters, Watchdog

PROMPT = [90, 91, 92]


def make(policy: str = "fixed:4", history: HistoryBuffer | None = None, **options: Any) -> Drafter:
    return Drafter(DrafterOptions(policy=policy, **options), history, CostModel.built_in("gpu"))


def history_of(*responses: list[int], prompt: int = 5) -> HistoryBuffer:
    history = HistoryBuffer(100)
    history.record(prompt, PROMPT, responses, [1.0] * len(responses), step=0)
    return history


def rows(requests: dict[str, list[int]], new: list[list[int]], room: int = 100, **more: Any) -> Rows:
    """`requests`: response so far of each request, the new tokens included."""
    texts = [PROMPT + response for response in requests.values()]
    return Rows(
        request_ids=list(requests),
        new_tokens=new,
        lengths=[len(text) for text in texts],
        rooms=[room] * len(texts),
        prompt_id=lambda row: int(list(requests)[row].split("-")[1]),
        context=lambda row: (texts[row], len(PROMPT)),
        **more,
    )


def replay(drafter: Drafter, responses: dict[str, list[int]]) -> tuple[int, int, int, int]:
    """Generate all responses at once; (request-steps, with a draft, drafted, accepted), counted here."""
    done = dict.fromkeys(responses, 1)
    emitted = [response[:1] for response in responses.values()]
    steps = covered = drafted = accepted = 0
    while True:
        alive = [r for r in responses if done[r] <= len(responses[r]) and emitted[list(responses).index(r)]]
        if not alive:
            return steps, covered, drafted, accepted
        drafts = drafter.step(
            rows({r: responses[r][: done[r]] for r in alive}, [emitted[list(responses).index(r)] for r in alive])
        )
        emitted = [[] for _ in responses]
        for request_id, draft in zip(alive, drafts):
            left = responses[request_id][done[request_id] :]
            if not left:
                continue
            agree = 0
            while agree < min(len(draft), len(left)) and draft[agree] == left[agree]:
                agree += 1
            tokens = left[: agree + 1]
            steps += 1
            covered += bool(draft)
            drafted += len(draft)
            accepted += min(agree, len(tokens) - 1)
            emitted[list(responses).index(request_id)] = tokens
            done[request_id] += len(tokens)


@pytest.mark.parametrize("policy", ["paper", "published", "fixed:4", "goodput"])
def test_a_repeated_response_is_drafted_whole(policy: str) -> None:
    """The same response again takes fewer request-steps than tokens, and the metrics are those counted outside."""
    response = np.random.default_rng(0).permutation(90).tolist()
    drafter = make(policy, history_of(response))
    drafter.load({5: PROMPT})
    steps, covered, drafted, accepted = replay(drafter, {"1-5-0": response, "1-5-1-suffix": response})
    metrics = drafter.take_metrics()
    assert metrics["histospec/request_steps"] == steps < len(response)
    assert metrics["histospec/coverage"] == pytest.approx(covered / steps)
    assert metrics["histospec/drafted"] == drafted and metrics["histospec/accepted"] == accepted
    assert metrics["histospec/acceptance"] > 0.9
    assert metrics["histospec/tokens_per_request_step"] == pytest.approx(2 * (len(response) - 1) / steps)
    assert drafter.take_metrics()["histospec/request_steps"] == 0, "counters start again"


def test_drafts_start_with_the_first_token() -> None:
    """The prompt's tail precedes every response in the index, so even the first token finds a match of its length + 1."""
    drafter = make(history=history_of([1, 2, 3, 4], [7, 8, 9]))
    drafter.load({5: PROMPT})
    assert drafter.step(rows({"1-5-0": [1], "1-5-1": [7]}, [[1], [7]])) == [[2, 3, 4], [8, 9]]
    assert drafter.take_metrics()["histospec/match_length"] == 4


def test_siblings_serve_where_there_is_no_history() -> None:
    drafter = make()
    requests = {"1-6-0": [1, 2, 3, 4, 5], "1-6-1": [1, 2]}
    assert drafter.step(rows(requests, [[1, 2, 3, 4, 5], [1, 2]])) == [[], [3, 4, 5]]
    alone = make(siblings=False)
    assert alone.step(rows(requests, [[1, 2, 3, 4, 5], [1, 2]])) == [[], []]


def test_another_prompts_history_is_not_used() -> None:
    history = history_of([1, 2, 3, 4])
    for prompt_id, prompt in ((6, PROMPT), (5, [90, 91, 93])):  # another id; the same id for another text
        drafter = make(history=history)
        drafter.load({prompt_id: prompt})
        assert drafter.step(rows({f"1-{prompt_id}-0": [1, 2]}, [[1, 2]])) == [[]]


def test_drafts_keep_to_the_room() -> None:
    drafter = make("fixed:8", history_of(list(range(1, 30))))
    drafter.load({5: PROMPT})
    requests = {"1-5-0": [1, 2]}
    for room, expected in ((3, 3), (0, 0), (-2, 0), (50, 8)):
        (draft,) = drafter.step(rows(requests, [[requests["1-5-0"][-1]]], room))
        assert len(draft) == expected
        requests = {"1-5-0": requests["1-5-0"] + [requests["1-5-0"][-1] + 1]}


def test_prefill_rows_get_no_draft_and_count_for_nothing() -> None:
    drafter = make(history=history_of([1, 2, 3]))
    assert drafter.step(rows({"1-5-0": [], "1-5-1": [1]}, [[], [1]])) == [[], [2, 3]]
    assert drafter.take_metrics()["histospec/request_steps"] == 0


def test_paused_and_resumed_requests_go_on() -> None:
    """A resumed request hands in its tokens as part of its prompt; a request whose tokens do not follow on is read anew."""
    drafter = make(history=history_of([1, 2, 3, 4, 5, 6]))
    drafter.load({5: PROMPT})
    drafter.step(rows({"1-5-0": [1]}, [[1]]))
    resumed = rows({"1-5-0-x": [1, 2, 3]}, [[3]])
    resumed.context = lambda row: (PROMPT + [1, 2, 3], len(PROMPT) + 2)
    assert drafter.step(resumed) == [[4, 5, 6]]
    assert drafter.step(rows({"1-5-0-x": [1, 2, 3, 4, 5]}, [[5]])) == [[6]], "one token was missed in between"
    assert drafter.step(rows({"1-5-0-x": [1, 2]}, [[2]])) == [[3, 4, 5, 6]], "and after a step back"


def test_scheduler_that_drops_a_draft_teaches_nothing_wrong() -> None:
    """What was not verified does not count as rejected."""
    drafter = make("paper", history_of(list(range(1, 30))))
    drafter.load({5: PROMPT})
    assert drafter.step(rows({"1-5-0": [1]}, [[1]])) == [[2, 3]]
    assert drafter.step(rows({"1-5-0": [1, 2]}, [[2]], scheduled=[0])) == [[3, 4]]
    metrics = drafter.take_metrics()
    assert metrics["histospec/drafted"] == 0 and metrics["histospec/request_steps"] == 1
    assert len(drafter.step(rows({"1-5-0": [1, 2, 3, 4, 5]}, [[3, 4, 5]], scheduled=[2]))[0]) == 4


def test_switched_off_it_only_answers() -> None:
    drafter = make(history=history_of([1, 2, 3]))
    drafter.enabled = False
    assert drafter.step(rows({"1-5-0": [1]}, [[1]])) == [[]]
    assert drafter.index.num_prompts == 0 and drafter.take_metrics()["histospec/draft_us_per_request"] == 0


def test_release_forgets_prompts_and_requests() -> None:
    drafter = make(history=history_of([1, 2, 3]))
    drafter.load({5: PROMPT, 6: PROMPT}, threads=2)
    drafter.step(rows({"1-5-0": [1], "1-6-0": [1]}, [[1], [1]]))
    drafter.finish("2-6-0", 6)
    drafter.finish("1-6-0", 99)
    assert drafter.index.num_open == 2, "no such request"
    drafter.finish("1-6-0", 6)
    assert drafter.index.num_open == 1
    drafter.release([6])
    assert drafter.index.num_prompts == 1
    drafter.release()
    assert drafter.index.num_prompts == 0 and drafter.index.num_open == 0
    assert drafter.step(rows({"1-5-0": [1, 2]}, [[2]])) == [[3]], "loaded again when it is met again"


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=30), min_size=1, max_size=4),
    st.sampled_from(["goodput", "paper"]),
)
def test_ranks_draft_alike(responses: list[list[int]], policy: str) -> None:
    """Two drafters given the same calls give the same drafts, whatever their clocks say."""
    history = history_of(*responses[:2])
    ranks = [make(policy, history) for _ in range(2)]
    requests: dict[str, list[int]] = {f"1-5-{i}": [] for i in range(len(responses))}
    for drafter in ranks:
        drafter.learner = CostModel.built_in("gpu")  # as in a tensor-parallel engine: measured apart from what decides
    for length in range(1, max(map(len, responses)) + 1):
        requests = {r: response[:length] for r, response in zip(requests, responses)}
        batch = {r: tokens for r, tokens in requests.items() if len(tokens) == length}
        drafts = [drafter.step(rows(batch, [[tokens[-1]] for tokens in batch.values()])) for drafter in ranks]
        assert drafts[0] == drafts[1]


def test_a_rest_is_counted_and_read_up_on_later() -> None:
    """While the policy rests nothing is asked of the drafter; what was emitted meanwhile is drafted from afterwards."""
    drafter = make(policy="goodput", history=history_of(list(range(40))))
    drafter.step(rows({"1-5-0": [0]}, [[0]]))
    drafter.policy._rest, drafter.policy._resting_at = 3, 1  # type: ignore[attr-defined]
    assert [drafter.rests([[token]]) for token in (1, 2, 3, 4)] == [True, True, True, False]
    draft = drafter.step(rows({"1-5-0": [0, 1, 2, 3, 4]}, [[4]]))[0]
    assert draft and draft == list(range(5, 5 + len(draft)))
    assert drafter.counters.request_steps == 3 and drafter.counters.tokens == 3
    drafter.enabled = False
    assert not drafter.rests([[5]])


def test_more_requests_than_a_prompt_may_have_documents() -> None:
    """The surplus gets no drafts, and nothing else happens to it."""
    from rhymemeg.histospec.index import MAX_DOCUMENTS

    drafter = make(history=history_of([1, 2, 3], [1, 2, 4]))
    last = {f"1-5-{i}": [1] for i in range(MAX_DOCUMENTS)}
    drafts = drafter.step(rows(last, [[1]] * MAX_DOCUMENTS))
    assert all(drafts[: MAX_DOCUMENTS - 2]) and drafts[-2:] == [[], []]
    assert drafter.step(rows({"1-5-0": [1, 2]}, [[2]]))[0]


def test_counters_add_up() -> None:
    a, b = Counters(steps=1, drafted=4, accepted=2), Counters(steps=2, drafted=6, accepted=5)
    assert (a + b).metrics()["histospec/acceptance"] == 0.7 and (a + b).steps == 3


def test_watchdog_warns_of_a_collapse_only() -> None:
    watchdog = Watchdog()
    for version, accepted in enumerate([600, 650, 580, 620]):
        assert watchdog.update(version, 1000, accepted) is None
    assert watchdog.update(4, 10, 0) is None, "too few tokens to judge"
    for version in (5, 6):
        warning = watchdog.update(version, 1000, 100)
        assert warning is not None and f"fell to 0.10 with weight version {version}" in warning
    assert watchdog.update(7, 1000, 600) is None
