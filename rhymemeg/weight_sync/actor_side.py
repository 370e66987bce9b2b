"""The actor's side of weight movement: what a rank's Megatron modules hold, under canonical names.

`local_params(chunks, arch, runtime)` maps canonical names (`layouts.py`) to this rank's parameters, without copies.
Layer indices come from each layer's own `layer_number`, so they are right for pipeline, virtual and uneven stages.
Both spellings are understood: Megatron's local layers, and Transformer Engine's with norms fused into linear layers and
experts grouped into one module. Parameters whose name or shape the model's table does not know are a WeightSyncError.

`actor_layout(chunks, runtime)` collects every rank's coordinates (a collective call).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rhymemeg.arch import ModelArch
from rhymemeg.errors import WeightSyncError
from rhymemeg.weight_sync.layouts import ModelLayout, canonical_suffix
from rhymemeg.weight_sync.topology import ActorLayout, Coordinates

if TYPE_CHECKING:
    from rhymemeg.parallel.runtime import Runtime

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12]\.weight)(\d+)")
# State that is a buffer in Megatron and a weight in Hugging Face.
_BUFFERS = ("mlp.router.expert_bias",)
# What no Hugging Face checkpoint of the model has: the critic's head.
_OWN = ("value_head.weight",)


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The GPT model inside Megatron's wrappers (DDP, half precision)."""
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def local_params(chunks: Sequence[torch.nn.Module], arch: ModelArch, runtime: Runtime) -> dict[str, torch.Tensor]:
    """Canonical name -> parameter, for all model chunks (virtual stages) of this rank."""
    layout = ModelLayout(arch)
    tp, etp = runtime.tp_size, runtime.etp_size
    found: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        model: Any = unwrap(chunk)
        named = dict(model.named_parameters())
        named.update({n: b for n, b in model.named_buffers() if n.endswith(_BUFFERS) and b is not None})
        for raw, tensor in named.items():
            if raw in _OWN:
                continue
            name = _canonical(raw, model, arch, runtime)
            if name in found:
                raise WeightSyncError(f"two parameters of this rank are called {name!r}")
            expected = layout.local_shape(name, tp, etp, _padded_vocab(name, tensor, tp, arch))
            if tuple(tensor.shape) != expected:
                raise WeightSyncError(f"{name}: Megatron holds {tuple(tensor.shape)}, the layout expects {expected}")
            found[name] = tensor.detach()
    return found


def _canonical(raw: str, model: Any, arch: ModelArch, runtime: Runtime) -> str:
    match = _LAYER.fullmatch(raw)
    if not match:
        return raw
    layer, suffix = model.decoder.layers[int(match[1])].layer_number - 1, match[2]
    if local := _LOCAL_EXPERT.fullmatch(suffix):
        index, rest = int(local[1]), local[2]
    elif grouped := _GROUPED_EXPERT.fullmatch(suffix):
        index, rest = int(grouped[2]), grouped[1]
    else:
        return f"decoder.layers.{layer}.{canonical_suffix(suffix)}"
    expert = runtime.ep_rank * (arch.num_experts // runtime.ep_size) + index
    return f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.{rest}"


def _padded_vocab(name: str, tensor: torch.Tensor, tp: int, arch: ModelArch) -> int:
    """Megatron's vocabulary size, read off the shard itself; anything for parameters without one."""
    return tensor.shape[0] * tp if name in ("embedding.word_embeddings.weight", "output_layer.weight") else 0


def actor_layout(chunks: Sequence[torch.nn.Module], arch: ModelArch, runtime: Runtime) -> ActorLayout:
    """Where every rank is and what it holds. All ranks call this together; each gets the same answer."""
    layers: list[int] = []
    vocab = 0
    for chunk in chunks:
        model: Any = unwrap(chunk)
        layers += [layer.layer_number - 1 for layer in model.decoder.layers]
        for name, tensor in model.named_parameters():
            vocab = max(vocab, _padded_vocab(name, tensor, runtime.tp_size, arch))
    mine = Coordinates(runtime.tp_rank, runtime.pp_rank, runtime.ep_rank, runtime.etp_rank, tuple(sorted(layers)))
    gathered: list[tuple[tuple[Any, ...], int]] = runtime.all_gather_object((tuple(mine), vocab))
    ranks = tuple(Coordinates(*coordinates) for coordinates, _ in gathered)
    missing = set(range(arch.num_layers)) - {layer for c in ranks for layer in c.layers}
    if missing:
        raise WeightSyncError(f"no rank of the actor holds layers {sorted(missing)}")
    return ActorLayout(
        ranks=ranks,
        tp=runtime.tp_size,
        pp=runtime.pp_size,
        ep=runtime.ep_size,
        etp=runtime.etp_size,
        padded_vocab=max(size for _, size in gathered),
    )
