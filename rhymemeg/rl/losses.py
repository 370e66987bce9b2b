"""Policy losses, KL estimators and how token losses are averaged. Needs torch only.

Scaling, explained once. A step has N responses spread over data-parallel ranks and micro-batches. Its loss is a weighted
sum over all response tokens, L = sum_t w_t l_t, where the weights depend on the aggregation and on the *whole* step
(`aggregation_weights`, computed once, before the split). So every micro-batch contributes its own part of the sum, no
part knows how many parts there are, and the result depends neither on the number of micro-batches nor on that of ranks.

A policy loss is a function `(log_ratio, advantages, mask, options) -> (loss, clipped)`, all of shape [b, s]: `log_ratio`
= log pi - log pi_old of each token (0 outside the mask), `loss` the token losses (differentiable), `clipped` where the
clip is active. A row is one whole response, so losses with a ratio of the sequence need nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rhymemeg.config import AlgorithmOptions

PolicyLoss = Callable[[Tensor, Tensor, Tensor, AlgorithmOptions], tuple[Tensor, Tensor]]
POLICY_LOSSES: dict[str, PolicyLoss] = {}

# A ratio above e**20 carries no information and overflows float32 soon after.
MAX_LOG_RATIO = 20.0


def register(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Add a policy loss to the registry under `name`."""

    def add(function: PolicyLoss) -> PolicyLoss:
        POLICY_LOSSES[name] = function
        return function

    return add


def _bounds(options: AlgorithmOptions) -> tuple[float, float]:
    """Lowest and highest ratio that the clip leaves alone."""
    high = options.eps_clip if options.eps_clip_high is None else options.eps_clip_high
    return 1 - options.eps_clip, 1 + high


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clip(ratio: Tensor, advantages: Tensor, options: AlgorithmOptions) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A), and where the clipped side is the smaller one."""
    plain = -ratio * advantages
    bounded = -ratio.clamp(*_bounds(options)) * advantages
    return torch.maximum(plain, bounded), bounded > plain


@register("ppo_clip")
def ppo_clip(log_ratio: Tensor, advantages: Tensor, mask: Tensor, options: AlgorithmOptions) -> tuple[Tensor, Tensor]:
    """l = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = exp(log_ratio). PPO (arXiv 1707.06347), equation 7, with
    the separate upper bound of DAPO (arXiv 2503.14476), section 3.1. With --eps-clip-c, tokens of negative advantage are
    bounded once more, l <= -c A: dual clip (arXiv 1912.09729), equation 3."""
    loss, clipped = _clip(_ratio(log_ratio), advantages, options)
    if options.eps_clip_c is not None:
        bound = -options.eps_clip_c * advantages
        beyond = (advantages < 0) & (loss > bound)
        loss, clipped = torch.where(beyond, bound, loss), clipped | beyond
    return loss, clipped


@register("gspo")
def gspo(log_ratio: Tensor, advantages: Tensor, mask: Tensor, options: AlgorithmOptions) -> tuple[Tensor, Tensor]:
    """PPO's clip on one ratio a response, the geometric mean of its tokens' ratios, s = exp(mean log r_t). Its gradient
    reaches every token alike: log s_t = stop(log s) + log pi_t - stop(log pi_t). GSPO (arXiv 2507.18071), equations 5
    and 14; use it with --loss-agg-mode seq_mean_token_mean and clips of about 3e-4."""
    mean = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return _clip(_ratio(mean.detach() + log_ratio - log_ratio.detach()), advantages, options)


@register("cispo")
def cispo(log_ratio: Tensor, advantages: Tensor, mask: Tensor, options: AlgorithmOptions) -> tuple[Tensor, Tensor]:
    """l = -stop(clip(r)) A log pi: the importance weight is bounded, but no token loses its gradient.
    MiniMax-M1 (arXiv 2506.13585), equation 4."""
    ratio, (low, high) = _ratio(log_ratio.detach()), _bounds(options)
    return -ratio.clamp(low, high) * advantages * log_ratio, (ratio < low) | (ratio > high)


@register("reinforce")
def reinforce(log_ratio: Tensor, advantages: Tensor, mask: Tensor, options: AlgorithmOptions) -> tuple[Tensor, Tensor]:
    """Plain policy gradient, l = -A log pi; off-policy drift is not corrected. Williams (1992)."""
    return -advantages * log_ratio, torch.zeros_like(log_ratio, dtype=torch.bool)


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(pi || ref) from samples of pi, with d = log pi - log ref: k1 = d, k2 = d^2 / 2,
    k3 = exp(-d) - 1 + d (unbiased and never negative). Schulman, "Approximating KL Divergence" (2020)."""
    d = (log_probs - ref_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    return torch.exp(-d) - 1 + d


# ---------------------------------------------------------------------------------------------------------- aggregation

Lengths = npt.NDArray[np.int64]


def _token_mean(lengths: Lengths, max_len: int) -> npt.NDArray[np.float64]:
    """Every token of the step counts the same: w = 1 / (all tokens). DAPO (arXiv 2503.14476), section 3.3."""
    return np.full(len(lengths), 1.0 / max(int(lengths.sum()), 1))


def _seq_mean_token_mean(lengths: Lengths, max_len: int) -> npt.NDArray[np.float64]:
    """Every response counts the same: w = 1 / (N len). GRPO (arXiv 2402.03300), equation 3."""
    return 1.0 / (max(len(lengths), 1) * np.maximum(lengths, 1))


def _seq_mean_token_sum(lengths: Lengths, max_len: int) -> npt.NDArray[np.float64]:
    """Responses count by their length, averaged over responses: w = 1 / N."""
    return np.full(len(lengths), 1.0 / max(len(lengths), 1))


def _dr_grpo(lengths: Lengths, max_len: int) -> npt.NDArray[np.float64]:
    """As seq_mean_token_sum over a constant, the longest allowed response: w = 1 / (N max_len), which favours neither
    short right answers nor long wrong ones. Dr. GRPO (arXiv 2503.20783), section 3."""
    return np.full(len(lengths), 1.0 / (max(len(lengths), 1) * max_len))


AGGREGATIONS: dict[str, Callable[[Lengths, int], npt.NDArray[np.float64]]] = {
    "token_mean": _token_mean,
    "seq_mean_token_mean": _seq_mean_token_mean,
    "seq_mean_token_sum": _seq_mean_token_sum,
    "dr_grpo": _dr_grpo,
}


def aggregation_weights(mode: str, lengths: Lengths, max_len: int) -> npt.NDArray[np.float64]:
    """Weight of each token of each response [n] under aggregation `mode`; `lengths` are the trained tokens of *all*
    responses of the optimizer step, `max_len` the longest allowed response."""
    return AGGREGATIONS[mode](lengths, max_len)
