"""Engines without a model, for tests of the window protocol: each response has a length that is known, and every engine
runs in a thread of its own on a store in memory. The real loop, board, planner and ledger; only the tokens are made up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from rhymemeg.histopipe.plan import Plan
from rhymemeg.histopipe.scheduler import Row, Scheduler
from rhymemeg.rollout.board import WindowBoard
from rhymemeg.rollout.engine import SamplingOptions, StepOutput
from rhymemeg.rollout.execution import WindowExecution, WindowOutcome, WindowPart
from rhymemeg.rollout.outliers import Outliers
from rhymemeg.rollout.samples import Prompt, Sample, SampleId

Length = Callable[[SampleId], int]


class ScriptedEngine:
    """The part of `RolloutEngine` that a window uses. `version` is written into every token."""

    def __init__(self, index: int, num_engines: int, slots: int, length: Length, version: int = 0) -> None:
        self.engine_index, self.num_engines, self.length, self.version = index, num_engines, length, version
        self.spec = SimpleNamespace(max_num_seqs=slots)
        self.is_leader, self.engine_ranks = True, [index]
        self.running: dict[SampleId, Sample] = {}
        self.steps = 0
        self.step_seconds = 0.0
        self.die_after: int | None = None
        self.added: list[SampleId] = []

    def has_unfinished(self) -> bool:
        return bool(self.running)

    @property
    def unfinished(self) -> list[Sample]:
        return list(self.running.values())

    def add(self, sample: Sample, sampling: SamplingOptions, seed: int) -> None:
        assert sample.sample_id not in self.running and sample.finish_reason is None
        assert len(self.running) < self.spec.max_num_seqs
        self.running[sample.sample_id] = sample
        sample.engine = self.engine_index
        self.added.append(sample.sample_id)

    def step(self) -> StepOutput:
        self.steps += 1
        if self.die_after is not None and self.steps > self.die_after:
            raise SystemExit  # ends the thread without a word, as a killed process does
        time.sleep(self.step_seconds)
        finished = []
        for sample in list(self.running.values()):
            sample.response_ids.append(len(sample.response_ids))
            sample.log_probs.append(-1.0)
            sample.versions.append(self.version)
            if len(sample.response_ids) >= self.length(sample.sample_id):
                sample.finish_reason = "stop"
                finished.append(self.running.pop(sample.sample_id))
        return StepOutput(finished, len(self.running) + len(finished), len(self.running), 0)

    def pause(self, ids: Sequence[SampleId]) -> list[Sample]:
        return [self.running.pop(sid) for sid in ids]


class Cluster:
    """Engines, their scheduler, and what they hold between windows."""

    def __init__(
        self, scheduler: Scheduler, length: Length, *, steal: bool = True, timeout: float = 30.0, silence: float = 20.0
    ) -> None:
        self.scheduler, self.length, self.steal, self.timeout, self.silence = scheduler, length, steal, timeout, silence
        self.store = dist.HashStore()
        self.boards = [
            WindowBoard(self.store, e, scheduler.num_engines, timeout=timeout) for e in range(scheduler.num_engines)
        ]
        self.paused: dict[SampleId, Sample] = {}
        self.early: list[Sample] = []
        self.engines: list[ScriptedEngine] = []
        self.errors: list[BaseException] = []
        self.plan: Plan | None = None
        self.prepare: Callable[[ScriptedEngine], None] = lambda engine: None

    def window(
        self, step: int, prompts: Sequence[int], then: Sequence[int] = (), strict: bool = False
    ) -> tuple[list[Sample], list[WindowOutcome], Any]:
        """One window on all engines: samples of this step that are complete, outcomes, record. Raises what the first
        engine raised."""
        s = self.scheduler
        self.plan = decided = s.plan(step, prompts, then, strict)
        totals = s.totals(decided)
        outcomes: list[WindowOutcome | None] = [None] * s.num_engines
        self.engines = [ScriptedEngine(e, s.num_engines, s.slots, self.length, step) for e in range(s.num_engines)]
        self.errors = []
        for board in self.boards:
            board.begin()

        def run(e: int) -> None:
            outliers = Outliers(decided, s.growth_of_outliers(prompts)) if s.options.outliers and not strict else None
            part = WindowPart(
                totals,
                [self.paused[sid] for sid in decided.resumed_of(e).sample_ids()],
                decided.queue_of(e),
                decided.early_of(e),
                {p: Prompt(p, "", (1, 2, 3)) for p in (*prompts, *then)},
                shared=decided.shared,
                steal=self.steal,
                outliers=outliers,
            )
            engine: Any = self.engines[e]
            board = self.boards[e] if s.num_engines > 1 else None
            try:
                self.prepare(engine)
                outcomes[e] = WindowExecution(
                    engine, part, board, SamplingOptions(), 0, timeout=self.timeout, silence=self.silence
                ).run()
            except SystemExit:
                pass
            except BaseException as error:
                self.errors.append(error)

        threads = [threading.Thread(target=run, args=(e,)) for e in range(s.num_engines)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.timeout + 60)
            assert not thread.is_alive(), "an engine hangs"
        if self.errors:
            raise self.errors[0]
        done = [outcome for outcome in outcomes if outcome is not None]
        rows = [
            Row(x.sample_id, outcome.report.engine, len(x.response_ids), complete)
            for outcome in done
            for complete, samples in ((True, [*outcome.finished, *outcome.finished_early]), (False, outcome.paused))
            for x in samples
        ]
        record = s.close(decided, max(o.seconds for o in done), [o.report for o in done], rows)
        self.paused = {x.sample_id: x for o in done for x in o.paused}
        finished = [x for o in done for x in o.finished] + [x for x in self.early if x.sample_id.step <= step]
        self.early = [x for x in self.early if x.sample_id.step > step] + [x for o in done for x in o.finished_early]
        return finished, done, record
