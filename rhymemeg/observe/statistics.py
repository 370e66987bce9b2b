"""The numbers of a step, from what every rank knows. Pure.

Names follow the field: `reward/`, `rollout/`, `eval/`. Means are over samples unless the name says otherwise; standard
errors (`_se`) are over prompts, since the samples of one prompt are not independent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rhymemeg.rl.exchange import SampleSummary


def _by_prompt(summaries: Sequence[SampleSummary], values: np.ndarray) -> list[np.ndarray]:
    groups = np.array([(s.sample_id.prompt_id, s.sample_id.step) for s in summaries])
    order = np.lexsort(groups.T)
    cuts = np.flatnonzero(np.diff(groups[order], axis=0).any(axis=1)) + 1
    return np.split(values[order], cuts)


def mean_and_error(groups: Sequence[np.ndarray]) -> tuple[float, float]:
    """Mean over groups of their means, and its standard error (0 for one group)."""
    means = np.array([g.mean() for g in groups])
    error = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else 0.0
    return float(means.mean()), float(error)


def reward_metrics(summaries: Sequence[SampleSummary]) -> dict[str, float]:
    """Mean, spread and range of the rewards, and the share of groups whose samples all got the same reward (which teach
    nothing under a group-normalised advantage). Nothing without samples."""
    if not summaries:
        return {}
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
    """Lengths in tokens, and the share of samples that ran into the limit. Nothing without samples."""
    if not summaries:
        return {}
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
