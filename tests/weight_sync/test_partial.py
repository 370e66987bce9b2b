"""A partial tensor behaves as the complete one wherever the engine's loader stays within the box, and refuses outside."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.errors import WeightSyncError
from rhymemeg.weight_sync.boxes import Box, slices
from rhymemeg.weight_sync.partial import PartialTensor, absent_tensor, partial_tensor

SHAPE = (6, 4)
FULL = torch.arange(24.0).view(SHAPE)


@st.composite
def intervals(draw: st.DrawFn, length: int) -> tuple[int, int]:
    start = draw(st.integers(0, length - 1))
    return start, draw(st.integers(start + 1, length))


def make(box: Box) -> torch.Tensor:
    return partial_tensor(FULL[slices(box)].clone(), box, SHAPE, "w")


@given(intervals(6), intervals(4), intervals(6), intervals(4), st.booleans())
def test_narrowing(
    rows: tuple[int, int], columns: tuple[int, int], r: tuple[int, int], c: tuple[int, int], extra: bool
) -> None:
    """Rows then columns, perhaps with a leading dimension added and removed, as loaders of experts do."""
    tensor = make((rows, columns))
    assert tensor.shape == FULL.shape and tensor.dtype == FULL.dtype and tensor.numel() == 24
    if extra:
        (tensor,) = tensor.unsqueeze(0).unbind()
    cut = tensor.narrow(0, r[0], r[1] - r[0])[:, c[0] : c[1]]
    assert tuple(cut.shape) == (r[1] - r[0], c[1] - c[0])
    inside = rows[0] <= r[0] and r[1] <= rows[1] and columns[0] <= c[0] and c[1] <= columns[1]
    if inside:
        assert type(cut) is torch.Tensor
        assert torch.equal(cut, FULL[r[0] : r[1], c[0] : c[1]])
    else:
        assert isinstance(cut, PartialTensor)
        with pytest.raises(WeightSyncError, match="'w'"):
            torch.empty(cut.shape).copy_(cut)


@pytest.mark.parametrize("dim", [0, 1])
def test_chunk_and_split(dim: int) -> None:
    tensor = make(((3, 6), (0, 4))) if dim == 0 else make(((0, 6), (2, 4)))
    parts = tensor.chunk(2, dim)
    assert isinstance(parts[0], PartialTensor)
    assert torch.equal(parts[1], FULL.chunk(2, dim)[1])
    sizes = [1, 3] if dim else [2, 4]
    assert [tuple(p.shape) for p in tensor.split(sizes, dim)] == [tuple(p.shape) for p in FULL.split(sizes, dim)]


def test_select() -> None:
    tensor = make(((2, 3), (0, 4)))
    assert torch.equal(tensor[2], FULL[2])
    assert isinstance(tensor[1], PartialTensor)


def test_a_complete_tensor_is_itself() -> None:
    assert partial_tensor(FULL, ((0, 6), (0, 4)), SHAPE, "w") is FULL


def test_nothing_of_an_absent_tensor_can_be_read() -> None:
    tensor = absent_tensor(SHAPE, torch.bfloat16, torch.device("cpu"), "model.layers.0.x")
    assert tensor.shape == SHAPE and tensor.dtype == torch.bfloat16
    for use in (lambda t: t + 1, lambda t: torch.empty(SHAPE).copy_(t), lambda t: t.t()):
        with pytest.raises(WeightSyncError, match=r"model\.layers\.0\.x"):
            use(tensor)
