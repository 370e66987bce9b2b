"""One rollout window on one engine: what `rhymemeg.histopipe.window` decides, carried out on the real thing.

    outcome = WindowExecution(engine, part, board, sampling, seed, ...).run()       all ranks of the engine alike

The loop starts requests as slots become free, steps the engine, and polls the board from time to time (`board`): it adds
what has happened to the common counters, answers thieves, steals when it has nothing left, moves outliers (`outliers`),
and stops as soon as the counters say that the window may close. What runs then is paused with its tokens.

With several ranks an engine, its leader polls and decides, and its other ranks wait for its commands at the same turn of
the loop, so that all of them make the same calls to the engine. A single engine needs no board and closes by itself.

Every wait ends: a window that takes longer than `timeout` and an engine that has not polled for `silence` seconds are
RolloutErrors that say who is missing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rhymemeg.errors import RolloutError
from rhymemeg.histopipe.cost import StepTiming
from rhymemeg.histopipe.record import EngineReport, Span
from rhymemeg.histopipe.window import EngineLedger, WindowTotals, check_alive, choose_victim
from rhymemeg.histopipe.window import Progress as Counters
from rhymemeg.rollout.board import Letter, Status, WindowBoard
from rhymemeg.rollout.engine import RolloutEngine, SamplingOptions
from rhymemeg.rollout.outliers import Outliers
from rhymemeg.rollout.samples import Prompt, Sample, SampleId, sample_seed
from rhymemeg.rollout.window import PROGRESS_INTERVAL, Progress, unfinished_message
from rhymemeg.rollout.wire import pack_samples, unpack_samples

IDLE_SECONDS = 0.002
"""Sleep of a turn of the loop without anything to run."""
POLL_SECONDS = 0.05
"""An engine polls about this often, and `NEAR` times as often towards the end; with many engines less, so that the store gets
`POLLS_PER_SECOND` at most."""
NEAR = 5
POLLS_PER_SECOND = 4000.0
SPAN_ENGINES = 32
"""Stays of responses are recorded for the chart on so many engines."""
TIMINGS = 4096
"""Engine steps of a window whose times are kept."""


class HistoryTransfer(Protocol):
    """How drafts follow a request that changes engine in the middle of a window."""

    def lend(self, prompt_ids: Iterable[int]) -> bytes: ...
    def borrow(self, prompt_ids: Iterable[int], data: bytes) -> None: ...


class Judge(Protocol):
    """What judges samples while the engine goes on with others (`rl.rewards.Scorer`)."""

    def submit(self, sample: Sample, prompt: Prompt) -> None: ...
    def poll(self) -> None: ...


@dataclass
class WindowPart:
    """The plan as far as it concerns one engine. `resumed`: samples with tokens, in start order. `queue`, `early`: ids in
    start order; where `shared`, all engines have the same two lists and pull from them. `prompts` by id: of the samples that
    start in this window."""

    totals: WindowTotals
    resumed: Sequence[Sample]
    queue: Sequence[SampleId]
    early: Sequence[SampleId]
    prompts: Mapping[int, Prompt]
    shared: bool = False
    steal: bool = True
    early_in_free_slots: bool = False
    outliers: Outliers | None = None


@dataclass
class WindowOutcome:
    """What one engine has at the close. On its leader `finished` (of this step) and `finished_early` (of the next), on all
    its ranks `paused`: samples with tokens that are to be resumed. `timings`: steps of plain decoding; `prefill`: tokens
    and seconds of all steps with prefill."""

    finished: list[Sample]
    finished_early: list[Sample]
    paused: list[Sample]
    report: EngineReport
    seconds: float
    timings: list[StepTiming]
    prefill: StepTiming


@dataclass
class _Stay:
    """A response on this engine: since when, with how many tokens."""

    begin: float
    tokens: int
    kind: str


@dataclass
class _Counts:
    """What the report needs."""

    steps: int = 0
    tokens: int = 0
    recomputed: int = 0
    early_started: int = 0
    stolen: int = 0
    migrated: int = 0
    idle: float = 0.0
    ran_dry: bool = False
    spans: list[Span] = field(default_factory=list)


class WindowExecution:
    """See the module. `silence` and `timeout` in seconds; `progress` is called on the leader, a few times a second, and
    `judge` gets samples there as they finish."""

    def __init__(
        self,
        engine: RolloutEngine,
        part: WindowPart,
        board: WindowBoard | None,
        sampling: SamplingOptions,
        run_seed: int,
        *,
        timeout: float,
        silence: float = 600.0,
        history: HistoryTransfer | None = None,
        judge: Judge | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.engine, self.part, self.board, self.sampling, self.run_seed = engine, part, board, sampling, run_seed
        self.timeout, self.silence, self.history, self.progress = timeout, silence, history, progress
        self.judge = judge if engine.is_leader else None
        self.samples = {s.sample_id: s for s in part.resumed}
        self.ledger: EngineLedger[SampleId] = EngineLedger(
            engine.engine_index,
            engine.spec.max_num_seqs,
            self.samples,
            () if part.shared else part.queue,
            () if part.shared else part.early,
            part.early_in_free_slots,
        )
        self.finished: list[Sample] = []
        self.finished_early: list[Sample] = []
        self.released: list[Sample] = []
        self.counts = _Counts()
        self.timings: deque[StepTiming] = deque(maxlen=TIMINGS)
        self.prefill = StepTiming(0, 0, 0.0)
        self._just_added = 0  # tokens to prefill in the next step
        self._prefilled: set[int] = set()
        self._stays: dict[SampleId, _Stay] = {}
        self._total = Counters(0, 0, 0)
        self._added = Counters(0, 0, 0)
        self._polls = self._turns = self._turns_to_poll = 0
        self._turn_seconds = IDLE_SECONDS
        self._asked = False
        self._drained = {"queue": False, "early": False}
        self._heard: dict[int, tuple[int, float]] = {}
        self._watch_at = 0.0
        self._report_at = 0.0

    # ---------------------------------------------------------------------------------------------------------- loop

    def run(self) -> WindowOutcome:
        """Until the window closes."""
        self._begin = self._mark = time.perf_counter()
        self._watch_at = self._now() + self.silence / 4
        self._start()
        while True:
            busy = self.engine.has_unfinished()
            fresh = self._step() if busy else False
            if not busy:
                time.sleep(IDLE_SECONDS)
            now = time.perf_counter()
            seconds, self._mark = now - self._mark, now
            if not busy:
                self.counts.idle += seconds
            self._turn_seconds += 0.2 * (seconds - self._turn_seconds)
            self._turns += 1
            if fresh:
                self._start()
            if self._closes():
                break
            if self._now() > self.timeout:
                raise RolloutError(self._too_long())
        return self._close()

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    def _step(self) -> bool:
        """One engine step; True where requests have finished."""
        before, added = self.ledger.running, self._just_added
        self._just_added = 0
        began = time.perf_counter()
        output = self.engine.step()
        seconds = time.perf_counter() - began
        self.counts.steps += 1
        self.counts.tokens += output.tokens
        if added:
            self.prefill = StepTiming(0, self.prefill.tokens + added, self.prefill.seconds + seconds)
        elif output.waiting == 0:
            self.timings.append(StepTiming(before, before, seconds))
        for sample in output.finished:
            sid = sample.sample_id
            if self.ledger.finish(sid):
                self.finished.append(sample)
                if self.part.outliers is not None:
                    self.part.outliers.finished(sid)
            else:
                self.finished_early.append(sample)
            del self.samples[sid]
            self._leave(sample, "finished")
            # A sample that came with tokens from the step before is judged after the window, where its prompt is known.
            if self.judge is not None and sid.prompt_id in self.part.prompts:
                self.judge.submit(sample, self.part.prompts[sid.prompt_id])
        if self.judge is not None:
            self.judge.poll()
        if self.progress and self.engine.is_leader and (self._now() >= self._report_at or not output.running):
            self._report_at = self._now() + PROGRESS_INTERVAL
            done = len(self.finished) if self.board is None else self._total.settled
            self.progress(Progress(self.counts.tokens, done, output.running, output.waiting))
        return bool(output.finished)

    def _start(self) -> None:
        """Give the engine what fits into its free slots."""
        while (sid := self.ledger.start()) is not None:
            sample = self.samples.get(sid)
            if sample is None:
                sample = self.samples[sid] = Sample(sid, self.part.prompts[sid.prompt_id].token_ids)
            had = len(sample.response_ids)
            self.engine.add(sample, self.sampling, sample_seed(self.run_seed, sid, had))
            if had or sid.prompt_id not in self._prefilled:  # siblings share the keys and values of their prompt
                self._just_added += len(sample.prompt_ids) + had
                self._prefilled.add(sid.prompt_id)
            kind = "resumed" if had else "new"
            if self.ledger.is_early(sid):
                self.counts.early_started += 1
                kind = "early"
            self.counts.recomputed += had
            self._stays[sid] = _Stay(self._now(), had, kind)

    def _leave(self, sample: Sample, outcome: str) -> None:
        stay = self._stays.pop(sample.sample_id)
        if self.engine.engine_index < SPAN_ENGINES and self.engine.is_leader:
            made = len(sample.response_ids) - stay.tokens
            self.counts.spans.append(
                Span(
                    self.engine.engine_index,
                    str(sample.sample_id),
                    round(stay.begin, 4),
                    round(self._now(), 4),
                    made,
                    stay.kind,
                    outcome,
                )
            )

    # ---------------------------------------------------------------------------------------------------------- poll

    def _closes(self) -> bool:
        """Whether this turn is the last one; polls if it is time to."""
        if self.board is None:
            self._pull_alone()
            self._total = self.ledger.progress()
            return self.part.totals.may_close(self._total)
        if self._turns < self._turns_to_poll:
            return False
        if not self.engine.is_leader:
            return self._apply_all(self.board.obey())
        commands = self._poll(self.board)
        self.board.command(commands)
        closed = self._apply_all(commands)
        ledger = self.ledger
        self.board.publish(
            Status(ledger.backlog, ledger.early_backlog, max(ledger.free, 0), self.counts.steps, self._polls)
        )
        return closed

    def _poll(self, board: WindowBoard) -> list[Letter]:
        """What the leader does between two steps; returns what all ranks of the engine are to do now."""
        self._polls += 1
        mine = self.ledger.progress()
        self._total = board.add(Counters(*(a - b for a, b in zip(mine, self._added))))
        self._added = mine
        commands: list[Letter] = []
        for letter in board.letters():
            if letter.kind == "want":
                commands.append(Letter("give", letter.fields))
            else:  # "grant" or "move": carried out by all ranks
                commands.append(letter)
        if self.part.totals.may_close(self._total):
            return [*commands, Letter("close", {})]
        if self.part.shared:
            commands += self._pull(board)
        elif self.part.steal:
            self._ask(board)
        if self.part.outliers is not None:
            running = [self.samples[sid] for sid in self.ledger.running_keys()]
            commands += self.part.outliers.poll(board, running, self.ledger.is_due)
        self._watch(board)
        return [*commands, Letter("next", {"turns": self._turns_until_poll()})]

    def _turns_until_poll(self) -> int:
        """Turns of the loop until the next poll: few when the window is about to close."""
        total, seconds = self._total, POLL_SECONDS
        left = self.part.totals.samples - total.settled
        if (
            total.started == self.part.totals.samples
            and left <= self.part.totals.max_unfinished + 2 * self.engine.num_engines
        ):
            seconds = POLL_SECONDS / NEAR
        seconds = max(seconds, self.engine.num_engines / POLLS_PER_SECOND)
        return max(1, round(seconds / max(self._turn_seconds, 1e-4)))

    def _ask(self, board: WindowBoard) -> None:
        """Ask the engine with the longest queue for a part of it, if there is nothing to start here."""
        early = self.ledger.wants_early() and self._total.started == self.part.totals.samples
        if self._asked or not (early or (self.ledger.wants_work() and self._total.started < self.part.totals.samples)):
            return
        known = board.statuses(board.candidates(self._polls))
        engines = [self.engine.engine_index, *known]
        backlog = [0, *((s.early_backlog if early else s.backlog) for s in known.values())]
        choice = choose_victim(np.array(backlog), 0)
        if choice is not None:
            self._asked = True
            fields = {"thief": self.engine.engine_index, "number": choice[1], "early": early}
            board.post(engines[choice[0]], Letter("want", fields))

    def _pull(self, board: WindowBoard) -> list[Letter]:
        """Take the next requests of the shared queues: of what is left, a share that shrinks, so that the first engine
        does not take all that fits into it."""
        commands = []
        for name, keys in (("queue", self.part.queue), ("early", self.part.early)):
            wants = self.ledger.wants_work() if name == "queue" else self.ledger.wants_early()
            if self._drained[name] or not wants:
                continue
            share = max(1, (len(keys) - self._total.started) // (2 * board.num_engines)) if name == "queue" else 1
            number = min(self.ledger.free, share)
            first = board.pull(name, number)
            taken = keys[first : first + number]
            self._drained[name] = first + number >= len(keys)
            if taken:
                commands.append(Letter("grant", {"keys": [str(k) for k in taken], "early": name == "early"}))
                break
        return commands

    def _pull_alone(self) -> None:
        """A single engine owns the shared queues."""
        if self.part.shared and not self._drained["queue"]:
            self.ledger.accept(self.part.queue)
            self.ledger.accept(self.part.early, early=True)
            self._drained["queue"] = True
            self._start()

    def _apply_all(self, commands: Sequence[Letter]) -> bool:
        """Carry out commands; True for the close."""
        closed = False
        for letter in commands:
            closed |= self._apply(letter)
        if not closed:
            self._start()
        return closed

    def _apply(self, letter: Letter) -> bool:
        fields = letter.fields
        match letter.kind:
            case "close":
                return True
            case "next":
                self._turns_to_poll = self._turns + fields["turns"]
            case "give":
                give = self.ledger.give_early if fields["early"] else self.ledger.give
                keys = give(fields["number"])
                if self.engine.is_leader:
                    assert self.board is not None
                    prompts = {key.prompt_id for key in keys}
                    data = self.history.lend(prompts) if self.history and keys else b""
                    grant = {"keys": [str(k) for k in keys], "early": fields["early"], "stolen": True}
                    self.board.post(fields["thief"], Letter("grant", grant, data))
            case "grant":
                keys = tuple(SampleId.parse(k) for k in fields["keys"])
                if fields.get("stolen"):
                    self._asked = False
                    self.counts.stolen += len(keys)
                    if self.history and letter.data:
                        self.history.borrow({key.prompt_id for key in keys}, letter.data)
                self.ledger.accept(keys, early=fields["early"])
            case "release":
                self._release(SampleId.parse(fields["key"]))
            case "move_out":
                self._move_out(SampleId.parse(fields["key"]), fields["to"])
            case "move":
                (sample,) = unpack_samples(letter.data)
                self.samples[sample.sample_id] = sample
                self.counts.migrated += 1
                self.ledger.move_in(sample.sample_id, fields["due"])
        return False

    def _release(self, sid: SampleId) -> None:
        """An outlier leaves for the next window."""
        self.ledger.release(sid)
        (sample,) = self.engine.pause([sid])
        self.counts.migrated += 1
        del self.samples[sid]
        self._leave(sample, "carried")
        self.released.append(sample)

    def _move_out(self, sid: SampleId, target: int) -> None:
        """An outlier leaves for another engine, with its tokens."""
        due = self.ledger.move_out(sid)
        (sample,) = self.engine.pause([sid])
        del self.samples[sid]
        self._leave(sample, "moved")
        if self.engine.is_leader:
            assert self.board is not None
            self.board.post(target, Letter("move", {"due": due}, pack_samples([sample])))

    # --------------------------------------------------------------------------------------------------------- watch

    def _watch(self, board: WindowBoard) -> None:
        """An engine that has stopped polling is named, by any that waits for it."""
        now = self._now()
        if now < self._watch_at or self.engine.has_unfinished():
            return
        self._watch_at = now + min(self.silence / 4, 30.0)
        watched = board.candidates(self._polls)
        known = board.statuses(watched)
        for engine in watched:
            polls = known[engine].polls if engine in known else -1  # one that has not begun the window is silent, too
            if engine not in self._heard or self._heard[engine][0] != polls:
                self._heard[engine] = (polls, now)
        heard = {engine: at for engine, (_, at) in self._heard.items()}
        check_alive(heard, now, self.silence, f"engine {self.engine.engine_index} waits for the window to close")

    def _too_long(self) -> str:
        if self.engine.has_unfinished():
            return unfinished_message(self.engine, self.timeout)
        t, p = self.part.totals, self._total
        message = (
            f"engine {self.engine.engine_index} is done, but the window did not close in {self.timeout:g} s "
            f"(--rollout-timeout-minutes): {p.started} of {t.samples} samples started, {p.settled} complete"
        )
        if self.board is None:
            return message
        steps = {e: s.steps for e, s in self.board.statuses(self.board.candidates(self._polls)).items()}
        time.sleep(1.0)
        later = {e: s.steps for e, s in self.board.statuses(list(steps)).items()}
        busy = [str(e) for e in steps if later.get(e) != steps[e]]
        return message + (f"; engine(s) {', '.join(busy[:16])} still generate" if busy else "; no engine generates")

    # --------------------------------------------------------------------------------------------------------- close

    def _close(self) -> WindowOutcome:
        seconds = self._now()
        self.counts.ran_dry = not self.engine.has_unfinished()
        paused = self.ledger.close()
        running = [key for key in (*paused.carried, *paused.early) if key in self._stays]
        for sample in self.engine.pause(running):
            self._leave(sample, "carried")
        # A response that was on its way here has tokens, but was not on the engine.
        left = [self.samples[key] for key in (*paused.carried, *paused.early)]
        c = self.counts
        report = EngineReport(
            engine=self.engine.engine_index,
            idle_seconds=c.idle,
            generated_tokens=c.tokens,
            recomputed_tokens=c.recomputed,
            steps=c.steps,
            early_started=c.early_started,
            stolen=c.stolen,
            migrated=c.migrated,
            spans=tuple(c.spans),
            ran_dry=c.ran_dry,
        )
        leader = self.engine.is_leader
        return WindowOutcome(
            sorted(self.finished, key=lambda s: s.sample_id) if leader else [],
            sorted(self.finished_early, key=lambda s: s.sample_id) if leader else [],
            [*self.released, *left],
            report,
            seconds,
            list(self.timings),
            self.prefill,
        )
