"""`paper`: HistoPipe as published (arXiv 2508.18588), colocated.

Tier 1 ranks prompts by the median length of their last group and cuts the ranking into N groups of equal count. Tier 2
gives group i k_i engines such that group times grow linearly over the engines. Odd steps put the groups in ascending
order on the engines, even steps mirror them, so that an engine with short work has long work in the next step; engines
that finish their share start that of the next step at once (`early_share` = 1). Outliers migrate (`window.outliers`).

What the paper leaves open is fixed here:

- N is at most the number of engines and of prompts.
- A group's time with k engines is the cost model's for its mean work and its mean length.
- Targets are t0 + d x (mean position of the group's engines), t0 the time of the shortest group on as many engines as
  it can get. Linear in position and not in group index: with unequal k_i only the former adds up to the same sum when
  the order is mirrored. Training is a barrier here, so t0 has no training time in it.
- The first upper bound of d is doubled until the plan fits, then bisected. Engines left over go one by one to the group
  furthest over its target.
- Even steps mirror engines (e -> E - 1 - e), not group indices.
- Within a group, samples are dealt to its engines in ranking order, prompts whole while there are enough of them.
"""

from __future__ import annotations

import numpy as np

from rhymemeg.histopipe.cost import CostModel
from rhymemeg.histopipe.plan import RankingGroups
from rhymemeg.histopipe.policies.base import PlaceInput, PlaceOutput, by_engine, in_prompt_order
from rhymemeg.histopipe.predict import Floats, Ints

BISECTIONS = 40


def place(given: PlaceInput) -> PlaceOutput:
    """One queue an engine, and the groups. Groups are made of the whole step, so that samples which started early do
    not change where the others go."""
    prompts, engines, n = len(given.prompt_ids), given.num_engines, given.samples_per_prompt
    if prompts == 0:
        return PlaceOutput(by_engine(given.row, given.row, given.sample, engines))
    count = max(1, min(given.ranking_groups, engines, prompts))
    ranking = np.argsort(given.prediction.median, kind="stable")
    borders = np.arange(count + 1) * prompts // count
    sizes = np.diff(borders).astype(np.int64)
    of_prompt = np.empty(prompts, np.int64)
    of_prompt[ranking] = np.repeat(np.arange(count), sizes)

    length = np.bincount(of_prompt, weights=given.prediction.mean, minlength=count) / sizes
    work = length * sizes * n
    k: Ints
    if given.two_tier:
        k, slope = engines_of_groups(given.cost, work, length, given.slots, engines)
    else:
        k, slope = np.diff(np.arange(count + 1) * engines // count).astype(np.int64), 0.0
    first = np.cumsum(k) - k

    # Prompt j of m goes whole to engine floor(j k / m) of its group; with fewer prompts than engines, sample by sample.
    rank = np.empty(prompts, np.int64)
    rank[ranking] = np.arange(prompts) - np.repeat(borders[:-1], sizes)
    row, sample, _ = in_prompt_order(given, ranking)
    group = of_prompt[row]
    whole = rank[row] * k[group] // sizes[group]
    split = (rank[row] * n + sample) * k[group] // (sizes[group] * n)
    engine = first[group] + np.where(sizes[group] >= k[group], whole, split)
    if given.step % 2 == 0:
        engine = engines - 1 - engine

    seconds = _seconds(given.cost, work, length, k, given.slots)
    target = seconds[0] + slope * (first + (k - 1) / 2)
    groups = RankingGroups(of_prompt, first, k, seconds, target, slope)
    return PlaceOutput(by_engine(engine, row, sample, engines), groups=groups)


def _seconds(cost: CostModel, work: Floats, length: Floats, k: Ints, slots: int) -> Floats:
    return cost.engine_seconds(work / k, length, slots)


def engines_of_groups(cost: CostModel, work: Floats, length: Floats, slots: int, engines: int) -> tuple[Ints, float]:
    """Tier 2: engines of each group (their sum is `engines`, each at least 1), and the slope of the targets."""
    count = len(work)
    most = engines - count + 1
    # tau[g, k - 1]: time of group g on k engines.
    tau = cost.engine_seconds(work[:, None] / np.arange(1, most + 1), length[:, None], slots)
    t0 = float(tau[0, -1])

    def fit(slope: float) -> Ints | None:
        """The fewest engines that meet the targets; None where more are needed than there are."""
        position, k = 0, np.zeros(count, np.int64)
        for g in range(count):
            allowed = min(most, engines - position - (count - 1 - g))
            if allowed < 1:
                return None
            sizes = np.arange(1, allowed + 1)
            meets = tau[g, :allowed] <= (t0 + slope * (position + (sizes - 1) / 2)) * (1 + 1e-12)
            if not meets.any():
                return None
            k[g] = sizes[int(np.argmax(meets))]
            position += int(k[g])
        return k

    high = max(float(tau[-1, 0]) - t0, 1e-9) / max(count - 1, 1)
    best = fit(high)
    for _ in range(200):
        if best is not None:
            break
        high *= 2
        best = fit(high)
    assert best is not None  # one engine each, two for the first group where there are more, fits any steep slope
    low, slope = 0.0, high
    for _ in range(BISECTIONS):
        middle = (low + slope) / 2
        found = fit(middle)
        if found is None:
            low = middle
        else:
            best, slope = found, middle
    k = best.copy()
    while int(k.sum()) < engines:
        position = np.cumsum(k) - k + (k - 1) / 2
        over = _seconds(cost, work, length, k, slots) - (t0 + slope * position)
        k[int(np.argmax(over))] += 1
    return k, slope
