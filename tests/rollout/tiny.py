"""A small random Qwen3 and an engine of it, for the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config, EngineOptions, ModelOptions, RolloutOptions, RunOptions
from rhymemeg.rollout.spec import EngineSpec

VOCAB = 96


@dataclass
class OneRank:
    """This process alone."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device_type: str = "cpu"


def one_rank() -> OneRank:
    """This process alone, with torch.distributed running (the engine uses what it finds)."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return OneRank()


def make_model(folder: Path, *, tie: bool = False, seed: int = 0) -> Path:
    """Save a random Qwen3 whose next-token distributions are neither flat nor peaked."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tie,
        eos_token_id=1,
        bos_token_id=0,
        initializer_range=0.15,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


def config(model: Path | str, **engine: Any) -> Config:
    """Options of a run on `model` with short prompts and responses."""
    return Config(
        run=RunOptions(device="cpu", seed=5),
        model=ModelOptions(hf_checkpoint=str(model)),
        rollout=RolloutOptions(max_prompt_len=64, max_response_len=192),
        engine=EngineOptions(**({"vllm_max_num_seqs": 32, "vllm_kv_cache_memory_gib": 0.05} | engine)),
    )


def spec(model: Path | str, arch: ModelArch, **changes: Any) -> EngineSpec:
    """The spec of a small engine."""
    return replace(EngineSpec.from_config(config(model), arch, "cpu"), **changes)
