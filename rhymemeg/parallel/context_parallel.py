"""How a sequence is divided over context-parallel ranks, and how values a token come back together.

With C ranks a sequence of length s (a multiple of 2 C) is cut into 2 C pieces, and rank c holds pieces c and 2 C - 1
- c, so that causal attention costs every rank the same. This is the division that Megatron's rotary embedding and
Transformer Engine's attention assume.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def held_positions(length: int, rank: int, size: int) -> Tensor:
    """Positions [length / size] that one rank holds, in its order."""
    piece = length // (2 * size)
    first, second = rank * piece, (2 * size - 1 - rank) * piece
    return torch.cat([torch.arange(first, first + piece), torch.arange(second, second + piece)])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        size, rank = group.size(), group.rank()
        parts = [torch.empty_like(local) for _ in range(size)]
        dist.all_gather(parts, local.contiguous(), group=group)
        length = local.shape[1] * size
        whole = local.new_empty(local.shape[0], length)
        for r, part in enumerate(parts):
            whole[:, held_positions(length, r, size).to(local.device)] = part
        ctx.positions = held_positions(length, rank, size).to(local.device)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Every rank computes the same loss of the whole rows; each passes on the part that belongs to its own tokens.
        return gradients[0][:, ctx.positions], None


def gather_rows(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[b, s / C] on each rank -> [b, s] on all, differentiable."""
    return local if group.size() == 1 else _Gather.apply(local, group)
