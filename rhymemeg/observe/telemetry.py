"""Rates of a step that need more than its times: MFU, energy, and the trace of single steps.

    perf/train_tflops_per_gpu     model FLOPs of the training phase / its seconds / ranks, in 1e12
    perf/mfu                      the same over the peak of the GPU (dense BF16, data sheet); left out on a CPU, and for a GPU
                                  whose peak is not known (--gpu-peak-tflops gives it)
    perf/tokens_per_joule         tokens generated / energy of all GPUs in the step
    gpu/*                         see `rhymemeg.observe.nvml`, over all ranks

Model FLOPs are those of `rhymemeg.planning.compute`: for a sequence of s tokens, forward, 2 N s + 2 L (q + v) s^2 / 2, with N
the weights a token meets (output layer included, embedding not, of experts k), L layers, q and v the total widths of queries
and values of a layer, and half of s^2 because attention is causal; backward twice that. Recomputation, padding, and forward
passes for old or reference log-probabilities (phases of their own) count as time where they fall into the phase, and never
as FLOPs. A critic's are not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.observe.clock import StepClock
from rhymemeg.observe.nvml import Sampler, merged
from rhymemeg.observe.trace import Tracer, parse_steps
from rhymemeg.planning.compute import sequence_flops
from rhymemeg.planning.hardware import GPUS
from rhymemeg.rl.exchange import SampleSummary

if TYPE_CHECKING:
    from rhymemeg.parallel.runtime import Runtime
    from rhymemeg.trainer import Trainer


def peak_flops(device_name: str) -> float | None:
    """Dense BF16 FLOPs a second of a GPU by the name that CUDA gives it; None where it is not known. Variants that are
    slower than the SXM model (PCIe, NVL) are not taken for it."""
    name = device_name.lower()
    if any(word in name for word in ("pcie", "nvl", "mig")):
        return None
    words = name.replace("-", " ").split()
    known = [gpu for key, gpu in GPUS.items() if key.partition("-")[0] in words]
    return known[0].flops if known else None


class Telemetry:
    """In this rank, for a run. All methods but `close` are called by all ranks alike."""

    def __init__(self, config: Config, arch: ModelArch, runtime: Runtime, clock: StepClock) -> None:
        options = config.observe
        self.config, self.arch, self.runtime, self.clock = config, arch, runtime, clock
        self.tracer = Tracer(parse_steps(options.trace_steps), runtime, clock)
        self.peak: float | None = None
        self.sampler: Sampler | None = None
        if runtime.device_type == "cuda":
            import torch

            properties = torch.cuda.get_device_properties(runtime.device)
            self.peak = options.gpu_peak_tflops * 1e12 or peak_flops(properties.name)
            if options.nvml_interval:
                self.sampler = Sampler.start(f"GPU-{str(properties.uuid).removeprefix('GPU-')}", options.nvml_interval)
        self.sampled = runtime.reduce_max(float(self.sampler is not None)) > 0
        self._train_flops = 0.0

    @contextlib.contextmanager
    def step(self, step: int, trainer: Trainer) -> Iterator[None]:
        """Around everything that belongs to a step; the clock runs inside."""
        self._train_flops = 0.0
        with self.tracer.step(step, trainer, Path(self.config.run.output_dir)), self.clock.step():
            yield

    def trained(self, summaries: Sequence[SampleSummary]) -> None:
        """These samples were trained in this step (of all ranks, the same list on each)."""
        lengths = [s.prompt_len + s.response_len for s in summaries]
        if lengths:
            self._train_flops += 3 * sequence_flops(self.arch, lengths) * self.config.algorithm.ppo_epochs

    def metrics(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """After a step with these numbers, `timing_s/*` among them."""
        found: dict[str, float] = {}
        seconds = numbers.get("timing_s/train", 0.0)
        if self._train_flops and seconds > 0:
            rate = self._train_flops / seconds / self.runtime.world_size
            found["perf/train_tflops_per_gpu"] = rate / 1e12
            if self.peak is not None:
                found["perf/mfu"] = rate / self.peak
        if self.sampled:
            parts = self.runtime.gather_object(self.sampler.take() if self.sampler is not None else {}, dst=0)
            found |= merged(parts or [])
            if found.get("gpu/energy_j"):
                found["perf/tokens_per_joule"] = numbers.get("rollout/tokens", 0.0) / found["gpu/energy_j"]
        return found

    def close(self) -> None:
        """End the thread."""
        if self.sampler is not None:
            self.sampler.stop()
