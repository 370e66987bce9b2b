"""Log-probabilities and entropies from vocab-parallel logits.

    log p(y) = x_y - log sum_v exp(x_v),   H = log sum_v exp(x_v) - sum_v p_v x_v,   x = logits / temperature,

over the true vocabulary: columns that pad it to a multiple of the tensor-parallel size do not exist for either sum.

Each rank holds a slice of the columns. Two all-reduces of one and three numbers a row combine the slices. The full
softmax is never stored: it is formed for `ROWS` rows at a time in fp32, in the forward pass for the sums and again in
the backward pass, where it goes straight into the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROWS = 1024


class _LogProbEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        first: int,
        columns: int,
        temperature: float,
        group: dist.ProcessGroup | None,
        in_place: bool,
    ) -> tuple[Tensor, Tensor]:
        n = logits.shape[0]
        top = logits.new_full((n,), -torch.inf, dtype=torch.float32)
        if columns:
            top = logits[:, :columns].amax(dim=1).float() / temperature
        _all_reduce(top, dist.ReduceOp.MAX, group)
        # Rows: sum exp(x - top), sum (x - top) exp(x - top), and x_label - top on the rank that holds the label.
        sums = torch.zeros(3, n, dtype=torch.float32, device=logits.device)
        local = labels - first
        mine = (local >= 0) & (local < columns)
        if columns:
            for rows in _slices(n):
                x = (logits[rows, :columns].float() / temperature).sub_(top[rows, None])
                target = x.gather(1, local[rows, None].clamp(0, columns - 1)).squeeze(1)
                sums[2, rows] = target * mine[rows]
                weights = x.exp()
                sums[0, rows] = weights.sum(1)
                sums[1, rows] = weights.mul_(x).sum(1)
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        log_sum = sums[0].log()
        log_probs, entropy = sums[2] - log_sum, log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, local, mine, top + log_sum, entropy)
        ctx.columns, ctx.temperature, ctx.in_place = columns, temperature, in_place
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, local, mine, log_z, entropy = ctx.saved_tensors
        of_log_prob, of_entropy = gradients
        columns, temperature = ctx.columns, ctx.temperature
        out = logits.detach() if ctx.in_place else torch.empty_like(logits)
        for rows in _slices(logits.shape[0]):
            log_p = (logits[rows, :columns].float() / temperature).sub_(log_z[rows, None])
            p = log_p.exp()
            grad = torch.zeros_like(p)
            if of_log_prob is not None:
                # d log p(y) / d x_v = [v = y] - p_v
                g = of_log_prob[rows]
                grad.sub_(p * g[:, None])
                if columns:
                    grad.scatter_add_(1, local[rows, None].clamp(0, columns - 1), (g * mine[rows])[:, None])
            if of_entropy is not None:
                # d H / d x_v = -p_v (log p_v + H)
                grad.sub_(p.mul_(log_p.add_(entropy[rows, None])).mul_(of_entropy[rows, None]))
            out[rows, :columns] = grad.div_(temperature).to(out.dtype)
            out[rows, columns:] = 0
        return out, None, None, None, None, None, None


def _slices(n: int) -> list[slice]:
    return [slice(i, min(i + ROWS, n)) for i in range(0, n, ROWS)]


def _all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op, group=group)


def log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of its distribution, both fp32 and of the labels' shape,
    differentiable.

    `logits` [..., local columns] are this rank's columns of the padded vocabulary, `group` the tensor-parallel ranks in
    the order of their columns (None: this rank has all), `vocab_size` the true size. With `in_place` the gradient is
    written over the logits, which saves a tensor of their size; nothing else may then use them, nor backward run
    twice.
    """
    width = logits.shape[-1]
    first = width * (group.rank() if group is not None else 0)
    columns = min(max(vocab_size - first, 0), width)
    log_probs, entropy = _LogProbEntropy.apply(
        logits.reshape(-1, width), labels.reshape(-1), first, columns, temperature, group, in_place
    )
    return log_probs.view(labels.shape), entropy.view(labels.shape)
