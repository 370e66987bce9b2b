"""`--dry-run`: check the options against the model and the number of ranks, and say what the run would be. Pure apart
from reading the model's files; no process group, no GPU, no engine.

Sizes are estimates of what one rank holds, in bytes:

    parameters        params_dtype of the rank's shard
    gradients         fp32 of the shard (Megatron's gradient buffer)
    optimizer         fp32 master weights and two Adam moments, over DP ranks with the distributed optimizer
    engine            params_dtype of the model / engine TP
    KV cache          2 * layers * KV heads / engine TP * head_dim * bytes, a token
"""

from __future__ import annotations

from pathlib import Path

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.errors import CheckpointError, ConfigError
from rhymemeg.parallel.layout_checks import Layout, describe_layout


def report(config: Config, arch: ModelArch, world_size: int, device_type: str) -> str:
    """A readable page about a configuration that has passed its checks."""
    layout = describe_layout(arch, config.parallel, world_size)
    lines = [
        f"model       {config.model.hf_checkpoint}: {arch.architecture}, {_count(arch.num_parameters())} parameters, "
        f"{arch.num_layers} layers, hidden {arch.hidden_size}, vocabulary {arch.vocab_size}"
        + (f", {arch.num_experts} experts ({arch.num_experts_per_tok} a token)" if arch.is_moe else ""),
        f"ranks       {world_size} ({device_type}): TP {layout.tp}, PP {layout.pp}"
        + (f" (virtual {layout.vpp})" if layout.vpp > 1 else "")
        + f", CP {layout.cp}, DP {layout.dp}"
        + (f", EP {layout.ep}, expert TP {layout.etp}" if arch.is_moe else ""),
        f"engines     {world_size // config.engine.vllm_tensor_parallel_size} of TP "
        f"{config.engine.vllm_tensor_parallel_size}, at most {config.engine.vllm_max_num_seqs} requests each",
        f"step        {config.rollout.rollout_batch_size} prompts x {config.rollout.n_samples_per_prompt} samples, up to "
        f"{config.max_model_len} tokens each; {config.algorithm.num_minibatches * config.algorithm.ppo_epochs} optimizer "
        f"step(s), micro-batches of up to {config.algorithm.max_tokens_per_microbatch} tokens",
        f"run         {config.run.train_iters} steps into {config.run.output_dir}",
        "",
        *_layout_table(layout),
        "",
        *_sizes(config, arch, layout, device_type),
    ]
    return "\n".join(lines)


def check_engines(config: Config, world_size: int, device_type: str) -> None:
    """The engines' layout against the number of ranks and the device."""
    size = config.engine.vllm_tensor_parallel_size
    if config.engine.vllm_enable_expert_parallel and size > 1 and device_type == "cpu":
        raise ConfigError(
            "--vllm-enable-expert-parallel needs a GPU: vLLM's CPU kernel for experts cannot hold a part of them"
        )
    if world_size % size:
        raise ConfigError(f"--vllm-tensor-parallel-size {size} does not divide the world size of {world_size} ranks")


def check_files(config: Config) -> None:
    """What a run would read, weights aside: prompts, rewards, profile, checkpoint. Raises the error that the run would."""
    from rhymemeg.data.prompts import load_prompts
    from rhymemeg.data.tokenizer import load_tokenizer
    from rhymemeg.rl.rewards import Scorer

    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    for evaluation in (False, True) if config.data.eval_interval else (False,):
        prompts = load_prompts(
            config.data, tokenizer, max_prompt_len=config.rollout.max_prompt_len, evaluation=evaluation
        )
        Scorer.from_options(config.data, prompts.default_reward, config.data.reward_args).close()
    if config.histospec.histospec and config.histospec.histospec_profile:
        from rhymemeg.histospec.cost_model import CostModel

        CostModel.load(config.histospec.histospec_profile)
    if config.checkpoint.load not in ("", "auto") and not Path(config.checkpoint.load).is_dir():
        raise CheckpointError(f"--load: {config.checkpoint.load} does not exist")


def _layout_table(layout: Layout, most: int = 16) -> list[str]:
    lines = ["rank   tp  cp  dp  pp  ep  layers"]
    for rank in range(min(layout.world_size, most)):
        place = layout.place(rank)
        layers = ", ".join(f"{r.start}-{r.stop - 1}" for r in place.layers if len(r))
        lines.append(f"{rank:>4} {place.tp:>4} {place.cp:>3} {place.dp:>3} {place.pp:>3} {place.ep:>3}  {layers}")
    if layout.world_size > most:
        lines.append(f"  ... {layout.world_size - most} more")
    return lines


def shard_parameters(arch: ModelArch, layout: Layout) -> int:
    """Parameters of the fullest rank: its layers, split over TP and EP, and the embeddings of the first stage."""
    h, d = arch.hidden_size, arch.head_dim
    attention = h * d * (2 * arch.num_attention_heads + 2 * arch.num_key_value_heads) / layout.tp + 2 * h

    def mlp(layer: int) -> float:
        if arch.layer_is_moe(layer):
            experts = arch.num_experts * 3 * h * arch.moe_intermediate_size
            return experts / layout.ep / layout.etp + arch.num_experts * h
        return 3 * h * arch.intermediate_size / layout.tp

    embedding = arch.vocab_size * h / layout.tp
    largest = 0.0
    for stage, parts in enumerate(layout.stages):
        size = sum(attention + mlp(layer) for part in parts for layer in part)
        first, last = stage == 0, stage == layout.pp - 1
        size += embedding * (first + (last and (layout.pp > 1 or not arch.tie_word_embeddings)))
        largest = max(largest, size)
    return int(largest)


def _sizes(config: Config, arch: ModelArch, layout: Layout, device_type: str) -> list[str]:
    dtype = config.model.params_dtype
    width = 4 if dtype == "fp32" or (dtype == "auto" and device_type == "cpu") else 2
    shard = shard_parameters(arch, layout)
    sharded = layout.dp if config.parallel.use_distributed_optimizer else 1
    states = 2 if width == 4 else 3  # fp32 parameters are their own master copy
    tp = config.engine.vllm_tensor_parallel_size
    kv_heads = max(arch.num_key_value_heads // tp, 1)
    token = 2 * arch.num_layers * kv_heads * arch.head_dim * width
    tokens = config.engine.vllm_max_num_seqs * config.max_model_len
    rows = [
        ("parameters", shard * width),
        ("gradients", shard * 4),
        ("optimizer state", shard * 4 * states // sharded),
        ("engine weights", arch.num_parameters() * width // tp),
        (f"KV cache, all {config.engine.vllm_max_num_seqs} requests at full length", token * tokens),
    ]
    lines = ["a rank holds at most (estimate)"]
    lines += [f"  {_bytes(size):>10}  {name}" for name, size in rows]
    lines.append(f"  {_bytes(sum(size for _, size in rows)):>10}  together, without activations and libraries")
    if device_type == "cpu":
        lines.append(f"  (KV cache given: {config.engine.vllm_kv_cache_memory_gib} GiB; requests wait when it is full)")
    return lines


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _count(number: float) -> str:
    for unit in ("", "K", "M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}B"
