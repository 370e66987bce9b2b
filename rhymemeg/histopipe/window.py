"""What engines decide between two of their steps. Pure: no clocks, no communication; whoever executes it brings both.

One window, seen from one engine (`EngineLedger`):

    resume   responses with tokens first, then new ones in plan order, then (if allowed) early ones of the next step
    count    publish `Progress`: events, not states, so its numbers only grow and do not change when work moves. Sums of
             old readings therefore never claim more than has happened, in whatever order the engines are read
    close    as soon as the summed progress passes `WindowTotals.may_close`, whoever sees it first says so, once;
             everybody stops at its next poll, and what still runs is paused with its tokens (`EngineLedger.close`)
    steal    an engine with free slots and an empty queue asks the one with the longest queue (`choose_victim`), which
             gives the end of it (`give`). On the way the requests are not started, so the window cannot close over them
    migrate  `paper` only: a running response that outgrew its ranking group moves on (`is_outlier`)

Staleness. A response that started in this window may be carried into the next and must end there; one that was resumed
must end in this window, which therefore waits for it. So a response spans at most two windows, and a window leaves at
most `max_unfinished` samples unfinished, each started in it. With max_unfinished = 0 and nothing early this is the
strict barrier. Nothing here looks at tokens or rewards: who is carried depends only on being late.

All ranks of one engine hold the same ledger and apply the same calls at the same engine step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rhymemeg.errors import RolloutError

Key = TypeVar("Key", bound=Hashable)


class Progress(NamedTuple):
    """What happened to the samples of this step since the window began, on one engine or on all of them.

    started      began or resumed; counted once, by the engine where it happened first
    settled      complete, or released to the next window (`EngineLedger.release`)
    due_settled  those of them that were not allowed to be carried, because they had tokens before the window
    """

    started: int
    settled: int
    due_settled: int

    def __add__(self, other: object) -> Progress:
        if not isinstance(other, Progress):
            return NotImplemented
        return Progress(*(a + b for a, b in zip(self, other)))


def total(progress: Iterable[Progress]) -> Progress:
    """Sum over engines."""
    result = Progress(0, 0, 0)
    for one in progress:
        result = result + one
    return result


@dataclass(frozen=True)
class WindowTotals:
    """What the plan says: samples of this step that have to be worked on (new and resumed), how many of them are due
    (resumed), and how many may be left unfinished."""

    samples: int
    due: int
    max_unfinished: int

    def may_close(self, progress: Progress) -> bool:
        """Everything has started, everything due is complete, and few enough are still running."""
        return (
            progress.started == self.samples
            and progress.due_settled == self.due
            and self.samples - progress.settled <= self.max_unfinished
        )


def choose_victim(backlog: npt.NDArray[np.int64], thief: int) -> tuple[int, int] | None:
    """Whom an engine asks for work, and for how many requests. `backlog` [E]: published `EngineLedger.backlog`. Half
    the difference to the longest (the first of several), so that work only moves from a longer queue to a shorter one;
    None where no queue is longer."""
    victim = int(np.argmax(backlog))
    number = (int(backlog[victim]) - int(backlog[thief]) + 1) // 2
    return (victim, number) if number > 0 else None


def missing(last_heard: Mapping[int, float], now: float, timeout: float) -> list[int]:
    """Engines that have been silent for longer than `timeout` seconds, ascending: the names for the error message."""
    return sorted(engine for engine, heard in last_heard.items() if now - heard > timeout)


def check_alive(last_heard: Mapping[int, float], now: float, timeout: float, waiting_for: str) -> None:
    """RolloutError naming the silent engines, if there are any."""
    silent = missing(last_heard, now, timeout)
    if silent:
        names = ", ".join(map(str, silent[:16])) + (f" and {len(silent) - 16} more" if len(silent) > 16 else "")
        raise RolloutError(f"{waiting_for}: no word from engine(s) {names} for {timeout:g} s")


@dataclass(frozen=True)
class Paused(Generic[Key]):
    """What an engine holds when the window closes. `carried` belong to this step, `early` to the next one; both have
    tokens, are trained with the next step and resume first. Early samples that were never started are simply forgotten:
    the next plan contains them."""

    carried: tuple[Key, ...]
    early: tuple[Key, ...]


class EngineLedger(Generic[Key]):
    """The requests of one engine in one window.

    resumed  keys that had tokens before the window, in start order
    queue    new keys of this step, in start order
    early    keys of the next step, in start order. They start when the engine runs nothing of this step any more, or,
             with `early_in_free_slots`, as soon as a slot is free and nothing of this step waits.
    """

    def __init__(
        self,
        engine: int,
        slots: int,
        resumed: Iterable[Key],
        queue: Iterable[Key],
        early: Iterable[Key] = (),
        early_in_free_slots: bool = False,
    ) -> None:
        self.engine, self.slots = engine, slots
        self._early_in_free_slots = early_in_free_slots
        self._resumed, self._queue, self._early = deque(resumed), deque(queue), deque(early)
        self._due: set[Key] = set(self._resumed)
        self._running: dict[Key, None] = {}  # insertion order: the order of starting
        self._running_early: dict[Key, None] = {}
        self._moved_in: set[Key] = set()  # started elsewhere: not to be counted again
        self._started = self._settled = self._due_settled = 0
        self.closed = False

    @property
    def free(self) -> int:
        """Slots without a request."""
        return self.slots - len(self._running) - len(self._running_early)

    @property
    def running(self) -> int:
        return len(self._running) + len(self._running_early)

    def running_keys(self) -> tuple[Key, ...]:
        """Requests of this step that run, in the order of starting."""
        return tuple(self._running)

    def is_early(self, key: Key) -> bool:
        """Runs, and belongs to the next step."""
        return key in self._running_early

    @property
    def waiting(self) -> int:
        """Requests of this step that are to start here."""
        return len(self._resumed) + len(self._queue)

    @property
    def backlog(self) -> int:
        """New requests beyond what the free slots are about to take: what others may steal."""
        return min(len(self._queue), max(0, self.waiting - max(self.free, 0)))

    def progress(self) -> Progress:
        """What this engine publishes."""
        return Progress(self._started, self._settled, self._due_settled)

    # ----------------------------------------------------------------------------------------------------------- run

    def start(self) -> Key | None:
        """The next request to start, now counted as running; None without a free slot or anything to start."""
        if self.closed or self.free <= 0:
            return None
        if self._resumed:
            key = self._resumed.popleft()
        elif self._queue:
            key = self._queue.popleft()
        elif self._early and (self._early_in_free_slots or not self._running):
            key = self._early.popleft()
            self._running_early[key] = None
            return key
        else:
            return None
        self._running[key] = None
        if key in self._moved_in:
            self._moved_in.discard(key)
        else:
            self._started += 1
        return key

    def finish(self, key: Key) -> bool:
        """A running request is complete; True if it is of this step, False if of the next. KeyError if it is not
        running."""
        if key in self._running_early:
            del self._running_early[key]
            return False
        del self._running[key]
        self._settle(key)
        return True

    def _settle(self, key: Key) -> None:
        self._settled += 1
        if key in self._due:
            self._due.discard(key)
            self._due_settled += 1

    # --------------------------------------------------------------------------------------------------------- steal

    def wants_work(self) -> bool:
        """Free slots and nothing of this step left to start."""
        return not self.closed and self.free > 0 and self.waiting == 0

    def wants_early(self) -> bool:
        """Would start samples of the next step if it had any."""
        return self.wants_work() and not self._early and (self._early_in_free_slots or not self._running)

    def give(self, number: int) -> tuple[Key, ...]:
        """Up to `number` queued requests, those that would start last, for another engine (`accept` there). Never what
        its own free slots are about to take; empty where there is nothing to give."""
        return tuple(self._queue.pop() for _ in range(min(number, self.backlog)))[::-1]

    @property
    def early_backlog(self) -> int:
        """Early samples not started: an engine without any may have some of them."""
        return len(self._early)

    def give_early(self, number: int) -> tuple[Key, ...]:
        """The last `number` early samples, for another engine. They are in nobody's counts, so nothing is confirmed:
        lost on the way, they start in their own step."""
        return tuple(self._early.pop() for _ in range(min(number, len(self._early))))[::-1]

    def accept(self, keys: Iterable[Key], early: bool = False) -> None:
        """Queue what another engine gave or what was pulled from the shared queue (`early`: of the next step)."""
        (self._early if early else self._queue).extend(keys)

    # ------------------------------------------------------------------------------------------------------- migrate

    def release(self, key: Key) -> None:
        """A running request leaves for the next window, before the close; KeyError if it must end in this one."""
        if key in self._due:
            raise KeyError(key)
        del self._running[key]
        self._settle(key)

    def move_out(self, key: Key) -> bool:
        """A running request leaves for another engine, with its tokens; whether it is due goes with it (`move_in`)."""
        del self._running[key]
        due = key in self._due
        self._due.discard(key)
        return due

    def move_in(self, key: Key, due: bool) -> None:
        """Queue a request that came with tokens from another engine, before everything new. RolloutError once the
        window has closed here: what was on its way is then carried, by whoever holds its tokens."""
        if self.closed:
            raise RolloutError(f"engine {self.engine}: a request moved in after the window had closed")
        self._resumed.append(key)
        self._moved_in.add(key)
        if due:
            self._due.add(key)

    def is_due(self, key: Key) -> bool:
        """Must end in this window."""
        return key in self._due

    # --------------------------------------------------------------------------------------------------------- close

    def close(self) -> Paused[Key]:
        """Stop. RolloutError if something is left that may not be carried: the window was closed against its rules."""
        moved_in = [key for key in self._resumed if key in self._moved_in]
        if self.waiting > len(moved_in) or self._due:
            raise RolloutError(
                f"engine {self.engine}: the window was closed with {self.waiting - len(moved_in)} requests not started and "
                f"{len(self._due)} that may not be carried"
            )
        self.closed = True
        paused = Paused(tuple(self._running) + tuple(moved_in), tuple(self._running_early))
        self._resumed.clear()
        self._running.clear()
        self._running_early.clear()
        self._early.clear()
        return paused


# --------------------------------------------------------------------------------------------------- outliers (paper)

ALPHA = 0.1
"""A group's last responses: this share of it."""
MIN_BETA = 1.1


def beta(last_epoch: Sequence[float], epoch_before: Sequence[float]) -> float:
    """75th percentile of the growth of the prompts' mean lengths over the last two epochs, at least 1.1."""
    growth = sorted(b / a for a, b in zip(epoch_before, last_epoch) if a > 0 and b > 0)
    if not growth:
        return MIN_BETA
    position = 0.75 * (len(growth) - 1)
    low = int(position)
    high = min(low + 1, len(growth) - 1)
    return max(MIN_BETA, growth[low] + (position - low) * (growth[high] - growth[low]))


def is_outlier(tokens: int, unfinished: int, group_size: int, group_longest: float, growth: float) -> bool:
    """The paper's two conditions: among the last 10 % unfinished of its ranking group, and longer than `growth` (beta)
    times the longest response that the group's prompts had last epoch."""
    return unfinished <= ALPHA * group_size and tokens > growth * group_longest
