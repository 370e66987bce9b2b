"""Order-independent checksums of tensors, so that shards can be checked without putting them together.

    checksum(tensor) = sum over its elements of mix(bits of the value, flat index in the tensor)   modulo 2^64

The sum can be taken over any partition of the tensor, in any order, on different ranks. The index is that of the whole
tensor, so a value in the wrong place, two swapped halves or one stale element change the sum; `mix` is a 64-bit
finaliser (multiply, xor-shift), so two different tensors agree by accident with a probability of about 2^-64.
"""

from __future__ import annotations

from math import prod

import torch

from rhymemeg.weight_sync.boxes import Box, Shape, shape_of

_MASK = (1 << 64) - 1
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 22
"""Elements hashed at a time: bounds the temporary memory at about 100 MiB."""


def _signed(constant: int) -> int:
    """A 64-bit constant as torch's signed integers want it."""
    return constant - (1 << 64) if constant >> 63 else constant


_INDEX, _FIRST, _SECOND = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@torch.no_grad()
def checksum(data: torch.Tensor, box: Box, shape: Shape) -> torch.Tensor:
    """Contribution of `data`, which is the box `box` of a tensor of this shape: an int64 scalar on data's device."""
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    if data.numel() == 0:
        return total
    assert tuple(data.shape) == shape_of(box), (tuple(data.shape), box)
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    row = max(1, data[0].numel())
    step = max(1, CHUNK // row)
    for first in range(0, data.shape[0], step):
        part = data[first : first + step].contiguous()
        bits = part.view(_BITS[part.element_size()]).to(torch.int64)
        start = (box[0][0] + first, *(low for low, _ in box[1:]))
        index = torch.zeros((), dtype=torch.int64, device=data.device)
        for d, (low, length, stride) in enumerate(zip(start, part.shape, strides)):
            along = torch.arange(low, low + length, device=data.device) * stride
            index = index + along.view(*(length if e == d else 1 for e in range(part.dim())))
        x = bits ^ (index + 1) * _INDEX
        x = (x ^ (x >> 30)) * _FIRST
        x = (x ^ (x >> 27)) * _SECOND
        total += (x ^ (x >> 31)).sum()
    return total


def halves(sums: torch.Tensor) -> torch.Tensor:
    """[..] int64 -> [.., 2]: the low and high 32 bits, so that adding over ranks cannot overflow."""
    return torch.stack([sums & 0xFFFFFFFF, (sums >> 32) & 0xFFFFFFFF], dim=-1)


def from_halves(sums: torch.Tensor) -> list[int]:
    """Inverse of `halves` after a sum over ranks, modulo 2^64, flattened."""
    pairs = sums.reshape(-1, 2).tolist()
    return [(low + (high << 32)) & _MASK for low, high in pairs]
