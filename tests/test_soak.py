"""What the soak tool makes of its samples; the run itself is for hand."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType

import pytest

from tests.torchrun import ROOT


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", ROOT / "tools/soak.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    return module


def test_growth_is_the_slope_after_warm_up(soak: ModuleType) -> None:
    samples = [
        {"step": step, "rank": rank, "rss_mib": 100 + 40 * (step < 5) + rank * 0.25 * step, "files": 7, "threads": 3}
        for step in range(41)
        for rank in (0, 1)
    ]
    rows = {(r["rank"], r["quantity"]): r for r in soak.summarise(samples, warm_up=5)}
    assert rows[0, "rss_mib"]["per_1000_steps"] == pytest.approx(0)
    assert rows[1, "rss_mib"]["per_1000_steps"] == pytest.approx(250)
    assert rows[1, "files"]["first"] == rows[1, "files"]["last"] == 7


def test_a_sample_of_this_process(soak: ModuleType) -> None:
    facts = soak.sample(os.getpid())
    assert facts["rss_mib"] > 1 and facts["files"] >= 3 and facts["threads"] >= 1
    with open(__file__):
        assert soak.sample(os.getpid())["files"] == facts["files"] + 1
    assert soak.sample(2**22 + 1) is None
