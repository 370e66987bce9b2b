"""Experts on their way with a sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.rollout.routing import assemble, expert_dtype, pack_routing, replayable, unpack_routing
from rhymemeg.rollout.samples import Sample, SampleId


def rows(n: int, first: int = 0) -> np.ndarray:
    """n tokens, 2 layers, 3 experts each, distinct numbers by token."""
    return (np.arange(n)[:, None, None] * 3 + np.arange(3) + first).repeat(2, axis=1) % 255


def test_parts_in_order_and_what_was_known_stays() -> None:
    whole = assemble(6, [(0, rows(4)), (3, rows(3, 50))], None, 8)
    assert whole is not None and whole.dtype == np.uint8 and whole.shape == (6, 2, 3)
    assert (whole[:3] == rows(4)[:3]).all() and (whole[3:] == rows(3, 50)).all()
    again = assemble(8, [(0, rows(8, 100))], whole, 8)
    assert again is not None
    assert (again[:6] == whole).all() and (again[6:] == rows(8, 100)[6:]).all()


def test_rows_that_no_engine_reported_are_marked() -> None:
    whole = assemble(5, [(3, rows(9))], None, 8)
    assert whole is not None and (whole[:3] == 255).all() and (whole[3:] == rows(2)).all()
    signed = replayable(whole, [0, 1], 255)
    assert (signed[:3] == -1).all() and (signed[3:] == rows(2)).all()
    assert assemble(5, [], None, 8) is None


def test_many_experts_take_two_bytes() -> None:
    assert expert_dtype(255) == np.uint8 and expert_dtype(256) == np.uint16
    whole = assemble(1, [(0, np.full((1, 1, 2), 255, np.uint8) - np.array([0, 1], np.uint8))], None, 256)
    assert whole is not None and replayable(whole, [0], 256).tolist() == [[[255, 254]]]


def test_impossible_experts_are_refused() -> None:
    good = np.array([[[9, 9], [0, 1]]], np.uint8)
    assert replayable(good, [1], 4).tolist() == good.tolist()  # layer 0 is dense
    with pytest.raises(ValueError, match="one expert twice"):
        replayable(good, [0, 1], 16)
    with pytest.raises(ValueError, match="beyond 3"):
        replayable(np.array([[[0, 4]]], np.uint8), [0], 4)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(1, 4), st.booleans())), st.integers(0, 60))
def test_bytes_and_back(sizes: list[tuple[int, int, int, bool]], cut: int) -> None:
    samples = []
    for i, (n, layers, k, wide) in enumerate(sizes):
        numbers: Any = np.random.default_rng(i).integers(0, 200, (n, layers, k)).astype(np.uint16 if wide else np.uint8)
        samples.append(Sample(SampleId(1, i, 2), (1, 2), routing=numbers))
    samples.append(Sample(SampleId(1, 99, 0), (1,)))
    data = pack_routing(samples)
    back = unpack_routing(data)
    assert set(back) == {s.sample_id for s in samples[:-1]}
    for sample in samples[:-1]:
        assert sample.routing is not None
        assert back[sample.sample_id].dtype == sample.routing.dtype
        assert (back[sample.sample_id] == sample.routing).all()
    if 0 < cut < min(len(data), 56):
        with pytest.raises(ValueError, match="cut short"):
            unpack_routing(data[:-cut])
