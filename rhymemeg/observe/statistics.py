"""The numbers of a step, from what every rank knows. Pure.

Names follow the field: `reward/`, `rollout/`, `eval/`. Means are over samples unless the name says otherwise; standard
errors (`_se`) are over prompts, since the samples of one prompt are not independent.
"""

from __future__ import annotations

import math
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


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k responses passes, from `passed` of `samples`:
    1 - C(n - c, k) / C(n, k). "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374), section 2.1."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def evaluation_metrics(
    summaries: Sequence[SampleSummary], pass_score: float = 1.0, prefix: str = "eval/"
) -> dict[str, float]:
    """Held-out reward with its standard error, lengths and truncation; of responses that pass (a reward of at least
    `pass_score`), the share `mean@n` with n samples a prompt, and `pass@k` for k = 1, 2, 4, ... and n. Standard errors
    (`_se`) are over prompts."""
    rewards = np.array([s.reward for s in summaries])
    groups = _by_prompt(summaries, rewards)
    mean, error = mean_and_error(groups)
    out = {
        "reward": mean,
        "reward_se": error,
        "samples": float(len(summaries)),
        "response_len_mean": float(np.mean([s.response_len for s in summaries])),
        "truncated": float(np.mean([s.truncated for s in summaries])),
    }
    counts = [(len(g), int((g >= pass_score).sum())) for g in groups]
    n = min(size for size, _ in counts)
    out[f"mean@{n}"], out[f"mean@{n}_se"] = mean_and_error([np.array([c / size]) for size, c in counts])
    for k in sorted({2**i for i in range(n.bit_length())} | {n}):
        estimates = [np.array([pass_at_k(size, c, k)]) for size, c in counts]
        out[f"pass@{k}"], out[f"pass@{k}_se"] = mean_and_error(estimates)
    return {prefix + name: value for name, value in out.items()}


def weighted_means(parts: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """Merge `{name: (sum, count)}` of several ranks into means."""
    totals: dict[str, list[float]] = {}
    for part in parts:
        for name, (value, count) in part.items():
            total = totals.setdefault(name, [0.0, 0.0])
            total[0] += value
            total[1] += count
    return {name: value / count for name, (value, count) in sorted(totals.items()) if count}
