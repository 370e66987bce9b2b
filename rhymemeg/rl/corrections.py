"""Corrections for tokens that were not sampled from the policy that is trained, and how far apart the two are. Needs torch
only.

Three policies meet in a loss. The *behaviour* policy made the tokens: the engine, with its own kernels and possibly an
older version of the weights. The *old* (proximal) policy is the actor before the first update of the step. The *current*
one is what is trained. The ratio current / old is PPO's and is bounded by the policy loss; this module is about the ratio
rho = old / behaviour, a constant of the loss:

    correct(log_rho [b, s], mask [b, s], options) -> Correction      weights of the token losses, and which tokens stay

    --rollout-is token       w_t = rho_t                                truncated importance sampling, a token at a time
                 sequence    w_t = prod_t rho_t of the response         unbiased, of larger variance
                 geometric   w_t = (prod_t rho_t) ** (1 / length)
    --rollout-is-bound truncate   w -> min(w, C)                        TIS: Yao et al., "Your Efficient RL Framework
                                                                        Secretly Brings You Off-Policy RL Training" (2025)
                       mask       w -> w where w <= C, else 0           MIS: Liu et al., "When Speed Kills Stability" (2025)
                       icepop     w -> w where c <= w <= C, else 0      IcePop: Ling Team, "Every Step Evolves"
                                                                        (arXiv 2510.18855)
    --rollout-rs sequence, geometric     a response is left out of the loss, KL and entropy terms included, unless its
                                         ratio (product, geometric mean) lies in [c, C]: rejection sampling
    --rollout-token-veto-threshold v     a response is left out if any of its tokens has rho_t < v
    --decoupled-ppo          for tokens of an older version, where no --rollout-is is set: w_t = rho_t up to
                             --behav-imp-weight-cap and 0 above. Hilton et al., "Batch size-invariance for policy
                             optimization" (arXiv 2110.00641), section 3; AReaL (arXiv 2505.24298), section 5

Denominators stay: what is masked still counts in the averages of the step, so the rest never weighs more because of it,
and the result does not depend on how the step is divided. Ratios are bounded to e**(+-20) where they would overflow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rhymemeg.config import AlgorithmOptions
from rhymemeg.rl.losses import MAX_LOG_RATIO


@dataclass(frozen=True)
class Correction:
    """All [b, s] and without gradient. `weights` multiply the token losses of the policy (0 where masked, 1 where nothing
    is corrected); `kept` is 1 where a token stays in the loss at all; `high` and `low` are where a weight was above its
    upper or below its lower bound."""

    weights: Tensor
    kept: Tensor
    high: Tensor
    low: Tensor


def is_corrected(options: AlgorithmOptions) -> bool:
    """Whether any option of this module is on."""
    veto = options.rollout_token_veto_threshold is not None
    return options.rollout_is != "none" or options.rollout_rs != "none" or veto or options.decoupled_ppo


def sequence_log_ratio(log_rho: Tensor, mask: Tensor, kind: str) -> Tensor:
    """[b, 1]: log of the product of a row's ratios (`sequence`) or of their geometric mean (`geometric`); 0 for a row
    without tokens."""
    total = (log_rho * mask).sum(-1, keepdim=True)
    return total / mask.sum(-1, keepdim=True).clamp(min=1) if kind == "geometric" else total


def correct(log_rho: Tensor, mask: Tensor, options: AlgorithmOptions, stale: Tensor | None = None) -> Correction:
    """See the module. `log_rho` = log old - log behaviour; `stale` is 1 for tokens of an older version."""
    log_rho = log_rho.detach() * mask
    nothing = torch.zeros_like(mask, dtype=torch.bool)
    weights, high, low = torch.ones_like(log_rho), nothing, nothing
    if options.rollout_is != "none":
        level = log_rho if options.rollout_is == "token" else sequence_log_ratio(log_rho, mask, options.rollout_is)
        raw = _exp(level).expand_as(log_rho)
        weights, high, low = _bound(raw, options)
    elif options.decoupled_ppo and stale is not None:
        raw = _exp(log_rho)
        high = (raw > options.behav_imp_weight_cap) & (stale > 0)
        weights = torch.where(stale > 0, raw.masked_fill(high, 0.0), weights)
    inside = mask > 0
    return Correction(weights * mask, _kept_rows(log_rho, mask, options) * mask, high & inside, low & inside)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _bound(raw: Tensor, options: AlgorithmOptions) -> tuple[Tensor, Tensor, Tensor]:
    """The bounded weights, and where they were above and below."""
    high, low = raw > options.rollout_is_threshold, torch.zeros_like(raw, dtype=torch.bool)
    if options.rollout_is_bound == "truncate":
        return raw.clamp(max=options.rollout_is_threshold), high, low
    if options.rollout_is_bound == "icepop":
        low = raw < options.rollout_is_threshold_lower
    return raw.masked_fill(high | low, 0.0), high, low


def _kept_rows(log_rho: Tensor, mask: Tensor, options: AlgorithmOptions) -> Tensor:
    """[b, 1]: 0 for responses that are rejected, else 1."""
    kept = torch.ones_like(mask[:, :1])
    if options.rollout_rs != "none":
        upper = options.rollout_rs_threshold
        lower = 1 / upper if options.rollout_rs_threshold_lower is None else options.rollout_rs_threshold_lower
        ratio = _exp(sequence_log_ratio(log_rho, mask, options.rollout_rs))
        kept = kept * ((ratio >= lower) & (ratio <= upper))
    if options.rollout_token_veto_threshold is not None:
        vetoed = (_exp(log_rho) < options.rollout_token_veto_threshold) & (mask > 0)
        kept = kept * ~vetoed.any(-1, keepdim=True)
    return kept


# -------------------------------------------------------------------------------------------------------------- metrics

# Means over the tokens that the present weights made; `finish_metrics` divides them by the share of these.
_FRESH = "fresh_share"
MISMATCH = (
    "actor/train_rollout_logprob_abs_diff",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/chi2_token",
    "training/rollout_probs_diff_mean",
)
MAXIMA = (
    "actor/train_rollout_logprob_abs_diff_max",
    "training/rollout_probs_diff_max",
    "rollout_corr/rollout_is_max",
)


def mismatch(actor: Tensor, engine: Tensor, fresh: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """How the actor's log-probabilities of the tokens [b, s] differ from the engine's, where `fresh` is 1: terms of the
    means `MISMATCH`, and maxima. With d = log actor - log engine, and expectations over the engine's samples:

    kl        mean of -d            k1 estimate of KL(engine || actor)
    k3_kl     mean of e^d - 1 - d   k3 estimate of the same
    chi2      mean of e^2d, minus 1 chi-square divergence; 1 / (1 + chi2) is the effective sample size of the ratios
    """
    d = ((actor - engine) * fresh).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    probabilities = (actor.exp() - engine.exp()).abs() * fresh
    sums = {
        "actor/train_rollout_logprob_abs_diff": (actor - engine).abs() * fresh,
        "rollout_corr/kl": -d,
        "rollout_corr/k3_kl": torch.expm1(d) - d,
        "rollout_corr/chi2_token": torch.expm1(2 * d),
        "training/rollout_probs_diff_mean": probabilities,
        _FRESH: fresh,
    }
    maxima = {
        "actor/train_rollout_logprob_abs_diff_max": sums["actor/train_rollout_logprob_abs_diff"].max(),
        "training/rollout_probs_diff_max": probabilities.max(),
    }
    return sums, maxima


def correction_sums(correction: Correction, mask: Tensor) -> dict[str, Tensor]:
    """Terms [b, s] of the metrics of a correction, for means over all tokens."""
    weights = correction.weights * correction.kept
    return {
        "rollout_corr/rollout_is_mean": weights,
        "rollout_corr/rollout_is_squares": weights * weights,
        "rollout_corr/rollout_is_ratio_fraction_high": correction.high.float(),
        "rollout_corr/rollout_is_ratio_fraction_low": correction.low.float(),
        "rollout_corr/rollout_is_masked_fraction": (correction.weights == 0).float() * mask,
        "rollout_corr/rollout_rs_masked_fraction": (1 - correction.kept) * mask,
    }


def finish_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """From means over all tokens of an optimizer step to what is reported: mismatch over fresh tokens only, and the
    effective sample size (sum w)^2 / (n sum w^2), in [0, 1]."""
    out = dict(metrics)
    share = out.pop(_FRESH, 1.0)
    for name in MISMATCH:
        if name in out:
            out[name] = out[name] / share if share > 0 else 0.0
    squares = out.pop("rollout_corr/rollout_is_squares", None)
    if squares is not None:
        mean = out["rollout_corr/rollout_is_mean"]
        out["rollout_corr/rollout_is_eff_sample_size"] = mean * mean / squares if squares > 0 else 0.0
    return out
