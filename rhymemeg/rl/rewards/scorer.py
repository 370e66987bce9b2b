"""Judging samples: in this process or in worker processes, with a time limit, and without surprises.

    scorer.score(samples, prompts)                  all at once, or
    scorer.submit(sample, prompt); scorer.poll()    as samples finish, while the engine goes on with the others, and
    scorer.collect()                                wait for the rest

Each sets `reward` and `reward_components` of the samples, or raises one RewardError that names the reward, the prompt and
what went wrong: it raised, took longer than the limit, or returned something that is not a finite number in its range, or
a dict of them with `score`. With `workers=0` rewards are computed in a thread of this process, one after the other; a
function that never lets go of the interpreter (a pathological regular expression, say) can only be stopped in a worker
process, so rewards marked `isolated` always get one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rhymemeg.config import DataOptions
from rhymemeg.errors import RewardError
from rhymemeg.rl.rewards.judge import Request, Verdict, check_range
from rhymemeg.rl.rewards.mix import weighted_reward
from rhymemeg.rl.rewards.pool import WorkerPool
from rhymemeg.rl.rewards.registry import Reward, importable, resolve
from rhymemeg.rl.rewards.thread import ThreadJudge
from rhymemeg.rollout.samples import Prompt, Sample


class Scorer:
    """Judges samples by one reward (a name, or a `Reward`). The name and the function's parameters are checked here;
    processes start when the first samples come. Not for use by several threads at once. Close it, or use it in `with`."""

    def __init__(
        self,
        reward: str | Reward,
        *,
        timeout: float = 30.0,
        workers: int = 0,
        arguments: Mapping[str, Any] | None = None,
        limits: tuple[float, float] | None = None,
        allow_code_execution: bool = False,
    ) -> None:
        self.reward = resolve(reward) if isinstance(reward, str) else reward
        self.timeout, self.limits = timeout, limits or self.reward.range
        if self.reward.runs_code and not allow_code_execution:
            raise RewardError(
                f"reward {self.reward.name!r} executes what the model writes: set --allow-code-execution if it may"
            )
        self._arguments = dict(arguments or {})
        self._function = self.reward.bound(self._arguments)
        self._workers = max(workers, 1) if self.reward.isolated else workers
        if self._workers and not importable(self.reward):
            raise RewardError(
                f"reward {self.reward.name!r} ({self.reward.location}) cannot be computed in worker processes, which "
                "import it by that name: put the function into a module, or set --reward-workers 0"
            )
        self._judge: WorkerPool | ThreadJudge | None = None
        self._pending: dict[int, Sample] = {}
        self._submitted = 0

    @classmethod
    def from_options(
        cls, options: DataOptions, default_reward: str, arguments: Mapping[str, Any] | None = None
    ) -> Scorer:
        """The scorer of a run; `--reward auto` is `default_reward`, that of the prompts."""
        reward: str | Reward = default_reward if options.reward == "auto" else options.reward
        if options.rewards:
            reward, arguments = weighted_reward(options.rewards, default_reward)
        return cls(
            reward,
            timeout=options.reward_timeout,
            workers=options.reward_workers,
            arguments=arguments,
            limits=options.reward_range,
            allow_code_execution=options.allow_code_execution,
        )

    def score(self, samples: Sequence[Sample], prompts: Mapping[int, Prompt] | Iterable[Prompt]) -> None:
        """Judge `samples`, whose prompts are among `prompts` (by id, or just the prompts). Samples that have a reward
        or were submitted before are not judged again."""
        by_id = prompts if isinstance(prompts, Mapping) else {prompt.prompt_id: prompt for prompt in prompts}
        known = {id(sample) for sample in self._pending.values()}
        for sample in samples:
            if sample.reward is None and id(sample) not in known:
                self.submit(sample, by_id[sample.sample_id.prompt_id])
        self.collect()

    def submit(self, sample: Sample, prompt: Prompt) -> None:
        """Have a finished sample judged, without waiting for it."""
        if self._judge is None:
            self._judge = (
                WorkerPool(self.reward.name, self.reward.location, self._arguments, self._workers, self.timeout)
                if self._workers
                else ThreadJudge(self._function, self.timeout)
            )
        self._pending[self._submitted] = sample
        self._judge.submit(self._submitted, _request(sample, prompt))
        self._submitted += 1

    def poll(self) -> None:
        """Take what has been judged and hand out what waits; returns at once. Call it between two steps of the engine."""
        if self._judge is not None and self._pending:
            self._take(self._judge.advance(wait=False))

    def collect(self) -> None:
        """Wait until everything that was submitted is judged."""
        while self._pending:
            assert self._judge is not None
            self._take(self._judge.advance(wait=True))

    def close(self) -> None:
        """End the worker processes. They also end when this process does, however that happens."""
        self._pending.clear()
        if self._judge is not None:
            self._judge.close()
            self._judge = None

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, verdicts: Mapping[int, Verdict]) -> None:
        for index in sorted(verdicts):
            sample = self._pending.pop(index)
            try:
                sample.reward, sample.reward_components = self._read(verdicts[index], sample)
            except RewardError:
                self.close()
                raise

    def _read(self, verdict: Verdict, sample: Sample) -> tuple[float, dict[str, float]]:
        """Reward and components; raises the RewardError that the verdict calls for."""
        where = f"on prompt {sample.sample_id.prompt_id} (sample {sample.sample_id})"
        bearable = self.reward.timeout_score is not None
        if verdict.components is not None:
            components = dict(verdict.components) | ({"timeout": 0.0} if bearable else {})
            score = components.pop("score")
            if problem := check_range(score, self.limits):
                raise RewardError(f"reward {self.reward.name!r} {problem} {where}")
            return score, components
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
        "response_len": len(sample.response_ids),
        "truncated": sample.truncated,
    }
    return sample.text, prompt.label, info


def component_sums(samples: Iterable[Sample]) -> dict[str, tuple[float, int]]:
    """Sum and count of each component as `reward/<name>`, to be merged over ranks into means."""
    sums: dict[str, tuple[float, int]] = {}
    for sample in samples:
        for name, value in sample.reward_components.items():
            total, count = sums.get(f"reward/{name}", (0.0, 0))
            sums[f"reward/{name}"] = (total + value, count + 1)
    return sums
