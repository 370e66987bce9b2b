"""Run by torchrun on 2 ranks: how much memory does a push need beyond what was there? Prints a JSON line.

The actor is PP 2, the engines are of TP 1, so each rank receives half of the model. The engine keeps nothing. Resident
memory is sampled by a thread while the push runs.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from rhymemeg.arch import ModelArch
from rhymemeg.config import ModelOptions, ParallelOptions, RunOptions, SyncOptions
from rhymemeg.parallel.model import build_model
from rhymemeg.parallel.runtime import init_runtime, shutdown
from rhymemeg.weight_sync.push import WeightSync
from rhymemeg.weight_sync.topology import EngineLayout

BUCKET = 12 << 20


class Sink:
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        for _, tensor in weights:
            assert tensor.sum().isfinite()
            time.sleep(0.002)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak_during(push: threading.Event) -> int:
    peak = 0
    while not push.is_set():
        peak = max(peak, resident())
        time.sleep(0.001)
    return peak


def main() -> None:
    parallel = ParallelOptions(pipeline_model_parallel_size=2)
    runtime = init_runtime(RunOptions(device="cpu", distributed_timeout_minutes=1), parallel, seed=1)
    arch = ModelArch.from_pretrained(sys.argv[1])
    chunks = build_model(arch, ModelOptions(), parallel, runtime)
    options = SyncOptions(update_weight_buffer_size=BUCKET, weight_sync_verify="off")
    sync = WeightSync(arch, options, runtime, chunks, Sink(), EngineLayout(2))
    sync.push(0)
    before, done, peak = resident(), threading.Event(), [0]
    sampler = threading.Thread(target=lambda: peak.__setitem__(0, peak_during(done)))
    sampler.start()
    metrics = sync.push(1)
    done.set()
    sampler.join()
    extra = runtime.all_gather_object(peak[0] - before)
    if runtime.is_rank0:
        outcome = {"extra": max(extra), "bucket": BUCKET, "received": metrics["sync/bytes_received"]}
        print("MEMORY " + json.dumps(outcome), flush=True)
    shutdown()


if __name__ == "__main__":
    main()
