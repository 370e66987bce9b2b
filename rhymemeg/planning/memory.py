"""Memory of a rank by part, and whether it fits. Pure.

    parameters, gradients, optimizer    exact, from the layout tables (`shards`); Megatron's rules:
                                        bf16: 2 + 4 + 12 / d bytes a parameter, fp32: 4 + 4 + 8 / d, where d is the number
                                        of ranks that share the optimizer state (DP x CP; expert DP for experts; 1
                                        without --use-distributed-optimizer)
    activations                         `activations`
    engine weights, KV cache            exact; the cache is what --vllm-gpu-memory-utilization leaves
    sync buffers                        two buckets and the largest layer of the engine
    fixed                               assumptions, named below: contexts, NCCL, CUDA graphs, fragmentation

`rhymemeg.weight_sync.colocation` puts them in the order of a step; the plan fits if its largest phase does. The numbers
are those of the fullest pipeline stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config, Section
from rhymemeg.errors import ConfigError
from rhymemeg.parallel.layout_checks import Layout, check_layout, describe_layout
from rhymemeg.planning.activations import activation_bytes
from rhymemeg.planning.hardware import GIB, Gpu
from rhymemeg.planning.shards import Shard, actor_shards, engine_shard, largest_engine_layer
from rhymemeg.planning.workload import Workload
from rhymemeg.weight_sync.colocation import Phase, Residency, Sizes, phases
from rhymemeg.weight_sync.deepseek import DeepseekArch

CONTEXT = 2 * GIB
"""CUDA context, NCCL's buffers of all groups, cuBLAS workspaces. An assumption."""
GRAPHS = GIB
"""What an engine keeps beside weights and cache, asleep or not: CUDA graphs, workspaces. An assumption."""
FRAGMENTATION = 0.04
"""Share of the device that the caching allocator cannot use. An assumption."""


def parameter_width(config: Config, device_type: str) -> int:
    """Bytes of a parameter."""
    dtype = config.model.params_dtype
    return 4 if dtype == "fp32" or (dtype == "auto" and device_type == "cpu") else 2


