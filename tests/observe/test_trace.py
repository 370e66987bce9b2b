"""Traces: phases nest and add up, windows stand on their engines, nothing is left on the objects, and off costs nothing."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.errors import ConfigError
from rhymemeg.observe.clock import StepClock
from rhymemeg.observe.trace import WINDOW, Tracer, document, parse_steps, traced_ranks
from tests.report.runs import windows_of


class Alone:
    """The only rank."""

    rank, world_size = 0, 1

    def barrier(self, what: str) -> None: ...

    def gather_object(self, value: Any, dst: int = 0) -> list[Any]:
        return [value]


class Engine:
    """Its steps make tokens."""

    def step(self) -> SimpleNamespace:
        time.sleep(0.001)
        return SimpleNamespace(tokens=3, running=2, waiting=1, finished=[])

    def sleep(self) -> None: ...
    def wake(self, tags: list[str]) -> None: ...
    def load_weights(self) -> None: ...


class Actor:
    def train_step(self) -> None:
        time.sleep(0.002)

    def log_probs(self) -> None: ...


class Sync:
    def push(self) -> None: ...


def make_trainer() -> Any:
    return SimpleNamespace(engine=Engine(), actor=Actor(), sync=Sync(), speculation=None)


def run_step(tracer: Tracer, clock: StepClock, trainer: Any, step: int, folder: Path) -> None:
    with tracer.step(step, trainer, folder), clock.step():
        with clock.phase("rollout"):
            for _ in range(3):
                trainer.engine.step()
            with clock.phase("reward"):
                time.sleep(0.001)
        with clock.phase("train"):
            trainer.actor.train_step()


def events_of(file: Path, **wanted: Any) -> list[dict[str, Any]]:
    events = json.loads(file.read_text())["traceEvents"]
    return [e for e in events if e["ph"] == "X" and all(e[k] == v for k, v in wanted.items())]


def test_a_traced_step_adds_up(tmp_path: Path) -> None:
    clock, trainer = StepClock(), make_trainer()
    tracer = Tracer(parse_steps("1"), Alone(), clock)
    for step in range(3):
        run_step(tracer, clock, trainer, step, tmp_path)
        if step == 1:
            seconds = clock.seconds
        file = tracer.write(None)
        assert (file is not None) == (step == 1)
    assert [p.name for p in (tmp_path / "traces").iterdir()] == ["step_1.json"]
    file = tmp_path / "traces" / "step_1.json"
    phases = {e["name"]: e["dur"] / 1e6 for e in events_of(file, tid=0)}
    # A phase of the trace holds the phases inside it; the clock takes them out.
    assert phases["rollout"] == pytest.approx(seconds["rollout"] + seconds["reward"], abs=1e-5)
    assert phases["reward"] == pytest.approx(seconds["reward"], abs=1e-5)
    assert phases["train"] == pytest.approx(seconds["train"], abs=1e-5)
    assert clock.total == pytest.approx(sum(clock.seconds.values()))
    steps = events_of(file, tid=1)
    assert [e["args"] for e in steps] == [{"tokens": 3, "running": 2, "waiting": 1}] * 3
    outer = events_of(file, name="rollout")[0]
    for e in steps:
        assert outer["ts"] <= e["ts"] and e["ts"] + e["dur"] <= outer["ts"] + outer["dur"] + 0.2
    assert events_of(file, name="optimizer step")


def test_off_leaves_the_objects_alone(tmp_path: Path) -> None:
    clock, trainer = StepClock(), make_trainer()
    tracer = Tracer(frozenset(), Alone(), clock)
    with tracer.step(0, trainer, tmp_path):
        assert "step" not in vars(trainer.engine) and clock.on_end is None
    assert tracer.write(None) is None and tracer.events == [] and not list(tmp_path.iterdir())


def test_objects_are_put_back_after_an_error(tmp_path: Path) -> None:
    clock, trainer = StepClock(), make_trainer()
    tracer = Tracer(frozenset({0}), Alone(), clock)
    with pytest.raises(RuntimeError), tracer.step(0, trainer, tmp_path):
        assert "step" in vars(trainer.engine)
        raise RuntimeError
    assert not vars(trainer.engine) and not vars(trainer.actor) and not vars(trainer.sync) and clock.on_end is None


def test_spans_of_a_window_stand_on_slots_of_their_engine() -> None:
    record = windows_of(engines=2, number=1, slots=4, seed=0)[0]
    rows: list[Any] = [(0, "rollout", 1.0, 60.0, {}), (1, "engine step", 1.5, 1.6, {"tokens": 1})]
    events = document([rows], record)["traceEvents"]
    spans = [e for e in events if e["ph"] == "X" and e["pid"] >= WINDOW]
    assert len(spans) == len(record.spans)
    assert {e["pid"] - WINDOW for e in spans} == {s.engine for s in record.spans}
    assert min(e["ts"] for e in spans) == pytest.approx(1e6 * (1.5 + min(s.begin for s in record.spans)), abs=1)
    by_slot: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in spans:
        by_slot.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for held in by_slot.values():
        held.sort()
        assert all(end <= begin + 0.3 for (_, end), (begin, _) in itertools.pairwise(held))
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)


@given(st.sets(st.integers(0, 2000), max_size=20))
def test_steps_are_read_back(steps: set[int]) -> None:
    assert parse_steps(",".join(map(str, steps))) == steps


def test_ranges_and_wrong_steps() -> None:
    assert parse_steps("3, 10-12") == {3, 10, 11, 12}
    assert parse_steps("") == frozenset()
    for text in ("x", "3-", "-3", "5-3", "1-2-3", "0-100000", "3.5"):
        with pytest.raises(ConfigError, match="--trace-steps"):
            parse_steps(text)


@given(st.integers(1, 5000), st.integers(1, 100))
def test_ranks_of_a_large_run(world: int, most: int) -> None:
    ranks = traced_ranks(world, most)
    assert len(ranks) == len(set(ranks)) == min(world, most) and ranks[0] == 0 and max(ranks) < world
