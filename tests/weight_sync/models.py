"""Small models of every family: descriptions, random descriptions, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from rhymemeg.arch import ModelArch
from rhymemeg.weight_sync.deepseek import describe

if TYPE_CHECKING:
    import torch

BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


def config(architecture: str, **changes: Any) -> dict[str, Any]:
    experts = MOE if architecture == "Qwen3MoeForCausalLM" else {}
    return {"architectures": [architecture], **BASE, **experts, **changes}


def arch(architecture: str, **changes: Any) -> ModelArch:
    return ModelArch.from_config(config(architecture, **changes))


def write_checkpoint(folder: Path, architecture: str, seed: int = 0, **changes: Any) -> dict[str, torch.Tensor]:
    """A model folder with random weights; returns them."""
    import torch
    from safetensors.torch import save_file

    from rhymemeg.weight_sync.layouts import hf_tensors

    folder.mkdir(parents=True, exist_ok=True)
    model_type = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
    settings = config(architecture, model_type=model_type.get(architecture, "qwen3_moe"), dtype="float32", **changes)
    (folder / "config.json").write_text(json.dumps(settings))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if "norm" in name else 0.0)
        for name, shape in hf_tensors(ModelArch.from_config(settings)).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 37,
    "hidden_size": 6,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 5,
    "kv_lora_rank": 3,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "max_position_embeddings": 64,
}
"""A DeepSeek-V3 with few of everything."""

ARCHITECTURES = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"]


@st.composite
def random_arch(draw: st.DrawFn, tp: int = 1, etp: int = 1, ep: int = 1) -> ModelArch:
    """A small model that these sizes divide."""
    name = draw(st.sampled_from([*ARCHITECTURES, "DeepseekV3ForCausalLM"]))
    if name == "DeepseekV3ForCausalLM":
        experts = {"n_routed_experts": ep * draw(st.integers(1, 3)), "q_lora_rank": draw(st.sampled_from([None, 5]))}
        return describe({**DEEPSEEK, **experts, "n_shared_experts": draw(st.integers(0, 2))})
    kv = draw(st.sampled_from([1, 2, 4, 8]))
    heads = kv * draw(st.sampled_from([x for x in (1, 2, 3, 4, 8) if kv * x % tp == 0] or [tp]))
    changes: dict[str, Any] = {
        "vocab_size": draw(st.integers(1, 40)),
        "hidden_size": 2 * draw(st.integers(1, 3)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 8 * draw(st.integers(1, 2)),
        "intermediate_size": 8 * draw(st.integers(1, 2)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if name == "Qwen3MoeForCausalLM":
        changes.update(
            num_experts=ep * draw(st.integers(1, 3)),
            num_experts_per_tok=1,
            moe_intermediate_size=8 * draw(st.integers(1, 2)),
            decoder_sparse_step=draw(st.sampled_from([1, 2])),
        )
    return arch(name, **changes)
