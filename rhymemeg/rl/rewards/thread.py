"""Computing rewards in a thread of this process, so that waiting for one can end.

`ThreadJudge` has the methods of `pool.WorkerPool`. After a time-out the thread is given up (it is a daemon, and ends when
the function returns) and the remaining requests go to a new one. A problem ends it.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque

from rhymemeg.rl.rewards.judge import Request, Verdict, judge
from rhymemeg.rl.rewards.registry import RewardFunction


class _Thread:
    """One thread and its two queues. `began` is when it took up its present request (time.monotonic)."""

    def __init__(self, function: RewardFunction) -> None:
        self.requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self.verdicts: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
        self.began, self.given_up = math.inf, False
        threading.Thread(target=self._work, args=(function,), name="reward", daemon=True).start()

    def _work(self, function: RewardFunction) -> None:
        while (request := self.requests.get()) is not None:
            self.began = time.monotonic()
            verdict = judge(function, request)
            self.began = math.inf
            self.verdicts.put(verdict)
            if verdict.problem or self.given_up:
                return


class ThreadJudge:
    """See the module."""

    def __init__(self, function: RewardFunction, timeout: float) -> None:
        self._function, self._timeout = function, timeout
        self._waiting: deque[tuple[int, Request]] = deque()  # without a verdict; the thread has them in this order
        self._thread: _Thread | None = None

    def submit(self, index: int, request: Request) -> None:
        """Queue a request; `advance` returns its verdict under `index`."""
        if self._thread is None:
            self._thread = _Thread(self._function)
        self._waiting.append((index, request))
        self._thread.requests.put(request)

    def advance(self, wait: bool) -> dict[int, Verdict]:
        """Take what is done and end what takes too long. With `wait`, until there is a verdict or nothing is
        outstanding."""
        found: dict[int, Verdict] = {}
        while self._waiting and self._thread is not None:
            thread = self._thread
            try:
                verdict = (
                    thread.verdicts.get(timeout=self._patience(thread))
                    if wait and not found
                    else thread.verdicts.get_nowait()
                )
            except queue.Empty:
                if thread.began + self._timeout > time.monotonic():
                    if wait and not found:
                        continue
                    return found
                verdict = Verdict()
                self._replace()
            found[self._waiting.popleft()[0]] = verdict
            if verdict.timed_out:
                for _, request in self._waiting:
                    self._thread.requests.put(request)
            if verdict.problem:
                self.close()
        return found

    def _patience(self, thread: _Thread) -> float:
        """Seconds to wait before looking again whether the present request has had its time."""
        return max(0.001, min(thread.began + self._timeout - time.monotonic(), self._timeout, 1.0))

    def _replace(self) -> None:
        assert self._thread is not None
        self._thread.given_up = True
        self._thread = _Thread(self._function)

    def close(self) -> None:
        """Forget all requests, and let the thread end."""
        if self._thread is not None:
            self._thread.given_up = True
            self._thread.requests.put(None)
            self._thread = None
        self._waiting.clear()
