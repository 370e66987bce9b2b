"""The model families: one table of rules each. Pure Python.

A table lists, for a model description, every Megatron parameter in the spelling of Megatron's local layer spec (norms
separate, experts one by one) with its rule:

    top      parameters outside the layers, by full name
    dense    parameters of a layer without experts, by suffix after `decoder.layers.{L}.`
    moe      parameters of a layer with experts, without the experts themselves
    expert   parameters of one expert, by suffix after `mlp.experts.local_experts.{E}.`

A new family is a function that returns a `Table`, and an entry in `layouts.TABLES`; docs/weight_sync.md walks through
one. DeepSeek-V3's is in `deepseek.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from rhymemeg.arch import ModelArch
from rhymemeg.weight_sync.rules import GatedMlp, QkvGroups, Replicated, Row, Rule, Vocabulary

LAYER = "model.layers.{L}."
EXPERT = LAYER + "mlp.experts.{E}."
MEGATRON_LAYER = "decoder.layers.{L}."
MEGATRON_EXPERT = "mlp.experts.local_experts.{E}."


@dataclass(frozen=True)
class Table:
    top: dict[str, Rule]
    dense: dict[str, Rule]
    moe: dict[str, Rule]
    expert: dict[str, Rule]


def embeddings(a: ModelArch) -> dict[str, Rule]:
    """Embedding, final norm and output layer. Tied weights are one Hugging Face tensor with two Megatron copies (the
    output layer has its own only on a last pipeline stage that is not the first)."""
    shape = (a.vocab_size, a.hidden_size)
    head = "model.embed_tokens.weight" if a.tie_word_embeddings else "lm_head.weight"
    return {
        "embedding.word_embeddings.weight": Vocabulary("model.embed_tokens.weight", shape),
        "decoder.final_layernorm.weight": Replicated("model.norm.weight", (a.hidden_size,)),
        "output_layer.weight": Vocabulary(head, shape),
    }


def layer_norms(a: ModelArch) -> dict[str, Rule]:
    return {
        "input_layernorm.weight": Replicated(LAYER + "input_layernorm.weight", (a.hidden_size,)),
        "pre_mlp_layernorm.weight": Replicated(LAYER + "post_attention_layernorm.weight", (a.hidden_size,)),
    }


def grouped_query_attention(a: ModelArch) -> dict[str, Rule]:
    """Attention with key/value groups; bias and norms of query and key where the family has them."""
    at = LAYER + "self_attn."

    def qkv(kind: str, columns: int | None) -> QkvGroups:
        return QkvGroups(
            query=f"{at}q_proj.{kind}",
            key=f"{at}k_proj.{kind}",
            value=f"{at}v_proj.{kind}",
            heads=a.num_attention_heads,
            kv_heads=a.num_key_value_heads,
            head_dim=a.head_dim,
            columns=columns,
            engine=f"{at}qkv_proj.{kind}",
        )

    rules: dict[str, Rule] = {"self_attention.linear_qkv.weight": qkv("weight", a.hidden_size)}
    if a.qkv_bias:
        rules["self_attention.linear_qkv.bias"] = qkv("bias", None)
    if a.qk_norm:
        rules["self_attention.q_layernorm.weight"] = Replicated(at + "q_norm.weight", (a.head_dim,))
        rules["self_attention.k_layernorm.weight"] = Replicated(at + "k_norm.weight", (a.head_dim,))
    width = a.num_attention_heads * a.head_dim
    rules["self_attention.linear_proj.weight"] = Row(at + "o_proj.weight", (a.hidden_size, width))
    return rules


def gated_mlp(hidden: int, width: int, at: str = LAYER + "mlp.", megatron: str = "mlp.") -> dict[str, Rule]:
    return {
        f"{megatron}linear_fc1.weight": GatedMlp(
            f"{at}gate_proj.weight", f"{at}up_proj.weight", (width, hidden), f"{at}gate_up_proj.weight"
        ),
        f"{megatron}linear_fc2.weight": Row(f"{at}down_proj.weight", (hidden, width)),
    }


def routed_expert(a: ModelArch) -> dict[str, Rule]:
    """One expert. The engine holds all of a layer's in two tensors, with the expert as one more first dimension."""
    width, fused = a.moe_intermediate_size, LAYER + "mlp.experts.routed_experts."
    gate, up, down = (f"{EXPERT}{x}_proj.weight" for x in ("gate", "up", "down"))
    return {
        "linear_fc1.weight": GatedMlp(gate, up, (width, a.hidden_size), fused + "w13_weight"),
        "linear_fc2.weight": Row(down, (a.hidden_size, width), fused + "w2_weight"),
    }


def router(a: ModelArch) -> dict[str, Rule]:
    return {"mlp.router.weight": Replicated(LAYER + "mlp.gate.weight", (a.num_experts, a.hidden_size))}


def llama_like(a: ModelArch) -> Table:
    """Llama 2 and 3, Qwen2 and 2.5, Qwen3 and Qwen3-MoE: they differ in bias, norms of query and key, and experts."""
    common = {**layer_norms(a), **grouped_query_attention(a)}
    return Table(
        top=embeddings(a),
        dense={**common, **gated_mlp(a.hidden_size, a.intermediate_size)},
        moe={**common, **router(a)} if a.is_moe else {},
        expert=routed_expert(a) if a.is_moe else {},
    )
