"""Event-driven engines under the trainer's planner (`planner.plan`) and the trainer's window rules (`window`).

An engine with c running requests makes `tokens_per_step(c)` tokens for each of them in `step_seconds(c)`: between two
of its events all its requests advance alike, so its events are only its next finish, found in a heap of its own. A heap
of engines gives the next event of all. Prefill (prompts, and the tokens of resumed responses) stalls the engine for its
length. What an engine step would round up, polling, and the training phase itself are left out.

In: `Setting` and an iterator of step lengths. Out: a `WindowRecord` a window. Deterministic.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rhymemeg.histopipe.cost import A100_7B, CostModel
from rhymemeg.histopipe.plan import Layout, Plan, PlanRequest, Requests
from rhymemeg.histopipe.planner import plan
from rhymemeg.histopipe.predict import CarryControl, Feedback, Floats
from rhymemeg.histopipe.record import EngineReport, Span, WindowRecord, window_record
from rhymemeg.histopipe.window import MIN_BETA, EngineLedger, Progress, WindowTotals, choose_victim, is_outlier
from rhymemeg.histopipe.workloads import StepLengths


@dataclass(frozen=True)
class Speculation:
    """Drafts of `draft` tokens, each accepted with probability `accept` given that those before it were, for a share
    `coverage` of the requests, while at most `max_running` requests run (above, the engine decodes plainly)."""

    draft: int = 0
    accept: float = 0.0
    coverage: float = 1.0
    max_running: int = 1 << 30

    def tokens_per_step(self, running: int) -> float:
        if self.draft == 0 or running > self.max_running:
            return 1.0
        expected = sum(self.accept**i for i in range(self.draft + 1))
        return self.coverage * expected + (1 - self.coverage)

    def query(self, running: int) -> float:
        """Query tokens a request and step."""
        return 1.0 if self.draft == 0 or running > self.max_running else 1.0 + self.coverage * self.draft


@dataclass(frozen=True)
class Setting:
    """One simulated configuration. `carry` is the limit of rho; `early` the share of the next step that may start
    early; `migrate`: the paper's outliers move on. `recompute`: keys and values of resumed responses are computed
    again."""

    policy: str = "complement"
    layout: Layout = "spread"
    carry: float = 0.0
    early: float = 0.0
    early_in_free_slots: bool = False
    steal: bool = True
    migrate: bool = False
    two_tier: bool = True
    keep_place: bool = False
    recompute: bool = True
    adapt: bool = True
    """Growth and trust are learned from past windows."""
    engines: int = 32
    slots: int = 64
    samples: int = 16
    cap: int = 16384
    prompt_tokens: int = 200
    cost: CostModel = A100_7B
    speculation: Speculation = Speculation()
    seed: int = 0
    span_engines: int = 0
    """Spans are recorded for this many engines."""


@dataclass
class _Response:
    """A response that has tokens from an earlier window."""

    key: int
    engine: int
    tokens: int


@dataclass
class _Engine:
    """`progress` counts tokens that each running request has made since the window began; `ends` holds (progress at
    which it finishes or crosses its outlier limit, key). `clock` may lie ahead of the event being handled: prefill."""

    ledger: EngineLedger[int]
    clock: float = 0.0
    progress: float = 0.0
    idle: float = 0.0
    idle_since: float | None = 0.0
    steps: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    prompts: set[int] = field(default_factory=set)
    generated: int = 0
    recomputed: int = 0
    early_started: int = 0
    stolen: int = 0
    migrated: int = 0
    spans: list[Span] = field(default_factory=list)

    def report(self) -> EngineReport:
        return EngineReport(
            self.ledger.engine,
            self.idle,
            self.generated,
            self.recomputed,
            round(self.steps),
            self.early_started,
            self.stolen,
            self.migrated,
            tuple(self.spans),
            self.idle_since is not None,
        )


class Simulator:
    """Windows of one setting. `run_window` takes the lengths of this step and of the next."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.step = 0
        self.feedback = Feedback()
        self.carry = CarryControl(setting.carry)
        self.unfinished: list[_Response] = []
        self.finished_early: list[int] = []
        self.trained: list[int] = []
        """Keys of the samples that the last window made complete for training."""
        self.lengths: dict[int, list[int]] = {}
        self.history: dict[int, Floats] = {}
        self.last_plan: Plan | None = None
        self.last_request: PlanRequest | None = None
        c = range(setting.slots + 1)
        query = [setting.speculation.query(i) for i in c]
        step_seconds = [float(setting.cost.step_seconds(i, q)) for i, q in zip(c, query)]
        self.tokens_per_step = [setting.speculation.tokens_per_step(i) for i in c]
        self.seconds_per_token = [s / t for s, t in zip(step_seconds, self.tokens_per_step)]

    # ------------------------------------------------------------------------------------------------------- planning

    def _request(self, now: StepLengths, then: StepLengths) -> PlanRequest:
        """What the trainer would know before this window."""
        s, per_step = self.setting, now.actual.size
        entries = []
        for response in self.unfinished:
            step, index = divmod(response.key, per_step)
            prompt, sample = divmod(index, s.samples)
            references = self.history[step][prompt]
            if step < self.step:  # its siblings are complete, and their lengths are known
                siblings = np.array(self.lengths[step][prompt * s.samples : (prompt + 1) * s.samples], np.float64)
                carried = {r.key for r in self.unfinished}
                known = [x for j, x in enumerate(siblings) if step * per_step + prompt * s.samples + j not in carried]
                references = np.concatenate([references, known])
            entries.append((step, prompt, sample, response.engine, response.tokens, references))
        width = max((len(e[5]) for e in entries), default=0)
        numbers = np.array([e[:5] for e in entries], np.int64).reshape(-1, 5)
        references = np.full((len(entries), width), np.nan)
        for i, entry in enumerate(entries):
            references[i, : len(entry[5])] = entry[5]
        first = self.step * (per_step // s.samples)
        ids = numbers[:, 1] + numbers[:, 0] * (per_step // s.samples)
        done = np.array(sorted(self.finished_early), np.int64) - self.step * per_step
        return PlanRequest(
            step=self.step,
            num_engines=s.engines,
            slots=s.slots,
            samples_per_prompt=s.samples,
            prompt_ids=first + np.arange(len(now.actual)),
            history=now.history,
            max_response_len=s.cap,
            policy=s.policy,
            layout=s.layout,
            cost=s.cost,
            feedback=self.feedback,
            resumed=Requests(numbers[:, 0], ids, numbers[:, 2], numbers[:, 3], numbers[:, 4], references),
            finished_early=np.stack([first + done // s.samples, done % s.samples], axis=1).reshape(-1, 2),
            carry_share=self.carry.share,
            early_share=s.early,
            next_prompt_ids=first + len(now.actual) + np.arange(len(then.actual)),
            next_history=then.history,
            keep_place=s.keep_place,
            seed=s.seed,
            two_tier=s.two_tier,
        )

    # ------------------------------------------------------------------------------------------------------ one window

    def run_window(self, now: StepLengths, then: StepLengths) -> WindowRecord:
        """Plan, run to the close, account. The steps must be of equal size."""
        per_step = now.actual.size
        for step, lengths in ((self.step, now), (self.step + 1, then)):
            self.lengths[step] = lengths.actual.ravel().tolist()
            self.history[step] = lengths.history
        for step in [s for s in self.lengths if s < self.step - 1]:
            del self.lengths[step], self.history[step]
        request = self._request(now, then)
        decided = plan(request)
        self.last_plan, self.last_request = decided, request
        window = _Window(self, decided, per_step)
        window.run()
        record = window.account(now)
        if self.setting.adapt:
            self.feedback = window.feedback
        self.carry = self.carry.after(now.actual.ravel(), self.setting.cap)
        self.trained = window.finished
        self.unfinished, self.finished_early = window.left, window.done_early
        self.step += 1
        return record


class _Window:
    """State of one window."""

    def __init__(self, simulator: Simulator, decided: Plan, per_step: int) -> None:
        self.sim, self.plan, self.per_step = simulator, decided, per_step
        self.setting = s = simulator.setting
        self.step = simulator.step
        self.first_had = {r.key: r.tokens for r in simulator.unfinished}
        self.had = dict(self.first_had)  # grows by what moves between engines
        self.started_at: dict[int, tuple[int, float, float]] = {}  # key -> tokens before, progress, time
        self.finished: list[int] = list(simulator.finished_early)
        self.done_early: list[int] = []
        self.left: list[_Response] = []
        self.migrated_out: list[_Response] = []
        self.moved: set[int] = set()
        self.events: list[tuple[float, int]] = []
        resumed_keys = self._resumed_keys()
        n = s.samples
        base, following = self.step * per_step, (self.step + 1) * per_step
        queue_keys = (base + decided.queue.row.astype(np.int64) * n + decided.queue.sample).tolist()
        early_keys = (following + decided.early.row.astype(np.int64) * n + decided.early.sample).tolist()
        self.shared: deque[int] = deque(queue_keys if decided.shared else ())
        self.shared_early: deque[int] = deque(early_keys if decided.shared else ())
        self.engines: list[_Engine] = []
        for e in range(s.engines):
            resumed = resumed_keys[decided.resumed_offsets[e] : decided.resumed_offsets[e + 1]]
            queue: list[int] = []
            early: list[int] = []
            if not decided.shared:
                queue = queue_keys[decided.queue.offsets[e] : decided.queue.offsets[e + 1]]
                early = early_keys[decided.early.offsets[e] : decided.early.offsets[e + 1]]
            self.engines.append(_Engine(EngineLedger(e, s.slots, resumed, queue, early, s.early_in_free_slots)))
        self.backlog = np.array([engine.ledger.backlog for engine in self.engines], np.int64)
        self.early_backlog = np.array([engine.ledger.early_backlog for engine in self.engines], np.int64)
        self.samples, self.due = len(queue_keys) + len(resumed_keys), len(resumed_keys)
        self.started = self.settled = self.due_settled = 0
        if s.migrate:
            self._prepare_migration()

    def _resumed_keys(self) -> list[int]:
        r, n = self.plan.resumed, self.setting.samples
        keys: list[int] = (r.prompt_id * n + r.sample_index).tolist()  # prompt ids count on over the steps
        return keys

    def _prepare_migration(self) -> None:
        groups, n = self.plan.groups, self.setting.samples
        assert groups is not None
        count = len(groups.engines)
        self.group_left = np.bincount(groups.of_prompt[self.plan.queue.row], minlength=count).tolist()
        self.group_of = np.repeat(groups.of_prompt, n).tolist()
        for key in self._resumed_keys():
            if key // self.per_step == self.step:
                self.group_left[self.group_of[key % self.per_step]] += 1
        self.group_size = (np.bincount(groups.of_prompt, minlength=count) * n).tolist()
        longest = np.zeros(count)
        np.maximum.at(longest, groups.of_prompt, self.plan.prediction.longest)
        self.group_longest = longest.tolist()

    # ------------------------------------------------------------------------------------------------------ event loop

    def run(self) -> None:
        """Until the window closes."""
        self.seconds = 0.0
        turns = min(len(self.shared), sum(engine.ledger.free - engine.ledger.waiting for engine in self.engines))
        e = 0
        while turns > 0:  # all pull at once, so in turns: the first must not take all that fits into it
            ledger = self.engines[e].ledger
            if ledger.free > ledger.waiting:
                ledger.accept([self.shared.popleft()])
                turns -= 1
            e = (e + 1) % len(self.engines)
        for e in range(len(self.engines)):
            self._fill(e, 0.0)
        # Under `paper` what may be carried is only what migrates, see `_crossed`.
        limit = 0 if self.setting.migrate else self.plan.max_unfinished
        totals = WindowTotals(self.samples, self.due, limit)
        while not totals.may_close(Progress(self.started, self.settled, self.due_settled)):
            t, e = heapq.heappop(self.events)
            self._event(e, t)
            self.seconds = t
        self._close()

    def _advance(self, engine: _Engine, t: float) -> None:
        running = engine.ledger.running
        if t > engine.clock:
            if running:
                made = (t - engine.clock) / self.sim.seconds_per_token[running]
                engine.progress += made
                engine.steps += made / self.sim.tokens_per_step[running]
            engine.clock = t

    def _event(self, e: int, t: float) -> None:
        engine = self.engines[e]
        ends = engine.ends
        if not ends or t < self._next(engine) - 1e-9:  # outdated: the engine took on more in the meantime
            return
        at = ends[0][0]
        self._advance(engine, t)
        engine.progress = at  # exactly, whatever rounding did to the clock
        while ends and ends[0][0] <= at + 1e-9:
            key = heapq.heappop(ends)[1]
            if key >= 0:
                self._finish(engine, key, t)
            else:
                self._crossed(e, -key - 1, t)
        self._fill(e, t)

    def _next(self, engine: _Engine) -> float:
        return engine.clock + (engine.ends[0][0] - engine.progress) * self.sim.seconds_per_token[engine.ledger.running]

    def _finish(self, engine: _Engine, key: int, t: float) -> None:
        due = engine.ledger.is_due(key)
        if engine.ledger.finish(key):
            self.finished.append(key)
            self.settled += 1
            self.due_settled += due
            if self.setting.migrate and key // self.per_step == self.step:
                self.group_left[self.group_of[key % self.per_step]] -= 1
        else:
            self.done_early.append(key)
        self._leave(engine, key, t, "finished")

    def _leave(self, engine: _Engine, key: int, t: float, outcome: str) -> int:
        """A running request stops here; its tokens so far. Records its span."""
        before, progress, begin = self.started_at.pop(key)
        if outcome != "finished" and engine.ends:
            # In place: the caller may be going through it.
            engine.ends[:] = [entry for entry in engine.ends if entry[1] not in (key, -key - 1)]
            heapq.heapify(engine.ends)
        length = self.sim.lengths[key // self.per_step][key % self.per_step]
        made = (
            length - before
            if outcome == "finished"
            else min(int(engine.progress - progress + 1e-6), length - before - 1)
        )
        made = max(made, 0)
        engine.generated += made
        if engine.ledger.engine < self.setting.span_engines:
            kind = "early" if key // self.per_step > self.step else ("resumed" if key in self.had else "new")
            step, index = divmod(key, self.per_step)
            prompt, sample = divmod(index, self.setting.samples)
            name = f"{step}-{prompt + step * (self.per_step // self.setting.samples)}-{sample}"
            engine.spans.append(Span(engine.ledger.engine, name, begin, t, made, kind, outcome))
        return before + made

    def _fill(self, e: int, t: float) -> None:
        """Start what can start, steal if there is nothing, and schedule the engine's next event."""
        engine = self.engines[e]
        ledger = engine.ledger
        prefill = 0.0
        s, sim = self.setting, self.sim
        while True:
            key = ledger.start()
            if key is None:
                if not ledger.wants_work() or not self._find_work(e):
                    break
                continue
            step, index = divmod(key, self.per_step)
            if step > self.step:
                engine.early_started += 1
                self.early_backlog[e] = ledger.early_backlog
            else:
                self.started += key not in self.moved
                self.backlog[e] = ledger.backlog
            have = self.had.get(key, 0)
            prompt = key // s.samples
            if have:
                if s.recompute:
                    engine.recomputed += have
                    prefill += have + s.prompt_tokens
            elif prompt not in engine.prompts:
                engine.prompts.add(prompt)
                prefill += s.prompt_tokens
            self.started_at[key] = (have, engine.progress, t)
            heapq.heappush(engine.ends, (engine.progress + sim.lengths[step][index] - have, key))
            if s.migrate and step == self.step:
                limit = MIN_BETA * self.group_longest[self.group_of[index]]
                if have <= limit < sim.lengths[step][index]:
                    heapq.heappush(engine.ends, (engine.progress + limit - have + 1, -key - 1))
        engine.clock = max(engine.clock, t) + prefill * s.cost.prefill_seconds_per_token
        if ledger.running:
            if engine.idle_since is not None:
                engine.idle += t - engine.idle_since
                engine.idle_since = None
            heapq.heappush(self.events, (self._next(engine), e))
        elif engine.idle_since is None:
            engine.idle_since = t

    def _find_work(self, e: int) -> bool:
        """Pull or steal; False where there is nothing."""
        engine, s = self.engines[e], self.setting
        if self.plan.shared:
            if self.shared:
                engine.ledger.accept([self.shared.popleft()])
                return True
            if self.shared_early and (s.early_in_free_slots or not engine.ledger.running):
                engine.ledger.accept([self.shared_early.popleft()], early=True)
                return True
            return False
        if not s.steal:
            return False
        if self.started == self.samples:
            return self._steal_early(e)
        choice = choose_victim(self.backlog, e)
        if choice is None:
            return self._steal_early(e)
        victim, number = choice
        keys = self.engines[victim].ledger.give(number)
        engine.ledger.accept(keys)
        self.backlog[victim], self.backlog[e] = self.engines[victim].ledger.backlog, engine.ledger.backlog
        engine.stolen += len(keys)
        return True

    def _steal_early(self, e: int) -> bool:
        ledger = self.engines[e].ledger
        if not ledger.wants_early():
            return False
        choice = choose_victim(self.early_backlog, e)
        if choice is None:
            return False
        victim, number = choice
        ledger.accept(self.engines[victim].ledger.give_early(number), early=True)
        for changed in (victim, e):
            self.early_backlog[changed] = self.engines[changed].ledger.early_backlog
        return True

    # ------------------------------------------------------------------------------------------------ outliers (paper)

    def _crossed(self, e: int, key: int, t: float) -> None:
        """A response outgrew its ranking group. If the group is nearly done it moves on; if not, it is looked at again
        after 5 % more tokens."""
        engine = self.engines[e]
        if key not in self.started_at:
            return
        group = self.group_of[key % self.per_step]
        before, progress, _ = self.started_at[key]
        tokens = before + int(engine.progress - progress)
        if not is_outlier(tokens, self.group_left[group], self.group_size[group], self.group_longest[group], MIN_BETA):
            heapq.heappush(engine.ends, (engine.progress + max(1.0, 0.05 * tokens), -key - 1))
            return
        groups = self.plan.groups
        assert groups is not None
        if group >= len(groups.engines) // 2:
            # Long groups have nowhere longer to go: their outliers join the next step, if they may.
            if not engine.ledger.is_due(key) and len(self.migrated_out) < self.plan.max_unfinished:
                engine.migrated += 1
                self.settled += 1
                engine.ledger.release(key)
                self.migrated_out.append(_Response(key, e, self._leave(engine, key, t, "carried")))
            return
        # Short groups hand theirs to the busiest-to-the-end group that still runs and has a free slot.
        for other in range(len(groups.engines) - 1, group, -1):
            first = int(groups.first_engine[other])
            members = range(first, first + int(groups.engines[other]))
            if self.plan.step % 2 == 0:
                members = range(self.setting.engines - first - int(groups.engines[other]), self.setting.engines - first)
            target = max(members, key=lambda m: (self.engines[m].ledger.free, -m))
            if self.group_left[other] > 0 and self.engines[target].ledger.free > 0 and target != e:
                self._move(e, target, key, t)
                return

    def _move(self, e: int, target: int, key: int, t: float) -> None:
        engine = self.engines[e]
        due = engine.ledger.move_out(key)
        self.had[key] = self._leave(engine, key, t, "moved")
        self._advance(self.engines[target], t)
        self.engines[target].ledger.move_in(key, due)
        self.moved.add(key)
        self.engines[target].migrated += 1
        self._fill(target, t)

    # ---------------------------------------------------------------------------------------------------------- close

    def _close(self) -> None:
        t = self.seconds
        self.left = list(self.migrated_out)
        for e, engine in enumerate(self.engines):
            self._advance(engine, t)
            if engine.idle_since is not None:
                engine.idle += t - engine.idle_since
            paused = engine.ledger.close()
            for key in paused.carried + paused.early:
                self.left.append(_Response(key, e, self._leave(engine, key, t, "carried")))

    def account(self, now: StepLengths) -> WindowRecord:
        """The record of the closed window; sets `feedback`."""
        s, sim = self.setting, self.sim

        def length(key: int) -> int:
            return sim.lengths[key // self.per_step][key % self.per_step]

        early = set(sim.finished_early)
        mean_of = {step: _row_means(history) for step, history in sim.history.items()}
        lengths = np.array([length(k) for k in self.finished], np.float64)
        last_epoch = np.array([mean_of[k // self.per_step][k % self.per_step // s.samples] for k in self.finished])
        self.feedback = sim.feedback.after(last_epoch, lengths)
        return window_record(
            self.plan,
            self.seconds,
            [engine.report() for engine in self.engines],
            lengths,
            stale_tokens=sum(length(k) if k in early else self.first_had.get(k, 0) for k in self.finished),
            last_epoch=last_epoch,
            mean_length_started=float(now.actual.mean()),
            carried_out=sum(r.key // self.per_step == self.step for r in self.left),
            growth=sim.feedback.growth,
        )


def _row_means(history: Floats) -> Floats:
    known = np.isfinite(history)
    count = known.sum(axis=1)
    total = np.where(known, history, 0.0).sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), math.nan)


def simulate(setting: Setting, steps: Iterator[StepLengths], windows: int) -> list[WindowRecord]:
    """`windows` windows in a row."""
    simulator = Simulator(setting)
    now = next(steps)
    records = []
    for _ in range(windows):
        then = next(steps)
        records.append(simulator.run_window(now, then))
        now = then
    return records
