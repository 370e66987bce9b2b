"""A trace of single steps for Perfetto (https://ui.perfetto.dev) and chrome://tracing: Chrome's JSON trace format.

    tracer = Tracer(parse_steps("3,10-12"), runtime, clock)
    with tracer.step(3, trainer, folder):
        ...the step...
    tracer.write(record)          # after it, on all ranks: traces/step_3.json by rank 0, whole or not at all

A process of the trace is a rank, with the tracks *phases* (nested, as the clock charges them), *engine steps* (tokens made,
requests running and waiting), *drafts*, and *training and weights*; and for every engine whose window recorded spans a process
with a track a slot, on which each response stands from start to end. Times are microseconds from a barrier of all ranks at
the beginning of the step, so ranks on one host agree to well under a millisecond and on several as far as the barrier goes.

A step that is not traced costs one comparison: the calls that are timed are replaced on the objects for the traced step alone,
and put back after it. At most `MOST_RANKS` ranks are traced, evenly spaced, so that the file of a large run opens.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rhymemeg.errors import ConfigError
from rhymemeg.histopipe.figures import lanes
from rhymemeg.histopipe.record import WindowRecord
from rhymemeg.observe.clock import StepClock
from rhymemeg.observe.files import write_atomically

if TYPE_CHECKING:
    from rhymemeg.trainer import Trainer

MOST_RANKS = 64
WINDOW = 1_000_000
"""Number of the trace's process of engine 0's window; ranks have their own numbers."""
TRACKS = {0: "phases", 1: "engine steps", 2: "drafts", 3: "training and weights"}


class Ranks(Protocol):
    """The part of `parallel.runtime.Runtime` that is needed."""

    rank: int
    world_size: int

    def barrier(self, what: str) -> None: ...
    def gather_object(self, value: Any, dst: int = 0) -> list[Any] | None: ...


@dataclass(frozen=True)
class Event:
    """Something that took time: `begin` and `end` in seconds of `time.perf_counter`."""

    track: int
    name: str
    begin: float
    end: float
    details: dict[str, float | str]


def parse_steps(text: str) -> frozenset[int]:
    """Steps of "3,10-12". ConfigError for anything else; '' is none."""
    steps: set[int] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"--trace-steps {text!r}: {part!r} is neither a step nor a range such as 10-12")
        if dash and not int(first) <= int(last) < int(first) + 1000:
            raise ConfigError(f"--trace-steps {text!r}: the range {part} is empty or longer than 1000 steps")
        steps.update(range(int(first), int(last or first) + 1))
    return frozenset(steps)


def traced_ranks(world_size: int, most: int = MOST_RANKS) -> list[int]:
    """All ranks, or of many `most`, evenly spaced, the first among them."""
    if world_size <= most:
        return list(range(world_size))
    return [i * world_size // most for i in range(most)]


class Tracer:
    """See the module. `steps` empty: off."""

    def __init__(self, steps: frozenset[int], runtime: Ranks, clock: StepClock) -> None:
        self.steps, self.runtime, self.clock = steps, runtime, clock
        self.here = runtime.rank in traced_ranks(runtime.world_size)
        self.events: list[Event] = []
        self._zero = 0.0
        self._file: Path | None = None

    @contextlib.contextmanager
    def step(self, step: int, trainer: Trainer, folder: Path) -> Iterator[None]:
        """Around a step, `StepClock.step` inside."""
        if step not in self.steps:
            yield
            return
        self.events, self._file = [], folder / "traces" / f"step_{step}.json"
        self.runtime.barrier("the beginning of a traced step")
        self._zero = time.perf_counter()
        with contextlib.ExitStack() as stack:
            if self.here:
                self.clock.on_end = self._phase
                stack.callback(setattr, self.clock, "on_end", None)
                for thing, method, track, name in self._calls(trainer):
                    stack.enter_context(self.watch(thing, method, track, name))
            yield

    def _calls(self, trainer: Trainer) -> list[tuple[Any, str, int, str]]:
        """What is timed besides the phases."""
        calls: list[tuple[Any, str, int, str]] = [
            (trainer.engine, "step", 1, "engine step"),
            (trainer.engine, "sleep", 3, "engine sleeps"),
            (trainer.engine, "wake", 3, "engine wakes"),
            (trainer.engine, "load_weights", 3, "engine loads weights"),
            (trainer.actor, "train_step", 3, "optimizer step"),
            (trainer.actor, "log_probs", 3, "log-probabilities"),
            (trainer.sync, "push", 3, "weight update"),
        ]
        if trainer.speculation is not None:
            calls.append((trainer.speculation.drafter, "step", 2, "draft"))
        return calls

    def _phase(self, name: str, begin: float, end: float) -> None:
        self.events.append(Event(0, name, begin, end, {}))

    @contextlib.contextmanager
    def watch(self, thing: Any, method: str, track: int, name: str) -> Iterator[None]:
        """Time every call of a method of this object until the block is left."""
        original: Callable[..., Any] = getattr(thing, method)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = original(*args, **kwargs)
            self.events.append(Event(track, name, begin, time.perf_counter(), _details(result)))
            return result

        setattr(thing, method, timed)
        try:
            yield
        finally:
            delattr(thing, method)  # the class's own method is found again

    def write(self, record: WindowRecord | None) -> Path | None:
        """After a step, on all ranks: rank 0 writes the file, if the step was traced, and returns its path. `record`: the
        step's window, whose spans rank 0 has."""
        file, self._file = self._file, None
        if file is None:
            return None
        mine = [(e.track, e.name, e.begin - self._zero, e.end - self._zero, e.details) for e in self.events]
        everyone = self.runtime.gather_object(mine if self.here else [], dst=0)
        self.events = []
        if everyone is None:
            return None
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, json.dumps(document(everyone, record)))
        return file


