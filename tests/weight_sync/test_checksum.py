"""Checksums: additive over any partition, different for anything else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.weight_sync import checksum as module
from rhymemeg.weight_sync.boxes import slices, whole
from rhymemeg.weight_sync.checksum import checksum, from_halves, halves


def of(tensor: torch.Tensor) -> int:
    return int(checksum(tensor, whole(tuple(tensor.shape)), tuple(tensor.shape)))


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9), st.sampled_from(["float32", "bfloat16"])
)
def test_sum_over_any_partition(n: int, m: int, row: int, column: int, dtype: str) -> None:
    tensor = torch.randn(n, m).to(getattr(torch, dtype))
    row, column = min(row, n), min(column, m)
    boxes = [(r, c) for r in ((0, row), (row, n)) for c in ((0, column), (column, m))]
    parts = torch.stack([checksum(tensor[slices(box)], box, (n, m)) for box in boxes])
    assert int(parts.sum()) == of(tensor)
    mask = (1 << 64) - 1
    assert from_halves(halves(parts).sum(0)) == [of(tensor) & mask]


@given(st.integers(0, 11), st.integers(0, 11))
def test_every_change_shows(i: int, j: int) -> None:
    tensor = torch.arange(12.0).view(3, 4)
    changed = tensor.clone()
    changed.view(-1)[i] += 1e-6 if i == 0 else 1e-3
    assert of(changed) != of(tensor)
    if i != j:
        swapped = tensor.clone()
        swapped.view(-1)[[i, j]] = tensor.view(-1)[[j, i]]
        assert of(swapped) != of(tensor)


def test_place_counts_among_equal_values_in_other_tensors() -> None:
    a = torch.ones(2, 4)
    assert checksum(a, ((0, 2), (0, 4)), (4, 4)) != checksum(a, ((2, 4), (0, 4)), (4, 4))
    assert of(torch.tensor([1.0])) != of(torch.tensor([1.0, 0.0]))


def test_signs_of_zero_and_nan_payloads_count() -> None:
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))
    assert of(torch.tensor([float("nan")])) == of(torch.tensor([float("nan")]))


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(37, 5)
    before = of(tensor)
    monkeypatch.setattr(module, "CHUNK", 11)
    assert of(tensor) == before


def test_an_empty_part_adds_nothing() -> None:
    assert int(checksum(torch.empty(0, 4), ((2, 2), (0, 4)), (4, 4))) == 0
