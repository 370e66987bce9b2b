"""Experts to replay, and the loss and gradients with them by transformers: the reference of the routing tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rhymemeg.rl.batching import MicroBatch
from tests.parallel import cases

EXPERTS, K, LAYERS = 4, 2, 4
COEFFICIENT = 0.3


def with_routing(batch: MicroBatch, seed: int) -> MicroBatch:
    """The micro-batch with random experts for most of its tokens."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(*batch.shape, LAYERS, EXPERTS, generator=generator).argsort(-1)
    routing = order[..., :K].to(torch.int16)
    routing[torch.rand(batch.shape, generator=generator) < 0.2] = -1
    routing[~batch.real] = -1
    return MicroBatch(batch.tokens, batch.labels, batch.loss_mask, batch.fields, routing)


def micro_batches(one_batch: bool = False) -> list[MicroBatch]:
    """Those of `cases`, each row with its own experts however the rows are put together."""
    five = [with_routing(batch, seed) for seed, batch in enumerate(cases.micro_batches())]
    if not one_batch:
        return five
    whole = cases.pad(cases.rows())
    routing = torch.full((*whole.shape, LAYERS, K), -1, dtype=torch.int16)
    row = 0
    for batch in five:
        assert isinstance(batch.routing, Tensor)
        routing[row : row + batch.shape[0], : batch.shape[1]] = batch.routing
        row += batch.shape[0]
    return [MicroBatch(whole.tokens, whole.labels, whole.loss_mask, whole.fields, routing)]


def reference(model: Any) -> dict[str, Tensor]:
    """`log_probs.i` of micro-batch i, `loss` of the policy, `aux` of the balance, `grad.NAME` of their sum, `load` [layers,
    experts] of the trained tokens; written a sequence and an expert at a time."""
    out: dict[str, Tensor] = {}
    load = torch.zeros(LAYERS, EXPERTS, dtype=torch.float64)
    policy, aux = torch.zeros(()), torch.zeros(())
    sequences = len(cases.rows())
    now: dict[Any, Any] = {}

    def hook(layer: int, norm: bool) -> Any:
        def forced(module: Any, args: Any, output: Any) -> Any:
            logits, _, own = output
            target = now["batch"].routing[:, :, layer].reshape(-1, K)
            chosen = torch.where(target >= 0, target.long(), own)
            p = logits.float().softmax(-1)
            weights = p.gather(1, chosen)
            now[layer] = (p.view(*now["batch"].shape, -1), chosen.view(*now["batch"].shape, -1))
            return logits, weights / weights.sum(-1, keepdim=True) if norm else weights, chosen

        return forced

    handles = [
        layer.mlp.gate.register_forward_hook(hook(i, model.config.norm_topk_prob))
        for i, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "gate")
    ]
    model.zero_grad()
    for i, batch in enumerate(micro_batches()):
        now["batch"] = batch
        log_softmax = (model(batch.tokens).logits.float() / cases.TEMPERATURE).log_softmax(-1)
        log_probs = log_softmax.gather(-1, batch.labels[..., None]).squeeze(-1)
        out[f"log_probs.{i}"] = log_probs.detach()
        policy = policy + cases.loss(log_probs, -(log_softmax.exp() * log_softmax).sum(-1), batch)[0]
        for layer in (k for k in now if isinstance(k, int)):
            p, chosen = now[layer]
            for row, real in enumerate(batch.real):
                tokens = int(real.sum())
                for e in range(EXPERTS):
                    sent = int((chosen[row][real] == e).sum())
                    load[layer][e] += sent
                    f = sent * EXPERTS / (K * tokens)
                    aux = aux + COEFFICIENT / sequences * f * p[row][real][:, e].mean()
    (policy + aux).backward()
    for handle in handles:
        handle.remove()
    out |= {"loss": policy.detach(), "aux": aux.detach(), "load": load}
    out |= {f"grad.{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out
