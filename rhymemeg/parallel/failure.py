"""How a run ends when something goes wrong.

    with failure.guard(runtime):
        failure.phase("rollout")
        ...

Inside the guard a background thread watches the other ranks, so that a lost rank does not leave the rest waiting:

* **An exception in a rank** ends all ranks with a non-zero status and is shown once, with the rank and the phase: one
  sentence for a `RhymeMegError`, a traceback for anything else (that is a defect). When all ranks raise the same, one
  speaks.
* **A rank that dies** (SIGKILL, out of memory, machine lost) is noticed within 30 s: at once on the same host, where the
  process is looked at, and by the heartbeat elsewhere. The survivors say which rank it was, its process id and host,
  and stop.
* **A collective that times out or loses its peer** is explained by the rank behind it where one is known, else by the
  phases that the ranks were last in.
* **SIGTERM** (preemption) during the step loop lets the current step end, within `grace` seconds: the loop asks
  `stop_requested` after each step, saves, and ends by `SystemExit(PREEMPTED)`. It is enough that one rank gets the
  signal. At any other time, without `grace`, or when it has run out, SIGTERM raises `SystemExit(143)` in the main thread,
  so that open files are closed; a main thread that does not return within `GRACE` seconds is ended.
* **A step that exceeds its budget** is reported once, with the phase of every rank, and all ranks write their stacks
  (`watchdog`).

Ranks talk through torch's TCP store (under torchrun it lives in torchrun's own process and survives any rank). Each
rank writes its own line and reads one on another host, so that the store's load grows with the number of ranks and not
with its square. What a rank finds it publishes; all look there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from rhymemeg.errors import RhymeMegError
from rhymemeg.parallel.runtime import Runtime
from rhymemeg.parallel.watchdog import StepBudget

BEAT = 1.0  # seconds between heartbeats
SILENCE = 20.0  # seconds without a heartbeat after which a rank on another host counts as lost
TERMINATED = 128 + signal.SIGTERM  # exit status after SIGTERM, nothing saved
PREEMPTED = os.EX_TEMPFAIL  # 75: exit status after SIGTERM with a checkpoint of all that was done; start again to go on
GRACE = 5.0  # seconds that a rank has to end by itself

# How the errors of a broken or timed-out collective read; they are consequences, not causes.
_CONSEQUENCES = (
    *("connection closed by peer", "connection reset", "broken pipe", "timed out", "timeout", "nccl", "gloo"),
    *("socket", "monitoredbarrier"),
)

_current: Guard | None = None


def phase(name: str) -> None:
    """Name what this rank is doing now; messages say it."""
    if _current is not None:
        _current.begin_phase(name)


def report(error: BaseException) -> None:
    """Tell all ranks of an error at once, before the `with` blocks inside the guard are left, which may take time (an
    engine that shuts down). The error must still be raised; the guard then says nothing more about it."""
    if _current is not None:
        _current.report(error)


def begin_step(step: int | None) -> None:
    """A step of the loop begins; None: the loop is over."""
    if _current is not None:
        _current.begin_step(step)


def stop_requested(runtime: Runtime) -> bool:
    """Whether any rank was told to stop (SIGTERM) since the loop began. Collective."""
    guard = _current
    if guard is None or guard.grace <= 0:  # the same on all ranks
        return False
    return runtime.reduce_max(float(guard.stop_asked)) > 0


@contextlib.contextmanager
def guard(runtime: Runtime, grace: float = 0.0, budget: StepBudget | None = None) -> Iterator[None]:
    """Around everything that a rank does after `init_runtime`. See the module. Ends by `SystemExit` after an error."""
    global _current
    with Guard(runtime, grace, budget) as _current:
        try:
            yield
        finally:
            _current = None


@dataclass
class Beat:
    """One rank's line in the store."""

    rank: int
    pid: int
    host: str
    count: int
    phase: str
    done: bool


