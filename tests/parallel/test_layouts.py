"""The actor against Hugging Face and against itself on one process, for every family and layout on up to four ranks.

One torchrun for each number of ranks runs all its layouts one after the other (`layout_worker`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.parallel import cases
from tests.parallel.launch import torchrun

pytestmark = pytest.mark.distributed

TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"
EP, ETP, SP = "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"
DISPATCHER = "moe_token_dispatcher_type"
DENSE, MOE = ("llama", "qwen2", "qwen3"), ("qwen3_moe", "qwen3_moe_mixed")

# Ranks -> name of the layout -> (options, models).
LAYOUTS: dict[int, dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    1: {"single": ({}, (*DENSE, *MOE)), "recompute": ({"recompute_activations": True}, ("qwen3", "qwen3_moe"))},
    2: {
        "tp2": ({TP: 2}, DENSE),
        "tp2-sp": ({TP: 2, SP: True}, (*DENSE, *MOE)),
        "pp2": ({PP: 2}, (*DENSE, *MOE)),
        "pp2-uneven": ({PP: 2, "decoder_first_pipeline_num_layers": 1}, ("qwen3",)),
        "vpp": ({PP: 2, VPP: 1}, ("llama", "qwen3", *MOE)),
        "dp2": ({}, ("qwen3", "qwen3_moe")),
        "ep2": ({EP: 2}, MOE),
        "ep2-allgather": ({EP: 2, DISPATCHER: "allgather"}, ("qwen3_moe",)),
        "tp2-ep2-etp1": ({TP: 2, SP: True, EP: 2, ETP: 1}, ("qwen3_moe",)),
    },
    4: {
        "tp2-pp2": ({TP: 2, PP: 2, SP: True}, ("llama", "qwen3", "qwen3_moe_mixed")),
        "tp2-vpp": ({TP: 2, PP: 2, VPP: 1}, ("qwen3",)),
        "tp2-dp2": ({TP: 2}, ("qwen2",)),
        "pp2-dp2": ({PP: 2}, ("qwen3",)),
        "tp2-ep2": ({TP: 2, SP: True, EP: 2}, MOE),
        "pp2-ep2": ({PP: 2, EP: 2}, ("qwen3_moe_mixed",)),
        "vpp-ep2-allgather": ({PP: 2, VPP: 1, EP: 2, DISPATCHER: "allgather"}, ("qwen3_moe",)),
    },
}

CASES = [
    (ranks, name, model)
    for ranks, layouts in LAYOUTS.items()
    for name, (_, models) in layouts.items()
    for model in models
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, dict[str, Tensor]]]]:
    """Folder of the checkpoints, and the reference results by model."""
    folder = tmp_path_factory.mktemp("models")
    yield folder, {name: cases.reference(cases.make_model(name, folder / name)) for name in cases.MODELS}


@pytest.fixture(scope="module")
def results(models: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """Results of every case, by `layout/model`, read when first asked for."""
    out = tmp_path_factory.mktemp("results")
    found: dict[str, dict[str, Tensor]] = {}
    for ranks, layouts in LAYOUTS.items():
        jobs: list[dict[str, Any]] = [
            {"name": f"{name}--{model}", "model": model, "layout": options}
            for name, (options, of) in layouts.items()
            for model in of
        ]
        if ranks == 1:
            jobs.append({"name": "one-batch--qwen3", "model": "qwen3", "layout": {}, "one_batch": True})
        if ranks == 2:
            jobs.append({"name": "plain-adam--qwen3", "model": "qwen3", "layout": {}, "distributed_optimizer": False})
        file = out / f"jobs{ranks}.json"
        file.write_text(json.dumps(jobs))
        done = torchrun(ranks, "layout_worker.py", str(models[0]), str(out), str(file))
        assert done.returncode == 0, f"{ranks} ranks:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        for job in jobs:
            found[job["name"]] = load_file(out / f"{job['name']}.safetensors")
    return found


def relative(value: Tensor, expected: Tensor) -> float:
    """|value - expected| / |expected|, in the 2-norm."""
    return float((value.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-12))


def of(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize(("ranks", "layout", "model"), CASES)
def test_log_probs_and_entropy_are_those_of_transformers(
    ranks: int, layout: str, model: str, models: Any, results: dict[str, dict[str, Tensor]]
) -> None:
    mine, reference = results[f"{layout}--{model}"], models[1][model]
    for i, batch in enumerate(cases.micro_batches()):
        # Real tokens: up to the last label of each row.
        real = batch.labels.ne(0).flip(1).cumsum(1).flip(1).gt(0)
        for what in ("log_probs", "entropy"):
            difference = (mine[f"{what}.{i}"] - reference[f"{what}.{i}"])[real].abs().max()
            assert difference < 1e-4, f"{what} of micro-batch {i} differ by {difference:.2e}"


@pytest.mark.parametrize(("ranks", "layout", "model"), CASES)
def test_loss_and_gradients_are_those_of_one_process(
    ranks: int, layout: str, model: str, models: Any, results: dict[str, dict[str, Tensor]]
) -> None:
    mine, single, reference = results[f"{layout}--{model}"], results[f"single--{model}"], models[1][model]
    assert relative(mine["loss"], single["loss"]) < 1e-5
    assert relative(mine["loss"], reference["loss"]) < 1e-5
    assert mine["tokens"] == sum(batch.loss_mask.sum() for batch in cases.micro_batches())
    whole = torch.cat([v.flatten() for v in of(single, "grad.").values()]).double()
    for name, expected in of(single, "grad.").items():
        error = float((mine[name].double() - expected.double()).norm())
        # A gradient that is nearly zero is measured against the whole.
        assert error < 1e-5 * max(float(expected.norm()), 1e-2 * float(whole.norm())), f"{name}: {error:.2e}"
    assert relative(mine["grad_norm"], whole.norm()) < 1e-5
    # transformers stores the experts of a layer in one tensor; compare what has the same name and size.
    shared = [name for name in of(reference, "grad.") if name in mine and mine[name].shape == reference[name].shape]
    assert len(shared) > 10
    for name in shared:
        assert relative(mine[name], reference[name]) < 1e-4, name


@pytest.mark.parametrize(("ranks", "layout", "model"), CASES)
def test_weights_after_three_steps_are_those_of_one_process(
    ranks: int, layout: str, model: str, models: Any, results: dict[str, dict[str, Tensor]]
) -> None:
    mine, single = results[f"{layout}--{model}"], results[f"single--{model}"]
    start = load_file(models[0] / model / "model.safetensors")
    moved = 0.0
    for name, expected in of(single, "weight.").items():
        # Adam turns rounding of a tiny gradient into a step of a fraction of lr: compare against lr, not the weight.
        assert (mine[name] - expected).abs().max() < 0.05 * 3 * 3e-3, name
        assert relative(mine[name], expected) < 1e-4, name
        moved += float((expected - start[name.removeprefix("weight.")]).abs().max()) if name[7:] in start else 0.0
    assert moved > 3e-3


def test_gradient_does_not_depend_on_the_number_of_micro_batches(results: dict[str, dict[str, Tensor]]) -> None:
    for name, expected in of(results["single--qwen3"], "grad.").items():
        assert relative(results["one-batch--qwen3"][name], expected) < 1e-5, name


def test_distributed_optimizer_steps_like_the_plain_one(results: dict[str, dict[str, Tensor]]) -> None:
    for name, expected in of(results["plain-adam--qwen3"], "weight.").items():
        assert relative(results["dp2--qwen3"][name], expected) < 1e-6, name
