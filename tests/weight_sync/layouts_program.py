"""Run by torchrun on 4 ranks: load, export and push a small model in many actor layouts. Prints a JSON line a case.

Arguments: the folder with the checkpoints that the test has written, and a scratch folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rhymemeg.arch import ModelArch
from rhymemeg.config import ModelOptions, ParallelOptions, RunOptions, SyncOptions
from rhymemeg.errors import WeightSyncError
from rhymemeg.parallel.model import build_model
from rhymemeg.parallel.runtime import Runtime, init_runtime, shutdown, start_layout
from rhymemeg.weight_sync.actor_side import local_params
from rhymemeg.weight_sync.hf_io import export_hf, load_hf_checkpoint
from rhymemeg.weight_sync.push import WeightSync
from rhymemeg.weight_sync.topology import EngineLayout

CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_tied", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    ("qwen3_tied", {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}),
    ("qwen2", {"tensor_model_parallel_size": 2}),
    ("llama", {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}),
    ("llama", {"tensor_model_parallel_size": 4}),
    ("llama", {"pipeline_model_parallel_size": 4}),
    ("qwen3_moe", {"expert_model_parallel_size": 2}),
    ("qwen3_moe", {"expert_model_parallel_size": 4}),
    ("qwen3_moe", {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "sequence_parallel": True}),
    (
        "qwen3_moe",
        {
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    ),
]
# TP, expert parallel, whole tensors; the last as if each rank were a node, with relays.
ENGINES = [
    (1, False, False),
    (2, False, False),
    (2, False, True),
    (4, False, False),
    (2, True, False),
    (4, True, False),
    (1, False, False),
]


class Recorder:
    """Takes what the loaders of an engine rank would take of each tensor. `narrow` is vLLM's rule, written anew."""

    def __init__(self, arch: ModelArch, rank: int, tp: int, expert_parallel: bool) -> None:
        self.arch, self.rank, self.tp, self.expert_parallel = arch, rank % tp, tp, expert_parallel
        self.taken: dict[str, torch.Tensor | None] = {}

    def narrow(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        tp, rank, kind = self.tp, self.rank, name.split(".")[-2]
        if ".experts." in name and self.expert_parallel:
            per_rank = self.arch.num_experts // tp
            return tensor if int(name.split(".experts.")[1].split(".")[0]) // per_rank == rank else None
        if kind in ("embed_tokens", "lm_head"):
            block = -(-self.arch.vocab_size // 64) * 64 // tp
            start = min(rank * block, self.arch.vocab_size)
            return tensor.narrow(0, start, min(block, self.arch.vocab_size - start))
        if kind in ("o_proj", "down_proj"):
            size = tensor.shape[1] // tp
            return tensor.narrow(1, rank * size, size)
        if kind in ("k_proj", "v_proj") and tp > self.arch.num_key_value_heads:
            size = self.arch.head_dim
            return tensor.narrow(0, rank // (tp // self.arch.num_key_value_heads) * size, size)
        if kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            size = tensor.shape[0] // tp
            return tensor.narrow(0, rank * size, size)
        return tensor

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        held = list(weights)  # kept to the end, as vLLM does: a reused buffer would show
        self.taken = {name: None if (x := self.narrow(name, t)) is None else x.clone() for name, t in held}


def changed(tensor: torch.Tensor) -> torch.Tensor:
    """Another value for every element; exact, so that it can be applied to shards."""
    return tensor * 2 + 1


def main() -> None:
    folder, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    runtime = init_runtime(RunOptions(device="cpu", distributed_timeout_minutes=1), ParallelOptions(), seed=1)
    for number, (model, options) in enumerate(CASES):
        outcome = run_case(runtime, folder / model, scratch / str(number), ParallelOptions(**options))
        if runtime.is_rank0:
            print("CASE " + json.dumps({"model": model, "options": options, **outcome}), flush=True)
    shutdown()


def run_case(runtime: Runtime, source: Path, scratch: Path, parallel: ParallelOptions) -> dict[str, Any]:
    start_layout(runtime, parallel, seed=1)
    arch = ModelArch.from_pretrained(source)
    model_options = ModelOptions(make_vocab_size_divisible_by=3)
    chunks = build_model(arch, model_options, parallel, runtime)
    load_hf_checkpoint(chunks, arch, source, runtime)
    whole = load_file(source / "model.safetensors")
    params = local_params(chunks, arch, runtime)
    options = SyncOptions(update_weight_buffer_size=20_000, weight_sync_verify="full")
    syncs: dict[str, tuple[Recorder, WeightSync]] = {}
    for number, (tp, ep, mode) in enumerate(ENGINES):
        if arch.is_moe or not ep:
            recorder = Recorder(arch, runtime.rank, tp, ep)
            engines = EngineLayout(runtime.world_size, tp, ep, whole=mode)
            relays = number == len(ENGINES) - 1
            far_apart: dict[str, Any] = {"ranks_per_node": 1, "relay_above": 0.5} if relays else {}
            sync = WeightSync(arch, options, runtime, chunks, recorder, engines, **far_apart)
            label = f"tp{tp}{'ep' if ep else ''}{' whole' if mode else ''}{' relays' if relays else ''}"
            syncs[label] = recorder, sync
    for step in range(2):
        if step:
            with torch.no_grad():
                for tensor in params.values():
                    tensor.copy_(changed(tensor))
            whole = {name: changed(tensor) for name, tensor in whole.items()}
        for label, (recorder, sync) in syncs.items():
            sync.push(step)
            assert recorder.taken.keys() == whole.keys()
            for name, tensor in whole.items():
                expected, taken = recorder.narrow(name, tensor), recorder.taken[name]
                assert (expected is None) == (taken is None), name
                if expected is not None and taken is not None:
                    assert torch.equal(taken, expected), f"{label}: {name}"
    export_hf(chunks, arch, runtime, scratch / "export", source, max_file_bytes=40_000)
    exported = {k: v for file in (scratch / "export").glob("*.safetensors") for k, v in load_file(file).items()}
    assert exported.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(exported[name], tensor), f"export: {name}"
    if parallel.pipeline_model_parallel_size == 4:
        hops = [b.hops[1] for b in syncs["tp1 relays"][1].plan.program(runtime.rank)]
        assert any(runtime.all_gather_object(any(hop.send for hop in hops))), "no relay was used"
    received = {}
    for label, (_, sync) in syncs.items():
        traffic = sync.plan.traffic()
        assert (
            traffic.received[runtime.rank] <= sync.courier.bytes_received <= traffic.received[runtime.rank] * 1.2 + 4096
        )
        received[label] = traffic.received
    refuses_non_finite(runtime, arch, chunks, params)
    return {"received": received}


def refuses_non_finite(runtime: Runtime, arch: ModelArch, chunks: Any, params: dict[str, torch.Tensor]) -> None:
    """One NaN on one rank stops the push on every rank, with the parameter's name."""
    recorder = Recorder(arch, runtime.rank, 1, False)
    sync = WeightSync(arch, SyncOptions(), runtime, chunks, recorder, EngineLayout(runtime.world_size))
    name = next(n for n in params if n.endswith("linear_proj.weight"))
    if runtime.rank == 1:
        params[name].view(-1)[3] = float("nan")
    try:
        sync.push(5)
    except WeightSyncError as error:
        assert "linear_proj.weight" in str(error) and "not finite" in str(error), error
    else:
        raise AssertionError("a NaN went unnoticed")
    assert not recorder.taken


if __name__ == "__main__":
    main()
