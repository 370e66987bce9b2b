"""`plan(PlanRequest) -> Plan`: once a step, on every rank, with the same result. Pure.

1. Prompts are sorted by id, resumed responses by sample id: from here on the order of the inputs cannot matter.
2. Lengths are predicted (`predict`); resumed responses are put on their engines.
3. The policy places the samples that have not started.
4. Where `early_share` > 0 the same policy places part of the next step's samples, for engines that run out of work.

Raises ConfigError for options out of range and ValueError for arrays that contradict each other; never for lengths.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rhymemeg.errors import ConfigError
from rhymemeg.histopipe.plan import Plan, PlanRequest, Queue, Requests
from rhymemeg.histopipe.policies import POLICIES, PlaceInput, PlaceOutput
from rhymemeg.histopipe.predict import Floats, Ints, Prediction, predict, remaining


def plan(request: PlanRequest) -> Plan:
    """The plan of one window."""
    _check(request)
    prompt_ids, history = _sorted_prompts(request.prompt_ids, request.history)
    prediction = predict(
        history,
        request.max_response_len,
        request.feedback.growth,
        request.feedback.trusted and request.policy != "random",
    )
    resumed, offsets, rest, moved = _place_resumed(request)
    work = np.bincount(resumed.engine, weights=rest, minlength=request.num_engines).astype(np.float64)
    longest = np.zeros(request.num_engines)
    np.maximum.at(longest, resumed.engine, rest)

    row, sample = _to_place(request, prompt_ids)
    given = PlaceInput(
        step=request.step,
        seed=request.seed,
        prompt_ids=prompt_ids,
        prediction=prediction,
        row=row,
        sample=sample,
        samples_per_prompt=request.samples_per_prompt,
        num_engines=request.num_engines,
        slots=request.slots,
        cost=request.cost,
        layout=request.layout,
        carried_work=work,
        carried_longest=longest,
        carried_count=np.diff(offsets),
        ranking_groups=request.ranking_groups,
        two_tier=request.two_tier,
    )
    place = POLICIES[request.policy]
    placed = place(given)
    early_ids, early = _place_early(request, given, placed)
    if not placed.shared:
        starts, busy = placed.queue.offsets[:-1], np.diff(placed.queue.offsets) > 0
        lengths = prediction.mean[placed.queue.row]
        work[busy] += np.add.reduceat(lengths, starts[busy])
        longest[busy] = np.maximum(longest[busy], np.maximum.reduceat(lengths, starts[busy]))
    return Plan(
        step=request.step,
        policy=request.policy,
        layout=request.layout,
        num_engines=request.num_engines,
        slots=request.slots,
        samples_per_prompt=request.samples_per_prompt,
        prompt_ids=prompt_ids,
        prediction=prediction,
        queue=placed.queue,
        shared=placed.shared,
        resumed=resumed,
        resumed_offsets=offsets,
        resumed_remaining=rest,
        moved=moved,
        max_unfinished=max_unfinished(request.carry_share, len(prompt_ids) * request.samples_per_prompt),
        early_prompt_ids=early_ids,
        early=early,
        engine_work=work,
        engine_seconds=request.cost.engine_seconds(work, longest, request.slots),
        groups=placed.groups,
    )


def max_unfinished(carry_share: float, samples: int) -> int:
    """floor(rho x samples), safe against 0.29 x 100 = 28.999..."""
    return math.floor(carry_share * samples + 1e-9)


def _check(request: PlanRequest) -> None:
    if request.policy not in POLICIES:
        raise ConfigError(f"policy: {request.policy!r} is none of {', '.join(POLICIES)}")
    if request.layout not in ("spread", "group"):
        raise ConfigError(f"layout: {request.layout!r} is neither spread nor group")
    for name in ("num_engines", "slots", "samples_per_prompt", "max_response_len", "ranking_groups"):
        if getattr(request, name) < 1:
            raise ConfigError(f"{name}: {getattr(request, name)} is less than 1")
    for name in ("carry_share", "early_share"):
        if not 0 <= getattr(request, name) <= 1:
            raise ConfigError(f"{name}: {getattr(request, name)} is not between 0 and 1")
    for name in ("", "next_"):
        ids, history = getattr(request, name + "prompt_ids"), getattr(request, name + "history")
        if np.ndim(ids) != 1 or np.ndim(history) != 2 or len(ids) != len(history):
            raise ValueError(
                f"{name}prompt_ids {np.shape(ids)} and {name}history {np.shape(history)}: want [P] and [P, H]"
            )
    if np.ndim(request.finished_early) != 2 or np.shape(request.finished_early)[1] != 2:
        raise ValueError(f"finished_early {np.shape(request.finished_early)}: want [F, 2]")


def _sorted_prompts(prompt_ids: Ints, history: Floats) -> tuple[Ints, Floats]:
    order = np.argsort(prompt_ids, kind="stable")
    ids = np.asarray(prompt_ids, np.int64)[order]
    if (np.diff(ids) == 0).any():
        raise ValueError("prompt_ids: a prompt occurs twice in the step")
    return ids, np.asarray(history, np.float64)[order]


def _place_resumed(request: PlanRequest) -> tuple[Requests, Ints, Floats, int]:
    """Resumed responses with their engines, sorted by engine and longest remaining first; offsets; remaining tokens;
    how many change engine. A response whose engine does not exist (any more) or that need not keep its place goes to
    the engine with the fewest of them, longest first."""
    requests, engines = request.resumed, request.num_engines
    order = np.lexsort((requests.sample_index, requests.prompt_id, requests.step))
    requests = requests.take(order)
    if len(requests) > 1:
        ids = np.stack([requests.step, requests.prompt_id, requests.sample_index])
        if (np.diff(ids, axis=1) == 0).all(axis=0).any():
            raise ValueError("resumed: a sample occurs twice")
    rest = remaining(requests.tokens, requests.references, request.max_response_len)
    before, engine = requests.engine, requests.engine.copy()
    adrift = (engine < 0) | (engine >= engines) | (not request.keep_place)
    loose = np.flatnonzero(adrift)
    ranked = loose[np.argsort(-rest[loose], kind="stable")]
    engine[ranked] = _fewest_first(np.bincount(engine[~adrift], minlength=engines), len(ranked))
    final = np.lexsort((np.arange(len(engine)), -rest, engine))
    offsets = np.zeros(engines + 1, np.int64)
    np.cumsum(np.bincount(engine, minlength=engines), out=offsets[1:])
    placed = replace(requests, engine=engine).take(final)
    return placed, offsets, rest[final], int(((engine != before) & (before >= 0)).sum())


def _fewest_first(count: Ints, number: int) -> Ints:
    """Engines that the next `number` items go to when each goes to the engine with the fewest, `count` [E] at first."""
    level = int(count.min()) + 1
    while int(np.maximum(level - count, 0).sum()) < number:
        level += max(1, (number - int(np.maximum(level - count, 0).sum())) // len(count))
    places = np.maximum(level - count, 0)
    engine = np.repeat(np.arange(len(count)), places)
    height = count[engine] + np.arange(len(engine)) - np.repeat(np.cumsum(places) - places, places)
    return engine[np.lexsort((engine, height))][:number]


def _to_place(request: PlanRequest, prompt_ids: Ints) -> tuple[Ints, Ints]:
    """(row, sample) of the step's samples that have neither started nor finished."""
    n = request.samples_per_prompt
    todo = np.ones(len(prompt_ids) * n, bool)
    own = request.resumed.step == request.step
    started = np.concatenate(
        [
            np.stack([request.resumed.prompt_id[own], request.resumed.sample_index[own]], axis=1),
            np.asarray(request.finished_early, np.int64).reshape(-1, 2),
        ]
    )
    if len(started):
        row = np.minimum(np.searchsorted(prompt_ids, started[:, 0]), max(len(prompt_ids) - 1, 0))
        if len(prompt_ids) == 0 or (prompt_ids[row] != started[:, 0]).any():
            raise ValueError("resumed or finished_early: a prompt that is not in the step")
        if (started[:, 1] < 0).any() or (started[:, 1] >= n).any():
            raise ValueError(f"resumed or finished_early: a sample index outside 0..{n - 1}")
        todo[row * n + started[:, 1]] = False
        if todo.size - int(todo.sum()) != len(started):
            raise ValueError("resumed and finished_early: a sample occurs twice")
    index = np.flatnonzero(todo).astype(np.int32)  # a million entries: half the memory traffic of int64
    return index // np.int32(n), index % np.int32(n)


