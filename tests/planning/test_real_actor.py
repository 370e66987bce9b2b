"""The planner's bytes against those of real actors on two ranks (fp32, Gloo), and offloading on them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.parallel import cases
from tests.planning.actor_program import LAYOUTS
from tests.torchrun import torchrun

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Layout -> what each rank holds: [measured, planned] by part."""
    models = tmp_path_factory.mktemp("models")
    for name in {model for model, _ in LAYOUTS.values()}:
        cases.make_model(name, models / name)
    words = ["tests/planning/actor_program.py", str(models)]
    output = torchrun(2, *words, timeout=300, env={"PYTHONPATH": "."}).check()
    lines = [json.loads(line[5:]) for line in output.splitlines() if line.startswith("HELD ")]
    return {line["layout"]: line["ranks"] for line in lines}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_are_as_planned(held: dict[str, list[dict[str, Any]]], layout: str) -> None:
    for rank in held[layout]:
        measured, planned = rank["parameters"]
        assert measured == planned
        # Megatron pads its buffers, which shows in models as small as these.
        measured, planned = rank["gradients"]
        assert planned <= measured <= 1.02 * planned + 4096
        measured, planned = rank["optimizer"]
        assert measured == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_leave_and_come_back(held: dict[str, list[dict[str, Any]]], layout: str) -> None:
    for rank in held[layout]:
        size = rank["gradients"][0]
        assert rank["gradients kept"] == [size] * 6
        assert rank["gradients away"] == [size, 0] * 3