class Guard:
    """The context manager behind `guard`."""

    def __init__(self, runtime: Runtime, grace: float = 0.0, budget: StepBudget | None = None) -> None:
        self.rank, self.world_size = runtime.rank, runtime.world_size
        self.grace, self._budget = grace, budget
        self.stop_asked = False  # SIGTERM came while steps are done
        self._step: int | None = None
        self._stop_by = float("inf")  # when the grace has run out
        self.phase = "start"
        self.host = socket.gethostname()
        self._count = 0
        self._over = threading.Event()  # the main thread has left the guard
        self._idle = threading.Event()  # the watching thread makes no more calls into torch
        self._leaving = False  # the main thread is in __exit__
        self._terminated = False
        self._reported: BaseException | None = None
        self._speaking = threading.RLock()
        self._beating = threading.Lock()
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
        # Torchrun keeps its store over restarts: what an earlier attempt wrote there is not about this one. Where each
        # attempt has a store of its own (launch/node.sh), hosts that came later count their restarts differently.
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if shared else "0"
        self._store: Any = dist.PrefixStore(f"rhymemeg/failure/{attempt}", store)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        first = self.rank - int(os.environ.get("LOCAL_RANK", "0"))
        # Every rank looks at the processes of its host and at the heartbeat of one rank of the next host.
        self._neighbours = [r for r in range(first, min(first + local, self.world_size)) if r != self.rank]
        self._remote = (self.rank + local) % self.world_size
        self._pids: dict[int, int] = {}  # neighbour -> its process id
        self._heard: tuple[int, float] = (-1, time.monotonic())  # count of the remote heartbeat, when it was new

    # ------------------------------------------------------------------------------------------------ start and end

    def __enter__(self) -> Guard:
        self._beat()
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._handles_signals = threading.current_thread() is threading.main_thread()
        if self._handles_signals:
            # The wake-up descriptor tells the watching thread of a signal even while the main thread sits in a
            # collective and Python's own handler cannot run.
            self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
            self._previous_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="rhymemeg-failure", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving = True
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0, PREEMPTED)):
            self._finish()
            return
        if isinstance(error, SystemExit):
            if error.code == TERMINATED:
                self._say_terminated()
            self._leave()
            return
        self.report(error)
        self._leave()
        raise SystemExit(TERMINATED if self._terminated else 1) from None

    def report(self, error: BaseException) -> None:
        """See the function of this name."""
        if self._reported is None and not isinstance(error, SystemExit):
            self._reported = error
            self._explain(error)

    def _leave(self) -> None:
        # An interpreter that ends while a thread is inside torch aborts.
        self._over.set()
        self._idle.wait(timeout=GRACE)

    def _finish(self) -> None:
        with contextlib.suppress(Exception):
            self._beat(done=True)
        self._over.set()
        self._thread.join(timeout=GRACE)
        if self._handles_signals:
            signal.set_wakeup_fd(self._previous_fd)
            signal.signal(signal.SIGTERM, self._previous_handler)
        os.close(self._read_end)
        os.close(self._write_end)

    def begin_phase(self, name: str) -> None:
        """See the function `phase`. Told at once, so that the phase of a rank that dies is known."""
        self.phase = name
        with contextlib.suppress(Exception):  # a store that is gone is the watching thread's matter
            self._beat()

    def begin_step(self, step: int | None) -> None:
        """See the function of this name."""
        self._step = step
        if step is None:
            self._stop_by = float("inf")  # what was done is saved
        if self._budget is not None:
            self._budget.begin(step)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self.grace > 0 and self._step is not None:
            self.stop_asked = True  # the watching thread sees to it that this does not take for ever
        elif not self._leaving:
            raise SystemExit(TERMINATED)

    # ------------------------------------------------------------------------------------------------------ messages

    def _explain(self, error: BaseException) -> None:
        """Show the error unless it follows from one that is shown already."""
        where = f"rank {self.rank} failed during phase {self.phase!r}"
        if isinstance(error, KeyboardInterrupt):
            self._publish(f"rhymemeg: interrupted during phase {self.phase!r}")
            return
        consequence = _is_consequence(error)
        if consequence and self._cause_appears():
            return
        if isinstance(error, RhymeMegError):
            message = f"rhymemeg: error: {where}: {error}"
        else:
            message = f"rhymemeg: {where}:\n{''.join(traceback.format_exception(error)).rstrip()}"
        if consequence:
            message += f"\nrhymemeg: where the ranks were last: {self._phases()}"
        self._publish(message, is_cause=not consequence)

    def _cause_appears(self) -> bool:
        """Wait for what broke a collective: another rank's error or a dead rank. On one host that takes moments; a
        silent rank elsewhere is given the time that its silence needs."""
        start = time.monotonic()
        while time.monotonic() < start + SILENCE + 3 * BEAT:
            if self._published() or self._report_dead():
                return True
            if time.monotonic() > start + 3 * BEAT and self.world_size == len(self._neighbours) + 1:
                break
            time.sleep(0.2)
        return self._published()

    def _say_terminated(self) -> None:
        # Torchrun answers the death of a rank with SIGTERM to the others: look for one before calling this a request.
        with self._speaking:
            if not self._published() and not self._report_dead():
                late = f"; step {self._step} did not end within {self.grace:.0f} s, nothing is saved"
                self._publish(
                    f"rhymemeg: rank {self.rank} was told to stop (SIGTERM) in phase {self.phase!r}"
                    + (late if time.monotonic() >= self._stop_by else "")
                )

    def _begin_stop(self) -> bool:
        """SIGTERM has come: whether the current step may end first. False if the signal is torchrun's answer to a dead
        rank."""
        if self.grace <= 0 or self._step is None or self._published() or self._report_dead():
            return False
        if self._stop_by == float("inf"):
            self._stop_by = time.monotonic() + self.grace
            if self._is_first("stop"):
                _print(f"rhymemeg: SIGTERM: saving after step {self._step} if it ends within {self.grace:.0f} s")
        return True

    def _is_first(self, key: str) -> bool:
        """Whether this rank is the first to have something to say of `key`, so that only one does."""
        with contextlib.suppress(Exception):
            return bool(self._store.add(f"said/{key}", 1) == 1)
        return False

    def _look_at_budget(self) -> None:
        budget = self._budget
        step = budget.exceeded(self.phase) if budget is not None else None
        if budget is None or step is None or not self._is_first(f"budget/{step}"):
            return
        silent = self._silent_ranks()
        unheard = f"; nothing is heard of rank {_some(silent)}" if silent else ""
        _print(
            f"rhymemeg: warning: step {step} takes longer than {budget.seconds:g} s; the ranks are in {self._phases()}"
            f"{unheard}; their stacks are in {budget.folder}"
        )

    def _silent_ranks(self) -> list[int]:
        """Ranks without a heartbeat for a few seconds: stopped, or stuck in native code. Takes that long."""
        before = {rank: self._read(rank) for rank in range(self.world_size) if rank != self.rank}
        time.sleep(3 * BEAT)
        after = {rank: self._read(rank) for rank in before}
        return [rank for rank, beat in before.items() if beat is not None and not beat.done and beat == after[rank]]

    def _publish(self, message: str, is_cause: bool = True) -> None:
        """Tell all ranks that the run is over. Shown is the first cause, and what follows from it only if there is
        none."""
        with self._speaking:
            try:
                first = self._store.add("causes" if is_cause else "consequences", 1) == 1
                speak = first if is_cause else first and not self._published()
                if speak:
                    self._store.set("message", message)
            except Exception:  # the store is gone and with it the run: better said twice than not at all
                speak = True
            if speak:
                _print(message)

    def _published(self) -> bool:
        try:
            return bool(self._store.check(["message"]))
        except Exception:
            return False

    def _phases(self) -> str:
        by_phase: dict[str, list[int]] = {}
        for beat in (self._read(rank) for rank in range(self.world_size)):
            if beat is not None:
                by_phase.setdefault(beat.phase, []).append(beat.rank)
        parts = []
        for name, ranks in by_phase.items():
            parts.append(f"{name!r}: rank {_some(ranks)}")
        return "; ".join(parts)

    # ------------------------------------------------------------------------------------------------------ watching

    def _beat(self, done: bool = False) -> None:
        with self._beating:
            self._count += 1
            line = (self.rank, os.getpid(), self.host, self._count, self.phase, done)
            self._store.set(f"beat/{self.rank}", json.dumps(line))

    def _read(self, rank: int) -> Beat | None:
        key = f"beat/{rank}"
        try:
            return Beat(*json.loads(self._store.get(key))) if self._store.check([key]) else None
        except Exception:
            return None

    def _report_dead(self) -> bool:
        """Publish that a process of this host is gone without having said so."""
        for rank in self._neighbours:
            if rank not in self._pids:
                beat = self._read(rank)
                if beat is None:
                    continue
                self._pids[rank] = beat.pid
            if not _alive(self._pids[rank]):
                beat = self._read(rank)
                if beat is not None and not beat.done and not self._published():
                    self._publish_lost(beat, "has died (killed, or out of memory)")
                    return True
        return False

    def _report_silent(self) -> bool:
        """Publish that the rank watched on another host is no longer heard of."""
        beat = self._read(self._remote) if self._remote not in (self.rank, *self._neighbours) else None
        if beat is None or beat.done:
            return False
        if beat.count != self._heard[0]:
            self._heard = (beat.count, time.monotonic())
        if time.monotonic() - self._heard[1] < SILENCE:
            return False
        self._publish_lost(beat, f"has not been heard of for {SILENCE:.0f} s (killed, or its machine lost)")
        return True

    def _publish_lost(self, beat: Beat, what: str) -> None:
        who = f"rank {beat.rank} (pid {beat.pid} on {beat.host})"
        self._publish(f"rhymemeg: error: {who} {what} in phase {beat.phase!r}; the run stops")

    def _watch(self) -> None:
        try:
            self._watch_until_over()
        finally:
            self._idle.set()

    def _watch_until_over(self) -> None:
        next_beat = 0.0
        while not self._over.is_set():
            asked = False
            with contextlib.suppress(OSError, ValueError):
                readable, _, _ = select.select([self._read_end], [], [], 0.25)
                asked = bool(readable) and signal.SIGTERM in os.read(self._read_end, 64)
            if self._over.is_set():
                break
            if asked and not self._begin_stop():
                self._terminated = True
            if self._terminated or time.monotonic() >= self._stop_by:
                self._terminated = True
                self._say_terminated()
                self._end_process(TERMINATED)
            self._look_at_budget()
            over = self._report_dead()
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT
                try:
                    self._beat()
                except Exception:
                    if not self._over.is_set():
                        _print(
                            f"rhymemeg: error: rank {self.rank} has lost the store of the run (torchrun or rank 0 died)"
                        )
                    self._end_process(1)
                over = over or self._report_silent() or self._published()
            if over:
                self._end_process(1)
        if self._published():
            self._end_process(1)

    def _end_process(self, status: int) -> None:
        """Leave the main thread a moment to end by itself (longer if it has noticed), then end the process."""
        self._idle.set()
        start = time.monotonic()
        while time.monotonic() < start + (GRACE if self._reported or self._over.is_set() or self._terminated else 1.0):
            time.sleep(0.1)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _some(ranks: list[int]) -> str:
    """The first few of a list of ranks."""
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _is_consequence(error: BaseException) -> bool:
    if isinstance(error, RhymeMegError):
        error = error.__cause__ or error
    text = str(error).lower()
    return isinstance(error, (RuntimeError, ConnectionError, dist.DistError)) and any(c in text for c in _CONSEQUENCES)


def _alive(pid: int) -> bool:
    """Whether a process of this host runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _print(message: str) -> None:
    # A live display may have hidden the cursor.
    restore = "\x1b[?25h" if sys.stderr.isatty() else ""
    with contextlib.suppress(Exception):
        print(restore + message, file=sys.stderr, flush=True)
