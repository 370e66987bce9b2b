"""From the rewards of responses to the advantages of their tokens, over all ranks.

    batches, metrics = assign_credit(options, step, batches, rows, reduce_sum, counts)

`step` has what every rank knows of every sample; `batches` are this rank's micro-batches by optimizer step, and `rows`
the sample (an index into `step`) of each of their rows. Returned are the micro-batches with the field `advantages`, for
`gae` also `returns`, and for the loss nothing else changes.

Most estimators give all tokens of a response one advantage. Where tokens differ (`gae`; `reinforce_pp` with a KL penalty
or a discount), advantages are normalised over all tokens of the step. The KL penalty of `--kl-coef` is that of the old
policy (the field `old_log_probs`, or the engine's log-probabilities) against the field `ref_log_probs`; estimators of one
advantage a response take the sum over its tokens off the reward. `gae` needs the field `values`.

`reduce_sum(numbers)` adds up over all ranks; `counts` says whether this rank's share counts (one rank of those that
hold the same micro-batches). Raises TrainingError for an advantage that is not finite, naming the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rhymemeg.config import AlgorithmOptions
from rhymemeg.errors import TrainingError
from rhymemeg.rl.advantages import ADVANTAGES, VALUE_ESTIMATORS, Array, gae, returns_to_go, token_rewards
from rhymemeg.rl.batching import MicroBatch, spread_fields
from rhymemeg.rl.losses import kl_estimate

ReduceSum = Callable[[Sequence[float]], list[float]]
Batches = list[list[MicroBatch]]  # by optimizer step
Rows = list[list[list[int]]]  # the sample of each row of each micro-batch


@dataclass(frozen=True)
class StepRewards:
    """Rewards, groups, lengths (response tokens) and names of the samples that are compared. Samples that no rank trains
    count in the advantages of the others."""

    rewards: Array
    groups: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    names: Sequence[str]


def tokens_differ(options: AlgorithmOptions) -> bool:
    """Whether the tokens of a response get advantages of their own."""
    if options.advantage_estimator in VALUE_ESTIMATORS:
        return True
    return options.advantage_estimator == "reinforce_pp" and (options.kl_coef > 0 or options.gamma < 1)


def assign_credit(
    options: AlgorithmOptions,
    step: StepRewards,
    batches: Batches,
    rows: Rows,
    reduce_sum: ReduceSum,
    counts: bool = True,
) -> tuple[Batches, dict[str, float]]:
    """See the module."""
    metrics: dict[str, float] = {}
    penalties = [[_kl(options, batch) for batch in mini] for mini in batches]
    totals = np.zeros(len(step.rewards))
    if options.kl_coef > 0:
        for indices, kl in zip(_flat(rows), _flat(penalties)):
            np.add.at(totals, indices, kl.sum(1)[: len(indices)])
        totals = np.array(reduce_sum((totals if counts else np.zeros_like(totals)).tolist()))
        metrics["actor/reward_kl_penalty"] = float(totals.sum() / max(int(step.lengths.sum()), 1))
    if tokens_differ(options):
        fields = _of_tokens(options, step, batches, rows, penalties, reduce_sum, counts)
    else:
        advantages = ADVANTAGES[options.advantage_estimator](
            step.rewards - options.kl_coef * totals, step.groups, step.lengths
        )
        _check_finite(advantages, range(len(advantages)), step.names)
        fields = [
            [{"advantages": _spread(advantages[indices], batch)} for indices, batch in zip(*mini)]
            for mini in zip(rows, batches)
        ]
    done = [[spread_fields(*pair) for pair in zip(mini, extra)] for mini, extra in zip(batches, fields)]
    return done, metrics


def _of_tokens(
    options: AlgorithmOptions,
    step: StepRewards,
    batches: Batches,
    rows: Rows,
    penalties: list[list[Array]],
    reduce_sum: ReduceSum,
    counts: bool,
) -> list[list[dict[str, Tensor]]]:
    """Fields `advantages`, normalised over all tokens of all ranks, and `returns` of a critic."""
    raw: list[list[tuple[Array, Array, Array | None]]] = []  # advantages, mask, returns
    for mini, indices_of, kl_of in zip(batches, rows, penalties):
        raw.append([])
        for batch, indices, kl in zip(mini, indices_of, kl_of):
            mask = _numpy(batch.loss_mask)
            scores = np.zeros(len(mask))
            scores[: len(indices)] = step.rewards[indices]
            rewards = token_rewards(scores, kl, mask, options.kl_coef)
            returns = None
            if options.advantage_estimator in VALUE_ESTIMATORS:
                values = _numpy(batch.fields["values"])
                advantages, returns = gae(rewards, values, mask, options.gamma, options.lam)
            else:
                advantages = returns_to_go(rewards, mask, options.gamma)
            _check_finite(advantages[: len(indices)].sum(1), indices, step.names)
            raw[-1].append((advantages, mask, returns))
    everything = _flat(raw)
    total = [sum(float(m.sum()) for _, m, _ in everything), sum(float((a * m).sum()) for a, m, _ in everything)]
    tokens, sum_a = reduce_sum(total if counts else [0.0, 0.0])
    mean = sum_a / max(tokens, 1.0)
    squares = sum(float(((a - mean) ** 2 * m).sum()) for a, m, _ in everything)
    (squares,) = reduce_sum([squares if counts else 0.0])
    scale = np.sqrt(squares / max(tokens, 1.0)) + 1e-8
    fields: list[list[dict[str, Tensor]]] = []
    for mini, parts in zip(batches, raw):
        fields.append([])
        for batch, (advantages, _, returns) in zip(mini, parts):
            entry = {"advantages": _tensor((advantages - mean) / scale, batch)}
            if returns is not None:
                entry["returns"] = _tensor(returns, batch)
            fields[-1].append(entry)
    return fields


def _kl(options: AlgorithmOptions, batch: MicroBatch) -> Array:
    """[b, s]: KL estimates of the tokens, 0 where there is no penalty."""
    if not options.kl_coef:
        return np.zeros(batch.shape)
    old = batch.fields.get("old_log_probs", batch.fields["rollout_log_probs"])
    kl = kl_estimate(old, batch.fields["ref_log_probs"], options.kl_type) * batch.loss_mask
    return _numpy(kl)


def _check_finite(values: Array, indices: Sequence[int], names: Sequence[str]) -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise TrainingError(f"the advantage of sample {names[indices[bad[0]]]} is {values[bad[0]]}")


def _numpy(tensor: Tensor) -> Array:
    array: Array = tensor.double().cpu().numpy()
    return array


def _tensor(values: Array, batch: MicroBatch) -> Tensor:
    return torch.from_numpy(values).to(batch.loss_mask)


def _spread(values: Array, batch: MicroBatch) -> Tensor:
    """One value a row, on all its tokens."""
    column = torch.zeros(batch.shape[0], 1, dtype=torch.float64)
    column[: len(values), 0] = torch.from_numpy(values)
    return column.to(batch.loss_mask).expand(*batch.shape)


def _flat(nested: Sequence[Sequence]) -> list:
    return [item for part in nested for item in part]
