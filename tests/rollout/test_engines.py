"""Engines of several ranks: the responses do not depend on how many engines there are nor on their tensor
parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollout import tiny
from tests.torchrun import torchrun


@pytest.mark.engine
@pytest.mark.distributed
def test_one_engine_of_two_ranks_equals_two_of_one(tmp_path: Path) -> None:
    folder = tiny.make_model(tmp_path / "model")
    assert "passed" in torchrun(2, "-m", "tests.rollout.check_engines", str(folder)).check()


@pytest.mark.engine
@pytest.mark.distributed
def test_windows_of_every_policy(tmp_path: Path) -> None:
    """Carried, stolen, moved and early samples on four engines of one rank and on two of two."""
    folder = tiny.make_model(tmp_path / "model")
    assert "passed" in torchrun(4, "-m", "tests.rollout.check_windows", str(folder)).check()
