"""Replayed experts, auxiliary loss and load against transformers with the same experts, on up to four ranks.

One torchrun for each number of ranks runs all its layouts one after the other (`replay_worker`)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rhymemeg.parallel.router_replay import load_metrics
from tests.parallel import cases, replay_cases
from tests.parallel.launch import torchrun
from tests.parallel.test_layouts import EP, PP, SP, TP, VPP, of, relative

pytestmark = pytest.mark.distributed

MOE, MIXED = "qwen3_moe", "qwen3_moe_mixed"
LAYOUTS: dict[int, dict[str, tuple[dict[str, Any], str]]] = {
    1: {
        "single": ({}, MOE),
        "single-mixed": ({}, MIXED),
        "recompute": ({"recompute_activations": True}, MOE),
        "one-batch": ({}, MOE),
    },
    2: {
        "tp2-sp": ({TP: 2, SP: True}, MOE),
        "tp2-sp-mixed": ({TP: 2, SP: True}, MIXED),
        "vpp-recompute": ({PP: 2, VPP: 1, "recompute_activations": True}, MOE),
        "ep2": ({EP: 2}, MOE),
    },
    4: {
        "tp2-pp2": ({TP: 2, PP: 2, SP: True, "recompute_activations": True}, MOE),
        "pp2-ep2": ({PP: 2, EP: 2}, MIXED),
    },
}
CASES = [(name, model) for layouts in LAYOUTS.values() for name, (_, model) in layouts.items()]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("models")
    return folder, {m: replay_cases.reference(cases.make_model(m, folder / m)) for m in (MOE, MIXED)}


@pytest.fixture(scope="module")
def results(models: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    out = tmp_path_factory.mktemp("results")
    for ranks, layouts in LAYOUTS.items():
        jobs = [
            {"name": name, "layout": layout, "model": model, "one_batch": name == "one-batch"}
            for name, (layout, model) in layouts.items()
        ]
        file = out / f"jobs{ranks}.json"
        file.write_text(json.dumps(jobs))
        done = torchrun(ranks, "replay_worker.py", str(models[0]), str(out), str(file))
        assert done.returncode == 0, f"{ranks} ranks:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return {name: load_file(out / f"{name}.safetensors") for name, _ in CASES}


@pytest.mark.parametrize(("name", "model"), CASES)
def test_log_probs_with_replayed_experts(name: str, model: str, models: Any, results: Any) -> None:
    if name == "one-batch":
        return
    for i, batch in enumerate(cases.micro_batches()):
        difference = (results[name][f"log_probs.{i}"] - models[1][model][f"log_probs.{i}"])[batch.real].abs().max()
        assert difference < 1e-4, f"log-probabilities of micro-batch {i} differ by {difference:.2e}"


@pytest.mark.parametrize(("name", "model"), CASES)
def test_gradients_with_replayed_experts_and_auxiliary_loss(name: str, model: str, models: Any, results: Any) -> None:
    mine, reference = results[name], models[1][model]
    assert relative(mine["loss"], reference["loss"]) < 1e-5
    assert relative(mine["moe/aux_loss"], reference["aux"]) < 1e-5
    gradients = of(results["single-mixed" if model == MIXED else "single"], "grad.")
    whole = torch.cat([v.flatten() for v in gradients.values()]).double().norm()
    for key, expected in gradients.items():
        error = float((mine[key].double() - expected.double()).norm())
        assert error < 1e-5 * max(float(expected.norm()), 1e-2 * float(whole)), f"{key}: {error:.2e}"
    shared = [key for key in of(reference, "grad.") if key in mine and mine[key].shape == reference[key].shape]
    assert any("gate.weight" in key for key in shared) and len(shared) > 10
    for key in shared:
        assert relative(mine[key], reference[key]) < 1e-4, key


@pytest.mark.parametrize(("name", "model"), CASES)
def test_load_of_the_experts(name: str, model: str, models: Any, results: Any) -> None:
    load = models[1][model]["load"]
    load = load[load.sum(1) > 0]
    mean = load.sum(1) / load.shape[1]
    found = results[name]
    assert float(found["moe/load_max_over_mean"]) == pytest.approx(float((load.max(1).values / mean).mean()))
    share = load / load.sum(1, keepdim=True)
    entropy = torch.tensor([-sum(x * math.log(x) for x in row if x > 0) / math.log(4) for row in share.tolist()])
    assert float(found["moe/load_entropy"]) == pytest.approx(float(entropy.mean()))
    assert 0.3 < float(found["moe/replay_changed"]) < 1


@pytest.mark.parametrize(("name", "model"), CASES)
def test_what_was_recorded_is_replayed(name: str, model: str, results: Any) -> None:
    assert bool(results[name]["recorded"])


def test_load_metrics_of_known_loads() -> None:
    nothing = torch.zeros(2)
    even = load_metrics(torch.tensor([[5.0] * 4, [0.0] * 4]).double(), nothing, 0.0, False)
    assert even == {
        "moe/load_max_over_mean": 1.0,
        "moe/load_max_over_mean_worst_layer": 1.0,
        "moe/load_entropy": pytest.approx(1.0),
        "moe/idle_experts": 0.0,
    }
    one = load_metrics(torch.tensor([[8.0, 0.0, 0.0, 0.0]]).double(), torch.tensor([8.0, 2.0]), 0.5, True)
    assert one["moe/load_max_over_mean"] == 4.0 and one["moe/load_entropy"] == 0.0 and one["moe/idle_experts"] == 0.75
    assert one["moe/aux_loss"] == 0.5 and one["moe/replay_changed"] == 0.25
    assert load_metrics(torch.zeros(3, 4), nothing, 0.0, False) == {}
