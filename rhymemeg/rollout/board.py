"""What engines tell each other while they run: counters and letters on a torch.distributed store.

Only the leader of an engine writes and reads here, and only when it polls (`run_window`), never at every engine step:

    total = board.add(progress)          one atomic addition for all three counters, which also returns their sums
    board.publish(status)                backlog and engine steps of this engine, for thieves and for the watch
    board.post(engine, letter)           a letter into another engine's inbox; `board.letters()` empties one's own
    board.command(data)                  to the other ranks of this engine, which wait for it in `board.obey()`

So a poll costs the store a handful of small operations whatever the number of engines; who steals reads the status of at
most `CANDIDATES` others. Each window has keys of its own; `begin` deletes those of the window before, which everybody has
left by then.

Letters and commands are a line of JSON and bytes: nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from rhymemeg.errors import RolloutError
from rhymemeg.histopipe.window import Progress

if TYPE_CHECKING:
    from rhymemeg.parallel.runtime import Runtime
    from rhymemeg.rollout.engine import RolloutEngine

CANDIDATES = 64
"""Engines that a thief looks at."""
_BITS = 21
MAX_SAMPLES = (1 << _BITS) - 1
"""Most samples of a window: three counters of this size share the 63 bits of one."""


class Status(NamedTuple):
    """What the others may know of an engine: requests of this step and of the next that it could give away, free slots,
    engine steps that it has done, and a number that grows with every poll."""

    backlog: int
    early_backlog: int
    free: int
    steps: int
    polls: int


@dataclass(frozen=True)
class Letter:
    """`kind` and `fields` are JSON, `data` is any bytes."""

    kind: str
    fields: Mapping[str, Any]
    data: bytes = b""

    def pack(self) -> bytes:
        return json.dumps({"kind": self.kind, "fields": self.fields}).encode() + b"\n" + self.data

    @classmethod
    def unpack(cls, raw: bytes) -> Letter:
        head, _, data = raw.partition(b"\n")
        entry = json.loads(head)
        return cls(entry["kind"], entry["fields"], data)


class WindowBoard:
    """The board as the leader of `engine` sees it; the other ranks of the engine use `obey` alone. `ranks` is the number
    of ranks of the engine, `tp_rank` this one's place among them; `timeout` in seconds is that of `obey`."""

    def __init__(
        self, store: dist.Store, engine: int, num_engines: int, tp_rank: int = 0, ranks: int = 1, timeout: float = 600.0
    ) -> None:
        self.engine, self.num_engines, self.tp_rank, self.ranks = engine, num_engines, tp_rank, ranks
        self._store = store
        self._timeout = timeout
        self._store.set_timeout(timedelta(seconds=timeout))
        self._window = -1
        self._last: Status | None = None
        self._used: set[str] = set()
        self.operations = 0
        """Requests to the store so far."""

    def begin(self) -> None:
        """Start a window. Called by all ranks after the last one has ended for all."""
        if self.tp_rank == 0 and self._window >= 0:
            self.letters()
            for key in self._used:  # several engines delete the shared ones; the store does not mind
                self._store.delete_key(key)
            self._used.clear()
        self._window, self._last = self._window + 1, None
        if self.tp_rank == 0:
            self.publish(Status(0, 0, 0, 0, 0))

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("window", self._window, *parts)))

    def _add(self, number: int, *parts: object) -> int:
        """Add to a counter of this window, and return its sum."""
        self.operations += 1
        key = self._key(*parts)
        self._used.add(key)
        return int(self._store.add(key, number))

    # ------------------------------------------------------------------------------------------------------ counters

    def add(self, progress: Progress) -> Progress:
        """Add to the sums of all engines, and return them."""
        packed = (progress.started << 2 * _BITS) + (progress.settled << _BITS) + progress.due_settled
        total = self._add(packed, "progress")
        return Progress(total >> 2 * _BITS, total >> _BITS & MAX_SAMPLES, total & MAX_SAMPLES)

    def pull(self, name: str, number: int) -> int:
        """Take the next `number` entries of the shared list `name`; returns the index of the first."""
        return self._add(number, "pull", name) - number

    def count(self, name: str, number: int) -> int:
        """Add to a counter that all engines share, and return its sum."""
        return self._add(number, "count", name)

    # -------------------------------------------------------------------------------------------------------- status

    def publish(self, status: Status) -> None:
        """Tell the others, where there are any."""
        if self.num_engines > 1 and status != self._last:
            self.operations += 1
            self._last = status
            key = self._key("status", self.engine)
            self._used.add(key)
            self._store.set(key, "/".join(map(str, status)))

    def candidates(self, turn: int) -> list[int]:
        """Engines to look at: all others, or with many of them `CANDIDATES` that change with `turn`."""
        others = self.num_engines - 1
        if others <= CANDIDATES:
            return [e for e in range(self.num_engines) if e != self.engine]
        stride = max(1, others // CANDIDATES)
        return [(self.engine + 1 + (turn + i * stride) % others) % self.num_engines for i in range(CANDIDATES)]

    def statuses(self, engines: Sequence[int]) -> dict[int, Status]:
        """Status of these engines; those that have not begun the window are left out."""
        keys = [self._key("status", e) for e in engines]
        self.operations += 2
        if not engines:
            return {}
        if not self._store.check(keys):
            engines = [e for e, key in zip(engines, keys) if self._store.check([key])]
            keys = [self._key("status", e) for e in engines]
            if not engines:
                return {}
        return {e: Status(*map(int, raw.decode().split("/"))) for e, raw in zip(engines, self._store.multi_get(keys))}

    # ------------------------------------------------------------------------------------------------------- letters

    def post(self, engine: int, letter: Letter) -> None:
        """Put a letter into the inbox of another engine."""
        self.operations += 1
        self._store.queue_push(self._key("inbox", engine), letter.pack())

    def letters(self) -> list[Letter]:
        """Everything in this engine's inbox, oldest first."""
        self.operations += 1
        key = self._key("inbox", self.engine)
        count = self._store.queue_len(key)
        self.operations += count
        return [Letter.unpack(self._store.queue_pop(key, False)) for _ in range(count)]

    # ------------------------------------------------------------------------------------------------------ commands

    def command(self, letters: Iterable[Letter]) -> None:
        """Tell the other ranks of this engine what its leader has decided."""
        if self.ranks == 1:
            return
        packed = [letter.pack() for letter in letters]
        sizes = json.dumps([len(p) for p in packed]).encode()
        for rank in range(1, self.ranks):
            self.operations += 1
            self._store.queue_push(self._key("command", self.engine, rank), sizes + b"\n" + b"".join(packed))

    def obey(self) -> list[Letter]:
        """Wait for the leader's next command. RolloutError where it does not come in time."""
        self.operations += 1
        try:
            raw = self._store.queue_pop(self._key("command", self.engine, self.tp_rank), True)
        except Exception as error:
            raise RolloutError(
                f"engine {self.engine}: no word from its leader for {self._timeout:g} s: {error}"
            ) from error
        head, _, body = raw.partition(b"\n")
        letters, at = [], 0
        for size in json.loads(head):
            letters.append(Letter.unpack(body[at : at + size]))
            at += size
        return letters


def open_board(runtime: Runtime, engine: RolloutEngine) -> WindowBoard | None:
    """The board of a run, on the store that torchrun or rank 0 keeps; None for a single engine. The keys begin with a
    token that no earlier attempt of the run can have used. Collective."""
    token = runtime.broadcast_object(uuid.uuid4().hex)
    if engine.num_engines == 1:
        return None
    timeout = runtime.timeout.total_seconds()
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )
    return WindowBoard(
        dist.PrefixStore(f"rhymemeg/board/{token}", store),
        engine.engine_index,
        engine.num_engines,
        engine.tp_rank,
        engine.spec.tensor_parallel_size,
        timeout,
    )
