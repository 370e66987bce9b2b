"""Random plan requests for the property tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from rhymemeg.histopipe.cost import A100_7B, ENGINE_STEPS
from rhymemeg.histopipe.plan import PlanRequest, Requests
from rhymemeg.histopipe.predict import Feedback

POLICIES = ("random", "paper", "complement", "pull")
lengths = st.one_of(
    st.just(float("nan")), st.just(0.0), st.just(-1.0), st.just(float("inf")), st.just(4096.0), st.floats(1, 9000)
)


@st.composite
def plan_requests(draw: st.DrawFn, resumed: bool = True) -> PlanRequest:
    """Any request: fewer prompts than engines, one engine, one slot, missing and broken history, carried responses."""
    prompts = draw(st.integers(0, 12))
    engines = draw(st.integers(1, 9))
    n = draw(st.integers(1, 5))
    columns = draw(st.integers(0, 4))
    step = draw(st.integers(0, 5))
    ids = draw(st.lists(st.integers(0, 10**9), min_size=prompts, max_size=prompts, unique=True))

    def history(rows: int) -> np.ndarray:
        return np.array(draw(st.lists(lengths, min_size=rows * columns, max_size=rows * columns))).reshape(
            rows, columns
        )

    samples = [(p, s) for p in ids for s in range(n)]
    gone = draw(st.lists(st.sampled_from(samples), unique=True)) if samples and resumed else []
    split = draw(st.integers(0, len(gone)))
    before = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), unique=True, max_size=6)) if resumed else []
    entries = [(step, p, s) for p, s in gone[:split]] + [(step - 1, p, s) for p, s in before]
    k = len(entries)
    numbers = np.array(entries, np.int64).reshape(k, 3)
    requests = Requests(
        *(numbers[:, i].copy() for i in range(3)),
        np.array(draw(st.lists(st.integers(-1, 11), min_size=k, max_size=k)), np.int64),
        np.array(draw(st.lists(st.integers(0, 4096), min_size=k, max_size=k)), np.int64),
        np.array(draw(st.lists(lengths, min_size=2 * k, max_size=2 * k))).reshape(k, 2),
    )
    following = draw(st.integers(0, 6))
    return PlanRequest(
        step=step,
        num_engines=engines,
        slots=draw(st.integers(1, 6)),
        samples_per_prompt=n,
        prompt_ids=np.array(ids, np.int64),
        history=history(prompts),
        max_response_len=4096,
        policy=draw(st.sampled_from(POLICIES)),
        layout=draw(st.sampled_from(("spread", "group"))),
        cost=draw(st.sampled_from((A100_7B, ENGINE_STEPS))),
        feedback=Feedback(
            draw(st.sampled_from((0.5, 1.0, float("nan"), 100.0))), draw(st.sampled_from((float("nan"), -0.5, 0.9)))
        ),
        resumed=requests,
        finished_early=np.array(gone[split:], np.int64).reshape(-1, 2),
        carry_share=draw(st.sampled_from((0.0, 0.03, 0.29, 1.0))),
        early_share=draw(st.sampled_from((0.0, 0.1, 1.0))),
        next_prompt_ids=np.arange(following) + 2 * 10**9,
        next_history=history(following),
        keep_place=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
        ranking_groups=draw(st.integers(1, 8)),
        two_tier=draw(st.booleans()),
    )
