"""The work of a training step, as far as it can be known before the first one. Pure.

Lengths of responses are not known in advance: they are drawn from the distribution that is typical of RL rollouts
(`rhymemeg.histopipe.workloads.Lognormal`), scaled to the expected mean and cut at the limit. The same seed draws the same
lengths, so two plans differ by their layouts only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rhymemeg.config import Config
from rhymemeg.errors import ConfigError
from rhymemeg.histopipe.workloads import Lognormal

PROMPT_SHARE = 0.25
"""Prompts are taken to be this share of --max-prompt-len long, unless the plan is told."""
RESPONSE_SHARE = 0.3
"""Mean response over --max-response-len, unless the plan is told (`--mean-response-len`)."""


@dataclass(frozen=True, eq=False)
class Workload:
    """`responses` [prompts, samples] in tokens; `prompt` is the length of every prompt."""

    prompt: int
    responses: npt.NDArray[np.int64]

    @property
    def samples(self) -> int:
        return self.responses.size

    @property
    def generated(self) -> int:
        return int(self.responses.sum())

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, prompts included: what is trained on."""
        return self.generated + self.samples * self.prompt

    @property
    def mean_response(self) -> float:
        return self.generated / self.samples

    @property
    def mean_context(self) -> float:
        """Mean number of tokens that a generated token attends to."""
        r = self.responses.astype(np.float64)
        return self.prompt + float((r * r).sum() / r.sum()) / 2

    @property
    def lengths(self) -> list[int]:
        """Lengths of all sequences."""
        return [int(n) + self.prompt for n in self.responses.ravel()]


def expected_workload(config: Config, mean_response: int = 0, seed: int = 0) -> Workload:
    """One step of `config` with responses of `mean_response` tokens on average (0: `RESPONSE_SHARE` of the limit)."""
    r = config.rollout
    if mean_response > r.max_response_len:
        raise ConfigError(f"--mean-response-len {mean_response} exceeds --max-response-len {r.max_response_len}")
    mean = mean_response or max(1, round(RESPONSE_SHARE * r.max_response_len))
    sigma = Lognormal().sigma
    median = mean / math.exp(sigma * sigma / 2)
    for _ in range(8):  # cutting at the limit shortens the mean: raise the median until it is met
        step = next(Lognormal(median).steps(r.rollout_batch_size, r.n_samples_per_prompt, r.max_response_len, seed))
        found = float(step.actual.mean())
        if abs(found - mean) <= 0.01 * mean or median > 4 * r.max_response_len:
            break
        median *= mean / found
    prompt = max(1, round(PROMPT_SHARE * r.max_prompt_len))
    return Workload(prompt, step.actual)
