"""`make_plan(...) -> Plan`: everything that can be known of a run before it starts. Pure.

    plan = make_plan(config, arch, world_size, device_type, gpu, mean_response=..., network=...)
    plan.lines()        a page for people
    plan.as_dict()      the same numbers, for JSON
    plan.fits           whether every phase fits on the device (True where no device is named)

Raises ConfigError for what cannot run at all, as the run itself would.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.parallel.layout_checks import Layout, check_layout, describe_layout
from rhymemeg.planning.compute import Efficiency, Rollout, Training, rollout_time, stage_flops, training_time
from rhymemeg.planning.hardware import Gpu
from rhymemeg.planning.memory import Advice, Memory, advise, estimate, parameter_width
from rhymemeg.planning.workload import Workload, expected_workload
from rhymemeg.weight_sync.plan import Bandwidths, update_figures
from rhymemeg.weight_sync.topology import EngineLayout

FRACTION_OF_NETWORK = 0.8
"""Of a link's bandwidth, that a weight update reaches. An assumption."""


@dataclass(frozen=True)
class Plan:
    """`rollout`, `training` and `advice` are None without a GPU type; `sync` are the figures of
    `rhymemeg.weight_sync.plan`."""

    world: int
    device_type: str
    gpu: Gpu | None
    layout: Layout
    work: Workload
    memory: Memory
    advice: Advice | None
    rollout: Rollout | None
    training: Training | None
    sync: dict[str, Any]
    efficiency: Efficiency
    stage_flops: tuple[float, ...]

    @property
    def problems(self) -> list[str]:
        return self.memory.problems()

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def sync_seconds(self) -> tuple[float, float]:
        """Floor and expected."""
        floor = float(self.sync["plan"]["estimated_seconds"])
        return floor, floor / FRACTION_OF_NETWORK

    @property
    def phases(self) -> dict[str, tuple[float, float]]:
        """Phase -> (floor, expected) in seconds; empty without a GPU type."""
        if self.rollout is None or self.training is None:
            return {}
        found = {"rollout": (self.rollout.floor, self.rollout.expected)}
        if self.training.log_prob_flops:
            found["forward passes"] = (self.training.log_prob_floor, self.training.log_prob)
        found["train"] = (self.training.train_floor, self.training.train)
        found["sync"] = self.sync_seconds
        return found

    @property
    def step_seconds(self) -> tuple[float, float]:
        """Floor and expected of a whole step."""
        return sum(f for f, _ in self.phases.values()), sum(e for _, e in self.phases.values())

    # ---------------------------------------------------------------------------------------------------------- output

    def as_dict(self) -> dict[str, Any]:
        """Plain data. Bytes, seconds, FLOPs, tokens."""
        m = self.memory
        return {
            "ranks": self.world,
            "device_type": self.device_type,
            "gpu": None if self.gpu is None else asdict(self.gpu),
            "fits": self.fits,
            "problems": self.problems,
            "advice": None if self.advice is None else asdict(self.advice),
            "memory": {
                "stage": m.stage,
                "parts": asdict(m.sizes),
                "fixed": m.fixed,
                "budget": m.budget,
                "phases": {phase.name: phase.bytes for phase in m.phases},
                "peak_by_stage": list(m.stages),
                "host": m.host,
                "kv_bytes_per_token": m.kv_token,
                "kv_tokens": m.kv_tokens,
                "requests_at_once": m.requests,
            },
            "workload": {
                "samples": self.work.samples,
                "prompt_len": self.work.prompt,
                "mean_response_len": self.work.mean_response,
                "longest_response": int(self.work.responses.max()),
                "generated_tokens": self.work.generated,
                "trained_tokens": self.work.tokens,
            },
            "training": None if self.training is None else asdict(self.training),
            "rollout": None if self.rollout is None else asdict(self.rollout) | {"floor": self.rollout.floor},
            "sync": self.sync,
            "seconds": {name: {"floor": f, "expected": e} for name, (f, e) in self.phases.items()},
            "step_seconds": dict(zip(("floor", "expected"), self.step_seconds)),
            "efficiency": asdict(self.efficiency),
            "stage_flops": list(self.stage_flops),
        }

    def lines(self) -> list[str]:
        """The page."""
        return [*self._memory_lines(), "", *self._time_lines()]

    def _memory_lines(self) -> list[str]:
        m, s = self.memory, self.memory.sizes
        stage = f", pipeline stage {m.stage}" if self.layout.pp > 1 else ""
        lines = [f"memory of the fullest rank{stage}"]
        rows = [
            ("parameters", s.parameters),
            ("gradients", s.gradients),
            ("optimizer state", s.optimizer),
            ("activations", s.activations),
            ("engine weights", s.engine_weights),
            ("KV cache", s.kv_cache),
            ("sync: two buckets and a layer", 2 * s.bucket + s.layer),
            *m.fixed.items(),
            *((f"host: {name}", size) for name, size in m.host.items()),
        ]
        lines += [f"  {show_bytes(size):>10}  {name}" for name, size in rows if size]
        limit = "" if m.budget is None else f" of {show_bytes(m.budget)}"
        lines.append(f"by phase{limit}")
        for phase in m.phases:
            mark = "  <- too much" if m.budget is not None and phase.bytes > m.budget else ""
            mark = mark or ("  <- peak" if phase is m.peak else "")
            lines.append(f"  {show_bytes(phase.bytes):>10}  {phase.name:<13} {', '.join(phase.parts)}{mark}")
        if m.kv_tokens:
            lines.append(
                f"KV cache holds {m.kv_tokens:,} tokens of {show_bytes(m.kv_token)} a rank: {m.requests} requests of "
                "expected length at once"
            )
        for problem in self.problems:
            lines.append(f"does not fit: {problem}")
        if self.advice is not None:
            word = "fits with" if self.advice.fits else "closest, still too much, with"
            lines.append(f"{word} {' '.join(self.advice.options)} (peak {show_bytes(self.advice.peak)})")
        return lines

    def _time_lines(self) -> list[str]:
        w, plan = self.work, self.sync["plan"]
        lines = [
            f"a step draws {w.samples:,} responses of {w.mean_response:,.0f} tokens on average (longest "
            f"{int(w.responses.max()):,}), {w.generated / 1e6:,.2f}M tokens; prompts of {w.prompt}",
            f"weight update: {show_bytes(plan['received_bytes_largest'])} to the busiest rank, "
            f"{show_bytes(plan['wire_bytes_across_nodes'])} across nodes in all "
            f"(gathering everything: {show_bytes(self.sync['gather']['received_bytes_largest'])} a rank)",
        ]
        t, r = self.training, self.rollout
        if t is None or r is None or self.gpu is None:
            return [*lines, "no times: --gpu-type is not given"]
        lines.append(f"{'seconds a step':<20}{'floor':>10}{'expected':>10}")
        floor, expected = self.step_seconds
        rows = [*self.phases.items(), ("together", (floor, expected))]
        lines += [f"  {name:<18}{least:>10.2f}{usual:>10.2f}" for name, (least, usual) in rows]
        rate = w.generated / expected / self.world
        mfu = (t.train_flops + t.log_prob_flops) / (self.world * self.gpu.flops * expected)
        lines += [
            f"that is {rate:,.0f} generated tokens a second and GPU, and {100 * mfu:.1f} % of the peak over the whole step",
            f"FLOPs: {t.train_flops:.3g} training, {t.log_prob_flops:.3g} forward passes (log-probabilities, values)",
            f"imbalance: pipeline stages {t.stage_imbalance:.2f} (busiest over mean), data-parallel ranks "
            f"{t.dp_imbalance:.2f}, bubble {100 * t.bubble:.0f} % with {t.micro_batches} micro-batches, padding "
            f"{100 * t.padding:.0f} %, engines idle {100 * r.idle:.0f} % of the rollout with a random split",
            f"rollout is bound by {'the longest response' if r.longest > r.even else 'its load'}: {r.longest:.1f} s for "
            f"the longest alone, {r.even:.1f} s for an even load",
        ]
        return lines


