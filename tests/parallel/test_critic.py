"""The critic against transformers with the same head, and against itself on one process, on up to four ranks.

One torchrun for each number of ranks runs all its layouts one after the other (`critic_worker`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.parallel import cases
from tests.parallel.critic_worker import TOKENS
from tests.parallel.launch import torchrun
from tests.parallel.test_layouts import EP, PP, SP, TP, VPP, of, relative

pytestmark = pytest.mark.distributed

# Ranks -> name -> (layout, layout on which its checkpoint is read, model). A tied and an untied one, and experts.
LAYOUTS: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any], str]]] = {
    1: {"single-qwen3": ({}, {}, "qwen3"), "single-moe": ({}, {}, "qwen3_moe")},
    2: {
        "tp2": ({TP: 2}, {PP: 2}, "qwen3"),
        "tp2-sp": ({TP: 2, SP: True}, {}, "qwen3"),
        "pp2": ({PP: 2}, {TP: 2, SP: True}, "qwen3"),
        "vpp": ({PP: 2, VPP: 1}, {PP: 2, VPP: 1}, "qwen3"),
        "dp2": ({}, {PP: 2}, "qwen3"),
        "ep2": ({EP: 2}, {PP: 2}, "qwen3_moe"),
    },
    4: {
        "tp2-pp2": ({TP: 2, PP: 2, SP: True}, {TP: 2}, "qwen3"),
        "tp2-ep2": ({TP: 2, SP: True, EP: 2}, {PP: 2, EP: 2}, "qwen3_moe"),
    },
}
CASES = [(name, model) for layouts in LAYOUTS.values() for name, (_, _, model) in layouts.items()]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("models")
    names = sorted({model for _, model in CASES})
    return folder, {m: cases.value_reference(cases.make_model(m, folder / m), 0.2, TOKENS) for m in names}


@pytest.fixture(scope="module")
def results(models: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    out = tmp_path_factory.mktemp("results")
    for ranks, layouts in LAYOUTS.items():
        jobs = [
            {"name": name, "layout": layout, "resume_on": resume_on, "model": model}
            for name, (layout, resume_on, model) in layouts.items()
        ]
        file = out / f"jobs{ranks}.json"
        file.write_text(json.dumps(jobs))
        done = torchrun(ranks, "critic_worker.py", str(models[0]), str(out), str(file))
        assert done.returncode == 0, f"{ranks} ranks:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return {name: load_file(out / f"{name}.safetensors") for name, _ in CASES}


@pytest.mark.parametrize(("name", "model"), CASES)
def test_values_are_those_of_transformers(name: str, model: str, models: Any, results: Any) -> None:
    for i, batch in enumerate(cases.micro_batches()):
        real = batch.labels.ne(0).flip(1).cumsum(1).flip(1).gt(0)
        difference = (results[name][f"values.{i}"] - models[1][model][f"values.{i}"])[real].abs().max()
        assert difference < 1e-4, f"values of micro-batch {i} differ by {difference:.2e}"


@pytest.mark.parametrize(("name", "model"), CASES)
def test_loss_and_gradients_are_those_of_transformers_and_of_one_process(
    name: str, model: str, models: Any, results: Any
) -> None:
    mine, reference = results[name], models[1][model]
    single = results["single-moe" if model == "qwen3_moe" else "single-qwen3"]
    assert relative(mine["loss"], reference["loss"]) < 1e-5
    gradients = of(single, "grad.")
    whole = torch.cat([v.flatten() for v in gradients.values()]).double()
    for key, expected in gradients.items():
        error = float((mine[key].double() - expected.double()).norm())
        assert error < 1e-5 * max(float(expected.norm()), 1e-2 * float(whole.norm())), f"{key}: {error:.2e}"
    assert relative(mine["grad_norm"], whole.norm()) < 1e-5
    shared = [key for key in of(reference, "grad.") if key in mine and mine[key].shape == reference[key].shape]
    assert "grad.value_head" in shared and len(shared) > 10
    for key in shared:
        if key != "grad.lm_head.weight":  # the critic has none
            assert relative(mine[key], reference[key]) < 1e-4, key


@pytest.mark.parametrize(("name", "model"), CASES)
def test_value_loss_falls_and_a_checkpoint_continues_on_another_layout(name: str, model: str, results: Any) -> None:
    losses = results[name]["losses"]
    assert losses[-1] < 0.5 * losses[0]
    before, after = results[name]["continued"].unbind(1)
    torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-5)
    assert before.abs().max() > 1e-2
