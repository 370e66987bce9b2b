"""One rank of the routing tests: torchrun replay_worker.py MODELS_FOLDER OUT_FOLDER JOBS.json

As `layout_worker`, with experts to replay and the auxiliary loss: rank 0 writes `log_probs.i`, `loss`, `grad.NAME` and every
metric `moe/*`; `recorded`: 1 if a replayed pass went where it was told, and a pass that is replayed from what the pass before
recorded gives the same log-probabilities after the routers were changed, and other ones without the replay.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rhymemeg.arch import ModelArch
from rhymemeg.parallel.runtime import Runtime, start_layout
from tests.parallel import cases, replay_cases
from tests.parallel.layout_worker import make_config, run_jobs, whole_gradients


def recorded_is_replayed(actor: Any, batches: list[Any]) -> bool:
    """See the module. Routers get a permutation of their experts, so that most tokens would go elsewhere."""
    free = [replace(batch, routing=None) for batch in batches]
    before = actor.log_probs(free, 1.0)
    recorded = actor.recorded
    assert all(recorded), "no layer of this rank has experts"
    told = [replace(batch, routing=routing) for batch, routing in zip(free, recorded)]
    same = all(torch.equal(a, b) for a, b in zip(actor.log_probs(told, 1.0), before))
    went = [all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(actor.recorded, recorded)]
    routers = [p for chunk in actor.chunks for name, p in chunk.named_parameters() if name.endswith("router.weight")]
    for weight in routers:
        weight.data.copy_(weight.data.flip(0))
    changed = actor.log_probs(free, 1.0)
    moved = any((a - b).abs().max() > 1e-3 for a, b in zip(changed, before))
    actor.log_probs(told, 1.0)
    still = [all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(actor.recorded, recorded)]
    for weight in routers:
        weight.data.copy_(weight.data.flip(0))
    return same and moved and all(went) and all(still)


def run(job: dict[str, Any], models: Path, out: Path, runtime: Runtime) -> None:
    from rhymemeg.parallel.actor import Actor

    config = make_config({**job["layout"], "use_distributed_optimizer": False})
    config.moe.moe_aux_loss_coeff = replay_cases.COEFFICIENT
    folder = models / job["model"]
    arch = ModelArch.from_pretrained(folder)
    start_layout(runtime, config.parallel, seed=1)
    batches = replay_cases.micro_batches(job.get("one_batch", False))
    mine = cases.share(batches, runtime.dp_rank, runtime.dp_size)
    actor = Actor(config, arch, runtime)
    actor.load_weights(folder)
    recorded = recorded_is_replayed(actor, mine)
    log_probs = actor.log_probs(mine, cases.TEMPERATURE)
    metrics = actor.backward(mine, cases.loss, cases.TEMPERATURE)
    gradients = whole_gradients(actor, arch, runtime)
    everyones = runtime.gather_object((runtime.dp_rank, log_probs, recorded, metrics))
    if gradients is None or everyones is None:
        return
    results: dict[str, Tensor] = {f"grad.{name}": value for name, value in gradients.items()}
    first = -(-len(batches) // runtime.dp_size)
    for dp_rank, theirs, _, numbers in everyones:
        assert numbers == metrics, "ranks report different metrics"
        results |= {f"log_probs.{dp_rank * first + i}": value for i, value in enumerate(theirs)}
    results |= {name: torch.tensor(v, dtype=torch.float64) for name, v in metrics.items() if name.startswith("moe/")}
    results |= {
        "loss": torch.tensor(metrics["actor/loss"], dtype=torch.float64),
        "recorded": torch.tensor(all(known for _, _, known, _ in everyones)),
    }
    save_file({k: v.contiguous() for k, v in results.items()}, out / f"{job['name']}.safetensors")


if __name__ == "__main__":
    run_jobs(run)