def kv_bytes_per_token(arch: ModelArch, engine_tp: int, width: int) -> int:
    """Keys and values of one token on one rank of an engine. MLA's compressed form is the same on every rank."""
    if isinstance(arch, DeepseekArch):
        return arch.num_layers * (arch.kv_lora_rank + arch.qk_rope_head_dim) * width
    return 2 * arch.num_layers * max(arch.num_key_value_heads // engine_tp, 1) * arch.head_dim * width


def optimizer_bytes(shard: Shard, layout: Layout, width: int, distributed: bool) -> int:
    """Adam's moments, and fp32 master weights where the parameters are not fp32 themselves."""
    state = 8 if width == 4 else 12
    dense, expert = (layout.dp * layout.cp, layout.edp) if distributed else (1, 1)
    return state * (-(-shard.dense // dense) + -(-shard.expert // expert))


@dataclass(frozen=True)
class Memory:
    """Bytes. `stage` is the pipeline stage described, `stages` the peak of every stage; `fixed` is on the device in every
    phase and `budget` what is left of it for `phases` (None: no limit known). `host` is main memory a rank."""

    stage: int
    sizes: Sizes
    phases: tuple[Phase, ...]
    stages: tuple[int, ...]
    fixed: dict[str, int]
    budget: int | None
    host: dict[str, int]
    kv_token: int
    kv_tokens: int
    requests: int
    """Requests of expected length that an engine can run at once."""
    engine_budget: int
    """What vLLM is told it may use."""

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.bytes)

    def problems(self) -> list[str]:
        """Why it does not fit; nothing if it does."""
        found = []
        if self.budget is not None:
            for phase in self.phases:
                if phase.bytes > self.budget:
                    over = (phase.bytes - self.budget) / GIB
                    found.append(f"{phase.name}: {phase.bytes / GIB:.1f} GiB, {over:.1f} GiB too much")
        if self.sizes.kv_cache <= 0:
            found.append(
                "no memory is left for the KV cache: --vllm-gpu-memory-utilization is too small for the weights"
            )
        elif self.requests < 1:
            found.append("the KV cache does not hold one request of full length")
        return found


def residency(config: Config, device_type: str) -> Residency:
    """What stays on the device while it is not needed, by the options."""
    return Residency(
        engine_while_training=not config.engine.vllm_enable_sleep_mode or device_type == "cpu",
        optimizer_in_rollout=not config.sync.offload_optimizer,
        gradients_in_rollout=not config.sync.offload_gradients,
    )


def expected_micro_batches(config: Config, layout: Layout, work: Workload) -> int:
    """Micro-batches of an optimizer step on a data-parallel rank; padding fills a tenth of them."""
    a = config.algorithm
    tokens = work.tokens / a.num_minibatches / layout.dp
    return max(1, math.ceil(1.1 * tokens / a.max_tokens_per_microbatch))


def estimate(
    config: Config, arch: ModelArch, layout: Layout, device_type: str, gpu: Gpu | None, work: Workload
) -> Memory:
    """Memory of the fullest stage. `gpu` None: sizes only (CPU, or a GPU that was not named)."""
    width, engine = parameter_width(config, device_type), config.engine
    tp, whole = engine.vllm_tensor_parallel_size, engine.vllm_enable_expert_parallel
    weights = engine_shard(arch, tp, whole) * width
    token = kv_bytes_per_token(arch, tp, width)
    if gpu is None:
        cache = int(engine.vllm_kv_cache_memory_gib * GIB) if device_type == "cpu" else 0
        budget, engine_budget = None, weights + cache
    else:
        engine_budget = int(engine.vllm_gpu_memory_utilization * gpu.memory)
        cache = engine_budget - weights - _engine_workspace(config, arch, gpu) - GRAPHS
        budget = int(gpu.memory * (1 - FRAGMENTATION)) - CONTEXT - GRAPHS
    padded = arch.padded_vocab_size(config.model.make_vocab_size_divisible_by, layout.tp)
    micro_batches = expected_micro_batches(config, layout, work)
    layer = largest_engine_layer(arch, tp, whole) * width
    stays = residency(config, device_type)
    # A critic is of the actor's size but for its head, which is small where the actor's output layer is large.
    models = 2 if config.algorithm.needs_critic else 1
    found: list[tuple[Sizes, tuple[Phase, ...]]] = []
    for stage, shard in enumerate(actor_shards(arch, layout, padded)):
        states = optimizer_bytes(shard, layout, width, config.parallel.use_distributed_optimizer)
        sizes = Sizes(
            parameters=models * shard.total * width,
            gradients=models * shard.total * 4,
            optimizer=models * states,
            activations=activation_bytes(arch, config, layout, stage, width, micro_batches, device_type == "cuda"),
            engine_weights=weights,
            kv_cache=max(cache, 0),
            layer=layer,
            bucket=config.sync.update_weight_buffer_size,
        )
        found.append((sizes, tuple(phases(sizes, stays))))
    peaks = [max(phase.bytes for phase in sequence) for _, sequence in found]
    stage = peaks.index(max(peaks))
    sizes, sequence = found[stage]
    kv_tokens = max(cache, 0) // token
    at_once = int(kv_tokens // (work.prompt + work.mean_response)) if kv_tokens >= config.max_model_len else 0
    return Memory(
        stage=stage,
        sizes=sizes,
        phases=sequence,
        stages=tuple(peaks),
        fixed={"contexts and NCCL": CONTEXT, "CUDA graphs": GRAPHS, "fragmentation": int(gpu.memory * FRAGMENTATION)}
        if gpu
        else {},
        budget=budget,
        host=_host(config, sizes, stays, device_type),
        kv_token=token,
        kv_tokens=kv_tokens,
        requests=min(engine.vllm_max_num_seqs, at_once),
        engine_budget=engine_budget,
    )


def _engine_workspace(config: Config, arch: ModelArch, gpu: Gpu) -> int:
    """Peak of vLLM's profile run: activations of a full step and the sampler's fp32 logits."""
    e = config.engine
    tokens = e.vllm_max_num_batched_tokens or (16_384 if gpu.memory >= 70 * GIB else 8_192)
    mlp = arch.intermediate_size / e.vllm_tensor_parallel_size
    experts = arch.num_experts_per_tok * arch.moe_intermediate_size / e.vllm_tensor_parallel_size if arch.is_moe else 0
    columns = 4 * arch.hidden_size + 3 * max(mlp, experts) + (arch.num_experts_per_tok * arch.hidden_size)
    return int(tokens * columns * 2 + 2 * e.vllm_max_num_seqs * arch.vocab_size * 4)


def _host(config: Config, sizes: Sizes, stays: Residency, device_type: str) -> dict[str, int]:
    found: dict[str, int] = {}
    if config.histospec.histospec:
        found["history (limit)"] = int(config.histospec.histospec_memory_gib * GIB)
    if device_type == "cuda":
        if not stays.engine_while_training:
            found["engine weights, asleep"] = sizes.engine_weights
        if not stays.optimizer_in_rollout:
            found["optimizer state, away"] = sizes.optimizer
    if config.algorithm.needs_reference:
        models = 2 if config.algorithm.needs_critic else 1
        found["reference weights, and the actor's own while they are lent"] = 2 * sizes.parameters // models
    return found


# ------------------------------------------------------------------------------------------------------------- advice


@dataclass(frozen=True)
class Advice:
    """Options to change, as on the command line, and the peak that results. `fits` says whether that is enough."""

    options: tuple[str, ...]
    peak: int
    fits: bool


def advise(config: Config, arch: ModelArch, world: int, device_type: str, gpu: Gpu, work: Workload) -> Advice | None:
    """The fewest changes, greedily, that make it fit, cheapest in speed first; what comes closest if none do. None if it
    fits as it is."""

    def shortfall(candidate: Config) -> tuple[Memory, float]:
        memory = estimate(candidate, arch, describe_layout(arch, candidate.parallel, world), device_type, gpu, work)
        assert memory.budget is not None
        over = sum(max(0, phase.bytes - memory.budget) for phase in memory.phases)
        # A cache that is too small counts by what the weights lack.
        missing = 0 if memory.requests else memory.sizes.engine_weights + GIB
        return memory, float(over + missing)

    memory, missing = shortfall(config)
    if not memory.problems():
        return None
    chosen: list[str] = []
    for _ in range(6):
        best: tuple[float, Config, str, Memory] | None = None
        for option, candidate in _changes(config):
            try:
                check_layout(arch, candidate.parallel, world, device_type)
                found, left = shortfall(candidate)
            except ConfigError:
                continue
            if not found.problems():
                return Advice((*chosen, option), found.peak.bytes, True)
            if left < missing and (best is None or left < best[0]):
                best = (left, candidate, option, found)
        if best is None:
            break
        missing, config, option, memory = best
        chosen = [c for c in chosen if c.split()[0] != option.split()[0]] + [option]
    return Advice(tuple(chosen), memory.peak.bytes, False) if chosen else None


def _changes(config: Config) -> Iterator[tuple[str, Config]]:
    """Single changes that save memory, cheapest first: (option, changed configuration)."""

    def with_(section: str, **values: object) -> Config:
        part: Section = getattr(config, section)
        return config.model_copy(update={section: part.model_copy(update=values)})

    p, e, a = config.parallel, config.engine, config.algorithm
    if not p.use_distributed_optimizer:
        yield "--use-distributed-optimizer", with_("parallel", use_distributed_optimizer=True)
    if not e.vllm_enable_sleep_mode:
        yield "--vllm-enable-sleep-mode", with_("engine", vllm_enable_sleep_mode=True)
    if p.tensor_model_parallel_size > 1 and not p.sequence_parallel:
        yield "--sequence-parallel", with_("parallel", sequence_parallel=True)
    if not config.sync.offload_gradients:
        yield "--offload-gradients", with_("sync", offload_gradients=True)
    if not config.sync.offload_optimizer:
        yield "--offload-optimizer", with_("sync", offload_optimizer=True)
    if not config.model.recompute_activations:
        yield "--recompute-activations", with_("model", recompute_activations=True)
    if a.max_tokens_per_microbatch // 2 >= config.max_model_len:
        half = a.max_tokens_per_microbatch // 2
        yield f"--max-tokens-per-microbatch {half}", with_("algorithm", max_tokens_per_microbatch=half)
    for share in (0.1, -0.1, -0.2):
        changed = round(e.vllm_gpu_memory_utilization + share, 2)
        if 0.2 <= changed <= 0.9:
            yield (
                f"--vllm-gpu-memory-utilization {changed}",
                with_("engine", vllm_gpu_memory_utilization=changed),
            )
    yield (
        f"--vllm-tensor-parallel-size {2 * e.vllm_tensor_parallel_size}",
        with_("engine", vllm_tensor_parallel_size=2 * e.vllm_tensor_parallel_size),
    )
    tp = 2 * p.tensor_model_parallel_size
    yield (
        f"--tensor-model-parallel-size {tp} --sequence-parallel",
        with_("parallel", tensor_model_parallel_size=tp, sequence_parallel=True),
    )
    ep = 2 * p.expert_model_parallel_size
    yield f"--expert-model-parallel-size {ep}", with_("parallel", expert_model_parallel_size=ep)
    pp = 2 * p.pipeline_model_parallel_size
    yield f"--pipeline-model-parallel-size {pp}", with_("parallel", pipeline_model_parallel_size=pp)
