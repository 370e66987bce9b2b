"""Wall-clock time of a step, divided into phases without gaps.

`StepClock` is entered once a step; within it, `phase(name)` charges time to a phase. Phases may nest: a nested phase's
time is taken out of the enclosing one, so the phases add up. What is outside every phase is charged to `other`, so
`timing_s/*` sums to `perf/step_time` exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepClock:
    """`now` is a monotonic clock in seconds; `on_phase` hears the name of each phase as it begins, `on_end`, where set, its
    name, begin and end when it is over."""

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, on_phase: Callable[[str], None] | None = None
    ) -> None:
        self._now = now
        self._on_phase = on_phase
        self.on_end: Callable[[str, float, float], None] | None = None
        self._stack: list[str] = []
        self._mark = 0.0
        self.seconds: dict[str, float] = {}

    def _charge(self) -> None:
        now = self._now()
        name = self._stack[-1]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._mark
        self._mark = now

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step; `seconds` starts empty and afterwards holds the time of each phase."""
        self.seconds, self._stack, self._mark = {}, ["other"], self._now()
        try:
            yield
        finally:
            self._charge()
            self._stack.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside to `name`. Outside a step it only announces the phase."""
        if self._on_phase:
            self._on_phase(name)
        if not self._stack:
            yield
            return
        self._charge()
        begin = self._mark
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()
            if self.on_end is not None:
                self.on_end(name, begin, self._mark)

    @property
    def total(self) -> float:
        """Seconds of the step so far."""
        return sum(self.seconds.values())

    def metrics(self) -> dict[str, float]:
        """`timing_s/<phase>` of each phase and `perf/step_time`, in seconds."""
        return {f"timing_s/{name}": value for name, value in self.seconds.items()} | {"perf/step_time": self.total}
