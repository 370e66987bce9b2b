"""`complement` (default): new long work goes where little old work is left.

Samples (or, with layout "group", whole groups) are taken longest first in rounds of one an engine. In each round the
longest goes to the engine that would be free earliest with what it has so far: what it carries over from the step
before and what earlier rounds gave it. Each engine starts its own longest first.

Rounds, and not strict longest-processing-time-first, for two reasons. Engines get equal numbers, so predictions that
are plain wrong cost no more than a random split does; and a million samples are placed by a few dozen sorts of the
engines.
"""

from __future__ import annotations

import numpy as np

from rhymemeg.histopipe.policies.base import PlaceInput, PlaceOutput, by_engine, in_prompt_order, longest_first
from rhymemeg.histopipe.predict import Floats, Ints

MAX_SORTS = 32
"""Engines are sorted at most this often. With more rounds than that, several follow one sort, back and forth."""


def place(given: PlaceInput) -> PlaceOutput:
    """One queue an engine."""
    ranking = longest_first(given)
    row, sample, sizes = in_prompt_order(given, ranking)
    length = given.prediction.mean[ranking]
    if given.layout == "spread":
        engine = deal(given, np.repeat(length, sizes))
    else:
        engine = deal(given, length * sizes).repeat(sizes)
    return PlaceOutput(by_engine(engine, row, sample, given.num_engines))


def deal(given: PlaceInput, work: Floats) -> Ints:
    """Engine of each item [N]; `work` in tokens, in the order in which items are dealt."""
    engines, count = given.num_engines, len(work)
    rounds = -(-count // engines)
    stride = max(1, -(-rounds // MAX_SORTS))
    load = given.carried_work.astype(np.float64).copy()
    result = np.empty(count, np.int32)
    for first in range(0, count, stride * engines):
        block = work[first : first + stride * engines]
        free_at = given.cost.engine_seconds(load, given.carried_longest, given.slots)
        earliest = np.lexsort((load, free_at))
        there_and_back = np.concatenate([earliest, earliest[::-1]])
        chosen = np.resize(there_and_back, len(block))
        result[first : first + len(block)] = chosen
        load += np.bincount(chosen, weights=block, minlength=engines)
    return result
