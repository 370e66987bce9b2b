"""What Megatron's shards and vLLM's slices are, written anew from whole tensors with reshape, split and concatenate: the
reference for the tables and the planner, sharing no code with them."""

from __future__ import annotations

import numpy as np

from rhymemeg.arch import ModelArch
from rhymemeg.weight_sync.layouts import hf_tensors


def numbered(a: ModelArch) -> dict[str, np.ndarray]:
    """A checkpoint in which every element of every tensor has a number of its own."""
    tensors, first = {}, 1
    for name, shape in hf_tensors(a).items():
        size = int(np.prod(shape))
        tensors[name] = np.arange(first, first + size).reshape(shape)
        first += size
    return tensors


def megatron_shard(a: ModelArch, hf: dict[str, np.ndarray], name: str, rank: int, size: int, padded: int) -> np.ndarray:
    """The shard as Megatron defines it; 0 where the vocabulary is padded."""
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        head = name == "output_layer.weight" and not a.tie_word_embeddings
        full = hf["lm_head.weight" if head else "model.embed_tokens.weight"]
        full = np.concatenate([full, np.zeros((padded - len(full), full.shape[1]), int)])
        return np.split(full, size)[rank]
    if name == "decoder.final_layernorm.weight":
        return hf["model.norm.weight"]
    _, _, layer, rest = name.split(".", 3)
    deepseek = a.family == "deepseek_v3"
    at = f"model.layers.{layer}."
    if rest.split(".")[1].startswith(("linear_q_", "linear_kv_")):  # latent attention
        mla = {"linear_q_up_proj": "q_b_proj", "linear_kv_up_proj": "kv_b_proj", "linear_q_proj": "q_proj"}
        copies = {"linear_q_down_proj": "q_a_proj", "linear_kv_down_proj": "kv_a_proj_with_mqa"}
        module = rest.split(".")[1]
        if module in copies:
            return hf[f"{at}self_attn.{copies[module]}.weight"]
        return np.split(hf[f"{at}self_attn.{mla[module]}.weight"], size)[rank]
    if "linear_qkv" in rest:
        kind = rest.rsplit(".", 1)[1]
        q, k, v = (hf[f"{at}self_attn.{x}_proj.{kind}"] for x in "qkv")
        groups = [part.reshape(a.num_key_value_heads, -1, *part.shape[1:]) for part in (q, k, v)]
        return np.split(np.concatenate(groups, axis=1).reshape(-1, *q.shape[1:]), size)[rank]
    if "local_experts" in rest:
        at += f"mlp.experts.{rest.split('.')[3]}."
    elif rest.startswith("mlp.shared_experts"):
        at += "mlp.shared_experts."
    elif rest.startswith("mlp.linear"):
        at += "mlp."
    if rest.endswith("linear_fc1.weight"):
        gate, up = hf[at + "gate_proj.weight"], hf[at + "up_proj.weight"]
        return np.concatenate([np.split(gate, size)[rank], np.split(up, size)[rank]])
    if rest.endswith("linear_fc2.weight"):
        return np.split(hf[at + "down_proj.weight"], size, axis=1)[rank]
    if rest == "self_attention.linear_proj.weight":
        return np.split(hf[at + "self_attn.o_proj.weight"], size, axis=1)[rank]
    return hf[
        at
        + {
            "input_layernorm.weight": "input_layernorm.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            "self_attention.q_layernorm.weight": f"self_attn.q_{'a_layer' if deepseek else ''}norm.weight",
            "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
            "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
            "mlp.router.weight": "mlp.gate.weight",
            "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        }[rest]
    ]


def engine_slice(a: ModelArch, name: str, full: np.ndarray, rank: int, tp: int, expert_parallel: bool) -> np.ndarray:
    """The part of a Hugging Face tensor that rank `rank` of an engine needs; empty for experts of other ranks."""
    kind = name.split(".")[-2]
    if ".experts." in name and expert_parallel:
        expert = int(name.split(".experts.")[1].split(".")[0])
        mine = np.array_split(np.arange(a.num_experts), tp)[rank]
        return full if expert in mine else full[:0]
    if kind in ("embed_tokens", "lm_head"):
        padded = -(-a.vocab_size // 64) * 64
        return full[padded // tp * rank : padded // tp * (rank + 1)]
    if kind in ("k_proj", "v_proj") and tp > a.num_key_value_heads:
        return np.split(full, a.num_key_value_heads)[rank // (tp // a.num_key_value_heads)]
    if kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj"):
        return np.split(full, tp)[rank]
    if kind in ("o_proj", "down_proj"):
        return np.split(full, tp, axis=1)[rank]
    return full
