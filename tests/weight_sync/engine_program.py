"""Run by torchrun on 2 ranks: an actor pushes changing weights into real vLLM engines.

Arguments: a JSON list of cases (model, actor options, engine options) and the folder in which the test has written
`{model}-{version}` checkpoints. A case starts an engine with random weights, pushes three versions, exports the actor
and compares the engine's log-probabilities with those of a fresh engine that loads the export. A JSON line a case.
All cases of a launch have the same engine TP: vLLM's groups belong to the process.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.parallel.model import build_model
from rhymemeg.parallel.runtime import Runtime, init_runtime, shutdown, start_layout
from rhymemeg.rollout.engine import RolloutEngine
from rhymemeg.weight_sync.hf_io import export_hf, load_hf_checkpoint
from rhymemeg.weight_sync.push import WeightSync

VERSIONS = 3
SEQUENCES = [[(7 * i + 3 * j) % 190 + 2 for j in range(24)] for i in range(6)]


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
    sync = WeightSync(arch, config.sync, runtime, chunks, rollout)
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
    return {"worst": runtime.reduce_max(worst), "moved": moved, "metrics": metrics, "engines": rollout.num_engines}


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
