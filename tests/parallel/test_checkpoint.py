"""Checkpoints: resuming, changing the layout, and what happens to broken, hostile and half-written ones; and a loss or
gradient that is not finite.

One torchrun of two ranks does everything (`checkpoint_worker`) and reports by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel import cases
from tests.parallel.launch import torchrun

pytestmark = pytest.mark.distributed

CHECKS = (
    "extra state",
    "pieces",
    "changed piece",
    "read changed piece",
    "piece with a path",
    "continues identically",
    "tp2 continues identically",
    "pp2 continues identically",
    "tp2 -> pp2 -> dp2",
    "nothing to load",
    "keeps the last and every third",
    "loads the newest",
    "gives the pieces",
    "passes over a damaged one",
    "says so",
    "tidies and sets aside",
    "one that is named is not passed over",
    "another model",
    "megatron reads converted weights on tp2",
    "megatron reads converted weights on ep2",
    "megatron reads converted weights on pp2",
    "hugging face weights from a checkpoint on tp2",
    "hugging face weights from a checkpoint on ep2",
    "hugging face weights from a checkpoint on pp2",
    "loads on tp2",
    "loads on pp2",
    "loads on dp2",
    "missing",
    "corrupt",
    "cut short",
    "no manifest",
    "refuses code in .metadata",
    "refuses code in common.pt",
    "nan loss",
    "nan gradient",
    "weights unchanged",
    "goes on afterwards",
    "full disk",
    "previous checkpoint is whole",
    "nothing left aside",
    "replaces",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    models, work = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("work")
    cases.make_model("qwen3_moe_mixed", models / "qwen3_moe_mixed")
    done = torchrun(2, "checkpoint_worker.py", str(models), str(work), timeout=480)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    found: dict[str, object] = json.loads(Path(work / "results.json").read_text())
    return found


def test_every_check_is_known(results: dict[str, object]) -> None:
    assert sorted(results) == sorted(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_checkpoint(name: str, results: dict[str, object]) -> None:
    assert results[name] is True, results[name]
