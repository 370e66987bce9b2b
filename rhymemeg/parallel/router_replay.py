"""Which experts a token goes to: recorded, replayed, counted and balanced. For every MoE layer of this rank's chunks.

    routing = RoutingControl(chunks, arch, runtime, coefficient, recompute)
    routing.begin(chunk, work)          # before the chunk's forward pass of a micro-batch
    routing.end(chunk, work)            # after it
    routing.metrics()                   # of the training passes since `start_update`, the same on all ranks

Megatron's router asks an object beside it, `TopKRouter.router_replay`, for the experts of its tokens; `LayerRouting` stands
there in place of Megatron's own class, which keeps one micro-batch a layer and knows no padding.

*Replay.* A micro-batch brings its experts along (`MicroBatch.routing`): either the engine's, [b, s, layers, k] with -1 where
the engine said nothing, or what an earlier forward pass of the same micro-batches recorded on this rank (`Recorded`).
Probabilities are always the router's own, of the experts that are replayed, and gradients go through them. Tokens without
a replayed choice, padding among them, go where the router sends them. With recomputation of activations, the second pass
of a layer gets what the first one got: micro-batches come back in the order in which they went.

*Balance.* The auxiliary loss is that of a sequence (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20):

    L = coefficient * mean over sequences of sum_i f_i P_i,   f_i = E / (k T) * tokens sent to i,   P_i = mean of p_i over tokens

summed over layers, with T tokens, E experts and p the router's probabilities over all experts. Unlike a loss of a
micro-batch it depends neither on how sequences are put together nor on how many ranks share them. Its gradient is added
where the layer's probabilities are, so it is not part of the policy's loss.

*Load.* Tokens of each expert, counted in the training passes, padding left out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from rhymemeg.arch import ModelArch
from rhymemeg.parallel.runtime import Runtime

if TYPE_CHECKING:
    from rhymemeg.parallel.trained_model import Work

Recorded = dict[int, Tensor]
"""Layer -> experts [tokens of this rank, k], as one forward pass of a micro-batch found them."""

TopK = Callable[..., tuple[Tensor, Tensor]]


class _AddLoss(torch.autograd.Function):
    """`values` as they are; in the backward pass `loss` gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones((), dtype=torch.float32, device=gradients[0].device)


class LayerRouting:
    """One layer, from 0 over the whole model. Tokens are in Megatron's order: this rank's part of [s, b], flattened."""

    def __init__(self, layer: int, router: TopKRouter, recompute: bool) -> None:
        self.layer, self.router, self.recompute = layer, router, recompute
        config: Any = router.config
        self.num_experts, self.probabilities_first = int(config.num_moe_experts), bool(config.moe_router_pre_softmax)
        self.targets: Tensor | None = None
        self.real: Tensor | None = None
        self.rows = 1
        self.coefficient = 0.0
        """Of the auxiliary loss, divided by the sequences of the update."""
        self.recorded: Tensor | None = None
        self._waiting: deque[tuple[Tensor | None, Tensor | None, int]] = deque()
        self.reset()

    def reset(self) -> None:
        """Forget the counts, and micro-batches of a pass that was broken off."""
        self._waiting.clear()
        device = self.router.weight.device
        self.load = torch.zeros(self.num_experts, dtype=torch.float64, device=device)
        self.replayed = torch.zeros(2, dtype=torch.float64, device=device)  # tokens, and of these sent elsewhere
        self.loss = torch.zeros((), dtype=torch.float64, device=device)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What the router calls: `scores` [tokens, experts] -> (scores of the chosen, chosen) [tokens, k]."""
        assert default_compute_topk is not None
        targets, real, rows = self.targets, self.real, self.rows
        if self.recompute and self.router.training:
            if torch.is_grad_enabled():
                targets, real, rows = self._waiting.popleft()
            else:
                self._waiting.append((targets, real, rows))
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = own
        if targets is not None:
            chosen = torch.where(targets >= 0, targets.to(own.dtype), own)
            values = scores.gather(1, chosen)
        self.recorded = chosen
        if torch.is_grad_enabled() and real is not None:
            self._count(own, chosen, real, targets)
            if self.coefficient:
                values = _AddLoss.apply(values, self._auxiliary_loss(scores, chosen, real, rows))
        return values, chosen

    @torch.no_grad()
    def _count(self, own: Tensor, chosen: Tensor, real: Tensor, targets: Tensor | None) -> None:
        self.load += torch.bincount(chosen[real].flatten(), minlength=self.num_experts)
        if targets is not None:
            known = real & (targets[:, 0] >= 0)
            differ = (own.sort(1).values != chosen.sort(1).values).any(1)
            self.replayed += torch.stack([known.sum(), (known & differ).sum()])

    def _auxiliary_loss(self, scores: Tensor, chosen: Tensor, real: Tensor, rows: int) -> Tensor:
        """This rank's share of the loss of its sequences: the sum over the ranks that share them is the whole."""
        p = scores.float() if self.probabilities_first else scores.float().softmax(-1)
        mask = real.to(p.dtype).view(-1, rows, 1)
        sent = torch.zeros_like(p).scatter(1, chosen, 1.0).view(-1, rows, self.num_experts)
        with torch.no_grad():
            # Per sequence: tokens of each expert, and all tokens.
            counts = torch.cat([(sent * mask).sum(0), mask.sum(0)], 1)
            group: Any = self.router.tp_cp_group
            if group.size() > 1:
                dist.all_reduce(counts, group=group)
            tokens = counts[:, -1:].clamp(min=1)
            f = counts[:, :-1] * self.num_experts / (chosen.shape[1] * tokens)
        mean_p = (p.view_as(sent) * mask).sum(0) / tokens
        loss = self.coefficient * (f * mean_p).sum()
        self.loss += loss.detach().double()
        return loss


