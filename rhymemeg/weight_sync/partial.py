"""A tensor of which this rank has only one box, for vLLM's weight loaders.

vLLM's loaders take a complete Hugging Face tensor and narrow it to the slice of their rank. The result of
`partial_tensor(data, box, shape, name)` looks complete (shape, dtype, device) but holds only `data`, the values of
`box`; the loader's own narrowing then yields ordinary memory. An empty box (an expert of another rank) is fine as long
as the loader never reads it.

Understood are the operations with which loaders take slices: narrow, indexing by slices and integers, select,
unsqueeze, unbind, chunk and split. As soon as a slice lies within the box it is an ordinary tensor (a view of `data`).
Reading an element that is not here, or any other operation, is a WeightSyncError that names the tensor: a wrong plan
cannot go unnoticed.
"""

from __future__ import annotations

from typing import Any

import torch

from rhymemeg.errors import WeightSyncError
from rhymemeg.weight_sync.boxes import Box, Shape, contains, shift, slices, whole

aten = torch.ops.aten


class PartialTensor(torch.Tensor):
    """`box` and `window` are boxes in the complete tensor: what is here, and what this tensor stands for."""

    data_here: torch.Tensor
    box: Box
    window: Box
    hf_name: str

    @staticmethod
    def __new__(cls, data: torch.Tensor, box: Box, window: Box, name: str) -> PartialTensor:
        size = tuple(stop - start for start, stop in window)
        made = torch.Tensor._make_wrapper_subclass(cls, size, dtype=data.dtype, device=data.device)
        made.data_here, made.box, made.window, made.hf_name = data, box, window, name
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PartialTensor({self.hf_name!r}, {list(self.window)}, here: {list(self.box)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tensor = next(a for a in args if isinstance(a, PartialTensor))
        if tensor is args[0] and not kwargs:
            if func is aten.detach.default or func is aten.alias.default:
                return _cut(tensor, tensor.window)
            if func is aten.slice.Tensor:
                defaults: tuple[Any, ...] = (0, None, None, 1)
                dim, start, stop, step = tuple(args[1:]) + defaults[len(args) - 1 :]
                if step == 1:
                    return tensor.interval(dim, start or 0, stop)
            if func is aten.select.int:
                return tensor.select_index(args[1], args[2])
            if func is aten.unbind.int:
                dim = args[1] if len(args) > 1 else 0
                return [tensor.select_index(dim, i) for i in range(tensor.shape[dim])]
            if func in (aten.split.Tensor, aten.split_with_sizes.default):
                dim = args[2] if len(args) > 2 else 0
                return tensor.cut_along(dim, args[1])
            if func is aten.unsqueeze.default:
                dim = args[1] % (tensor.dim() + 1)
                insert = lambda b: (*b[:dim], (0, 1), *b[dim:])  # noqa: E731
                return PartialTensor(
                    tensor.data_here.unsqueeze(dim), insert(tensor.box), insert(tensor.window), tensor.hf_name
                )
        raise WeightSyncError(
            f"the engine's loader applies {func} to {tensor.hf_name!r}, of which this rank has only {list(tensor.box)}"
        )

    def interval(self, dim: int, start: int, stop: int | None) -> torch.Tensor:
        """Elements `start` to `stop` along `dim`, as `narrow` and slicing take them."""
        dim %= self.dim()
        first, last = self.window[dim]
        length = last - first
        start = min(max(start + length if start < 0 else start, 0), length)
        end = length if stop is None else min(max(stop + length if stop < 0 else stop, start), length)
        window = (*self.window[:dim], (first + start, first + end), *self.window[dim + 1 :])
        return _cut(self, window)

    def cut_along(self, dim: int, sizes: int | list[int]) -> list[torch.Tensor]:
        length = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [self.interval(dim, start, start + size) for start, size in zip(starts, sizes)]

    def select_index(self, dim: int, index: int) -> torch.Tensor:
        """Drop a dimension. The box drops it too, or becomes empty if the index is not in it."""
        dim %= self.dim()
        index = self.window[dim][0] + (index + self.shape[dim] if index < 0 else index)
        rest = (*self.window[:dim], *self.window[dim + 1 :])
        low, high = self.box[dim]
        if low <= index < high:
            kept = PartialTensor(
                self.data_here.select(dim, index - low), (*self.box[:dim], *self.box[dim + 1 :]), rest, self.hf_name
            )
        else:
            nothing = tuple((start, start) for start, _ in rest)
            kept = PartialTensor(self.data_here.new_empty((0,) * len(rest)), nothing, rest, self.hf_name)
        return _cut(kept, rest)


def _cut(tensor: PartialTensor, window: Box) -> torch.Tensor:
    """The part of `tensor` that `window` is: ordinary memory if all of it is here."""
    if contains(tensor.box, window):
        with torch._C._DisableTorchDispatch():
            return tensor.data_here[slices(shift(window, tensor.box, whole(tuple(tensor.data_here.shape))))]
    return PartialTensor(tensor.data_here, tensor.box, window, tensor.hf_name)


def partial_tensor(data: torch.Tensor, box: Box, shape: Shape, name: str) -> torch.Tensor:
    """See the module. A complete tensor is returned as it is."""
    return data if box == whole(shape) else PartialTensor(data, box, whole(shape), name)


def absent_tensor(shape: Shape, dtype: torch.dtype, device: torch.device, name: str) -> torch.Tensor:
    """A tensor of which this rank has, and its engine's loader reads, nothing."""
    nothing = tuple((0, 0) for _ in shape)
    return PartialTensor(torch.empty((0,) * len(shape), dtype=dtype, device=device), nothing, whole(shape), name)
