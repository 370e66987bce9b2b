"""The scheduler's memory over windows: last epoch's lengths, what is carried, and what past windows taught. Pure.

    decided = scheduler.plan(step, prompt_ids, next_prompt_ids)       before a window
    ... the engines carry it out ...
    record = scheduler.close(decided, seconds, reports, rows)         after it: what became of every sample

Every rank has one and makes the same calls with the same arguments, so that all have the same plan without talking about
it. `state` and `restore` put it into a checkpoint, as JSON.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rhymemeg.histopipe.cost import ENGINE_STEPS, CostModel, StepTiming, profile_from_steps
from rhymemeg.histopipe.plan import Layout, Plan, PlanRequest, Requests
from rhymemeg.histopipe.planner import plan
from rhymemeg.histopipe.predict import CarryControl, Feedback, history_matrix
from rhymemeg.histopipe.record import EngineReport, WindowRecord, window_record
from rhymemeg.histopipe.window import MIN_BETA, WindowTotals, beta
from rhymemeg.rollout.samples import SampleId

VISITS = 2
"""Visits of a prompt whose lengths are kept: the last for predictions, the one before for the growth of outliers."""

CARRIED_PER_ENGINE = 2
MEASURED_WINDOWS = 16


class Row(NamedTuple):
    """A sample after a window: complete, or paused with `tokens` tokens on `engine`."""

    sample_id: SampleId
    engine: int
    tokens: int
    complete: bool


@dataclass(frozen=True)
class SchedulerOptions:
    """`carry` and `early` are limits of the shares, see `PlanRequest`; `outliers`: those of `paper` move on."""

    policy: str = "complement"
    layout: Layout = "group"
    carry: float = 0.0
    early: float = 0.0
    ranking_groups: int = 8
    outliers: bool = False


class Scheduler:
    """See the module. `slots`: requests that an engine runs at once; `cost`: None learns it from the engines."""

    def __init__(
        self,
        options: SchedulerOptions,
        *,
        num_engines: int,
        slots: int,
        samples_per_prompt: int,
        max_response_len: int,
        seed: int = 0,
        cost: CostModel | None = None,
    ) -> None:
        self.options, self.num_engines, self.slots = options, num_engines, slots
        self.samples_per_prompt, self.max_response_len, self.seed = samples_per_prompt, max_response_len, seed
        self.cost, self._learns_cost = cost or ENGINE_STEPS, cost is None
        self._measured: deque[tuple[list[StepTiming], list[StepTiming]]] = deque(maxlen=MEASURED_WINDOWS)
        self.feedback = Feedback()
        self.carry = CarryControl(options.carry)
        self.unfinished: dict[SampleId, tuple[int, int]] = {}
        """Samples with tokens that are to be resumed: engine, tokens."""
        self.complete_early: dict[SampleId, int] = {}
        """Samples of the next step that are complete: tokens."""
        self._visits: dict[int, list[tuple[int, list[int]]]] = {}  # prompt -> (step, lengths), newest first

    # ---------------------------------------------------------------------------------------------------------- plan

    def plan(
        self, step: int, prompt_ids: Sequence[int], next_prompt_ids: Sequence[int] = (), strict: bool = False
    ) -> Plan:
        """The plan of the window of `step`. `strict`: nothing is left to the next window or started early, whatever the
        options say (the last step)."""
        early = 0.0 if strict or not next_prompt_ids else self.options.early
        done = [(s.prompt_id, s.sample_index) for s in sorted(self.complete_early) if s.step == step]
        return plan(
            PlanRequest(
                step=step,
                num_engines=self.num_engines,
                slots=self.slots,
                samples_per_prompt=self.samples_per_prompt,
                prompt_ids=np.array(prompt_ids, np.int64),
                history=history_matrix(prompt_ids, self._last(prompt_ids, step)),
                max_response_len=self.max_response_len,
                policy=self.options.policy,
                layout=self.options.layout,
                cost=self.cost,
                feedback=self.feedback,
                resumed=Requests.of(
                    (sid, engine, tokens, self._references(sid))
                    for sid, (engine, tokens) in sorted(self.unfinished.items())
                ),
                finished_early=np.array(done, np.int64).reshape(-1, 2),
                carry_share=0.0 if strict else self.carry_share(len(prompt_ids)),
                early_share=early,
                next_prompt_ids=np.array(next_prompt_ids if early else (), np.int64),
                next_history=history_matrix(
                    next_prompt_ids if early else (), self._last(next_prompt_ids if early else (), step + 1)
                ),
                seed=self.seed,
                ranking_groups=self.options.ranking_groups,
            )
        )

    def carry_share(self, prompts: int) -> float:
        """rho of a window of so many prompts: what `CarryControl` finds, and room for `CARRIED_PER_ENGINE` responses an
        engine, since with fewer one engine runs dry while another still has the last ones; within the limit."""
        room = CARRIED_PER_ENGINE * self.num_engines / max(prompts * self.samples_per_prompt, 1)
        return min(self.options.carry, max(self.carry.share, room))

    def totals(self, decided: Plan) -> WindowTotals:
        """When the window of this plan may close. Under `paper` only what grew out of its group may be left, and leaves
        before the close."""
        resumed, new = len(decided.resumed), len(decided.queue)
        return WindowTotals(resumed + new, resumed, 0 if self.options.outliers else decided.max_unfinished)

    def growth_of_outliers(self, prompt_ids: Iterable[int]) -> float:
        """beta: how much the mean lengths of these prompts grew over the last two epochs."""
        pairs = [
            (np.mean(visits[1][1]), np.mean(visits[0][1]))
            for prompt_id in prompt_ids
            if len(visits := self._visits.get(prompt_id, [])) == VISITS
        ]
        return beta([float(b) for _, b in pairs], [float(a) for a, _ in pairs]) if pairs else MIN_BETA

    def _last(self, prompt_ids: Iterable[int], step: int) -> dict[int, list[int]]:
        """Lengths of the last visit before `step`, by prompt."""
        found = {}
        for prompt_id in prompt_ids:
            for visited, lengths in self._visits.get(prompt_id, ()):
                if visited < step:
                    found[prompt_id] = lengths
                    break
        return found

    def _references(self, sid: SampleId) -> list[int]:
        """Lengths that tell how long a response may get: its complete siblings, and last epoch's."""
        visits = self._visits.get(sid.prompt_id, ())
        return [n for step, lengths in visits if step == sid.step for n in lengths] + self._last(
            [sid.prompt_id], sid.step
        ).get(sid.prompt_id, [])

    # --------------------------------------------------------------------------------------------------------- close

    def close(
        self, decided: Plan, seconds: float, reports: Sequence[EngineReport], rows: Iterable[Row]
    ) -> WindowRecord:
        """Take in what became of every sample that ran in the window: `rows` (in any order) are the samples that ended
        or were paused in it. Returns the window's record."""
        growth, before = self.feedback.growth, self.unfinished
        self.unfinished = {}
        complete: list[tuple[SampleId, int, int]] = []  # sample, tokens, tokens made before this window
        for sid, tokens in sorted(self.complete_early.items()):
            if sid.step <= decided.step:
                complete.append((sid, tokens, tokens))
        self.complete_early = {sid: n for sid, n in self.complete_early.items() if sid.step > decided.step}
        for row in sorted(rows):
            sid = row.sample_id
            if not row.complete:
                self.unfinished[sid] = (row.engine, row.tokens)
                continue
            self._visit(sid, row.tokens)
            if sid.step > decided.step:
                self.complete_early[sid] = row.tokens
            else:
                complete.append((sid, row.tokens, before.get(sid, (0, 0))[1]))
        lengths = np.array([tokens for _, tokens, _ in complete], np.float64)
        last = np.array([self._mean_before(sid) for sid, _, _ in complete], np.float64)
        self.feedback = self.feedback.after(last, lengths)
        self.carry = self.carry.after(lengths, self.max_response_len)
        return window_record(
            decided,
            seconds,
            reports,
            lengths,
            stale_tokens=sum(old for _, _, old in complete),
            last_epoch=last,
            mean_length_started=self._mean_drawn(decided),
            carried_out=sum(sid.step <= decided.step for sid in self.unfinished),
            growth=growth,
        )

    def learn_cost(self, steps: Iterable[StepTiming], prefill: Iterable[StepTiming] = ()) -> None:
        """What was measured in the window, the same on all ranks: steps of plain decoding, and tokens and seconds of those
        with prefill. The last `MEASURED_WINDOWS` windows count. A cost model that was given stays."""
        if not self._learns_cost:
            return
        self._measured.append((list(steps), list(prefill)))
        filled = [p for _, window in self._measured for p in window]
        tokens = sum(p.tokens for p in filled)
        try:
            self.cost = profile_from_steps(
                "measured",
                [timing for window, _ in self._measured for timing in window],
                sum(p.seconds for p in filled) / tokens if tokens else 0.0,
            )
        except ValueError:
            return  # windows without a step of plain decoding teach nothing

    def _visit(self, sid: SampleId, tokens: int) -> None:
        visits = self._visits.setdefault(sid.prompt_id, [])
        for step, lengths in visits:
            if step == sid.step:
                lengths.append(tokens)
                return
        visits.append((sid.step, [tokens]))
        visits.sort(key=lambda visit: -visit[0])
        del visits[VISITS:]

    def _mean_before(self, sid: SampleId) -> float:
        lengths = self._last([sid.prompt_id], sid.step).get(sid.prompt_id)
        return float(np.mean(lengths)) if lengths else math.nan

    def _mean_drawn(self, decided: Plan) -> float:
        """Mean length of what this step drew; NaN while some of it is not complete."""
        n, step = decided.samples_per_prompt, decided.step
        drawn = [
            lengths
            for prompt_id in decided.prompt_ids.tolist()
            for visited, lengths in self._visits.get(prompt_id, ())
            if visited == step
        ]
        if sum(map(len, drawn)) != n * len(decided.prompt_ids):
            return math.nan
        return float(np.concatenate(drawn).mean()) if drawn else math.nan

    # ---------------------------------------------------------------------------------------------------- checkpoint

    def state(self) -> dict[str, Any]:
        """Everything that the next plan depends on, for JSON."""
        return {
            "feedback": self.feedback.as_dict(),
            "capped": self.carry.capped,
            "unfinished": [
                [*_numbers(sid), engine, tokens] for sid, (engine, tokens) in sorted(self.unfinished.items())
            ],
            "complete_early": [[*_numbers(sid), tokens] for sid, tokens in sorted(self.complete_early.items())],
            "visits": {str(p): [[step, lengths] for step, lengths in v] for p, v in sorted(self._visits.items())},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`; the options, and with them the limits, are those of this run. Engines that do not exist any
        more count as none: what they held is placed anew."""
        self.feedback = Feedback.from_dict(state["feedback"])
        self.carry = CarryControl(self.options.carry, capped=float(state["capped"]))
        self.unfinished = {SampleId(s, p, i): (e, n) for s, p, i, e, n in state["unfinished"]}
        self.complete_early = {SampleId(s, p, i): n for s, p, i, n in state["complete_early"]}
        self._visits = {int(p): [(step, list(lengths)) for step, lengths in v] for p, v in state["visits"].items()}


def _numbers(sid: SampleId) -> tuple[int, int, int]:
    return sid.step, sid.prompt_id, sid.sample_index