class RoutingControl:
    """See the module."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], arch: ModelArch, runtime: Runtime, coefficient: float, recompute: bool
    ) -> None:
        self.arch, self.runtime, self.coefficient = arch, runtime, coefficient
        self.sequence_parallel = any(getattr(chunk.config, "sequence_parallel", False) for chunk in chunks)
        self.layers: dict[int, list[LayerRouting]] = {}  # by id of the chunk
        for chunk in chunks:
            found = self.layers.setdefault(id(chunk), [])
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    assert module.layer_number is not None
                    found.append(LayerRouting(module.layer_number - 1, module, recompute))
                    module.router_replay = found[-1]

    def start_update(self, sequences: int) -> None:
        """Before the passes of an optimizer step over this many sequences of this data-parallel rank."""
        total = sequences
        if self.coefficient:
            r = self.runtime
            speaks = r.tp_rank == 0 and r.cp_rank == 0 and r.pp_rank == 0
            total = int(r.reduce_sum([float(sequences) if speaks else 0.0])[0])
        for layer in self._all():
            layer.reset()
            layer.coefficient = self.coefficient / max(total, 1)

    def begin(self, chunk: torch.nn.Module, work: Work) -> None:
        """The next forward pass of the chunk is that of `work`."""
        routing = work.routing
        real = self._local(work.real)
        for layer in self.layers[id(chunk)]:
            layer.real, layer.rows = real, work.tokens.shape[0]
            if isinstance(routing, dict):
                layer.targets = routing[layer.layer]
            else:
                layer.targets = None if routing is None else self._local(routing[:, :, layer.layer])

    def end(self, chunk: torch.nn.Module, work: Work) -> None:
        """The forward pass is over: `work.recorded` gets its routing."""
        for layer in self.layers[id(chunk)]:
            assert layer.recorded is not None
            work.recorded[layer.layer] = layer.recorded

    def _local(self, values: Tensor) -> Tensor:
        """[b, s, ...] -> this rank's tokens [tokens, ...] in Megatron's order."""
        ordered = values.transpose(0, 1)
        if self.sequence_parallel:
            ordered = ordered.chunk(self.runtime.tp_size)[self.runtime.tp_rank]
        return ordered.flatten(0, 1)

    def _all(self) -> list[LayerRouting]:
        return [layer for layers in self.layers.values() for layer in layers]

    def metrics(self) -> dict[str, float]:
        """Of each layer: the busiest expert's tokens over the mean (1: balanced), the entropy of the load over log E (1:
        balanced), the share of experts without a token; averaged over layers, and the worst. Where routing is replayed,
        the share of tokens (times layers) that the router itself would have sent elsewhere."""
        e, n = self.arch.num_experts, self.arch.num_layers
        numbers = torch.zeros(n, e + 3, dtype=torch.float64)
        for layer in self._all():
            numbers[layer.layer] = torch.cat([layer.load, layer.replayed, layer.loss[None]]).cpu()
        r = self.runtime
        # Ranks that hold the same tokens count them once; those that share a sequence hold different ones.
        if r.tp_rank and not self.sequence_parallel:
            numbers.zero_()
        summed = torch.tensor(r.reduce_sum(numbers.flatten().tolist()), dtype=torch.float64).view(n, e + 3)
        return load_metrics(
            summed[:, :e], summed[:, e : e + 2].sum(0), float(summed[:, -1].sum()), bool(self.coefficient)
        )


def load_metrics(load: Tensor, replayed: Tensor, loss: float, balanced: bool) -> dict[str, float]:
    """Metrics from tokens by layer and expert [layers, experts] (layers without tokens are dense), and from the numbers of
    replayed tokens and of those among them that the router would have sent elsewhere."""
    load = load[load.sum(1) > 0]
    if not len(load):
        return {}
    share = load / load.sum(1, keepdim=True)
    peak = share.max(1).values * load.shape[1]
    entropy = -(share * share.clamp_min(1e-300).log()).sum(1) / max(math.log(load.shape[1]), 1e-12)
    metrics = {
        "moe/load_max_over_mean": float(peak.mean()),
        "moe/load_max_over_mean_worst_layer": float(peak.max()),
        "moe/load_entropy": float(entropy.mean()),
        "moe/idle_experts": float((load == 0).double().mean()),
    }
    if balanced:
        metrics["moe/aux_loss"] = loss
    if replayed[0] > 0:
        metrics["moe/replay_changed"] = float(replayed[1] / replayed[0])
    return metrics
