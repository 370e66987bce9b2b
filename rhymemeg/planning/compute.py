"""FLOPs of a step, the least time that each phase could take, and the time to expect. Pure.

Floating-point operations a token, forward: two for each weight that the token meets (k of the experts), the output layer
included and the embedding not; and in each layer 2 x heads x (width of a key + width of a value) for every token attended
to, counted causally. Backward is twice the forward pass; recomputation adds one forward pass.

    floor       all ranks at the data sheet's peak: FLOPs / peak for training and log-probabilities; for the rollout the
                engine steps that the longest response or the mean load needs, each at the speed of the memory (weights
                read once a step, keys and values of every running request once) or of the arithmetic
    expected    the floor over the share of the peak that such programs reach (`Efficiency`), with the losses that the
                layout itself causes: the pipeline's bubble, uneven micro-batches, engines that wait for the longest

Lengths come from `workload`. Speculation and HistoPipe are not granted: both depend on history that a plan lacks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.histopipe.cost import CostModel
from rhymemeg.parallel.layout_checks import Layout
from rhymemeg.planning.activations import widths
from rhymemeg.planning.hardware import Gpu
from rhymemeg.planning.memory import Memory
from rhymemeg.planning.shards import engine_shard
from rhymemeg.planning.workload import Workload
from rhymemeg.weight_sync.layouts import ModelLayout
from rhymemeg.weight_sync.rules import Rule

MAX_PLANNED_SAMPLES = 65_536
"""Above this, the balance of micro-batches is that of a random part of the samples (and of the ranks)."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peak that are reached. Training: dense models train at 0.38 to 0.43 (Llama 3, arXiv 2407.21783, table
    4), DeepSeek-V3 at 0.39 of the BF16 peak with FP8 (`tests/planning`); rollout: 0.8, Qwen2.5-7B on an A100 against this
    module's floor (the same tests)."""

    train_dense: float = 0.40
    train_moe: float = 0.30
    rollout: float = 0.80
    step_overhead: float = 0.5e-3
    """Seconds of an engine step that are neither memory nor arithmetic: launch, sampling, the loop around it."""
    reduce_in_node: float = 8e-6
    reduce_across_nodes: float = 30e-6
    """Seconds of one small all-reduce over the ranks of an engine, of which a step has two a layer. Assumptions."""


def active_parameters(arch: ModelArch) -> int:
    """Weights that a token meets: everything but the embedding, of the experts k. A tied output layer counts."""
    table = ModelLayout(arch).table

    def size(rules: dict[str, Rule]) -> int:
        return sum(math.prod(part.shape) for rule in rules.values() for part in rule.parts)

    moe = sum(arch.layer_is_moe(layer) for layer in range(arch.num_layers))
    found = arch.vocab_size * arch.hidden_size + (arch.num_layers - moe) * size(table.dense)
    if moe:
        found += moe * (size(table.moe) + arch.num_experts_per_tok * size(table.expert))
    return found


def attention_flops(arch: ModelArch, context: float) -> float:
    """Forward, of one token that attends to `context` tokens, all layers."""
    x = widths(arch, False)
    return 2 * arch.num_layers * (x.query + x.value_out) * context


def forward_flops(arch: ModelArch, length: float) -> float:
    """Forward, a token of a sequence of `length` tokens (causal: half of it is attended to on average)."""
    return 2 * active_parameters(arch) + attention_flops(arch, length / 2)


def sequence_flops(arch: ModelArch, lengths: list[int]) -> float:
    """Forward, all tokens of these sequences."""
    n = np.asarray(lengths, np.float64)
    return float(2 * active_parameters(arch) * n.sum() + attention_flops(arch, 1.0) * (n * n).sum() / 2)


# ------------------------------------------------------------------------------------------------------------ rollout


