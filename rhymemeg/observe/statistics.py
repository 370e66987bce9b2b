"""The numbers of a step, from what every rank knows. Pure.

Names follow the field: `reward/`, `rollout/`, `eval/`. Means are over samples unless the name says otherwise; standard
errors (`_se`) are over prompts, since the samples of one prompt are not independent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rhymemeg.rl.exchange import SampleSummary


def _by_prompt(summaries: Sequence[SampleSummary], values: np.ndarray) -> list[np.ndarray]:
    prompts = np.array([s.sample_id.prompt_id for s in summaries])
    order = np.argsort(prompts, kind="stable")
    cuts = np.flatnonzero(np.diff(prompts[order])) + 1
    return np.split(values[order], cuts)


def mean_and_error(groups: Sequence[np.ndarray]) -> tuple[float, float]:
    """Mean over groups of their means, and its standard error (0 for one group)."""
    means = np.array([g.mean() for g in groups])
    error = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else 0.0
    return float(means.mean()), float(error)


def reward_metrics(summaries: Sequence[SampleSummary]) -> dict[str, float]:
    """Mean, spread and range of the rewards, and the share of groups whose samples all got the same reward (which teach
    nothing under a group-normalised advantage)."""
    rewards = np.array([s.reward for s in summaries])
    groups = _by_prompt(summaries, rewards)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/equal_groups": float(np.mean([np.ptp(g) == 0 for g in groups])),
    }


def rollout_metrics(summaries: Sequence[SampleSummary]) -> dict[str, float]:
    """Lengths in tokens, and the share of samples that ran into the limit."""
    lengths = np.array([s.response_len for s in summaries])
    return {
        "rollout/samples": float(len(lengths)),
        "rollout/tokens": float(lengths.sum()),
        "rollout/prompt_tokens": float(sum(s.prompt_len for s in summaries)),
        "rollout/response_len_mean": float(lengths.mean()),
        "rollout/response_len_median": float(np.median(lengths)),
        "rollout/response_len_p90": float(np.percentile(lengths, 90)),
        "rollout/response_len_max": float(lengths.max()),
        "rollout/truncated": float(np.mean([s.truncated for s in summaries])),
    }


@dataclass(frozen=True)
class EngineWork:
    """What the engine of a rank did in a window: engine steps with work, and seconds from the window's start until its
    last sample was finished."""

    engine: int
    steps: int
    seconds: float


def engine_metrics(work: Sequence[EngineWork]) -> dict[str, float]:
    """Idle shares of a window that lasts until the slowest engine is done, by seconds and by engine steps (which noise on
    the machine does not touch), and the engine steps in all."""
    engines = list({w.engine: w for w in work}.values())
    seconds, steps = np.array([w.seconds for w in engines]), np.array([w.steps for w in engines])
    return {
        "rollout/idle_share": float(1 - seconds.mean() / max(seconds.max(), 1e-9)),
        "rollout/idle_step_share": float(1 - steps.mean() / max(steps.max(), 1)),
        "rollout/engine_steps": float(steps.sum()),
    }


def evaluation_metrics(summaries: Sequence[SampleSummary]) -> dict[str, float]:
    """Held-out reward with its standard error, lengths, and truncation, as `eval/*`."""
    rewards = np.array([s.reward for s in summaries])
    mean, error = mean_and_error(_by_prompt(summaries, rewards))
    return {
        "eval/reward": mean,
        "eval/reward_se": error,
        "eval/samples": float(len(summaries)),
        "eval/response_len_mean": float(np.mean([s.response_len for s in summaries])),
        "eval/truncated": float(np.mean([s.truncated for s in summaries])),
    }


def weighted_means(parts: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """Merge `{name: (sum, count)}` of several ranks into means."""
    totals: dict[str, list[float]] = {}
    for part in parts:
        for name, (value, count) in part.items():
            total = totals.setdefault(name, [0.0, 0.0])
            total[0] += value
            total[1] += count
    return {name: value / count for name, (value, count) in sorted(totals.items()) if count}
