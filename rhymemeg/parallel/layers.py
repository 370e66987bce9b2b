"""The layers of the actor where Transformer Engine is not used, as Megatron module specs.

Megatron's tensor-parallel linear layers, MLP and MoE are taken as they are. Two modules are our own: `RMSNorm`, because
Megatron's plain-torch norm refuses sequence parallelism, and `CausalAttention`, torch's fused attention in place of
Megatron's explicit score matrix (same values, memory linear in the sequence length where a fused kernel exists).
Parameter names are those of Megatron's local spec.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from rhymemeg.parallel.cpu_backend import current_device


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, statistics in fp32, as Llama and Qwen define
    it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        ones = torch.ones(hidden_size, dtype=config.params_dtype, device=current_device())
        self.weight = torch.nn.Parameter(ones)
        # Under sequence parallelism each rank sees a part of the tokens: Megatron sums the gradients of marked weights.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype) * self.weight


class CausalAttention(torch.nn.Module):
    """softmax(Q K^T / sqrt(d), causal) V with grouped key-value heads. Rows are padded on the right, so the causal mask
    is all that is needed: no real token sees padding."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """query [s, b, heads, d]; key, value [s, b, kv heads, d] -> [s, b, heads * d]."""
        s, b, heads, d = query.shape
        group = heads // key.shape[2]
        if group > 1:
            key, value = key.repeat_interleave(group, dim=2), value.repeat_interleave(group, dim=2)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).reshape(s, b, heads * d)


_FUSED_INPUT_NORM = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_FUSED_MLP_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def layer_spec(config: TransformerConfig, moe: bool) -> ModuleSpec:
    """One decoder layer, dense or with experts."""
    if moe:
        mlp = get_moe_module_spec_for_backend(
            LocalSpecProvider(), num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
        )
    else:
        mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=CausalAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            # In a checkpoint, norms go by the names that Transformer Engine's fused layers give them, so that it loads with
            # either kind of layer.
            sharded_state_dict_keys_map=_FUSED_INPUT_NORM if moe else _FUSED_INPUT_NORM | _FUSED_MLP_NORM,
        ),
    )
