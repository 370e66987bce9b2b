"""What a run costs the busiest rank at a given size, counted and timed on this machine, without a GPU or a process group.

    python tools/scale.py --gpus 8 64 512 4096 --engine-tp 1

For each size, one line a part:

    window     requests to the store that the engines share during a rollout: one poll of the real `WindowBoard` against a
               store that counts requests and bytes, times the polls a second that `WindowExecution` allows itself
    guard      the same for the heartbeats of `parallel.failure`, from its own interval
    plan       seconds of CPU of HistoPipe's plan of a step, which every rank makes for itself
    batches    seconds of CPU of the plan of micro-batches, likewise
    summaries  bytes of the line a sample that every rank receives once a step
    tokens     bytes that a rank sends to those that train its samples: ids, log-probabilities, versions
    history    bytes of history that change rank between two epochs, a rank
    straggler  how much longer than the mean the slowest rank takes, where a rank's time varies by --jitter (normal): what a
               barrier over all ranks costs

and once: how many requests a second a real store answers here. No part of a rank's work grows with the number of ranks at
every engine step; the window's and the guard's requests end at the one process that keeps the store, so these two bound it.
Weight sync, rollout and training have tools of their own (docs/scale.md).
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from rhymemeg.histopipe.plan import PlanRequest
from rhymemeg.histopipe.planner import plan
from rhymemeg.histopipe.window import Progress
from rhymemeg.histopipe.workloads import Lognormal

SUMMARY_BYTES = 9 * 8
"""`rl.exchange.share_summaries`: nine fp64 numbers a sample."""
TOKEN_BYTES = 4 + 4 + 4
"""Of a response token on its way to training: id, log-probability, version."""
FRAME = 16
"""Bytes of a request to the store beside keys and values: kind and lengths. An estimate."""


class CountingStore:
    """A store in memory that counts requests and bytes; the part of torch.distributed's interface that the board uses."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, list[bytes]] = {}
        self.requests = self.bytes = 0

    def _count(self, *parts: str | bytes) -> None:
        self.requests += 1
        self.bytes += FRAME + sum(map(len, parts))

    def set_timeout(self, timeout: timedelta) -> None:
        del timeout

    def add(self, key: str, number: int) -> int:
        self._count(key, b"12345678", b"12345678")
        total = int(self.values.get(key, b"0")) + number
        self.values[key] = str(total).encode()
        return total

    def set(self, key: str, value: str | bytes) -> None:
        self._count(key, value)
        self.values[key] = value if isinstance(value, bytes) else value.encode()

    def check(self, keys: list[str]) -> bool:
        self._count(*keys)
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = [self.values[key] for key in keys]
        self._count(*keys, *found)
        return found

    def delete_key(self, key: str) -> bool:
        self._count(key)
        return self.values.pop(key, None) is not None

    def queue_len(self, key: str) -> int:
        self._count(key)
        return len(self.queues.get(key, ()))

    def queue_push(self, key: str, value: bytes) -> None:
        self._count(key, value)
        self.queues.setdefault(key, []).append(value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        del block
        value = self.queues[key].pop(0)
        self._count(key, value)
        return value


@dataclass(frozen=True)
class Window:
    """Requests and bytes a second at the store. `quiet`: all engines busy; `steal`: all of them look for work at once."""

    polls_a_second: float
    quiet_requests: float
    quiet_bytes: float
    steal_requests: float
    steal_bytes: float


def window(engines: int, engine_tp: int) -> Window:
    """Count one poll of one engine's leader and of the ranks that obey it."""
    from rhymemeg.rollout.board import Letter, Status, WindowBoard
    from rhymemeg.rollout.execution import POLL_SECONDS, POLLS_PER_SECOND

    store: Any = CountingStore()
    for engine in range(engines):
        store.values[f"window/0/status/{engine}"] = b"12/3/4/56789/1234"
    leader = WindowBoard(store, 0, engines, 0, engine_tp)
    others = [WindowBoard(store, 0, engines, rank, engine_tp) for rank in range(1, engine_tp)]
    for board in (leader, *others):
        board.begin()

    def poll(steal: bool) -> tuple[int, int]:
        before = store.requests, store.bytes
        leader.add(Progress(1, 1, 0))
        leader.letters()
        if steal:
            leader.statuses(leader.candidates(7))
            leader.post(engines - 1, Letter("want", {"thief": 0, "number": 3, "early": False}))
        leader.command([Letter("next", {"turns": 3})])
        leader.publish(Status(*(store.requests % 97 + i for i in range(len(Status._fields)))))
        for board in others:
            board.obey()
        return store.requests - before[0], store.bytes - before[1]

    if engines == 1:
        return Window(0.0, 0.0, 0.0, 0.0, 0.0)
    rate = engines / max(POLL_SECONDS, engines / POLLS_PER_SECOND)
    quiet, steal = poll(False), poll(True)
    return Window(rate, rate * quiet[0], rate * quiet[1], rate * steal[0], rate * steal[1])


def guard(ranks: int) -> float:
    """Requests a second: each rank sets its line, looks for its neighbour's (two) and for a message."""
    from rhymemeg.parallel.failure import BEAT

    return 4 * ranks / BEAT


def store_capacity(clients: int = 8, seconds: float = 1.0) -> float:
    """Additions a second that a real TCPStore answers to this many clients of one process."""
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    counts = [0] * clients

    def work(number: int) -> None:
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop:
            client.add("k", 1)
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


@dataclass(frozen=True)
class Step:
    """Of one rank and step. Seconds, bytes."""

    plan_seconds: float
    batch_seconds: float
    summary_bytes: int
    token_bytes: int
    history_bytes: int
    straggler: float


def straggler(ranks: int, jitter: float) -> float:
    """Mean excess of the largest of `ranks` normal numbers of this relative deviation, over 200 draws."""
    draws = np.random.default_rng(0).standard_normal((200, ranks))
    return float(jitter * draws.max(axis=1).mean())


def step(gpus: int, engines: int, options: argparse.Namespace) -> Step:
    """Plans are timed at full size; bytes follow from the numbers of samples and tokens."""
    from rhymemeg.rl.batching import plan_micro_batches

    prompts = options.prompts_per_engine * engines
    source = Lognormal(median=options.median)
    drawn = next(source.steps(prompts, options.samples, options.cap, 0))
    request = PlanRequest(
        step=1,
        num_engines=engines,
        slots=options.slots,
        samples_per_prompt=options.samples,
        prompt_ids=drawn.prompt_ids,
        history=drawn.history,
        max_response_len=options.cap,
        carry_share=0.03,
    )
    start = time.process_time()
    plan(request)
    planned = time.process_time()
    data_parallel = max(1, gpus // options.model_parallel)
    lengths = (drawn.actual.ravel() + options.prompt_tokens).tolist()
    begin = time.process_time()
    plan_micro_batches(lengths, data_parallel, options.cap + options.prompt_tokens, 4096)
    batched = time.process_time()
    samples, tokens = drawn.actual.size, int(drawn.actual.sum())
    return Step(
        planned - start,
        batched - begin,
        SUMMARY_BYTES * samples,
        TOKEN_BYTES * tokens // engines * options.model_parallel,
        int(options.history_bytes * tokens / engines * (1 - 1 / engines)),
        straggler(gpus, options.jitter),
    )


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 512, 4096])
    p.add_argument("--engine-tp", type=int, default=1, help="ranks an engine (1)")
    p.add_argument("--model-parallel", type=int, default=8, help="TP x PP x CP of the actor (8)")
    p.add_argument("--prompts-per-engine", type=int, default=8, help="prompts a step (8)")
    p.add_argument("--samples", type=int, default=16, help="samples a prompt (16)")
    p.add_argument("--slots", type=int, default=64, help="requests an engine runs at once (64)")
    p.add_argument("--median", type=float, default=1160.0, help="median response, tokens (1160)")
    p.add_argument("--cap", type=int, default=16384, help="longest response, tokens (16384)")
    p.add_argument("--prompt-tokens", type=int, default=200, help="(200)")
    p.add_argument("--history-bytes", type=float, default=2.25, help="packed, a token (2.25, docs/histospec.md)")
    p.add_argument("--jitter", type=float, default=0.01, help="relative deviation of a rank's time (0.01)")
    p.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return p


