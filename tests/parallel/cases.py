"""Small random models of each family, a batch, and its loss by Hugging Face transformers: the independent reference of
the layout tests. Everything is in fp32 and made from fixed seeds, so that every process builds the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rhymemeg.rl.batching import MicroBatch

TEMPERATURE = 0.7
VOCAB = 300  # no multiple of 128 x TP: the vocabulary is padded

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Name -> (transformers configuration class, its arguments). Heads are wider than hidden / heads in the Qwen3 models.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": _LLAMA3, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 32, **_MOE, "norm_topk_prob": True, "tie_word_embeddings": False}),
    "qwen3_moe_mixed": (
        "Qwen3MoeConfig",
        {"head_dim": 32, **_MOE, "norm_topk_prob": False, "mlp_only_layers": [1], "tie_word_embeddings": False},
    ),
}


def make_model(name: str, folder: Path) -> Any:
    """Write a random model of the family to `folder` and return it."""
    import transformers

    kind, options = MODELS[name]
    config = getattr(transformers, kind)(**_SIZES, **options)
    torch.manual_seed(sum(name.encode()))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():  # norms and biases that start as ones and zeros would hide mistakes
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            assert parameter.isfinite().all(), parameter_name
    model.save_pretrained(folder)
    return model


def rows() -> list[tuple[Tensor, int]]:
    """Sequences of several lengths with the length of their prompts."""
    generator = torch.Generator().manual_seed(11)
    lengths = [24, 21, 9, 14, 13, 12, 6, 17]
    return [(torch.randint(0, VOCAB, (n,), generator=generator), max(2, n // 3)) for n in lengths]


def pad(members: list[tuple[Tensor, int]]) -> MicroBatch:
    """Rows as a micro-batch; no rows give one token outside the loss."""
    width = max((len(tokens) for tokens, _ in members), default=2) - 1
    shape = (max(len(members), 1), width)
    tokens, labels = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    mask, advantages = torch.zeros(shape), torch.zeros(shape)
    for i, (row, prompt) in enumerate(members):
        n = len(row) - 1
        tokens[i, :n], labels[i, :n] = row[:-1], row[1:]
        mask[i, prompt - 1 : n] = 1
        advantages[i, :n] = torch.sin(row[1:].float())
    return MicroBatch(tokens, labels, mask, {"advantages": advantages})


def micro_batches() -> list[MicroBatch]:
    """The batch in five micro-batches of different shapes."""
    r = rows()
    return [pad(r[:2]), pad(r[2:5]), pad(r[5:6]), pad(r[6:7]), pad(r[7:])]


def share(batches: list[MicroBatch], dp_rank: int, dp_size: int) -> list[MicroBatch]:
    """The part of one data-parallel rank: equally many on each, filled up with empty ones."""
    count = -(-len(batches) // dp_size)
    mine = batches[dp_rank * count : (dp_rank + 1) * count]
    return mine + [pad([])] * (count - len(mine))


def loss(log_probs: Tensor, entropy: Tensor | None, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """A policy-gradient loss with an entropy term, divided by a constant of the whole batch."""
    assert entropy is not None
    terms = (-log_probs * batch.fields["advantages"] - 0.1 * entropy) * batch.loss_mask
    return terms.sum() / 70, {"tokens": batch.loss_mask.sum()}


def reference(model: Any) -> dict[str, Tensor]:
    """By transformers: `log_probs.i` and `entropy.i` of micro-batch i, `loss`, and `grad.NAME` of every parameter."""
    out: dict[str, Tensor] = {}
    total = torch.zeros(())
    model.zero_grad()
    for i, batch in enumerate(micro_batches()):
        # Padding is on the right and attention causal, so no mask is needed at the real tokens.
        logits = model(batch.tokens).logits.float() / TEMPERATURE
        log_softmax = logits.log_softmax(-1)
        log_probs = log_softmax.gather(-1, batch.labels[..., None]).squeeze(-1)
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        out[f"log_probs.{i}"], out[f"entropy.{i}"] = log_probs.detach(), entropy.detach()
        total = total + loss(log_probs, entropy, batch)[0]
    total.backward()
    out["loss"] = total.detach()
    out |= {f"grad.{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out


# --------------------------------------------------------------------------------------------------------- the critic


def value_head() -> Tensor:
    """Weights [1, hidden] of a head that is not zero."""
    head: Tensor = torch.sin(torch.arange(_SIZES["hidden_size"], dtype=torch.float32))[None] * 0.3
    return head


def with_values(batch: MicroBatch) -> MicroBatch:
    """The micro-batch with old values and returns."""
    labels = batch.labels.float()
    extra = {"values": torch.cos(labels) * 0.5 * batch.loss_mask, "returns": torch.sin(labels) * batch.loss_mask}
    return MicroBatch(batch.tokens, batch.labels, batch.loss_mask, {**batch.fields, **extra})


def value_reference(model: Any, clip: float, tokens: int) -> dict[str, Tensor]:
    """By transformers: `values.i`, `loss`, `grad.NAME` of the trunk and `grad.value_head`. The loss is written a token at
    a time."""
    out: dict[str, Tensor] = {}
    head = value_head().requires_grad_()
    total = torch.zeros(())
    model.zero_grad()
    for i, batch in enumerate(map(with_values, micro_batches())):
        values = (model.model(batch.tokens).last_hidden_state @ head.t()).squeeze(-1)
        out[f"values.{i}"] = values.detach()
        for at in batch.loss_mask.nonzero().tolist():
            value, old, target = (x[tuple(at)] for x in (values, batch.fields["values"], batch.fields["returns"]))
            near = torch.minimum(torch.maximum(value, old - clip), old + clip)
            total = total + 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2) / tokens
    total.backward()
    out |= {"loss": total.detach(), "grad.value_head": head.grad.clone()}  # type: ignore[union-attr]
    out |= {f"grad.{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out
