"""Which samples are trained when a group is complete only after two windows. Pure.

A carried response ends one window after its siblings. `GroupBuffer("complete")` holds its siblings back until the whole
group can be compared and trains them together; `GroupBuffer("available")` trains every sample in the step in which it
ends, against the siblings known by then: the early ones against each other, the late one against all. Either way every
sample is trained exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple
from typing import Any, Literal

from rhymemeg.rl.exchange import SampleSummary
from rhymemeg.rollout.samples import SampleId

GroupMode = Literal["complete", "available"]


class GroupBuffer:
    """See the module. The same on every rank, which all call it alike."""

    def __init__(self, samples_per_prompt: int, mode: GroupMode = "complete") -> None:
        self.samples_per_prompt, self.mode = samples_per_prompt, mode
        self._known: dict[tuple[int, int], list[SampleSummary]] = {}

    @property
    def waiting(self) -> int:
        """Complete samples that are held back."""
        return sum(map(len, self._known.values())) if self.mode == "complete" else 0

    def add(self, complete: Iterable[SampleSummary]) -> tuple[list[SampleSummary], list[SampleSummary]]:
        """New complete samples with their rewards. Returns those to train now, sorted, and siblings of theirs that have
        been trained before."""
        ready: list[SampleSummary] = []
        siblings: list[SampleSummary] = []
        touched: dict[tuple[int, int], list[SampleSummary]] = {}
        for summary in complete:
            key = (summary.sample_id.step, summary.sample_id.prompt_id)
            touched.setdefault(key, []).append(summary)
        for key, new in touched.items():
            known = self._known.setdefault(key, [])
            whole = len(known) + len(new) >= self.samples_per_prompt
            if self.mode == "available":
                siblings += known
                ready += new
            elif whole:
                ready += known + new
            known += new
            if whole:
                del self._known[key]
        return sorted(ready), sorted(siblings)

    def state(self) -> list[list[Any]]:
        """For the checkpoint, as JSON."""
        rows = [summary for group in self._known.values() for summary in group]
        return [[*astuple(s.sample_id), *astuple(s)[1:]] for s in sorted(rows)]

    def restore(self, state: Iterable[Iterable[Any]], holder_of: Mapping[SampleId, int]) -> None:
        """Inverse of `state`. `holder_of`: the rank that has each sample's tokens now; samples that nobody holds have
        been trained and count as siblings only."""
        self._known = {}
        for row in state:
            step, prompt_id, index, _, *rest = row
            sid = SampleId(step, prompt_id, index)
            self._known.setdefault((step, prompt_id), []).append(SampleSummary(sid, holder_of.get(sid, -1), *rest))
