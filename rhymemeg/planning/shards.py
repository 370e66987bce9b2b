"""How many elements each rank of the actor and of an engine holds, from the model's layout table. Pure, exact.

The same tables move the weights (`rhymemeg.weight_sync`), so these are the sizes of the real tensors: padded vocabulary,
copies of tied embeddings, biases, norms and routers included. Numbers are elements, not bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from rhymemeg.arch import ModelArch
from rhymemeg.errors import ConfigError
from rhymemeg.parallel.layout_checks import Layout
from rhymemeg.weight_sync.boxes import numel
from rhymemeg.weight_sync.layouts import ModelLayout
from rhymemeg.weight_sync.rules import Rule


@dataclass(frozen=True)
class Shard:
    """What one rank holds: `dense` is replicated over data- and context-parallel ranks, `expert` over expert DP."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


def actor_shards(arch: ModelArch, layout: Layout, padded_vocab: int) -> list[Shard]:
    """A rank's shard, by pipeline stage. All ranks of a stage hold the same number."""
    table = ModelLayout(arch).table
    experts = arch.num_experts // layout.ep if arch.is_moe else 0

    def size(rules: Iterable[Rule], ranks: int) -> int:
        return sum(prod(rule.local_shape(ranks, padded_vocab)) for rule in rules)

    dense_layer = size(table.dense.values(), layout.tp)
    # The router's correction bias is a buffer in Megatron: no gradient, no optimizer state, and small.
    moe_layer = size((r for name, r in table.moe.items() if not name.endswith("expert_bias")), layout.tp)
    expert_layer = experts * size(table.expert.values(), layout.etp)
    embedding = size([table.top["embedding.word_embeddings.weight"]], layout.tp)
    norm = size([table.top["decoder.final_layernorm.weight"]], layout.tp)
    shards = []
    for stage, parts in enumerate(layout.stages):
        layers = [layer for part in parts for layer in part]
        moe = sum(arch.layer_is_moe(layer) for layer in layers)
        dense = (len(layers) - moe) * dense_layer + moe * moe_layer
        first, last = stage == 0, stage == layout.pp - 1
        dense += embedding * first + norm * last
        dense += embedding * (last and (not arch.tie_word_embeddings or layout.pp > 1))
        shards.append(Shard(dense, moe * expert_layer))
    return shards


def engine_shard(arch: ModelArch, tp: int, expert_parallel: bool) -> int:
    """Elements of the fullest rank of an engine. ConfigError where `tp` does not divide the model."""
    layout = ModelLayout(arch)
    held = -(-arch.num_experts // tp) if expert_parallel else arch.num_experts

    def size(rules: Iterable[Rule], ranks: int) -> int:
        try:
            # Rank 0 has a full block of the padded vocabulary.
            return sum(numel(part.split(part.name, part.shape, 0, ranks)) for rule in rules for part in rule.parts)
        except ValueError as error:
            raise ConfigError(f"--vllm-tensor-parallel-size {tp}: {error}") from None

    top = dict(layout.table.top)
    if arch.tie_word_embeddings:
        del top["output_layer.weight"]
    moe = sum(arch.layer_is_moe(layer) for layer in range(arch.num_layers))
    expert = held * size(layout.table.expert.values(), 1 if expert_parallel else tp) if arch.is_moe else 0
    return (
        size(top.values(), tp)
        + (arch.num_layers - moe) * size(layout.table.dense.values(), tp)
        + moe * (size(layout.table.moe.values(), tp) + expert if arch.is_moe else 0)
    )


def largest_engine_layer(arch: ModelArch, tp: int, expert_parallel: bool) -> int:
    """Elements of an engine rank's largest layer, which vLLM's reload holds until it is complete."""
    one = _with_layers(arch, 1)
    none = _with_layers(arch, 0)
    layer = engine_shard(one, tp, expert_parallel) - engine_shard(none, tp, expert_parallel)
    return max(layer, -(-arch.vocab_size // tp) * arch.hidden_size)


def _with_layers(arch: ModelArch, layers: int) -> ModelArch:
    from dataclasses import replace

    return replace(arch, num_layers=layers, dense_layers=())
