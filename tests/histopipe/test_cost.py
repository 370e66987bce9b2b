"""The cost model against its own measurements, and profile files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rhymemeg.errors import ConfigError
from rhymemeg.histopipe.cost import (
    A100_7B,
    ENGINE_STEPS,
    CostModel,
    StepTiming,
    correction,
    cost_model,
    load_profile,
    profile_from_steps,
)

AFFINE = CostModel("affine", (1, 10, 100), (1,), ((2.1,), (3.0,), (12.0,)))


def test_grid_points_and_what_lies_between():
    assert A100_7B.step_seconds(16) == pytest.approx(0.01064)
    assert A100_7B.step_seconds(24) == pytest.approx((0.01064 + 0.01236) / 2)
    assert A100_7B.step_seconds(8, query=6) == pytest.approx((0.0120 + 0.0133) / 2)
    assert A100_7B.step_seconds([0, 1]).tolist() == [0.0, pytest.approx(0.00966)]


def test_affine_form_is_recovered_and_continued_beyond_the_grid():
    assert AFFINE.affine == (pytest.approx(2.0), pytest.approx(0.1))
    assert AFFINE.step_seconds(200) == pytest.approx(22.0)
    assert AFFINE.engine_seconds(work=100, longest=5, slots=4) == pytest.approx(2 * 25 + 0.1 * 100)
    assert AFFINE.engine_seconds(work=100, longest=50, slots=4) == pytest.approx(2 * 50 + 0.1 * 100)


def test_more_requests_or_longer_drafts_never_cost_less():
    for query in (1, 2, 5, 16, 40):
        assert (np.diff(A100_7B.step_seconds(np.arange(1, 300), query)) >= 0).all()
    assert ENGINE_STEPS.step_seconds(7) == 1 and ENGINE_STEPS.affine == (1, 0)


def test_profile_survives_its_file(tmp_path):
    A100_7B.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == A100_7B == cost_model(str(tmp_path / "p.json"))
    assert cost_model("a100-7b") is A100_7B


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": [[1.0]]}, "row for each"),
        ({"seconds": None}, "cost profile"),
        ({"concurrency": [3, 2, 1]}, "ascending"),
        ({"prefill_seconds_per_token": -1}, "prefill"),
        ({"query": "x"}, "cost profile"),
    ],
)
def test_broken_profiles_are_named(tmp_path, change, message):
    file = tmp_path / "p.json"
    AFFINE.save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=message) as error:
        load_profile(file)
    assert str(file) in str(error.value)


def test_missing_field_and_missing_file_are_named(tmp_path):
    (tmp_path / "p.json").write_text("{}")
    with pytest.raises(ConfigError, match="'name' is missing"):
        load_profile(tmp_path / "p.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(tmp_path / "none.json")
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_profile(tmp_path / "p.json")


def test_correction_finds_the_speed_of_the_machine():
    steps = [StepTiming(c, c, 3 * float(AFFINE.step_seconds(c))) for c in (1, 5, 50)]
    prefill = StepTiming(1, 1000, 99.0)
    assert correction(AFFINE, [*steps, prefill]) == pytest.approx(3)
    assert AFFINE.scaled(3).step_seconds(10) == pytest.approx(9)
    assert correction(AFFINE, []) == 1


def test_profile_from_measured_steps():
    steps = [StepTiming(c, c, 2 + 0.1 * c) for c in range(1, 65)] + [StepTiming(3, 300, 50.0)]
    model = profile_from_steps("here", steps)
    assert model.step_seconds(40) == pytest.approx(6, rel=0.05)
    with pytest.raises(ValueError, match="no decode steps"):
        profile_from_steps("here", [])