def engine_cost(arch: ModelArch, config: Config, gpu: Gpu, width: int, kv_token: int, context: float) -> CostModel:
    """Seconds of a decode step at the data sheet's speed, by number of running requests: `kv_token` bytes a rank for each
    of `context` tokens of each request, and the weights that the batch meets."""
    tp, whole = config.engine.vllm_tensor_parallel_size, config.engine.vllm_enable_expert_parallel
    held, experts = engine_shard(arch, tp, whole) * width, 0
    if arch.is_moe:
        moe = sum(arch.layer_is_moe(layer) for layer in range(arch.num_layers))
        each = sum(math.prod(part.shape) for rule in ModelLayout(arch).table.expert.values() for part in rule.parts)
        experts = moe * arch.num_experts * each * width // tp
    embedding = 0 if arch.tie_word_embeddings else arch.vocab_size * arch.hidden_size * width // tp
    flops = (2 * active_parameters(arch) + attention_flops(arch, context)) / tp
    grid = sorted(
        {1, *(2**k for k in range(1, 13) if 2**k < config.engine.vllm_max_num_seqs), config.engine.vllm_max_num_seqs}
    )
    seconds = []
    for running in grid:
        met = 1 - (1 - arch.num_experts_per_tok / arch.num_experts) ** running if arch.is_moe else 0.0
        read = held - embedding - experts * (1 - met) + running * context * kv_token
        seconds.append(max(read / gpu.memory_bandwidth, running * flops / gpu.flops))
    prefill = 2 * active_parameters(arch) / tp / gpu.flops
    return CostModel("roofline", tuple(map(float, grid)), (1.0,), tuple((s,) for s in seconds), prefill)


@dataclass(frozen=True)
class Rollout:
    """Seconds. `even`: every engine has its share of the tokens; `longest`: the longest response alone; the floor is the
    larger. `expected` is of a random split over the engines. `idle`: share of engine time without a request."""

    even: float
    longest: float
    expected: float
    idle: float
    slots: int

    @property
    def floor(self) -> float:
        return max(self.even, self.longest)


def rollout_time(
    arch: ModelArch,
    config: Config,
    gpu: Gpu,
    work: Workload,
    memory: Memory,
    width: int,
    world: int,
    efficiency: Efficiency,
) -> Rollout:
    """One step's samples, dealt over all engines prompt by prompt."""
    engines = world // config.engine.vllm_tensor_parallel_size
    slots = max(1, min(memory.requests, config.engine.vllm_max_num_seqs))
    cost = engine_cost(arch, config, gpu, width, memory.kv_token, work.mean_context)
    share = max(1, min(slots, math.ceil(work.samples / engines)))
    at = np.arange(1, share + 1)
    per_token = float(np.min(cost.step_seconds(at) / at))
    prefill = work.samples * work.prompt * cost.prefill_seconds_per_token / engines
    even = work.generated / engines * per_token + prefill
    longest = float(work.responses.max()) * float(cost.step_seconds(1))
    tp = config.engine.vllm_tensor_parallel_size
    reduce = efficiency.reduce_in_node if tp <= gpu.gpus_a_node else efficiency.reduce_across_nodes
    overhead = efficiency.step_overhead + 2 * arch.num_layers * reduce * (tp > 1)
    real = replace(
        cost,
        seconds=tuple((s / efficiency.rollout + overhead,) for (s,) in cost.seconds),
        prefill_seconds_per_token=cost.prefill_seconds_per_token / efficiency.rollout,
    )
    order = np.random.default_rng(0).permutation(work.samples)
    lengths = work.responses.ravel()[order]
    busy = np.array([drain_seconds(lengths[e::engines], slots, real) for e in range(min(engines, 512))])
    spent = busy + prefill / efficiency.rollout
    return Rollout(
        even, longest, float(spent.max()), float(1 - spent.mean() / spent.max()) if spent.max() else 0.0, slots
    )


def drain_seconds(lengths: np.ndarray, slots: int, cost: CostModel) -> float:
    """How long an engine takes for these responses, longest queue order as given, `slots` at once, one token a step."""
    import heapq

    if not len(lengths):
        return 0.0
    table = cost.step_seconds(np.arange(slots + 1))
    running = [int(n) for n in lengths[:slots]]
    heapq.heapify(running)
    now, seconds = 0, 0.0
    for n in lengths[slots:]:
        done = heapq.heappop(running)
        seconds += (done - now) * float(table[slots])
        now = done
        heapq.heappush(running, now + int(n))
    while running:
        done = running[0]
        seconds += (done - now) * float(table[len(running)])
        now = done
        heapq.heappop(running)
    return seconds


