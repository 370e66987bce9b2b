"""The actor's model, built from a `ModelArch`: one `ActorModel` a virtual pipeline stage.

    chunks = build_model(arch, model_options, parallel_options, runtime)

The critic's is a subclass of it (`critic.ValueModel`), built the same way.

The weights are Megatron's random initialisation until a checkpoint is read into them (`weight_sync.hf_io`).
Layers are Transformer Engine's on a GPU where it is installed, else Megatron's local ones (`layers`); parameters are
fp32 on the CPU and bf16 on a GPU unless `--params-dtype` says otherwise.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rhymemeg.arch import ModelArch
from rhymemeg.config import ModelOptions, ParallelOptions
from rhymemeg.errors import ConfigError
from rhymemeg.parallel.cpu_backend import megatron_calls
from rhymemeg.parallel.layers import RMSNorm, layer_spec
from rhymemeg.parallel.layout_checks import check_layout, stage_layers, virtual_stages
from rhymemeg.parallel.runtime import Runtime, have_nvidia_apex, have_transformer_engine


class ActorModel(GPTModel):
    """Megatron's GPT, whose last stage returns vocab-parallel logits as they come out of the output layer,
    [s, b, padded vocabulary / TP], without Megatron's transposed copy of them."""

    has_logits = True

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _bias = self.output_layer(hidden_states, weight=weight)
        return logits


def params_dtype(options: ModelOptions, device_type: str) -> torch.dtype:
    """Type of the parameters: what `--params-dtype` says, by default bf16 on a GPU and fp32 on the CPU."""
    if options.params_dtype == "auto":
        return torch.bfloat16 if device_type == "cuda" else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[options.params_dtype]


def uses_transformer_engine(options: ModelOptions, parallel: ParallelOptions, device_type: str) -> bool:
    """Whether the layers are Transformer Engine's. Refuses a choice that cannot be had."""
    installed = have_transformer_engine()
    if options.transformer_impl == "transformer_engine" and device_type != "cuda":
        raise ConfigError("--transformer-impl transformer_engine needs a GPU; this run is on the CPU")
    if options.transformer_impl == "transformer_engine" and not installed:
        raise ConfigError("--transformer-impl transformer_engine: the package transformer_engine is not installed")
    chosen = device_type == "cuda" and installed and options.transformer_impl != "local"
    if not chosen:
        for used, option in (
            (parallel.context_parallel_size > 1, "--context-parallel-size > 1"),
            (parallel.moe_grouped_gemm, "--moe-grouped-gemm"),
        ):
            if used:
                reason = "it is not installed" if not installed else "--transformer-impl is local"
                raise ConfigError(f"{option} needs Transformer Engine layers, but {reason}")
    return chosen


def transformer_config(
    arch: ModelArch, options: ModelOptions, parallel: ParallelOptions, device_type: str, transformer_engine: bool
) -> TransformerConfig:
    """Megatron's description of the model and of how it is split."""
    dtype, cuda = params_dtype(options, device_type), device_type == "cuda"
    vpp = virtual_stages(arch, parallel)
    moe: dict[str, Any] = {}
    if arch.is_moe:
        moe = {
            "num_moe_experts": arch.num_experts,
            "moe_router_topk": arch.num_experts_per_tok,
            "moe_ffn_hidden_size": arch.moe_intermediate_size,
            "moe_layer_freq": [int(arch.layer_is_moe(layer)) for layer in range(arch.num_layers)],
            # Renormalised weights of the top k are a softmax over their logits alone; otherwise the softmax over all
            # experts comes first and the chosen probabilities stay as they are.
            "moe_router_pre_softmax": not arch.norm_topk_prob,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": parallel.moe_grouped_gemm,
            "expert_model_parallel_size": parallel.expert_model_parallel_size,
            "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        }
    recompute: dict[str, Any] = {}
    if options.recompute_activations:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.intermediate_size,
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=arch.num_key_value_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_in_first_pipeline_stage=parallel.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=parallel.decoder_last_pipeline_num_layers,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        # Micro-batches differ in shape; the all-gather dispatcher needs equal ones, which the actor then pads.
        variable_seq_lengths=not uses_equal_shapes(arch, parallel),
        # The loss that the actor is given is a sum already: Megatron must scale neither it nor the gradients.
        calculate_per_token_loss=True,
        moe_token_dispatcher_type=parallel.moe_token_dispatcher_type if arch.is_moe else "alltoall",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        apply_rope_fusion=cuda and transformer_engine,
        masked_softmax_fusion=False,
        persist_layer_norm=transformer_engine,
        gradient_accumulation_fusion=cuda and have_nvidia_apex(),
        deallocate_pipeline_outputs=True,
        # With virtual stages, unbatched messages keep the two directions between the same two ranks apart.
        batch_p2p_comm=vpp == 1,
        **moe,
        **recompute,
    )


