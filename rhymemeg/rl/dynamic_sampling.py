"""Dynamic sampling: a step trains on groups that teach something. Pure. DAPO (arXiv 2503.14476), section 3.2.

A group whose samples all have the same reward has no advantage under any estimator that compares them. Such groups are
replaced: `GroupFilter` takes the groups of one rollout after the other, says how many more prompts are wanted, and ends
when a batch is full, when the rollouts allowed for a step are used up, or when there are no more prompts; then the step
trains on what there is. `replacement_indices` names the prompts: as good as random, never one that the step has had, and
a function of seed, step and round alone, so that neither the order of the epochs nor a resumed run is touched by it.

    groups = GroupFilter(batch_size, max_rounds)
    groups.add(summaries)                            # of the step's own prompts
    while wanted := groups.wanted():
        ...sample and judge `wanted` more prompts...
        groups.add(summaries)
    groups.kept(), groups.metrics(), groups.shortage()
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from rhymemeg.rl.exchange import SampleSummary


class GroupFilter:
    """See the module. `target`: groups a step trains; `max_rounds`: rollouts a step may take, its first included."""

    def __init__(self, target: int, max_rounds: int) -> None:
        self.target, self.max_rounds = target, max_rounds
        self.rounds = 0
        self._kept: list[list[SampleSummary]] = []
        self._sampled, self._surplus = 0, 0
        self._equal: list[float] = []  # the reward of each group that has only one
        self._rewards: set[float] = set()

    def add(self, summaries: Sequence[SampleSummary]) -> None:
        """The judged samples of one rollout: whole groups. Groups beyond the target are dropped, those of higher prompt
        ids first."""
        self.rounds += 1
        groups: dict[int, list[SampleSummary]] = {}
        for summary in sorted(summaries):
            groups.setdefault(summary.sample_id.prompt_id, []).append(summary)
        self._sampled += len(groups)
        for group in groups.values():
            rewards = {s.reward for s in group}
            self._rewards |= {min(rewards), max(rewards)}
            if len(rewards) == 1:
                self._equal += rewards
            elif len(self._kept) < self.target:
                self._kept.append(group)
            else:
                self._surplus += 1

    def wanted(self) -> int:
        """Prompts to sample next: as many as should fill the batch, judged by the share that was kept so far, and at most
        a whole batch; 0: the step goes on."""
        missing = self.target - len(self._kept)
        if missing <= 0 or self.rounds >= self.max_rounds:
            return 0
        return min(self.target, -(-missing * max(self._sampled, 1) // max(len(self._kept), 1)))

    def kept(self) -> list[SampleSummary]:
        """Samples of the groups to train, sorted."""
        return sorted(s for group in self._kept for s in group)

    def shortage(self) -> str:
        """What to say where the batch is not full, or nothing."""
        if len(self._kept) >= self.target:
            return ""
        what = f"trains on {len(self._kept)} of {self.target} groups" if self._kept else "trains on nothing"
        return f"{what}: the others of {self._sampled} sampled in {self.rounds} rollout(s) have equal rewards"

    def metrics(self) -> dict[str, float]:
        """Rollouts and groups of the step; shares of the groups that all had the lowest or the highest reward seen."""
        sampled = max(self._sampled, 1)
        lowest, highest = min(self._rewards, default=0.0), max(self._rewards, default=0.0)
        return {
            "dynamic_sampling/rounds": float(self.rounds),
            "dynamic_sampling/sampled_groups": float(self._sampled),
            "dynamic_sampling/kept_groups": float(len(self._kept)),
            "dynamic_sampling/surplus_groups": float(self._surplus),
            "dynamic_sampling/all_lowest": self._equal.count(lowest) / sampled,
            "dynamic_sampling/all_highest": self._equal.count(highest) / sampled,
            "dynamic_sampling/full": float(len(self._kept) >= self.target),
        }


def replacement_indices(seed: int, step: int, round_: int, wanted: int, count: int, used: Collection[int]) -> list[int]:
    """Indices of prompts, out of `count`, to sample in round `round_` of a step (1: the first after its own); none is in
    `used`, and there are fewer than `wanted` only if all others are used."""
    order = np.random.default_rng([seed, step, round_]).permutation(count)
    taken = set(used)
    return [int(i) for i in order if int(i) not in taken][:wanted]
