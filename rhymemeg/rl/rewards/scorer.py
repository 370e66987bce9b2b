"""Judging samples: in this process or in worker processes, with a time limit, and without surprises.

`Scorer.score` sets `reward` and `reward_components` of each sample, or raises one RewardError that names the reward,
the prompt and what went wrong: it raised, took longer than the limit, or returned something that is not a finite
number or a dict of them with `score`. With `workers=0` rewards are computed in a thread of this process, one after
the other; a function that never lets go of the interpreter (a pathological regular expression, say) can only be
stopped in a worker process, so rewards marked `isolated` always get one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from rhymemeg.config import DataOptions
from rhymemeg.errors import RewardError
from rhymemeg.rl.rewards.judge import Request, Verdict, judge
from rhymemeg.rl.rewards.pool import WorkerPool
from rhymemeg.rl.rewards.registry import RewardFunction, importable, resolve
from rhymemeg.rollout.samples import Prompt, Sample


class Scorer:
    """Judges samples by one reward. The name and the function's parameters are checked here; processes start when the
    first samples come. Not for use by several threads at once. Close it, or use it in `with`."""

    def __init__(
        self, reward: str, *, timeout: float = 30.0, workers: int = 0, arguments: Mapping[str, Any] | None = None
    ) -> None:
        self.reward = resolve(reward)
        self.timeout = timeout
        self._arguments = dict(arguments or {})
        self._function = self.reward.bound(self._arguments)
        self._workers = max(workers, 1) if self.reward.isolated else workers
        if self._workers and not importable(self.reward):
            raise RewardError(
                f"reward {reward!r} ({self.reward.location}) cannot be computed in worker processes, which import "
                "it by that name: put the function into a module, or set --reward-workers 0"
            )
        self._pool: WorkerPool | None = None

    @classmethod
    def from_options(
        cls, options: DataOptions, default_reward: str, arguments: Mapping[str, Any] | None = None
    ) -> Scorer:
        """The scorer of a run; `--reward auto` is `default_reward`, that of the prompts."""
        name = default_reward if options.reward == "auto" else options.reward
        return cls(name, timeout=options.reward_timeout, workers=options.reward_workers, arguments=arguments)

    def score(self, samples: Sequence[Sample], prompts: Mapping[int, Prompt] | Iterable[Prompt]) -> None:
        """Judge `samples`, whose prompts are among `prompts` (by id, or just the prompts)."""
        by_id = prompts if isinstance(prompts, Mapping) else {prompt.prompt_id: prompt for prompt in prompts}
        requests = [_request(sample, by_id[sample.sample_id.prompt_id]) for sample in samples]
        for index, verdict in self._verdicts(requests):
            samples[index].reward, samples[index].reward_components = self._read(verdict, samples[index])

    def close(self) -> None:
        """End the worker processes. They also end when this process does, however that happens."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _verdicts(self, requests: Sequence[Request]) -> Iterable[tuple[int, Verdict]]:
        """Index and verdict of each request, or at least of one that ends the run."""
        if not self._workers:
            return enumerate(judge_here(self._function, requests, self.timeout))
        if self._pool is None:
            self._pool = WorkerPool(self.reward.name, self.reward.location, self._arguments, self._workers)
        verdicts = self._pool.run(requests, self.timeout, bear_timeouts=self.reward.timeout_score is not None)
        return sorted(verdicts.items(), key=lambda item: item[0])

    def _read(self, verdict: Verdict, sample: Sample) -> tuple[float, dict[str, float]]:
        """Reward and components; raises the RewardError that the verdict calls for."""
        where = f"on prompt {sample.sample_id.prompt_id} (sample {sample.sample_id})"
        bearable = self.reward.timeout_score is not None
        if verdict.components is not None:
            components = dict(verdict.components) | ({"timeout": 0.0} if bearable else {})
            return components.pop("score"), components
        if not verdict.timed_out:
            raise RewardError(f"reward {self.reward.name!r} {verdict.problem} {where}") from verdict.cause
        if self.reward.timeout_score is None:
            raise RewardError(
                f"reward {self.reward.name!r} took longer than --reward-timeout {self.timeout:g} s {where}"
            )
        return self.reward.timeout_score, {"timeout": 1.0}


def _request(sample: Sample, prompt: Prompt) -> Request:
    info = {
        "prompt": prompt.text,
        "prompt_id": prompt.prompt_id,
        "source": prompt.source,
        "truncated": sample.truncated,
    }
    return sample.text, prompt.label, info


def judge_here(function: RewardFunction, requests: Sequence[Request], timeout: float) -> Iterator[Verdict]:
    """Judge in a thread of this process, so that waiting can end. After a time-out the thread is given up (it is a
    daemon) and the remaining requests go to a new one. A problem ends it."""
    done: queue.SimpleQueue[Verdict] = queue.SimpleQueue()

    def work(out: queue.SimpleQueue[Verdict], given_up: threading.Event, remaining: Sequence[Request]) -> None:
        for request in remaining:
            out.put(verdict := judge(function, request))
            if verdict.problem or given_up.is_set():
                return

    given_up = threading.Event()
    running = False
    try:
        for index in range(len(requests)):
            if not running:
                done, given_up = queue.SimpleQueue(), threading.Event()
                arguments = (done, given_up, requests[index:])
                threading.Thread(target=work, args=arguments, name="reward", daemon=True).start()
                running = True
            try:
                yield done.get(timeout=timeout)
            except queue.Empty:
                given_up.set()
                running = False
                yield Verdict()
    finally:
        given_up.set()


def component_sums(samples: Iterable[Sample]) -> dict[str, tuple[float, int]]:
    """Sum and count of each component as `reward/<name>`, to be merged over ranks into means."""
    sums: dict[str, tuple[float, int]] = {}
    for sample in samples:
        for name, value in sample.reward_components.items():
            total, count = sums.get(f"reward/{name}", (0.0, 0))
            sums[f"reward/{name}"] = (total + value, count + 1)
    return sums