def make_plan(
    config: Config,
    arch: ModelArch,
    world: int,
    device_type: str,
    gpu: Gpu | None = None,
    *,
    mean_response: int = 0,
    network: float = 0.0,
    efficiency: Efficiency | None = None,
) -> Plan:
    """See the module. `mean_response` in tokens, `network` in bytes a second and GPU (0: that of the GPU type)."""
    check_layout(arch, config.parallel, world, device_type)
    if gpu is not None and network:
        gpu = replace(gpu, network=network)
    efficiency = efficiency or Efficiency()
    layout = describe_layout(arch, config.parallel, world)
    work = expected_workload(config, mean_response)
    memory = estimate(config, arch, layout, device_type, gpu, work)
    width = parameter_width(config, device_type)
    links = Bandwidths(gpu.node_bandwidth, gpu.network) if gpu else Bandwidths(1e9, 1e9)
    engine = config.engine
    sync = update_figures(
        arch,
        config.parallel,
        EngineLayout(world, engine.vllm_tensor_parallel_size, engine.vllm_enable_expert_parallel),
        links,
        itemsize=width,
        bucket_bytes=config.sync.update_weight_buffer_size,
        ranks_per_node=gpu.gpus_a_node if gpu else world,
        make_vocab_size_divisible_by=config.model.make_vocab_size_divisible_by,
    )
    rollout = training = advice = None
    if gpu is not None:
        rollout = rollout_time(arch, config, gpu, work, memory, width, world, efficiency)
        training = training_time(arch, config, layout, gpu, work, efficiency)
        advice = advise(config, arch, world, device_type, gpu, work)
    flops = tuple(stage_flops(arch, layout, work))
    return Plan(world, device_type, gpu, layout, work, memory, advice, rollout, training, sync, efficiency, flops)


def show_bytes(size: float) -> str:
    """'1.5 GiB'."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB" if size < 10_240 else f"{size / 1024:,.1f} TiB"


def show_count(number: float) -> str:
    """'8.19B'."""
    for unit in ("", "K", "M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}B"
