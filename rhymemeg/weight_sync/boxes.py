"""Axis-aligned boxes in a tensor: the unit in which weights are cut, moved and counted. Pure Python.

A box is a tuple with one half-open interval `(start, stop)` a dimension, in elements; a tensor's whole extent is
`whole(shape)`. A box with an empty interval holds nothing.
"""

from __future__ import annotations

from math import prod

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]


def whole(shape: Shape) -> Box:
    """The box that covers a tensor of this shape."""
    return tuple((0, n) for n in shape)


def shape_of(box: Box) -> Shape:
    return tuple(stop - start for start, stop in box)


def numel(box: Box) -> int:
    return prod(max(0, stop - start) for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None if they share no element."""
    common = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b))
    return common if all(start < stop for start, stop in common) else None


def contains(outer: Box, inner: Box) -> bool:
    return all(s <= t and f <= e for (s, e), (t, f) in zip(outer, inner))


def shift(box: Box, source: Box, target: Box) -> Box:
    """Where `box`, a part of `source`, lies once `source` has been put at `target` (boxes of equal shape)."""
    return tuple((start - s + t, stop - s + t) for (start, stop), (s, _), (t, _) in zip(box, source, target))


def slices(box: Box) -> tuple[slice, ...]:
    """Index with which `tensor[slices(box)]` is the box."""
    return tuple(slice(start, stop) for start, stop in box)


def rows(start: int, stop: int, shape: Shape) -> Box:
    """Rows `start` to `stop` (first dimension) of a tensor of this shape, all of the other dimensions."""
    return ((start, stop), *((0, n) for n in shape[1:]))


def even(length: int, rank: int, size: int, what: str) -> tuple[int, int]:
    """Interval of part `rank` of `size` equal parts; a length that does not divide is a ValueError naming `what`."""
    if length % size:
        raise ValueError(f"{what}: {length} is not divisible by {size}")
    part = length // size
    return rank * part, (rank + 1) * part
