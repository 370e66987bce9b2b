"""DeepSeek-V3: multi-head latent attention, routed and shared experts, a few dense layers first. Pure Python.

`describe(config)` reads any supported `config.json`, DeepSeek-V3's included, for planning. Megatron's spelling is that
of its Transformer Engine layers with `multi_latent_attention`: the two down-projections are whole on every
tensor-parallel rank, the up-projections are split by head; Hugging Face and Megatron keep the rows of a head in the same
order. The multi-token-prediction layer (the last in the Hugging Face numbering) is not part of the policy and does not
travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from rhymemeg.arch import ModelArch
from rhymemeg.errors import ConfigError
from rhymemeg.weight_sync.families import LAYER, Table, embeddings, gated_mlp, layer_norms, routed_expert, router
from rhymemeg.weight_sync.rules import Column, Replicated, Row, Rule

ARCHITECTURE = "DeepseekV3ForCausalLM"


@dataclass(frozen=True)
class DeepseekArch(ModelArch):
    """`head_dim` is that of queries and keys: without and with rotary position, `qk_nope_head_dim + qk_rope_head_dim`.
    `q_lora_rank` is 0 where queries are projected directly."""

    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    n_shared_experts: int = 0

    def num_parameters(self) -> int:
        """Number of parameters, the routers' correction biases included."""
        from rhymemeg.weight_sync.layouts import hf_tensors

        return sum(map(prod, hf_tensors(self).values()))


def describe(config: dict[str, Any], where: str = "config.json") -> ModelArch:
    """`ModelArch.from_config`, and a DeepseekArch for DeepSeek-V3. Raises ConfigError naming the key."""
    if ARCHITECTURE not in (config.get("architectures") or []):
        return ModelArch.from_config(config, where)

    def need(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{where}: {key!r} must be a positive integer, got {value!r}")
        return value

    nope, rope = need("qk_nope_head_dim"), need("qk_rope_head_dim")
    if config.get("moe_layer_freq", 1) != 1:
        raise ConfigError(f"{where}: moe_layer_freq={config['moe_layer_freq']} is not supported for {ARCHITECTURE}")
    return DeepseekArch(
        architecture=ARCHITECTURE,
        family="deepseek_v3",
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        num_layers=need("num_hidden_layers"),
        num_attention_heads=need("num_attention_heads"),
        num_key_value_heads=need("num_attention_heads"),
        head_dim=nope + rope,
        intermediate_size=need("intermediate_size"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(config.get("rope_theta", 10_000.0)),
        rope_scaling=config.get("rope_scaling"),
        max_position_embeddings=need("max_position_embeddings"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=False,
        qk_norm=False,
        eos_token_ids=(),
        num_experts=need("n_routed_experts"),
        num_experts_per_tok=need("num_experts_per_tok"),
        moe_intermediate_size=need("moe_intermediate_size"),
        norm_topk_prob=bool(config.get("norm_topk_prob", True)),
        dense_layers=tuple(range(int(config.get("first_k_dense_replace", 0)))),
        q_lora_rank=config.get("q_lora_rank") or 0,
        kv_lora_rank=need("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=need("v_head_dim"),
        n_shared_experts=int(config.get("n_shared_experts") or 0),
    )


def latent_attention(a: DeepseekArch) -> dict[str, Rule]:
    at, heads = LAYER + "self_attn.", a.num_attention_heads
    rules: dict[str, Rule] = {}
    if a.q_lora_rank:
        rules["self_attention.linear_q_down_proj.weight"] = Replicated(
            at + "q_a_proj.weight", (a.q_lora_rank, a.hidden_size)
        )
        rules["self_attention.q_layernorm.weight"] = Replicated(at + "q_a_layernorm.weight", (a.q_lora_rank,))
        rules["self_attention.linear_q_up_proj.weight"] = Column(
            at + "q_b_proj.weight", (heads * a.head_dim, a.q_lora_rank)
        )
    else:
        rules["self_attention.linear_q_proj.weight"] = Column(at + "q_proj.weight", (heads * a.head_dim, a.hidden_size))
    rules["self_attention.linear_kv_down_proj.weight"] = Replicated(
        at + "kv_a_proj_with_mqa.weight", (a.kv_lora_rank + a.qk_rope_head_dim, a.hidden_size)
    )
    rules["self_attention.kv_layernorm.weight"] = Replicated(at + "kv_a_layernorm.weight", (a.kv_lora_rank,))
    rules["self_attention.linear_kv_up_proj.weight"] = Column(
        at + "kv_b_proj.weight", (heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank)
    )
    rules["self_attention.linear_proj.weight"] = Row(at + "o_proj.weight", (a.hidden_size, heads * a.v_head_dim))
    return rules


def deepseek_v3(a: ModelArch) -> Table:
    assert isinstance(a, DeepseekArch)
    common = {**layer_norms(a), **latent_attention(a)}
    moe = {
        **common,
        **router(a),
        "mlp.router.expert_bias": Replicated(
            LAYER + "mlp.gate.e_score_correction_bias", (a.num_experts,), float32=True
        ),
    }
    if a.n_shared_experts:
        width = a.n_shared_experts * a.moe_intermediate_size
        moe.update(gated_mlp(a.hidden_size, width, LAYER + "mlp.shared_experts.", "mlp.shared_experts."))
    return Table(
        top=embeddings(a),
        dense={**common, **gated_mlp(a.hidden_size, a.intermediate_size)},
        moe=moe,
        expert=routed_expert(a),
    )
