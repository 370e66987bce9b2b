"""Bytes that a micro-batch leaves on a rank between its forward and its backward pass. Pure.

Counted are the tensors that autograd keeps of Megatron's layers, after the method of Korthikanti et al. (arXiv
2205.05198, section 4), for what RhymeMeg trains: RMSNorm, gated MLP, grouped or latent attention, no dropout, attention
that keeps no score matrix (flash) on a GPU and one that does (`local` layers) elsewhere. For one token of one layer, with
width w bytes, hidden h, TP t, and s = t with sequence parallelism, else 1:

    residual and norms       4 h w / s            input of both norms, and what both hand on
    attention                q, k, v (twice with norms of q and k), output, fp32 log-sum        all / t
    gated MLP                3 f w / t            gate and up, their product
    experts (k a token)      k' (h + 3 f' / t') w, k' = k t' / s       the tokens that a rank gets if all experts are equal

With --recompute-activations a layer keeps its input only, and one layer is complete at a time. A pipeline's first stage
holds the micro-batches that are under way: PP of them in 1F1B, more with virtual stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.parallel.layout_checks import Layout
from rhymemeg.weight_sync.deepseek import DeepseekArch

LOGIT_ROWS = 1024
"""Rows for which the loss forms an fp32 softmax at a time (`rhymemeg.parallel.vocab_parallel`)."""


@dataclass(frozen=True)
class LayerWidths:
    """Columns a token of a layer's tensors, before any split."""

    query: int
    key_value: int
    value_out: int
    down: int
    """Of MLA's compressed queries and keys, not split by TP."""
    mlp: int


def widths(arch: ModelArch, moe: bool) -> LayerWidths:
    """Sizes of a layer with or without experts (shared experts count as its MLP)."""
    heads, d = arch.num_attention_heads, arch.head_dim
    if isinstance(arch, DeepseekArch):
        mlp = arch.n_shared_experts * arch.moe_intermediate_size if moe else arch.intermediate_size
        down = arch.q_lora_rank + arch.kv_lora_rank + arch.qk_rope_head_dim
        return LayerWidths(heads * d, heads * (d + arch.v_head_dim), heads * arch.v_head_dim, down, mlp)
    mlp = 0 if moe else arch.intermediate_size
    return LayerWidths(heads * d, 2 * arch.num_key_value_heads * d, heads * d, 0, mlp)


def layer_bytes(arch: ModelArch, moe: bool, config: Config, layout: Layout, width: int, sequence: int | None) -> float:
    """Bytes a token of a complete layer. `sequence`: length of the rows where attention keeps its scores, else None."""
    t, h = layout.tp, arch.hidden_size
    s = t if config.parallel.sequence_parallel else 1
    x = widths(arch, moe)
    found = 4 * h * width / s + x.down * width / s
    found += (x.query + x.key_value) * (2 if arch.qk_norm else 1) * width / t
    found += x.value_out * width / t + 4 * arch.num_attention_heads / t
    if sequence is not None:
        found += 2 * arch.num_attention_heads * sequence * width / t  # scores and probabilities
    found += 3 * x.mlp * width / t
    if moe:
        copies = arch.num_experts_per_tok * layout.etp / s
        found += copies * (h + 3 * arch.moe_intermediate_size / layout.etp) * width + 8 * arch.num_experts / s
    return found


def in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Micro-batches, as multiples of all layers of the stage, whose activations it holds at its fullest (1F1B; with
    virtual stages Megatron's interleaved schedule)."""
    pp, vpp = layout.pp, layout.vpp
    if vpp == 1:
        return min(pp - stage, micro_batches)
    warm_up = 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    return min(warm_up, micro_batches * vpp) / vpp


def activation_bytes(
    arch: ModelArch, config: Config, layout: Layout, stage: int, width: int, micro_batches: int, flash: bool
) -> int:
    """Peak on a rank of `stage`, for micro-batches of --max-tokens-per-microbatch tokens."""
    tokens = config.algorithm.max_tokens_per_microbatch / layout.cp
    sequence = None if flash else config.max_model_len
    layers = [layer for part in layout.stages[stage] for layer in part]
    complete = [
        layer_bytes(arch, arch.layer_is_moe(layer), config, layout, width, sequence) * tokens for layer in layers
    ]
    s = layout.tp if config.parallel.sequence_parallel else 1
    kept = complete
    working = 0.0
    if config.model.recompute_activations:
        kept = [arch.hidden_size * width / s * tokens] * len(layers)
        working = max(complete, default=0.0)
    held = sum(kept) * in_flight(layout, stage, micro_batches) + working
    if stage == layout.pp - 1:
        columns = arch.padded_vocab_size(config.model.make_vocab_size_divisible_by, layout.tp) / layout.tp
        # Logits (their gradient is written over them), the last norm's output, and a slice of fp32 softmax, twice.
        held += tokens * (columns * width + arch.hidden_size * width) + 2 * LOGIT_ROWS * columns * 4
    return int(held)
