"""Samples survive the way to another rank and to a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.rollout.samples import Sample, SampleId
from rhymemeg.rollout.wire import pack_numbers, pack_samples, unpack_numbers, unpack_samples

TOKEN = st.integers(0, 2**31 - 1)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    n = draw(st.integers(0, 6))

    def each(strategy: st.SearchStrategy) -> list:
        return draw(st.lists(strategy, min_size=n, max_size=n))

    return Sample(
        SampleId(draw(st.integers(0, 99)), draw(st.integers(0, 2**40)), draw(st.integers(0, 99))),
        tuple(draw(st.lists(TOKEN, max_size=5))),
        each(TOKEN),
        each(st.floats(allow_nan=False, allow_infinity=False)),
        each(st.integers(-1, 10**6)),
        finish_reason=draw(st.sampled_from([None, "stop", "length", "abort"])),
        engine=draw(st.integers(-1, 4096)),
        reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        reward_components=draw(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=2)),
    )


@given(st.lists(samples(), max_size=5))
def test_everything_but_the_text_survives(before: list[Sample]) -> None:
    assert unpack_samples(pack_samples(before)) == before
    buffer = np.concatenate([pack_numbers(s) for s in before]) if before else np.zeros(0, np.int64)
    for one, other in zip(before, unpack_numbers(buffer), strict=True):
        for name in ("sample_id", "prompt_ids", "response_ids", "log_probs", "versions", "engine"):
            assert getattr(one, name) == getattr(other, name)


def test_routing_goes_along() -> None:
    with_routing, without = Sample(SampleId(0, 1, 0), (1, 2), [3]), Sample(SampleId(0, 1, 1), (1, 2), [3])
    for sample in (with_routing, without):
        sample.log_probs, sample.versions = [-1.0], [0]
    with_routing.routing = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    one, two = unpack_samples(pack_samples([with_routing, without]))
    assert one.routing is not None and np.array_equal(one.routing, with_routing.routing)
    assert one.routing.dtype == np.uint8 and two.routing is None
    with pytest.raises(ValueError):
        unpack_samples(pack_samples([with_routing])[:-1])


@given(st.lists(samples(), min_size=1, max_size=3), st.data())
def test_what_is_cut_short_is_refused(before: list[Sample], data: st.DataObject) -> None:
    packed = pack_samples(before)
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(ValueError):
        unpack_samples(packed[:cut])


def test_an_unknown_finish_reason_is_refused() -> None:
    packed = pack_samples([Sample(SampleId(0, 1, 2), (1,), finish_reason="stop")])
    with pytest.raises(ValueError, match="hot"):
        unpack_samples(packed.replace(b'"stop"', b'"shot"'))
