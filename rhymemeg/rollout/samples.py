"""The data that moves between the parts of a training step. Pure.

A *prompt* is one question; a *sample* is one response to it; a *group* is the n samples of one prompt in one step.
Every generated token carries the log-probability that the engine gave it and the version of the weights that made it;
nothing downstream guesses either.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """`prompt_id` is unique and stable over epochs and runs on the same data; `label` is whatever the reward needs."""

    prompt_id: int
    text: str
    token_ids: tuple[int, ...]
    label: Any = None
    source: str = ""


@dataclass(frozen=True, order=True)
class SampleId:
    """Names one sample of a run. The engine's request id is `str(sample_id)`: `{step}-{prompt_id}-{sample_index}`."""

    step: int
    prompt_id: int
    sample_index: int

    def __str__(self) -> str:
        return f"{self.step}-{self.prompt_id}-{self.sample_index}"

    @classmethod
    def parse(cls, text: str) -> SampleId:
        """Inverse of `str`; ignores whatever follows the third number (vLLM appends a random suffix)."""
        step, prompt_id, sample_index = text.split("-")[:3]
        return cls(int(step), int(prompt_id), int(sample_index))


def sample_seed(run_seed: int, sample_id: SampleId, tokens_so_far: int = 0) -> int:
    """Seed of one request, in [0, 2**63). Depends on nothing but the run seed, the sample and, when a paused request is
    resumed, the number of tokens it already has (a resumed request must not repeat the draws it has used up)."""
    text = f"{run_seed}/{sample_id.step}/{sample_id.prompt_id}/{sample_id.sample_index}/{tokens_so_far}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass
class Sample:
    """One response, complete when `finish_reason` is set. The three lists have one entry a generated token (the
    end-of-sequence token included). `routing` are the engine's experts, where they are asked for (`rollout.routing`)."""

    sample_id: SampleId
    prompt_ids: tuple[int, ...]
    response_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    engine: int = -1
    text: str = ""
    reward: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    routing: npt.NDArray[np.unsignedinteger] | None = None

    @property
    def truncated(self) -> bool:
        """The response ran into its length limit instead of ending by itself."""
        return self.finish_reason == "length"
