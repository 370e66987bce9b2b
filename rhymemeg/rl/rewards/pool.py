"""Worker processes that compute rewards.

A worker is a new Python interpreter that runs `rhymemeg.rl.rewards.worker` and imports the reward by its location: it
is neither forked from a process that holds CUDA and an engine's threads, nor does it import the training program.
Requests and replies are pickled frames over its standard input and output, which nobody else can write to. One
request is in a worker at a time; a worker that takes longer than the limit is killed and replaced, which also stops
what no thread could.

`WorkerPool.submit` queues a request and `advance` moves on with all of them, so that rewards are computed while their
caller does something else. They raise RewardError if a worker cannot start or dies.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rhymemeg.errors import RewardError
from rhymemeg.rl.rewards.judge import Request, Verdict

STARTUP_TIMEOUT = 120.0  # seconds until a new worker has imported the reward
_LENGTH = struct.Struct("<Q")


def pack(message: Any) -> bytes:
    """One frame: the length of the pickled message, then the message."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Takes bytes as they come and gives messages as they are complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if len(self._buffer) < _LENGTH.size + length:
                break
            messages.append(pickle.loads(self._buffer[_LENGTH.size : _LENGTH.size + length]))
            del self._buffer[: _LENGTH.size + length]
        return messages


class _Worker:
    """One process. `task` is the index of the request that it has, `deadline` when it must have answered
    (time.monotonic)."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rhymemeg.rl.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The package must be found before sys.path has arrived, also when it runs from a checkout.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self.frames = Frames()
        self.ready = False
        self.task: int | None = None
        self.deadline = time.monotonic() + STARTUP_TIMEOUT
        self.send(setup)

    def send(self, message: Any) -> None:
        try:
            self.input.write(pack(message))
            self.input.flush()
        except BrokenPipeError:
            pass  # it has died; its closed output says so

    def receive(self) -> list[Any] | None:
        """Messages that have arrived; None if the worker has closed its output."""
        data = os.read(self.output.fileno(), 1 << 16)
        return self.frames.feed(data) if data else None

    def kill(self) -> int:
        """End it at once; returns its status."""
        self.process.kill()
        status = self.process.wait()
        for stream in (self.input, self.output):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        return status


class WorkerPool:
    """Processes that compute one reward, each request within `timeout` seconds. They start when requests come."""

    def __init__(self, name: str, location: str, arguments: Mapping[str, Any], size: int, timeout: float) -> None:
        self._name, self._size, self._timeout = name, size, timeout
        self._setup = {"path": list(sys.path), "name": name, "location": location, "arguments": dict(arguments)}
        self._workers: list[_Worker] = []
        self._waiting: deque[tuple[int, Request]] = deque()
        self._selector = selectors.DefaultSelector()

    @property
    def outstanding(self) -> int:
        """Requests without a verdict."""
        return len(self._waiting) + sum(worker.task is not None for worker in self._workers)

    def submit(self, index: int, request: Request) -> None:
        """Queue a request; `advance` returns its verdict under `index`."""
        self._waiting.append((index, request))
        if len(self._workers) < min(self._size, self.outstanding):
            self._start()
        self._assign_waiting()

    def advance(self, wait: bool) -> dict[int, Verdict]:
        """Take what is done, hand out what waits, end what takes too long. With `wait`, until there is a verdict or nothing
        is outstanding."""
        verdicts: dict[int, Verdict] = {}
        try:
            while self.outstanding and not verdicts:
                busy = [w.deadline for w in self._workers if w.task is not None or not w.ready]
                for key, _ in self._selector.select(max(0.0, min(busy) - time.monotonic()) if wait else 0.0):
                    self._collect(key.data, verdicts)
                self._assign_waiting()
                self._end_late(verdicts)
                if not wait:
                    break
        except BaseException:
            self.close()  # workers may hold requests that nobody waits for any more
            raise
        return verdicts

    def close(self) -> None:
        """End all workers and forget all requests."""
        for worker in list(self._workers):
            self._end(worker)
        self._waiting.clear()

    def _start(self) -> None:
        worker = _Worker(self._setup)
        self._workers.append(worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)

    def _end(self, worker: _Worker) -> int:
        self._selector.unregister(worker.output)
        self._workers.remove(worker)
        return worker.kill()

    def _assign_waiting(self) -> None:
        for worker in self._workers:
            if self._waiting and worker.ready and worker.task is None:
                worker.task, request = self._waiting.popleft()
                worker.deadline = time.monotonic() + self._timeout
                worker.send(request)

    def _end_late(self, verdicts: dict[int, Verdict]) -> None:
        now = time.monotonic()
        for worker in [w for w in self._workers if w.deadline <= now]:
            if not worker.ready:
                raise RewardError(f"reward {self._name!r}: a worker process was not ready after {STARTUP_TIMEOUT:g} s")
            if worker.task is not None:
                verdicts[worker.task] = Verdict()
                self._end(worker)
                if self._waiting:
                    self._start()

    def _collect(self, worker: _Worker, verdicts: dict[int, Verdict]) -> None:
        """Take what a worker has sent: first that it is ready, or why it cannot be, then its verdicts."""
        messages = worker.receive()
        if messages is None:
            ended = f"ended its worker process (status {self._end(worker)})"
            if worker.task is None:
                raise RewardError(f"reward {self._name!r} {ended} before it judged anything")
            verdicts[worker.task] = Verdict(problem=ended)
            return
        for message in messages:
            if not worker.ready:
                if message["error"]:
                    raise RewardError(message["error"])
                worker.ready = True
            else:
                assert worker.task is not None
                verdicts[worker.task] = Verdict(message["components"], message["problem"])
                worker.task = None
