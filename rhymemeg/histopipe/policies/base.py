"""What a policy sees and returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rhymemeg.histopipe.cost import CostModel
from rhymemeg.histopipe.plan import Layout, Queue, RankingGroups
from rhymemeg.histopipe.predict import Floats, Ints, Prediction


@dataclass(frozen=True, eq=False)
class PlaceInput:
    """Prompts [P] in ascending order of their id, with their prediction; the samples to place as (`row`, `sample`) [N],
    sorted; and what each engine still carries [E]: tokens, longest, number of responses."""

    step: int
    seed: int
    prompt_ids: Ints
    prediction: Prediction
    row: Ints
    sample: Ints
    samples_per_prompt: int
    num_engines: int
    slots: int
    cost: CostModel
    layout: Layout
    carried_work: Floats
    carried_longest: Floats
    carried_count: Ints
    ranking_groups: int = 8
    two_tier: bool = True


@dataclass(frozen=True, eq=False)
class PlaceOutput:
    """The queue, whether all engines share it, and what only `paper` has to tell."""

    queue: Queue
    shared: bool = False
    groups: RankingGroups | None = None


def by_engine(engine: Ints, row: Ints, sample: Ints, num_engines: int) -> Queue:
    """Queue from samples listed in start order, each with its engine."""
    # numpy sorts integers of 16 bits by radix, ten times as fast as wider ones.
    order = np.argsort(engine.astype(np.uint16) if num_engines <= 1 << 16 else engine, kind="stable")
    offsets = np.zeros(num_engines + 1, np.int64)
    np.cumsum(np.bincount(engine, minlength=num_engines), out=offsets[1:])
    return Queue(offsets, row[order], sample[order])


def in_prompt_order(given: PlaceInput, ranking: Ints) -> tuple[Ints, Ints, Ints]:
    """The samples to place, prompt after prompt in the order of `ranking` [P] (rows), ascending within each: `row` and
    `sample` [N], and the number of samples of each ranked prompt [P]. `given.row` is sorted, so this moves blocks and
    never sorts a million samples."""
    counts = np.bincount(given.row, minlength=len(ranking))
    sizes = counts[ranking]
    rows = np.repeat(ranking.astype(given.row.dtype), sizes)
    if len(rows) == len(ranking) * given.samples_per_prompt:  # nothing of the step has started: blocks are alike
        each = np.arange(given.samples_per_prompt, dtype=given.sample.dtype)
        return rows, np.tile(each, len(ranking)), sizes
    shift = (np.cumsum(counts) - counts)[ranking] - (np.cumsum(sizes) - sizes)
    order = np.arange(len(given.row)) + np.repeat(shift, sizes)
    return rows, given.sample[order], sizes


def longest_first(given: PlaceInput) -> Ints:
    """Ranking of the prompts: predicted longest first, ties by prompt."""
    return np.argsort(-given.prediction.mean, kind="stable")


def splitmix64(values: Ints, *salt: int) -> np.ndarray:
    """Scrambles integers to uniformly distributed uint64: a seeded random order that depends on nothing but the values
    (Steele, Lea, Flood: Fast splittable pseudorandom number generators)."""
    with np.errstate(over="ignore"):
        x = values.astype(np.uint64)
        for word in (*salt, 0):
            x = x + np.uint64(word & 0xFFFFFFFFFFFFFFFF) + np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
    return x
