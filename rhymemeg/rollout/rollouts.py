"""Rollout windows of a run, on all ranks: plan, bring samples and history where the plan wants them, run, account.

    rollouts = Rollouts(engine, runtime, board, speculation, ...)
    window = rollouts.window(scheduler, step, prompts, sampling, seed, ...)

`window.finished` are the samples of this step (and those carried into it) that are complete now, on the leader of the
engine where they ended; every sample of a run is in exactly one window's list. What is paused, or complete before its step
has begun, stays with `Rollouts` until it is due; `held` and `restore` are for the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rhymemeg.errors import RolloutError
from rhymemeg.histopipe.cost import StepTiming
from rhymemeg.histopipe.plan import Plan
from rhymemeg.histopipe.record import WindowRecord
from rhymemeg.histopipe.scheduler import Row, Scheduler
from rhymemeg.parallel.runtime import Runtime
from rhymemeg.rl.exchange import all_gather_rows, exchange_bytes
from rhymemeg.rollout.board import MAX_SAMPLES, WindowBoard
from rhymemeg.rollout.engine import RolloutEngine, SamplingOptions
from rhymemeg.rollout.execution import Judge, WindowExecution, WindowOutcome, WindowPart
from rhymemeg.rollout.outliers import Outliers
from rhymemeg.rollout.samples import Prompt, Sample, SampleId
from rhymemeg.rollout.speculation import Speculation
from rhymemeg.rollout.window import Progress
from rhymemeg.rollout.wire import pack_samples, unpack_samples


@dataclass(frozen=True)
class Window:
    """A closed window: this rank's `finished` samples, and the record, the same on all ranks but for the spans, which rank 0
    has."""

    finished: list[Sample]
    record: WindowRecord


@dataclass(frozen=True)
class WindowLimits:
    """Seconds: of a whole window, and of silence of one engine. `steal`: engines without work take that of others.
    `early_in_free_slots`: samples of the next step start as soon as a slot is free, and not only on an engine that runs
    nothing of this step."""

    timeout: float
    silence: float
    steal: bool = True
    early_in_free_slots: bool = False


class Rollouts:
    """See the module. All methods are collective."""

    def __init__(
        self,
        engine: RolloutEngine,
        runtime: Runtime,
        board: WindowBoard | None,
        speculation: Speculation | None,
        limits: WindowLimits,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.engine, self.runtime, self.board, self.speculation = engine, runtime, board, speculation
        self.limits, self.progress = limits, progress
        self.paused: dict[SampleId, Sample] = {}
        """Samples with tokens, to be resumed; on all ranks of the engine that made them."""
        self.finished_early: list[Sample] = []

    # -------------------------------------------------------------------------------------------------------- window

    def window(
        self,
        scheduler: Scheduler,
        step: int,
        prompts: Sequence[Prompt],
        sampling: SamplingOptions,
        seed: int,
        *,
        next_prompts: Sequence[Prompt] = (),
        strict: bool = False,
        judge: Judge | None = None,
    ) -> Window:
        """Run one window. `next_prompts` are those of the next step, for engines that may start early. `judge` gets samples as
        they finish; those of the step before are left to the caller."""
        decided = scheduler.plan(
            step, [p.prompt_id for p in prompts], [p.prompt_id for p in next_prompts], strict=strict
        )
        totals = scheduler.totals(decided)
        if totals.samples > MAX_SAMPLES:
            raise RolloutError(f"{totals.samples} samples in a window: at most {MAX_SAMPLES} can be counted")
        known = {p.prompt_id: p for p in (*prompts, *next_prompts)}
        self._place_paused(decided)
        resumed = self._resumed(decided)
        if self.speculation is not None:
            loaded = list(known.values()) + self._prompts_of_paused(known, len(decided.resumed) > 0)
            self.speculation.begin(loaded, self._engines_of(decided, [p.prompt_id for p in loaded]))
        outliers = None
        if scheduler.options.outliers and not strict:
            outliers = Outliers(decided, scheduler.growth_of_outliers(known))
        part = WindowPart(
            totals,
            resumed,
            decided.queue_of(self.engine.engine_index),
            decided.early_of(self.engine.engine_index),
            known,
            shared=decided.shared,
            steal=self.limits.steal,
            early_in_free_slots=self.limits.early_in_free_slots,
            outliers=outliers,
        )
        if self.board is not None:
            self.board.begin()
        outcome = WindowExecution(
            self.engine,
            part,
            self.board,
            sampling,
            seed,
            timeout=self.limits.timeout,
            silence=self.limits.silence,
            history=self.speculation,
            judge=judge,
            progress=self.progress,
        ).run()
        if self.speculation is not None:
            self.speculation.release()
        self.paused = {s.sample_id: s for s in outcome.paused}
        record = self._account(scheduler, decided, outcome)
        due = [s for s in self.finished_early if s.sample_id.step <= step]
        self.finished_early = [s for s in self.finished_early if s.sample_id.step > step] + outcome.finished_early
        return Window(sorted(due + outcome.finished, key=lambda s: s.sample_id), record)

    def _resumed(self, decided: Plan) -> list[Sample]:
        """What this engine resumes, in the order of the plan."""
        return [self.paused[sid] for sid in decided.resumed_of(self.engine.engine_index).sample_ids()]

    def _prompts_of_paused(self, known: Collection[int], any_paused: bool) -> list[Prompt]:
        """Prompts of the step before, of which something is resumed, the same list on every rank."""
        if not any_paused:
            return []
        mine = {s.sample_id.prompt_id: s.prompt_ids for s in self.paused.values()}
        rows = sorted((p, ids) for p, ids in mine.items() if p not in known)
        merged = dict(row for part in self.runtime.all_gather_object(rows) for row in part)
        return [Prompt(prompt_id, "", tuple(ids)) for prompt_id, ids in sorted(merged.items())]

    def _engines_of(self, decided: Plan, prompt_ids: Iterable[int]) -> dict[int, set[int]]:
        """Engines that the plan lets sample each prompt."""
        engines: dict[int, set[int]] = {prompt_id: set() for prompt_id in prompt_ids}
        if decided.shared:
            everywhere = set(range(decided.num_engines))
            return dict.fromkeys(engines, everywhere)
        for queue, ids in ((decided.queue, decided.prompt_ids), (decided.early, decided.early_prompt_ids)):
            for engine in range(decided.num_engines):
                rows, _ = queue.part(engine)
                for prompt_id in np.unique(ids[rows]).tolist():
                    engines[prompt_id].add(engine)
        for prompt_id, engine in zip(decided.resumed.prompt_id.tolist(), decided.resumed.engine.tolist()):
            engines[prompt_id].add(engine)
        return engines

    def _place_paused(self, decided: Plan) -> None:
        """Bring paused samples to the engines that resume them. Who sends what follows from the plan; every rank of the
        new engine gets a copy, and every rank of the old one drops its own."""
        size = self.engine.spec.tensor_parallel_size
        here = self.engine.engine_index
        outgoing: list[list[Sample]] = [[] for _ in range(self.runtime.world_size)]
        target_of = dict(zip(decided.resumed.sample_ids(), decided.resumed.engine.tolist()))
        for sid in sorted(self.paused):
            target = target_of[sid]
            if target != here:
                sample = self.paused.pop(sid)
                if self.engine.is_leader:
                    for rank in range(target * size, (target + 1) * size):
                        outgoing[rank].append(sample)
        if decided.moved:
            for data in exchange_bytes([pack_samples(part) if part else b"" for part in outgoing], self.runtime):
                if data:
                    self.paused.update((s.sample_id, s) for s in unpack_samples(data))

    def _account(self, scheduler: Scheduler, decided: Plan, outcome: WindowOutcome) -> WindowRecord:
        """Tell everybody what became of every sample."""
        mine: list[tuple[float, ...]] = []
        if self.engine.is_leader:
            for complete, samples in (
                (1, [*outcome.finished, *outcome.finished_early]),
                (0, outcome.paused),
            ):
                for s in samples:
                    sid = s.sample_id
                    mine.append(
                        (
                            sid.step,
                            sid.prompt_id,
                            sid.sample_index,
                            self.engine.engine_index,
                            len(s.response_ids),
                            complete,
                        )
                    )
        everyone = all_gather_rows(np.array(mine, np.float64).reshape(-1, 6), self.runtime).astype(np.int64).tolist()
        rows = [Row(SampleId(s, p, i), e, n, bool(c)) for s, p, i, e, n, c in everyone]
        report = replace(outcome.report, spans=())
        told = self.runtime.all_gather_object(
            (report, outcome.seconds, buckets(outcome.timings), outcome.prefill) if self.engine.is_leader else None
        )
        leaders = [entry for entry in told if entry is not None]
        reports = [entry[0] for entry in leaders]
        seconds = max(entry[1] for entry in leaders)
        # An engine that sees the close first waits for the others to see it.
        reports = [replace(r, idle_seconds=min(r.idle_seconds, seconds)) for r in reports]
        spans = self.runtime.gather_object(outcome.report.spans if self.engine.is_leader else (), dst=0)
        record = scheduler.close(decided, seconds, reports, rows)
        scheduler.learn_cost([timing for entry in leaders for timing in entry[2]], [entry[3] for entry in leaders])
        return record if spans is None else replace(record, spans=tuple(span for part in spans for span in part))

    # ---------------------------------------------------------------------------------------------------- checkpoint

    def held(self) -> list[Sample]:
        """Samples that this rank alone would lose: paused ones and those complete before their step."""
        return [*self.paused.values(), *self.finished_early] if self.engine.is_leader else []

    def restore(self, samples: Iterable[Sample], scheduler: Scheduler) -> None:
        """Take over what all ranks of the saved run held; the layout may be another one. Paused samples of engines that do
        not exist any more go to engine 0 for the plan to place."""
        for sample in samples:
            sid = sample.sample_id
            if sample.finish_reason is None:
                engine, tokens = scheduler.unfinished[sid]
                if engine >= self.engine.num_engines:
                    scheduler.unfinished[sid] = (engine := 0, tokens)
                if engine == self.engine.engine_index:
                    self.paused[sid] = sample
            elif self.engine.is_leader and sid.prompt_id % self.engine.num_engines == self.engine.engine_index:
                self.finished_early.append(sample)


def buckets(timings: Sequence[StepTiming]) -> list[StepTiming]:
    """A summary of measured steps: the median of each power of two of running requests, which is all that
    `histopipe.cost.profile_from_steps` looks at, in a handful of entries."""
    by_size: dict[int, list[StepTiming]] = {}
    for timing in timings:
        by_size.setdefault(timing.running.bit_length(), []).append(timing)
    result = []
    for _, entries in sorted(by_size.items()):
        running = int(np.median([t.running for t in entries]))
        result.append(StepTiming(running, running, float(np.median([t.seconds for t in entries]))))
    return result
