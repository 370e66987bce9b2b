"""`--dry-run`: check the options against the model and the number of ranks, and say what the run would be. Pure apart
from reading the model's files; no process group, no GPU, no engine.

    python -m rhymemeg.train --dry-run --gpu-type h100 --num-gpus 256 --config ...

plans for GPUs that are not here: the model folder needs nothing but its config.json, and what cannot be looked at on this
machine (prompts, tokenizer) is named instead of refused. The numbers are those of `rhymemeg.planning`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from rhymemeg.arch import FAMILIES, ModelArch
from rhymemeg.cli import DryRun
from rhymemeg.config import Config
from rhymemeg.errors import CheckpointError, ConfigError, DataError, RhymeMegError
from rhymemeg.parallel.layout_checks import Layout, check_layout
from rhymemeg.planning.hardware import gpu_type
from rhymemeg.planning.plan import Plan, make_plan, show_count

DOES_NOT_FIT = 1
"""Exit status where everything is in order but the memory."""


def run(config: Config, options: DryRun) -> int:
    """Check, plan, print (on rank 0). Returns 0, or `DOES_NOT_FIT`. Raises RhymeMegError for what cannot be run."""
    from rhymemeg.parallel.runtime import choose_device_type

    gpu = gpu_type(options.gpu_type) if options.gpu_type else None
    device_type = "cuda" if gpu else choose_device_type(config.run.device)
    world = options.num_gpus or int(os.environ.get("WORLD_SIZE", "1"))
    arch = read_arch(config.model.hf_checkpoint)
    config.check_model(arch)
    check_layout(arch, config.parallel, world, device_type)
    check_engines(config, world, device_type)
    unchecked = _check_what_is_here(config) if gpu else check_files(config)
    if arch.family not in FAMILIES.values():
        unchecked = [*unchecked, f"{arch.architecture} can be planned; training it is not supported yet"]
    plan = make_plan(
        config,
        arch,
        world,
        device_type,
        gpu,
        mean_response=options.mean_response_len,
        network=options.network_gb_per_s * 1e9,
    )
    if os.environ.get("RANK", "0") == "0":
        if options.json:
            print(json.dumps(plan.as_dict() | {"unchecked": unchecked}, indent=1))
        else:
            print(report(config, arch, plan, unchecked))
    return 0 if plan.fits else DOES_NOT_FIT


def read_arch(folder: str) -> ModelArch:
    """The model of a folder, also of a family that can be planned but not trained."""
    from rhymemeg.weight_sync.deepseek import ARCHITECTURE, describe

    file = Path(folder) / "config.json"
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ModelArch.from_pretrained(folder)  # says what is wrong
    if isinstance(tree, dict) and ARCHITECTURE in (tree.get("architectures") or []):
        return describe(tree, str(file))
    return ModelArch.from_config(tree, str(file))


def report(config: Config, arch: ModelArch, plan: Plan, unchecked: list[str]) -> str:
    """A readable page about a configuration that has passed its checks."""
    layout, world = plan.layout, plan.world
    device = plan.device_type if plan.gpu is None else plan.gpu.name
    lines = [
        f"model       {config.model.hf_checkpoint}: {arch.architecture}, {show_count(arch.num_parameters())} parameters, "
        f"{arch.num_layers} layers, hidden {arch.hidden_size}, vocabulary {arch.vocab_size}"
        + (f", {arch.num_experts} experts ({arch.num_experts_per_tok} a token)" if arch.is_moe else ""),
        f"ranks       {world} ({device}): TP {layout.tp}, PP {layout.pp}"
        + (f" (virtual {layout.vpp})" if layout.vpp > 1 else "")
        + f", CP {layout.cp}, DP {layout.dp}"
        + (f", EP {layout.ep}, expert TP {layout.etp}" if arch.is_moe else ""),
        f"engines     {world // config.engine.vllm_tensor_parallel_size} of TP "
        f"{config.engine.vllm_tensor_parallel_size}, at most {config.engine.vllm_max_num_seqs} requests each",
        f"step        {config.rollout.rollout_batch_size} prompts x {config.rollout.n_samples_per_prompt} samples, up to "
        f"{config.max_model_len} tokens each; {config.algorithm.num_minibatches * config.algorithm.ppo_epochs} optimizer "
        f"step(s), micro-batches of up to {config.algorithm.max_tokens_per_microbatch} tokens",
        f"run         {config.run.train_iters} steps into {config.run.output_dir}",
        "",
        *_layout_table(layout),
        "",
        *plan.lines(),
    ]
    return "\n".join([*lines, *(f"not checked here: {what}" for what in unchecked)])


def check_engines(config: Config, world_size: int, device_type: str) -> None:
    """The engines' layout against the number of ranks and the device."""
    size = config.engine.vllm_tensor_parallel_size
    if config.engine.vllm_enable_expert_parallel and size > 1 and device_type == "cpu":
        raise ConfigError(
            "--vllm-enable-expert-parallel needs a GPU: vLLM's CPU kernel for experts cannot hold a part of them"
        )
    if world_size % size:
        raise ConfigError(f"--vllm-tensor-parallel-size {size} does not divide the world size of {world_size} ranks")