def _details(result: Any) -> dict[str, float | str]:
    """What an engine step says of itself."""
    found: dict[str, float | str] = {}
    for name in ("tokens", "running", "waiting"):
        value = getattr(result, name, None)
        if isinstance(value, int):
            found[name] = value
    return found


Row = tuple[int, str, float, float, dict[str, float | str]]


def document(ranks: list[list[Row]], record: WindowRecord | None) -> dict[str, Any]:
    """The trace from every rank's (track, name, begin, end, details) in seconds. Pure."""
    events: list[dict[str, Any]] = []
    for rank, rows in enumerate(ranks):
        if not rows:
            continue
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        events += [_name("thread_name", rank, track, TRACKS[track]) for track in sorted({row[0] for row in rows})]
        # Enclosing events first: viewers nest what begins at the same time in the order of the file.
        for track, name, begin, end, details in sorted(rows, key=lambda row: (row[0], row[2], -row[3])):
            events.append(_span(rank, track, name, begin, end, details))
    if record is not None and record.spans:
        events += _window(record, _window_begin(ranks))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _window_begin(ranks: list[list[Row]]) -> float:
    """Seconds at which the window began: the first engine step of any rank, else the rollout phase of the first."""
    steps = [begin for rows in ranks for track, _, begin, *_ in rows if track == 1]
    phases = [begin for rows in ranks for track, name, begin, *_ in rows if track == 0 and name == "rollout"]
    return min(steps or phases or [0.0])


def _window(record: WindowRecord, start: float) -> list[dict[str, Any]]:
    engines = sorted({span.engine for span in record.spans})
    events = [_name("process_name", WINDOW + e, 0, f"window of step {record.step}, engine {e}") for e in engines]
    for span, (row, lane, _) in zip(record.spans, lanes(record)):
        details: dict[str, float | str] = {"tokens": span.tokens, "kind": span.kind, "outcome": span.outcome}
        begin, end = start + span.begin, start + span.end
        events.append(_span(WINDOW + engines[row], lane, f"{span.sample} ({span.kind})", begin, end, details))
    return events


def _name(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _span(
    process: int, track: int, name: str, begin: float, end: float, details: dict[str, float | str]
) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "X", "name": name, "pid": process, "tid": track}
    event |= {"ts": round(1e6 * begin, 1), "dur": round(1e6 * max(end - begin, 0.0), 1)}
    known = {k: v for k, v in details.items() if not isinstance(v, float) or math.isfinite(v)}
    return event | ({"args": known} if known else {})