# ----------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Training:
    """Seconds of updates and of forward passes; FLOPs of all ranks. `bubble`: share of the pipeline's time that it fills and
    drains; `dp_imbalance`: busiest data-parallel rank over the mean; `padding`: share of the tokens that are padding;
    `stage_imbalance`: heaviest pipeline stage over the mean."""

    train_flops: float
    log_prob_flops: float
    train_floor: float
    log_prob_floor: float
    train: float
    log_prob: float
    micro_batches: int
    bubble: float
    dp_imbalance: float
    padding: float
    stage_imbalance: float


def training_time(
    arch: ModelArch, config: Config, layout: Layout, gpu: Gpu, work: Workload, efficiency: Efficiency
) -> Training:
    """All optimizer steps of one training phase, a critic's included, and the forward passes before it: old
    log-probabilities, the reference's, a critic's values (`rhymemeg.learner`)."""
    a = config.algorithm
    forward = sequence_flops(arch, work.lengths)
    passes = 3 + config.model.recompute_activations
    train = forward * passes * a.ppo_epochs * (2 if a.needs_critic else 1)
    needs_old = a.old_log_probs == "actor" and (a.ppo_epochs * a.num_minibatches > 1 or a.kl_coef > 0)
    log_prob = forward * (needs_old + a.needs_reference + a.needs_critic)
    peak = gpu.flops * layout.world_size
    share = efficiency.train_moe if arch.is_moe else efficiency.train_dense
    micro_batches, imbalance, padding = balance(config, arch, layout, work)
    stages = stage_flops(arch, layout, work)
    stage_imbalance = max(stages) / (sum(stages) / len(stages))
    bubble = (layout.pp - 1) / (layout.vpp * micro_batches + layout.pp - 1)
    slower = imbalance * stage_imbalance / (1 - bubble) / (1 - padding)
    # Recomputed operations are work as well, but no part of what the published shares of the peak count.
    return Training(
        train,
        log_prob,
        train / peak,
        log_prob / peak,
        train / peak / share * slower,
        log_prob / peak / share * slower,
        micro_batches,
        bubble,
        imbalance,
        padding,
        stage_imbalance,
    )


def balance(config: Config, arch: ModelArch, layout: Layout, work: Workload) -> tuple[int, float, float]:
    """Micro-batches a data-parallel rank, imbalance over these ranks, and padding, of the first optimizer step: what the
    run's own planner makes of the drawn lengths."""
    from rhymemeg.rl.batching import plan_micro_batches  # which imports torch

    lengths = np.random.default_rng(0).permutation(np.asarray(work.lengths))
    lengths = lengths[: math.ceil(len(lengths) / config.algorithm.num_minibatches)]
    ranks = layout.dp
    if len(lengths) > MAX_PLANNED_SAMPLES:
        part = math.ceil(len(lengths) / MAX_PLANNED_SAMPLES)
        ranks = max(1, ranks // part)
        lengths = lengths[: len(lengths) * ranks // layout.dp]
    tokens = config.algorithm.max_tokens_per_microbatch
    plan = plan_micro_batches(lengths.tolist(), ranks, tokens, arch.hidden_size)
    rows, padded, real = [], 0, int(lengths.sum())
    for rank in plan:
        cost = 0.0
        for batch in rank:
            if batch:
                longest = int(max(lengths[i] for i in batch))
                padded += longest * len(batch)
                cost += longest * len(batch) * forward_flops(arch, longest)
        rows.append(cost)
    return len(plan[0]), max(rows) / (sum(rows) / len(rows)), 1 - real / padded


def stage_flops(arch: ModelArch, layout: Layout, work: Workload) -> list[float]:
    """Relative forward FLOPs of each pipeline stage; the last has the output layer."""
    head = 2.0 * arch.vocab_size * arch.hidden_size
    length = work.prompt + work.mean_response
    one = {
        moe: forward_flops(_one_layer(arch, moe), length) - head for moe in ({True, False} if arch.is_moe else {False})
    }
    found = []
    for stage, parts in enumerate(layout.stages):
        flops = sum(one[arch.layer_is_moe(layer)] for part in parts for layer in part)
        found.append(flops + head * (stage == layout.pp - 1))
    return found


def _one_layer(arch: ModelArch, moe: bool) -> ModelArch:
    return replace(arch, num_layers=1, dense_layers=() if moe else (0,))