def uses_equal_shapes(arch: ModelArch, parallel: ParallelOptions) -> bool:
    """Whether all micro-batches of a call must have the same shape on all ranks."""
    return arch.is_moe and parallel.moe_token_dispatcher_type == "allgather"


def inverse_frequencies(arch: ModelArch) -> Tensor:
    """Rotary frequencies [head_dim / 2] in fp32: theta^(-2i/d), with Llama 3's long-context scaling where the model has
    it (wavelengths beyond the original context divided by `factor`, a linear blend between the two bounds)."""
    d = arch.head_dim
    freqs = 1.0 / arch.rope_theta ** (torch.arange(0, d, 2, dtype=torch.float32, device="cpu") / d)
    if arch.rope_scaling is None:
        return freqs
    s = arch.rope_scaling
    factor, low, high = float(s["factor"]), float(s["low_freq_factor"]), float(s["high_freq_factor"])
    context = float(s["original_max_position_embeddings"])
    turns = context * freqs / (2 * math.pi)  # full turns within the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * freqs / factor + blend * freqs


def build_model(
    arch: ModelArch,
    options: ModelOptions,
    parallel: ParallelOptions,
    runtime: Runtime,
    kind: type[ActorModel] = ActorModel,
) -> list[ActorModel]:
    """This rank's chunks in order of their virtual stage. Refuses a layout that does not fit the model."""
    check_layout(arch, parallel, runtime.world_size, runtime.device_type)
    engine = uses_transformer_engine(options, parallel, runtime.device_type)
    config = transformer_config(arch, options, parallel, runtime.device_type, engine)
    vpp, pp, pp_rank = virtual_stages(arch, parallel), runtime.pp_size, runtime.pp_rank
    ps.set_virtual_pipeline_model_parallel_world_size(vpp if vpp > 1 else None)
    frequencies = inverse_frequencies(arch).to(runtime.device)
    chunks = []
    with megatron_calls():
        for stage, layers in enumerate(stage_layers(arch, parallel)[pp_rank]):
            vp_stage = stage if vpp > 1 else None
            if engine:
                spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
            else:
                spec = TransformerBlockSubmodules(
                    layer_specs=[layer_spec(config, arch.layer_is_moe(layer)) for layer in layers], layer_norm=RMSNorm
                )
            chunk = kind(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=arch.padded_vocab_size(options.make_vocab_size_divisible_by, runtime.tp_size),
                max_sequence_length=arch.max_position_embeddings,
                pre_process=pp_rank == 0 and stage == 0,
                post_process=pp_rank == pp - 1 and stage == vpp - 1,
                share_embeddings_and_output_weights=arch.tie_word_embeddings and kind.has_logits,
                position_embedding_type="rope",
                rotary_base=arch.rope_theta,
                vp_stage=vp_stage,
            )
            chunk.rotary_pos_emb.inv_freq = frequencies
            held = [layer.layer_number - 1 for layer in chunk.decoder.layers]
            assert held == list(layers), f"Megatron built layers {held}, the layout says {list(layers)}"
            chunks.append(chunk)
    return chunks
