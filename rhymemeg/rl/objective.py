"""The loss of a training step, as the actor calls it on each micro-batch, and its metrics.

`Objective(options, total_tokens)` is called as `objective(log_probs [b, s], entropy [b, s] or None, micro_batch)` and
returns the micro-batch's part of the step's loss (see `rhymemeg.rl.losses` for the scaling) and sums of metrics that are
already divided by `total_tokens`, the number of trained tokens of the optimizer step, so that adding them up over
micro-batches and ranks gives means over tokens.

Fields of the micro-batch: `advantages`, `weights` (of the aggregation), `rollout_log_probs` (the engine's), and where
they apply `old_log_probs`, `ref_log_probs` and `stale`. Without `old_log_probs` the step is the first on fresh data, where
the old policy is the current one: the ratio is 1 and only its gradient counts, which saves a forward pass. `stale` is 1
for tokens that an older version of the weights made; their old policy is the one that made them, so their old
log-probabilities are the engine's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rhymemeg.config import AlgorithmOptions
from rhymemeg.rl.batching import MicroBatch
from rhymemeg.rl.losses import POLICY_LOSSES, kl_estimate


class Objective:
    """See the module. `mismatch_max` holds the largest |log pi_actor - log pi_engine| seen, for the caller to reduce."""

    def __init__(self, options: AlgorithmOptions, total_tokens: int) -> None:
        self.options = options
        self.total_tokens = max(total_tokens, 1)
        self.needs_entropy = True
        self.mismatch_max = 0.0

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, batch: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        fields, mask = batch.fields, batch.loss_mask
        current = log_probs.detach()
        old = fields.get("old_log_probs", current)
        sums: dict[str, Tensor] = {}
        if "stale" in fields:
            old = torch.where(fields["stale"] > 0, fields["rollout_log_probs"], old)
        log_ratio = (log_probs - old) * mask
        losses, clipped = POLICY_LOSSES[self.options.policy_loss](log_ratio, fields["advantages"], mask, self.options)
        sums |= {"actor/pg_clipfrac": clipped * mask, "actor/ppo_kl": -log_ratio.detach()}
        if "stale" in fields:
            ratio = log_ratio.detach().exp()
            sums["stale/token_share"] = fields["stale"] * mask
            sums["stale/ratio_deviation"] = (ratio - 1).abs() * fields["stale"] * mask
            sums["stale/clipfrac"] = clipped * fields["stale"] * mask
        if self.options.kl_loss_coef > 0:
            kl = kl_estimate(log_probs, fields["ref_log_probs"], self.options.kl_loss_type) * mask
            losses = losses + self.options.kl_loss_coef * kl
            sums["actor/kl_loss"] = kl.detach()
        if entropy is not None:
            losses = losses - self.options.entropy_coef * entropy if self.options.entropy_coef else losses
            sums["actor/entropy"] = entropy.detach() * mask
        difference = (current - fields["rollout_log_probs"]).abs() * mask
        if "stale" in fields:  # compared would be two versions, and not two implementations
            difference = difference * (1 - fields["stale"])
        sums["actor/train_rollout_logprob_abs_diff"] = difference
        self.mismatch_max = max(self.mismatch_max, float(difference.max()))
        loss = (losses * fields["weights"] * mask).sum()
        return loss, {name: value.sum(dtype=torch.float64) / self.total_tokens for name, value in sums.items()}