def main(words: list[str] | None = None) -> int:
    options = _parser().parse_args(words)
    rows = []
    for gpus in options.gpus:
        if gpus < 1 or gpus % options.engine_tp:
            print(f"error: --gpus {gpus} is not a multiple of --engine-tp {options.engine_tp}", file=sys.stderr)
            return 2
        engines = gpus // options.engine_tp
        rows.append(
            {
                "gpus": gpus,
                "engines": engines,
                "window": asdict(window(engines, options.engine_tp)),
                "guard_requests": guard(gpus),
                "step": asdict(step(gpus, engines, options)),
            }
        )
    capacity = store_capacity()
    if options.json:
        print(json.dumps({"sizes": rows, "store_requests_a_second": capacity}, indent=1))
        return 0
    names = ["GPUs", *(f"{row['gpus']:,}" for row in rows)]
    lines = [names, ["engines", *(f"{row['engines']:,}" for row in rows)]]

    def add(name: str, form: str, part: str, key: str, scale: float = 1.0) -> None:
        lines.append([name, *(form.format(np.float64(row[part][key]) * scale) for row in rows)])

    add("window: polls/s", "{:,.0f}", "window", "polls_a_second")
    add("window: requests/s, all busy", "{:,.0f}", "window", "quiet_requests")
    add("window: KB/s, all busy", "{:,.0f}", "window", "quiet_bytes", 1e-3)
    add("window: requests/s, all steal", "{:,.0f}", "window", "steal_requests")
    add("window: MB/s, all steal", "{:,.1f}", "window", "steal_bytes", 1e-6)
    lines.append(["guard: requests/s", *(f"{row['guard_requests']:,.0f}" for row in rows)])
    add("plan: ms", "{:,.1f}", "step", "plan_seconds", 1e3)
    add("batches: ms", "{:,.0f}", "step", "batch_seconds", 1e3)
    add("summaries: MB a rank", "{:,.2f}", "step", "summary_bytes", 1e-6)
    add("tokens: MB a rank", "{:,.1f}", "step", "token_bytes", 1e-6)
    add("history: MB a rank", "{:,.2f}", "step", "history_bytes", 1e-6)
    add("straggler: % of the step", "{:,.1f}", "step", "straggler", 100)
    width = max(len(row[0]) for row in lines)
    for row in lines:
        print(row[0].ljust(width) + "".join(cell.rjust(12) for cell in row[1:]))
    print(f"a store of this machine answers {capacity:,.0f} requests/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
