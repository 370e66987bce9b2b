"""The division of a sequence over context-parallel ranks."""

from __future__ import annotations

import pytest
import torch

from rhymemeg.parallel.context_parallel import held_positions


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_position_is_held_once_and_work_is_equal(size: int) -> None:
    length = 24 * size
    held = [held_positions(length, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(length))
    # Causal attention costs position t about t + 1.
    assert len({int((positions + 1).sum()) for positions in held}) == 1


def test_it_is_megatrons_division() -> None:
    """Megatron cuts in 2 C pieces and gives rank c the pieces c and 2 C - 1 - c."""
    assert held_positions(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert held_positions(8, 1, 2).tolist() == [2, 3, 4, 5]
