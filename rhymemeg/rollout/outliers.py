"""Outliers of the policy `paper` on real engines: running responses that outgrew their ranking group.

Which they are decides `histopipe.window.is_outlier`, from the number of unfinished samples of the group on all engines
(counted on the board) and the group's longest response of last epoch. Those of the shorter half of the groups move, with
their tokens, to an engine of a longer group that has a free slot; those of the longer half have nowhere to go and are left
to the next window, if they may be (`Plan.max_unfinished` in all).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rhymemeg.histopipe.plan import Plan
from rhymemeg.histopipe.window import is_outlier
from rhymemeg.rollout.board import Letter, WindowBoard
from rhymemeg.rollout.samples import Sample, SampleId

AGAIN = 1.05
"""A response that was no outlier yet is looked at again when it has grown by this factor."""


class Outliers:
    """The view of one engine's leader. `growth` is beta (`histopipe.window.beta`)."""

    def __init__(self, plan: Plan, growth: float) -> None:
        groups = plan.groups
        assert groups is not None, "only plans of the policy `paper` have ranking groups"
        count = len(groups.engines)
        self.step, self.growth, self.limit = plan.step, growth, plan.max_unfinished
        self.group_of = dict(zip(plan.prompt_ids.tolist(), groups.of_prompt.tolist()))
        self.sizes = (np.bincount(groups.of_prompt, minlength=count) * plan.samples_per_prompt).tolist()
        longest = np.zeros(count)
        np.maximum.at(longest, groups.of_prompt, plan.prediction.longest)
        self.longest = longest.tolist()
        first, number = groups.first_engine.tolist(), groups.engines.tolist()
        mirrored = plan.step % 2 == 0
        self.engines = [
            [plan.num_engines - 1 - e if mirrored else e for e in range(a, a + k)] for a, k in zip(first, number)
        ]
        self._left = np.bincount(groups.of_prompt[plan.queue.row], minlength=count)
        for sid in plan.resumed.sample_ids():
            if sid.step == plan.step:
                self._left[self.group_of[sid.prompt_id]] += 1
        self._finished = [0] * count
        self._look_at: dict[SampleId, float] = {}

    def finished(self, sid: SampleId) -> None:
        """A response of this step is complete here."""
        if sid.step == self.step:
            self._finished[self.group_of[sid.prompt_id]] += 1

    def poll(self, board: WindowBoard, running: Sequence[Sample], is_due: Callable[[SampleId], bool]) -> list[Letter]:
        """Commands "release" and "move_out" for the outliers among `running`."""
        for group, number in enumerate(self._finished):
            if number:
                board.count(f"group/{group}", number)
                self._finished[group] = 0
        commands: list[Letter] = []
        taken: dict[int, int] = {}
        for sample in running:
            sid, tokens = sample.sample_id, len(sample.response_ids)
            if sid.step != self.step:
                continue
            group = self.group_of[sid.prompt_id]
            if tokens <= max(self.growth * self.longest[group], self._look_at.get(sid, 0.0)):
                continue
            unfinished = int(self._left[group]) - board.count(f"group/{group}", 0)
            if not is_outlier(tokens, unfinished, self.sizes[group], self.longest[group], self.growth):
                self._look_at[sid] = AGAIN * tokens
            elif group >= len(self.sizes) // 2:
                if not is_due(sid) and board.count("released", 1) <= self.limit:
                    commands.append(Letter("release", {"key": str(sid)}))
                else:
                    self._look_at[sid] = float("inf")
            elif (target := self._longer_engine(board, group, taken)) is not None:
                taken[target] = taken.get(target, 0) + 1
                commands.append(Letter("move_out", {"key": str(sid), "to": target}))
            else:
                self._look_at[sid] = AGAIN * tokens
        return commands

    def _longer_engine(self, board: WindowBoard, group: int, taken: dict[int, int]) -> int | None:
        """The engine with most free slots in the longest group that has one and still runs."""
        for other in range(len(self.sizes) - 1, group, -1):
            if int(self._left[other]) - board.count(f"group/{other}", 0) <= 0:
                continue
            known = board.statuses([e for e in self.engines[other][:64] if e != board.engine])
            free = {e: status.free - taken.get(e, 0) for e, status in known.items()}
            best = max(free, key=lambda e: (free[e], -e), default=None)
            if best is not None and free[best] > 0:
                return best
        return None