def check_files(config: Config) -> list[str]:
    """What a run would read, weights aside: prompts, rewards, profile, checkpoint. Raises the error that the run would;
    returns what it could not look at, which is nothing."""
    from rhymemeg.data.prompts import load_prompts
    from rhymemeg.data.tokenizer import load_tokenizer
    from rhymemeg.evaluation import load_held_out
    from rhymemeg.rl.rewards import Scorer

    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    prompts = load_prompts(config.data, tokenizer, max_prompt_len=config.rollout.max_prompt_len)
    Scorer.from_options(config.data, prompts.default_reward, config.data.reward_args).close()
    for held_out in load_held_out(config, tokenizer):
        held_out.scorer.close()
    if config.histospec.histospec and config.histospec.histospec_profile:
        from rhymemeg.histospec.cost_model import CostModel

        CostModel.load(config.histospec.histospec_profile)
    if reference := config.model.ref_hf_checkpoint:
        _check_reference(reference, ModelArch.from_pretrained(config.model.hf_checkpoint))
    if config.histospec.histospec and (file := config.histospec.histospec_warm_start) and not Path(file).is_file():
        raise DataError(f"--histospec-warm-start: {file} is not a file")
    if config.checkpoint.load not in ("", "auto") and not Path(config.checkpoint.load).is_dir():
        raise CheckpointError(f"--load: {config.checkpoint.load} does not exist")
    return []


def _check_reference(folder: str, arch: ModelArch) -> None:
    """The reference model borrows the actor's modules, so its shapes must be the actor's."""
    try:
        reference = ModelArch.from_pretrained(folder)
    except RhymeMegError as error:
        raise ConfigError(f"--ref-hf-checkpoint: {str(error).removeprefix('--hf-checkpoint: ')}") from None
    for name in ("architecture", "num_layers", "hidden_size", "vocab_size"):
        if getattr(reference, name) != getattr(arch, name):
            raise ConfigError(
                f"--ref-hf-checkpoint: {name} of {folder} is {getattr(reference, name)}, the model's is {getattr(arch, name)}"
            )


def _check_what_is_here(config: Config) -> list[str]:
    """`check_files` for a run that is to happen elsewhere: returns what is not in order here, instead of raising."""
    try:
        return check_files(config)
    except RhymeMegError as error:
        return [str(error)]
    except OSError as error:  # transformers, about a tokenizer that is not in the folder
        return [str(error).splitlines()[0]]


def _layout_table(layout: Layout, most: int = 16) -> list[str]:
    lines = ["rank   tp  cp  dp  pp  ep  layers"]
    for rank in range(min(layout.world_size, most)):
        place = layout.place(rank)
        layers = ", ".join(f"{r.start}-{r.stop - 1}" for r in place.layers if len(r))
        lines.append(f"{rank:>4} {place.tp:>4} {place.cp:>3} {place.dp:>3} {place.pp:>3} {place.ep:>3}  {layers}")
    if layout.world_size > most:
        lines.append(f"  ... {layout.world_size - most} more")
    return lines
