"""Run by torchrun on 2 ranks: an actor pushes changing weights into real vLLM engines.

Arguments: a JSON list of cases (model, actor options, engine options) and the folder in which the test has written
`{model}-{version}` checkpoints. A case starts an engine with random weights, pushes three versions, exports the actor
and compares the engine's log-probabilities with those of a fresh engine that loads the export; then it plants faults
between the transfer and the engine's loader, each of which must stop the push with the tensor's name. A JSON line a case.
All cases of a launch have the same engine TP: vLLM's groups belong to the process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.errors import WeightSyncError
from rhymemeg.parallel.model import build_model
from rhymemeg.parallel.runtime import Runtime, init_runtime, shutdown, start_layout
from rhymemeg.rollout.engine import RolloutEngine
from rhymemeg.weight_sync.hf_io import export_hf, load_hf_checkpoint
from rhymemeg.weight_sync.partial import PartialTensor
from rhymemeg.weight_sync.push import ROTATION, WeightSync

VERSIONS = 3
SEQUENCES = [[(7 * i + 3 * j) % 190 + 2 for j in range(24)] for i in range(6)]


class Faulty:
    """An engine that is given something else than what was sent."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine, self.spec, self.vllm = engine, engine.spec, engine.vllm
        self.fault: Callable[[str, torch.Tensor], list[tuple[str, torch.Tensor]]] | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        fault = self.fault
        changed = weights if fault is None else (pair for name, t in weights for pair in fault(name, t))
        self.engine.load_weights(changed, version)


def rebuilt(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The tensor with other values where this rank has any."""
    if isinstance(tensor, PartialTensor):
        return PartialTensor(change(tensor.data_here.clone()), tensor.box, tensor.window, tensor.hf_name)
    return change(tensor.clone())


def with_nan(values: torch.Tensor) -> torch.Tensor:
    values.view(-1)[-1] = float("nan")
    return values


def planted_faults(moe: bool) -> dict[str, tuple[str, Callable[[str, torch.Tensor], list[tuple[str, torch.Tensor]]]]]:
    """Name -> what the error must mention, and the fault."""
    mlp = "model.layers.1.mlp."  # a dense layer in both models
    norm = "model.layers.2.input_layernorm.weight"
    swap = {f"{mlp}gate_proj.weight": f"{mlp}up_proj.weight", f"{mlp}up_proj.weight": f"{mlp}gate_proj.weight"}
    experts = {
        f"model.layers.2.mlp.experts.{a}.{x}_proj.weight": f"model.layers.2.mlp.experts.{b}.{x}_proj.weight"
        for x in ("gate", "up", "down")
        for a, b in ((0, 1), (1, 0))
    }
    o_proj, embedding = "model.layers.3.self_attn.o_proj.weight", "model.embed_tokens.weight"
    faults = {
        "gate and up swapped": (mlp, lambda n, t: [(swap.get(n, n), t)]),
        "stale tensor": (norm, lambda n, t: [(n, rebuilt(t, lambda v: v * 0.99) if n == norm else t)]),
        "NaN": (o_proj, lambda n, t: [(n, rebuilt(t, with_nan) if n == o_proj else t)]),
        "missing name": (norm, lambda n, t: [] if n == norm else [(n, t)]),
        "rows off by one": (embedding, lambda n, t: [(n, rebuilt(t, lambda v: v.roll(1, 0)) if n == embedding else t)]),
    }
    if moe:
        faults["expert index"] = ("mlp.experts.", lambda n, t: [(experts.get(n, n), t)])
    # Last: vLLM's loader gives up in the middle.
    faults["padded row"] = (embedding, lambda n, t: [(n, torch.zeros(200, t.shape[1]) if n == embedding else t)])
    return faults


def plant(sync: WeightSync, engine: Faulty, moe: bool) -> list[str]:
    """Push with each fault; the names of those that were found. A push without a fault works in between."""
    found = []
    for number, (name, (mention, fault)) in enumerate(planted_faults(moe).items()):
        sync.push(10 + number)
        engine.fault = fault
        try:
            sync.push(10 + number)
        except WeightSyncError as error:
            assert mention in str(error), f"{name}: {error}"
            found.append(name)
        engine.fault = None
    return found


def pushes_until_found(sync: WeightSync, engine: Faulty) -> int:
    """Sampled verification: the number of pushes in which one stale tensor is found."""
    _, engine.fault = planted_faults(False)["stale tensor"]
    for number in range(1, 2 * ROTATION):
        try:
            sync.push(30 + number)
        except WeightSyncError:
            engine.fault = None
            return number
    raise AssertionError("never found")


def run_case(
    runtime: Runtime, folder: Path, model: str, actor: dict[str, Any], engine: dict[str, Any]
) -> dict[str, Any]:
    source = folder / f"{model}-0"
    options = {
        "hf_checkpoint": str(source),
        "prompt_data": "none",
        "max_prompt_len": 16,
        "max_response_len": 24,
        "vllm_max_num_seqs": 8,
        "vllm_kv_cache_memory_gib": 0.1,
        "weight_sync_verify": "full",
        "update_weight_buffer_size": 50_000,
        **actor,
        **engine,
    }
    config = Config.from_tree(options, "test")
    start_layout(runtime, config.parallel, seed=1)
    arch = ModelArch.from_pretrained(source)
    chunks = build_model(arch, config.model, config.parallel, runtime)
    rollout = RolloutEngine.start(config, arch, runtime, load_format="dummy")
    engine_or_fault = Faulty(rollout)
    sync = WeightSync(arch, config.sync, runtime, chunks, engine_or_fault)
    sampled = config.sync.model_copy(update={"weight_sync_verify": "sampled"})
    sampling = WeightSync(arch, sampled, runtime, chunks, engine_or_fault)
    scores: list[list[list[float]]] = []
    for version in range(VERSIONS):
        load_hf_checkpoint(chunks, arch, folder / f"{model}-{version}", runtime)
        metrics = sync.push(version)
        assert rollout.version == version
        scores.append(rollout.score(SEQUENCES, [1] * len(SEQUENCES)))
    export = folder / f"export-{model}"
    export_hf(chunks, arch, runtime, export, source)
    fresh_config = Config.from_tree({**options, "hf_checkpoint": str(export)}, "test")
    fresh = RolloutEngine.start(fresh_config, arch, runtime)
    expected = fresh.score(SEQUENCES, [1] * len(SEQUENCES))
    worst = largest_difference(scores[-1], expected)
    moved = min(largest_difference(a, b) for a, b in pairwise(scores))
    return {
        "worst": runtime.reduce_max(worst),
        "moved": moved,
        "metrics": metrics,
        "pushes_until_found": pushes_until_found(sampling, engine_or_fault),
        "faults_found": plant(sync, engine_or_fault, arch.is_moe),
    }


def largest_difference(a: list[list[float]], b: list[list[float]]) -> float:
    return max(abs(x - y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))


def main() -> None:
    cases, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    first = Config.from_tree({"device": "cpu", "distributed_timeout_minutes": 2}, "test")
    runtime = init_runtime(first.run, first.parallel, seed=1)
    for model, actor, engine in cases:
        outcome = run_case(runtime, folder, model, actor, engine)
        if runtime.is_rank0:
            print("CASE " + json.dumps({"case": [model, actor, engine], **outcome}), flush=True)
    shutdown()


if __name__ == "__main__":
    main()
