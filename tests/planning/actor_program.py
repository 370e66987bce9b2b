"""Run by torchrun on 2 ranks: what a real actor holds on some layouts, and that a step after `Offload` is the step without.
Prints a JSON line; see test_real_actor.py.

    actor_program.py MODELS_FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config, SyncOptions
from rhymemeg.parallel.layout_checks import describe_layout
from rhymemeg.parallel.runtime import init_runtime, shutdown, start_layout
from rhymemeg.planning.memory import optimizer_bytes
from rhymemeg.planning.shards import actor_shards
from tests.parallel import cases

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("qwen3", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": ("qwen2", {"pipeline_model_parallel_size": 2}),
    "dp2": ("llama", {}),
    "dp2-replicated": ("llama", {"use_distributed_optimizer": False}),
    "ep2": ("qwen3_moe", {"expert_model_parallel_size": 2}),
}


def nbytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def state_bytes(optimizer: Any) -> int:
    """Adam's moments of all chained optimizers; fp32 parameters are their own master weights."""
    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    states = [state for one in inner for state in one.optimizer.state.values()]
    return nbytes(t for state in states for t in state.values() if torch.is_tensor(t) and t.numel() > 1)


def measure(model: str, layout: dict[str, Any], models: Path, runtime: Any) -> dict[str, Any]:
    from rhymemeg.parallel.actor import Actor
    from rhymemeg.parallel.offload import Offload

    config = Config.from_tree({"device": "cpu", "lr": 1e-3, **layout}, where="test")
    arch = ModelArch.from_pretrained(models / model)
    start_layout(runtime, config.parallel, seed=1)
    mine = cases.share(cases.micro_batches(), runtime.dp_rank, runtime.dp_size)

    def train(options: SyncOptions) -> tuple[Any, list[float], list[int]]:
        actor, held = Actor(config, arch, runtime), []
        actor.load_weights(models / model)
        offload = Offload([actor], options)
        losses = []
        for _ in range(3):
            offload.restore()
            losses.append(actor.train_step(mine, cases.loss, cases.TEMPERATURE)["actor/loss"])
            held.append(offload.gradient_bytes)
            offload.release()
            held.append(offload.gradient_bytes)
        return actor, losses, held

    actor, plain, held = train(SyncOptions())
    _, offloaded, away = train(SyncOptions(offload_gradients=True, offload_optimizer=True))
    assert plain == offloaded, (plain, offloaded)
    described = describe_layout(arch, config.parallel, runtime.world_size)
    padded = arch.padded_vocab_size(config.model.make_vocab_size_divisible_by, runtime.tp_size)
    shard = actor_shards(arch, described, padded)[runtime.pp_rank]
    return {
        "parameters": [nbytes(p for chunk in actor.chunks for p in chunk.parameters()), 4 * shard.total],
        "gradients": [held[0], 4 * shard.total],
        "optimizer": [
            state_bytes(actor.optimizer),
            optimizer_bytes(shard, described, 4, config.parallel.use_distributed_optimizer),
        ],
        "gradients kept": held,
        "gradients away": away,
    }


def main() -> None:
    models = Path(sys.argv[1])
    first = Config.from_tree({"device": "cpu"}, where="test")
    runtime = init_runtime(first.run, first.parallel, seed=1)
    for name, (model, layout) in LAYOUTS.items():
        everyone = runtime.all_gather_object(measure(model, layout, models, runtime))
        if runtime.is_rank0:
            print("HELD " + json.dumps({"layout": name, "ranks": everyone}), flush=True)
    shutdown()


if __name__ == "__main__":
    main()
