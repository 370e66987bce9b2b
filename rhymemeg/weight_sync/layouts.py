"""Which Hugging Face elements each Megatron parameter holds, for any model family and layout. Pure Python.

Canonical names are those of Megatron's local layer spec with *global* layer and expert indices, for example
`decoder.layers.{L}.self_attention.linear_qkv.weight` and
`decoder.layers.{L}.mlp.experts.local_experts.{E}.linear_fc1.weight`.
`canonical_suffix` turns Transformer Engine's fused spelling of norms into it (grouped experts: `actor_side.py`).

`ModelLayout` answers for one model; `pieces` and `hf_tensors` are shorthands. Names that a model does not have and
sizes that a layout does not divide are a WeightSyncError that names the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from rhymemeg.arch import ModelArch
from rhymemeg.errors import WeightSyncError
from rhymemeg.weight_sync.boxes import Box, Shape
from rhymemeg.weight_sync.deepseek import deepseek_v3
from rhymemeg.weight_sync.families import MEGATRON_EXPERT, MEGATRON_LAYER, Table, llama_like
from rhymemeg.weight_sync.rules import Part, Rule

TABLES: dict[str, Callable[[ModelArch], Table]] = {
    "llama": llama_like,
    "qwen2": llama_like,
    "qwen3": llama_like,
    "qwen3_moe": llama_like,
    "deepseek_v3": deepseek_v3,
}
"""Family (`ModelArch.family`) -> its table."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(?:mlp\.experts\.local_experts\.(\d+)\.)?(.+)")

FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}


class Piece(NamedTuple):
    """A box of a Hugging Face tensor and where it lies in the local shard of a Megatron parameter (equal shapes)."""

    hf_name: str
    hf_box: Box
    local_box: Box


class Parameter(NamedTuple):
    """A Megatron parameter: canonical name, rule, and its indices. `layer` is None outside the layers, `expert` is None
    for what expert parallelism does not split."""

    name: str
    rule: Rule
    layer: int | None
    expert: int | None

    def hf_name(self, part: Part) -> str:
        return part.name.replace("{L}", str(self.layer)).replace("{E}", str(self.expert))

    def engine_name(self, part: Part) -> str:
        return part.engine_param.replace("{L}", str(self.layer))


def canonical_suffix(suffix: str) -> str:
    """A parameter's name within its layer, with fused norms spelled as separate ones."""
    return FUSED_NORMS.get(suffix, suffix)


class ModelLayout:
    """The table of a model's family, with names and indices filled in."""

    def __init__(self, arch: ModelArch) -> None:
        if arch.family not in TABLES:
            raise WeightSyncError(f"no weight layout for family {arch.family!r} (known: {', '.join(sorted(TABLES))})")
        self.arch = arch
        self.table: Table = TABLES[arch.family](arch)

    def parameter(self, name: str) -> Parameter:
        """The parameter with this canonical name."""
        if name in self.table.top:
            return Parameter(name, self.table.top[name], None, None)
        match = _LAYER.fullmatch(name)
        if match:
            layer, expert, suffix = int(match[1]), match[2], match[3]
            rules = self._layer_rules(layer) if expert is None else self.table.expert
            index = None if expert is None else int(expert)
            known = layer < self.arch.num_layers and (
                index is None or (self.arch.layer_is_moe(layer) and index < self.arch.num_experts)
            )
            if known and suffix in rules:
                return Parameter(name, rules[suffix], layer, index)
        raise WeightSyncError(f"{self.arch.architecture} has no parameter {name!r}")

    def _layer_rules(self, layer: int) -> dict[str, Rule]:
        return self.table.moe if self.arch.layer_is_moe(layer) else self.table.dense

    def layer_parameters(self, layer: int, experts: Iterable[int] | None = None) -> Iterator[Parameter]:
        """Parameters of one layer; of its experts, if it has any, all or those listed."""
        prefix = MEGATRON_LAYER.format(L=layer)
        for suffix, rule in self._layer_rules(layer).items():
            yield Parameter(prefix + suffix, rule, layer, None)
        if self.arch.layer_is_moe(layer):
            for e in range(self.arch.num_experts) if experts is None else experts:
                for suffix, rule in self.table.expert.items():
                    yield Parameter(prefix + MEGATRON_EXPERT.format(E=e) + suffix, rule, layer, e)

    def parameters(self) -> Iterator[Parameter]:
        """All parameters in the model's order. A tied output layer is left out: it has no tensor of its own."""
        top = self.table.top
        yield Parameter("embedding.word_embeddings.weight", top["embedding.word_embeddings.weight"], None, None)
        for layer in range(self.arch.num_layers):
            yield from self.layer_parameters(layer)
        for name in top:
            tied = name == "output_layer.weight" and self.arch.tie_word_embeddings
            if name != "embedding.word_embeddings.weight" and not tied:
                yield Parameter(name, top[name], None, None)

    def hf_tensors(self) -> dict[str, Shape]:
        """Every tensor of a Hugging Face checkpoint of this model with its shape, in the order of `parameters`."""
        return {p.hf_name(part): part.shape for p in self.parameters() for part in p.rule.parts}

    def local_shape(self, name: str, tp_size: int, etp_size: int, padded_vocab: int) -> Shape:
        """Shape of a rank's shard of the parameter."""
        p = self.parameter(name)
        try:
            return p.rule.local_shape(tp_size if p.expert is None else etp_size, padded_vocab)
        except ValueError as error:
            raise WeightSyncError(f"{name}: {error}") from None

    def pieces(
        self, name: str, tp_rank: int, tp_size: int, etp_rank: int, etp_size: int, padded_vocab: int
    ) -> list[Piece]:
        """What the shard at these coordinates holds. Expert parameters are split by expert TP, all others by TP."""
        p = self.parameter(name)
        rank, size = (tp_rank, tp_size) if p.expert is None else (etp_rank, etp_size)
        try:
            found = p.rule.pieces(rank, size, padded_vocab)
        except ValueError as error:
            raise WeightSyncError(f"{name}: {error}") from None
        return [Piece(p.hf_name(p.rule.parts[part]), hf_box, local_box) for part, hf_box, local_box in found]


def hf_tensors(arch: ModelArch) -> dict[str, Shape]:
    """Every tensor of a Hugging Face checkpoint of this model, with its shape."""
    return ModelLayout(arch).hf_tensors()


def pieces(
    arch: ModelArch, name: str, tp_rank: int, tp_size: int, etp_rank: int, etp_size: int, padded_vocab: int
) -> list[Piece]:
    """See `ModelLayout.pieces`."""
    return ModelLayout(arch).pieces(name, tp_rank, tp_size, etp_rank, etp_size, padded_vocab)