def _place_early(request: PlanRequest, given: PlaceInput, placed: PlaceOutput) -> tuple[Ints, Queue]:
    """The next step's samples that may start early: the predicted shortest. One that starts late in this window must
    end in the next, so that a long one would keep the next window open; and short ones make the fewest stale tokens.
    Prompts without history may be anything, so they only start early where the whole next step may."""
    parts = 1 if placed.shared else request.num_engines
    total = len(request.next_prompt_ids) * request.samples_per_prompt
    wanted = max_unfinished(request.early_share, total)
    if wanted == 0:
        return np.zeros(0, np.int64), Queue(np.zeros(parts + 1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    prompt_ids, history = _sorted_prompts(request.next_prompt_ids, request.next_history)
    prediction: Prediction = predict(
        history,
        request.max_response_len,
        request.feedback.growth,
        request.feedback.trusted and request.policy != "random",
    )
    index = np.arange(total, dtype=np.int32)
    n = request.samples_per_prompt
    if wanted < total:
        index = index[prediction.known[index // n]]
        index = np.sort(index[np.argsort(prediction.mean[index // n], kind="stable")[:wanted]])
    nothing = np.zeros(request.num_engines)
    early = POLICIES[request.policy](
        replace(
            given,
            step=request.step + 1,
            prompt_ids=prompt_ids,
            prediction=prediction,
            row=index // n,
            sample=index % n,
            carried_work=nothing,
            carried_longest=nothing,
            carried_count=nothing.astype(np.int64),
        )
    )
    return prompt_ids, early.queue
