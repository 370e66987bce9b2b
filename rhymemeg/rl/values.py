"""The loss of the critic, as it calls it on each micro-batch, and its metrics. Needs torch only.

    l_t = 1/2 max((V_t - R_t)^2, (clip(V_t, V_old - c, V_old + c) - R_t)^2),     L = mean over all trained tokens of the step

V_old are the values before the first update of the step (the field `values`), R_t the returns of `advantages.gae` (the field
`returns`), c is `--value-clip`; without it l_t = 1/2 (V_t - R_t)^2. The clip is that of OpenAI's PPO (baselines, ppo2), as in
InstructGPT's and verl's.

`ValueObjective(value_clip, total_tokens)` is called as `objective(values [b, s], micro_batch)` and returns the
micro-batch's part of the loss and sums of metrics divided by `total_tokens`, the number of trained tokens of the optimizer
step, so that adding them up over micro-batches and ranks gives means over tokens. `finish_value_metrics` turns these into
what is reported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rhymemeg.rl.batching import MicroBatch


class ValueObjective:
    """See the module."""

    def __init__(self, value_clip: float | None, total_tokens: int) -> None:
        self.value_clip = value_clip
        self.total_tokens = max(total_tokens, 1)

    def __call__(self, values: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mask, old, returns = batch.loss_mask, batch.fields["values"], batch.fields["returns"]
        losses = (values - returns) ** 2
        clipped = torch.zeros_like(mask)
        if self.value_clip is not None:
            near = values.clamp(old - self.value_clip, old + self.value_clip)
            bounded = (near - returns) ** 2
            clipped = (bounded > losses).to(mask)
            losses = torch.maximum(losses, bounded)
        error = (returns - old) * mask
        sums = {
            "critic/vf_clipfrac": clipped * mask,
            "critic/value_mean": old * mask,
            "critic/return_mean": returns * mask,
            "_return_square": returns**2 * mask,
            "_error": error,
            "_error_square": error**2,
        }
        loss = 0.5 * (losses * mask).sum() / self.total_tokens
        return loss, {name: value.detach().sum(dtype=torch.float64) / self.total_tokens for name, value in sums.items()}


def finish_value_metrics(means: dict[str, float]) -> dict[str, float]:
    """Metrics from means over tokens. `critic/explained_variance` is 1 - Var[R - V_old] / Var[R]: 1 for a critic that knows
    the returns, 0 for one that knows no more than their mean; 0 where all returns are equal."""
    done = {name: value for name, value in means.items() if not name.startswith("_")}
    variance = means["_return_square"] - means["critic/return_mean"] ** 2
    unexplained = means["_error_square"] - means["_error"] ** 2
    done["critic/explained_variance"] = 1 - unexplained / variance if variance > 1e-12 else 0.0
    return done
