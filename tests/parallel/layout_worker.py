"""One rank of the layout tests: torchrun layout_worker.py MODELS_FOLDER OUT_FOLDER JOBS.json

A job names a model, options of the layout and where its results go. For each, the model is built on that layout from
the same checkpoint, and rank 0 writes (safetensors) `log_probs.i`, `entropy.i`, `loss`, `tokens`, `grad_norm`, and as
whole tensors under their Hugging Face names `grad.NAME` after a backward pass and `weight.NAME` after three optimizer
steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.parallel.runtime import Runtime, init_runtime, shutdown, start_layout
from rhymemeg.weight_sync.layouts import hf_tensors, pieces
from tests.parallel import cases

# Options that are not of the layout.
MODEL_OPTIONS = ("recompute_activations",)


def make_config(layout: dict[str, Any]) -> Config:
    config = Config()
    config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.clip_grad = 3e-3, 0.1, 0.5
    config.run.device = "cpu"
    for name, value in layout.items():
        setattr(config.model if name in MODEL_OPTIONS else config.parallel, name, value)
    return config


def whole_tensors(
    local: dict[str, Tensor], arch: ModelArch, runtime: Runtime, lacking: tuple[str, ...] = ()
) -> dict[str, Tensor] | None:
    """Put the shards of all ranks together by the layouts (rank 0). Shards that overlap must agree. `lacking` names what
    the model does not have."""
    parts = []
    for name, tensor in local.items():
        vocabulary = name in ("embedding.word_embeddings.weight", "output_layer.weight")
        padded = tensor.shape[0] * runtime.tp_size if vocabulary else 0
        held = pieces(arch, name, runtime.tp_rank, runtime.tp_size, runtime.etp_rank, runtime.etp_size, padded)
        for piece in held:
            inside = tuple(slice(a, b) for a, b in piece.local_box)
            parts.append((piece.hf_name, piece.hf_box, tensor[inside].detach().clone()))
    gathered = runtime.gather_object(parts)
    if gathered is None:
        return None
    whole = {name: torch.full(shape, torch.nan) for name, shape in hf_tensors(arch).items() if name not in lacking}
    for name, box, value in (part for rank in gathered for part in rank):
        target = whole[name][tuple(slice(a, b) for a, b in box)]
        known = ~target.isnan()
        torch.testing.assert_close(target[known], value[known], rtol=1e-5, atol=1e-7, msg=f"ranks differ in {name}")
        target.copy_(value)
    for name, value in whole.items():
        assert not value.isnan().any(), f"no rank holds all of {name}"
    return whole


def whole_gradients(
    model: Any, arch: ModelArch, runtime: Runtime, lacking: tuple[str, ...] = ()
) -> dict[str, Tensor] | None:
    """What a backward pass left in the gradient buffers; without the distributed optimizer, which scatters them."""
    from rhymemeg.weight_sync.actor_side import local_params

    mains = {p.data_ptr(): p.main_grad for chunk in model.chunks for p in chunk.parameters()}
    shards = {name: mains[p.data_ptr()] for name, p in local_params(model.chunks, arch, runtime).items()}
    return whole_tensors(shards, arch, runtime, lacking)


def run(job: dict[str, Any], models: Path, out: Path, runtime: Runtime) -> None:
    from rhymemeg.parallel.actor import Actor
    from rhymemeg.weight_sync.actor_side import local_params

    config = make_config(job["layout"])
    folder = models / job["model"]
    arch = ModelArch.from_pretrained(folder)
    start_layout(runtime, config.parallel, seed=1)
    batches = cases.micro_batches() if not job.get("one_batch") else [cases.pad(cases.rows())]
    mine = cases.share(batches, runtime.dp_rank, runtime.dp_size)
    results: dict[str, Tensor] = {}

    plain = make_config({**job["layout"], "use_distributed_optimizer": False})
    actor = Actor(plain, arch, runtime)
    actor.load_weights(folder)
    pairs = actor.log_probs_and_entropy(mine, cases.TEMPERATURE)
    actor.backward(mine, cases.loss, cases.TEMPERATURE)
    gradients = whole_gradients(actor, arch, runtime)
    everyones = runtime.gather_object((runtime.dp_rank, runtime.dp_size, pairs))

    config.parallel.use_distributed_optimizer = job.get("distributed_optimizer", True)
    actor = Actor(config, arch, runtime)
    actor.load_weights(folder)
    updates = [actor.train_step(mine, cases.loss, cases.TEMPERATURE) for _ in range(3)]
    weights = whole_tensors(local_params(actor.chunks, arch, runtime), arch, runtime)
    assert runtime.all_gather_object(updates) == [updates] * runtime.world_size, "ranks report different metrics"
    if gradients is None or weights is None or everyones is None:
        return
    for dp_rank, dp_size, theirs in everyones:
        first = dp_rank * -(-len(batches) // dp_size)
        for i, (log_probs, entropy) in enumerate(theirs):
            known = results.setdefault(f"log_probs.{first + i}", log_probs)
            assert torch.equal(known, log_probs), "ranks of one data-parallel index differ"
            results[f"entropy.{first + i}"] = entropy
    results |= {f"grad.{name}": value for name, value in gradients.items()}
    results |= {f"weight.{name}": value for name, value in weights.items()}
    results |= {
        "loss": torch.tensor(updates[0]["actor/loss"], dtype=torch.float64),
        "tokens": torch.tensor(updates[0]["tokens"]),
        "grad_norm": torch.tensor(updates[0]["actor/grad_norm"]),
    }
    save_file({k: v.contiguous() for k, v in results.items()}, out / f"{job['name']}.safetensors")


def run_jobs(run: Callable[[dict[str, Any], Path, Path, Runtime], None]) -> None:
    """What the workers of this kind do: MODELS_FOLDER OUT_FOLDER JOBS.json of the command line, job after job."""
    models, out, jobs = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    first = make_config({})
    runtime = init_runtime(first.run, first.parallel, seed=1)
    for job in jobs:
        try:
            run(job, models, out, runtime)
        except Exception as error:
            raise RuntimeError(f"job {job['name']} on rank {runtime.rank}") from error
    shutdown()


if __name__ == "__main__":
    run_jobs(run)
