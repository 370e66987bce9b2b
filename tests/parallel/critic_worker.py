"""One rank of the critic's tests: torchrun critic_worker.py MODELS_FOLDER OUT_FOLDER JOBS.json

As `layout_worker`, for the critic: rank 0 writes `values.i`, `loss`, `grad_norm`, `grad.NAME` of the trunk and
`grad.value_head`, `losses` of 12 optimizer steps on the same batch, and `continued`, the values after these steps and
after a checkpoint of them was read again on the job's `resume_on` layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rhymemeg.arch import ModelArch
from rhymemeg.parallel.runtime import Runtime, start_layout
from rhymemeg.rl.values import ValueObjective
from tests.parallel import cases
from tests.parallel.layout_worker import make_config, run_jobs, whole_gradients

TOKENS = 70


def micro_batches(runtime: Runtime) -> list[Any]:
    return list(map(cases.with_values, cases.share(cases.micro_batches(), runtime.dp_rank, runtime.dp_size)))


def build(layout: dict[str, Any], folder: Path, runtime: Runtime, head: Tensor | None = None) -> Any:
    from rhymemeg.parallel.critic import Critic

    config = make_config(layout)
    config.critic.critic_lr = 3e-3
    critic = Critic(config, ModelArch.from_pretrained(folder), runtime)
    critic.load_weights(folder)
    for chunk in critic.chunks:
        model: Any = chunk
        if model.post_process and head is not None:
            model.value_head.weight.data.copy_(head)
    critic.weights_changed()
    return critic


def all_values(critic: Any, runtime: Runtime) -> dict[int, Tensor]:
    """Values of every micro-batch of the batch, on rank 0."""
    found: dict[int, Tensor] = {}
    count = -(-len(cases.micro_batches()) // runtime.dp_size)
    for dp_rank, values in runtime.all_gather_object((runtime.dp_rank, critic.values(micro_batches(runtime)))):
        for i, value in enumerate(values):
            known = found.setdefault(dp_rank * count + i, value)
            assert torch.equal(known, value), "ranks of one data-parallel index differ"
    return found


def run(job: dict[str, Any], models: Path, out: Path, runtime: Runtime) -> None:
    folder = models / job["model"]
    arch = ModelArch.from_pretrained(folder)
    start_layout(runtime, make_config(job["layout"]).parallel, seed=1)
    mine, objective = micro_batches(runtime), ValueObjective(0.2, TOKENS)
    critic = build({**job["layout"], "use_distributed_optimizer": False}, folder, runtime, cases.value_head())
    results = {f"values.{i}": value for i, value in all_values(critic, runtime).items()}
    first = critic.train_step(mine, objective)
    assert runtime.all_gather_object(first) == [first] * runtime.world_size, "ranks report different metrics"
    critic = build({**job["layout"], "use_distributed_optimizer": False}, folder, runtime, cases.value_head())
    critic.backward(mine, objective)
    gradients = whole_gradients(critic, arch, runtime, lacking=("lm_head.weight",))
    heads = [c.value_head.weight.main_grad for c in critic.chunks if c.post_process]
    everyones = [part for parts in runtime.all_gather_object(heads) for part in parts]

    critic = build(job["layout"], folder, runtime)
    losses = [critic.train_step(mine, ValueObjective(None, TOKENS))["critic/loss"] for _ in range(12)]
    critic.save_checkpoint(out / job["name"], {})
    before = all_values(critic, runtime)
    start_layout(runtime, make_config(job["resume_on"]).parallel, seed=1)
    again = build(job["resume_on"], folder, runtime)
    again.load_checkpoint(out / job["name"])
    assert again.updates == 12
    after = all_values(again, runtime)
    if gradients is None:
        return
    for head in everyones:
        torch.testing.assert_close(head, everyones[0], rtol=1e-5, atol=1e-7)
    results |= {f"grad.{name}": value for name, value in gradients.items()}
    results |= {
        "grad.value_head": everyones[0],
        "loss": torch.tensor(first["critic/loss"], dtype=torch.float64),
        "grad_norm": torch.tensor(first["critic/grad_norm"]),
        "losses": torch.tensor(losses),
        "continued": torch.stack([torch.stack((before[i], after[i])).flatten(1)[:, 0] for i in range(5)]),
    }
    save_file({k: v.contiguous() for k, v in results.items()}, out / f"{job['name']}.safetensors")


if __name__ == "__main__":
    run_jobs(run)
