"""The loss of a training step, as the actor calls it on each micro-batch, and its metrics.

`Objective(options, total_tokens)` is called as `objective(log_probs [b, s], entropy [b, s] or None, micro_batch)` and
returns the micro-batch's part of the step's loss (see `rhymemeg.rl.losses` for the scaling) and sums of metrics that are
already divided by `total_tokens`, the number of trained tokens of the optimizer step, so that adding them up over
micro-batches and ranks gives means over tokens. `corrections.finish_metrics` turns these means into what is reported.

Fields of the micro-batch: `advantages`, `weights` (of the aggregation), `rollout_log_probs` (the engine's), and where
they apply `old_log_probs`, `ref_log_probs` and `stale`. Without `old_log_probs` the step is the first on fresh data, where
the old policy is the current one: the ratio is 1 and only its gradient counts, which saves a forward pass.

`stale` is 1 for tokens that an older version of the weights made. Their old policy is the one that made them, so their
old log-probabilities are the engine's; under `--decoupled-ppo` it is the actor as for all others, and a weight corrects
for the policy that made them (`rhymemeg.rl.corrections`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rhymemeg.config import AlgorithmOptions
from rhymemeg.rl.batching import MicroBatch
from rhymemeg.rl.corrections import MAXIMA, correct, correction_sums, is_corrected, mismatch
from rhymemeg.rl.losses import POLICY_LOSSES, kl_estimate


class Objective:
    """See the module. `maxima` are for the caller to reduce over ranks."""

    def __init__(self, options: AlgorithmOptions, total_tokens: int) -> None:
        self.options = options
        self.total_tokens = max(total_tokens, 1)
        self.needs_entropy = True
        self._largest: dict[str, Tensor] = {}

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, batch: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        options, fields, mask = self.options, batch.fields, batch.loss_mask
        current, engine, stale = log_probs.detach(), fields["rollout_log_probs"], fields.get("stale")
        old = fields.get("old_log_probs", current)
        # What the actor itself says of the tokens, by the weights that the engine had.
        own = old if options.old_log_probs == "actor" else current
        if stale is not None and not options.decoupled_ppo:
            old = torch.where(stale > 0, engine, old)
        log_ratio = (log_probs - old) * mask
        losses, clipped = POLICY_LOSSES[options.policy_loss](log_ratio, fields["advantages"], mask, options)
        sums = {"actor/pg_clipfrac": clipped * mask, "actor/ppo_kl": -log_ratio.detach()}
        kept = mask
        if is_corrected(options):
            log_rho = own - engine
            if stale is not None and not options.decoupled_ppo:
                log_rho = log_rho * (1 - stale)
            correction = correct(log_rho, mask, options, stale)
            losses, kept = losses * correction.weights, correction.kept
            sums |= correction_sums(correction, mask)
            self._keep_maxima({"rollout_corr/rollout_is_max": (correction.weights * kept).max()})
        if stale is not None:
            ratio = log_ratio.detach().exp()
            sums["stale/token_share"] = stale * mask
            sums["stale/ratio_deviation"] = (ratio - 1).abs() * stale * mask
            sums["stale/clipfrac"] = clipped * stale * mask
        if options.kl_loss_coef > 0:
            kl = kl_estimate(log_probs, fields["ref_log_probs"], options.kl_loss_type) * mask
            losses = losses + options.kl_loss_coef * kl
            sums["actor/kl_loss"] = kl.detach()
        if entropy is not None:
            losses = losses - options.entropy_coef * entropy if options.entropy_coef else losses
            sums["actor/entropy"] = entropy.detach() * mask
        # Tokens of an older version would compare two versions, and not two implementations.
        terms, maxima = mismatch(own, engine, mask if stale is None else mask * (1 - stale))
        sums |= terms
        self._keep_maxima(maxima)
        loss = (losses * fields["weights"] * kept).sum()
        return loss, {name: value.sum(dtype=torch.float64) / self.total_tokens for name, value in sums.items()}

    @property
    def maxima(self) -> dict[str, float]:
        """The largest value of each of `MAXIMA` that this rank has seen; 0 where it has seen none."""
        return {name: float(self._largest.get(name, 0.0)) for name in MAXIMA}

    def _keep_maxima(self, maxima: dict[str, Tensor]) -> None:
        for name, value in maxima.items():  # on the device: reading a number would wait for it
            self._largest[name] = torch.maximum(value, self._largest.get(name, value))
