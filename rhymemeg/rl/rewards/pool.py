"""Worker processes that compute rewards.

A worker is a new Python interpreter that runs `rhymemeg.rl.rewards.worker` and imports the reward by its location: it
is neither forked from a process that holds CUDA and an engine's threads, nor does it import the training program.
Requests and replies are pickled frames over its standard input and output, which nobody else can write to. One
request is in a worker at a time; a worker that takes longer than the limit is killed and replaced, which also stops
what no thread could.

`WorkerPool.run` returns the verdicts on a list of requests. It raises RewardError if a worker cannot start or dies.
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
from collections.abc import Iterator, Mapping, Sequence
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
    """Processes that compute one reward. They start with the first `run`."""

    def __init__(self, name: str, location: str, arguments: Mapping[str, Any], size: int) -> None:
        self._name, self._size = name, size
        self._setup = {"path": list(sys.path), "name": name, "location": location, "arguments": dict(arguments)}
        self._workers: list[_Worker] = []

    def run(self, requests: Sequence[Request], timeout: float, bear_timeouts: bool) -> dict[int, Verdict]:
        """Verdicts by the index of the request. The first problem (or time-out, unless `bear_timeouts`) ends the run
        and the workers: then only that verdict and those already known are there."""
        verdicts: dict[int, Verdict] = {}
        waiting = iter(range(len(requests)))
        try:
            with selectors.DefaultSelector() as selector:
                for worker in self._workers:
                    selector.register(worker.output, selectors.EVENT_READ, worker)
                while len(self._workers) < min(self._size, len(requests)):
                    self._start(selector)
                for worker in self._workers:
                    if worker.ready:
                        self._assign(worker, requests, waiting, timeout)
                while len(verdicts) < len(requests):
                    busy = [w.deadline for w in self._workers if w.task is not None or not w.ready]
                    for key, _ in selector.select(max(0.0, min(busy) - time.monotonic())):
                        self._collect(key.data, verdicts)
                        if key.data.ready and key.data.task is None:
                            self._assign(key.data, requests, waiting, timeout)
                    now = time.monotonic()
                    for worker in [w for w in self._workers if w.deadline <= now]:
                        if not worker.ready:
                            raise RewardError(
                                f"reward {self._name!r}: a worker process was not ready after {STARTUP_TIMEOUT:g} s"
                            )
                        if worker.task is not None:
                            verdicts[worker.task] = Verdict()
                            selector.unregister(worker.output)
                            worker.kill()
                            self._workers.remove(worker)
                            self._start(selector)
                    if any(v.problem or (v.timed_out and not bear_timeouts) for v in verdicts.values()):
                        self.close()
                        break
        except BaseException:
            self.close()  # workers may hold requests that nobody waits for any more
            raise
        return verdicts

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _start(self, selector: selectors.BaseSelector) -> None:
        worker = _Worker(self._setup)
        self._workers.append(worker)
        selector.register(worker.output, selectors.EVENT_READ, worker)

    @staticmethod
    def _assign(worker: _Worker, requests: Sequence[Request], waiting: Iterator[int], timeout: float) -> None:
        worker.task = next(waiting, None)
        if worker.task is not None:
            worker.deadline = time.monotonic() + timeout
            worker.send(requests[worker.task])

    def _collect(self, worker: _Worker, verdicts: dict[int, Verdict]) -> None:
        """Take what a worker has sent: first that it is ready, or why it cannot be, then its verdicts."""
        messages = worker.receive()
        if messages is None:
            ended = f"ended its worker process (status {worker.kill()})"
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
