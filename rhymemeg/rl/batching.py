"""From samples to micro-batches.

Three steps, of which the first is pure planning and is computed identically on every rank from the lengths of *all*
samples of an optimizer step:

1. `plan_micro_batches(lengths, ...)` puts samples of similar length together under a token budget (padding included) and
   deals the micro-batches to the data-parallel ranks so that each gets the same number and about the same FLOPs.
2. `rhymemeg.rl.exchange` brings each sample to the ranks that train it.
3. `collate` pads the rows of one micro-batch into tensors.

Invariants (asserted by the tests): every sample is in exactly one micro-batch; no micro-batch exceeds the budget; every
rank has the same number of micro-batches; none is empty unless every other holds a single sample and their number is no
multiple of the ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass
class TrainSample:
    """One sample as the trainer sees it: `tokens` [prompt + response], and per *response token* [response] the float
    fields that the loss needs (advantages, weights, log-probabilities). `trained` [response] is 0 where a token is left
    out of the loss. `routing` [tokens - 1, layers, k] are the engine's experts, -1 where it said nothing, if they are to
    be replayed."""

    tokens: npt.NDArray[np.int64]
    prompt_len: int
    trained: npt.NDArray[np.float32]
    fields: dict[str, npt.NDArray[np.float32]]
    routing: npt.NDArray[np.int16] | None = None


@dataclass
class MicroBatch:
    """Rows of similar length, padded on the right. All tensors are [b, s] with s = longest row - 1 (the last token is
    only ever a label). `labels[i, t]` is `tokens[i, t + 1]`; `loss_mask` is 1 where the label is a trained response
    token; `fields` are aligned with the labels and 0 elsewhere. `routing` are experts to replay: the engine's [b, s,
    layers, k], or what a forward pass recorded on this rank (`parallel.router_replay`)."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    fields: dict[str, Tensor]
    routing: Tensor | dict[int, Tensor] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens.shape[0], self.tokens.shape[1]

    @property
    def real(self) -> Tensor:
        """[b, s]: where a row has a token that the loss depends on, those up to its last trained one; False at padding."""
        return self.loss_mask.flip(1).cumsum(1).flip(1) > 0


def sample_cost(length: int, hidden_size: int) -> float:
    """Relative FLOPs of one row: per layer about 24 h^2 s for the matrices and 4 h s^2 for attention, i.e. s (6 h + s)."""
    return float(length) * (6 * hidden_size + length)


def plan_micro_batches(
    lengths: Sequence[int], data_parallel: int, max_tokens: int, hidden_size: int
) -> list[list[list[int]]]:
    """Plan `[data-parallel rank][micro-batch] -> sample indices`. `lengths` are in tokens, prompt included."""
    if lengths and max(lengths) > max_tokens:
        raise ValueError(f"a sample of {max(lengths)} tokens exceeds the budget of {max_tokens} tokens a micro-batch")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    for i in order:
        # Descending order: the first row of a batch is its longest and sets the padded length of all.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])

    def cost(batch: list[int]) -> float:
        return len(batch) * sample_cost(lengths[batch[0]], hidden_size)

    # The costliest batches are halved until every rank can have the same number.
    costliest = [(-cost(batch), batch) for batch in batches if len(batch) > 1]
    heapq.heapify(costliest)
    batches = [batch for batch in batches if len(batch) == 1]
    while (len(batches) + len(costliest)) % data_parallel or not (batches or costliest):
        if not costliest:
            batches.append([])
            continue
        _, batch = heapq.heappop(costliest)
        for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :]):
            if len(half) > 1:
                heapq.heappush(costliest, (-cost(half), half))
            else:
                batches.append(half)
    batches += [batch for _, batch in costliest]

    # Longest processing time first, with room for exactly the same number on every rank.
    share = len(batches) // data_parallel
    plan: list[list[list[int]]] = [[] for _ in range(data_parallel)]
    load = [(0.0, rank) for rank in range(data_parallel)]
    for batch in sorted(batches, key=lambda batch: (-cost(batch) if batch else 0.0, batch)):
        total, rank = heapq.heappop(load)
        plan[rank].append(batch)
        if len(plan[rank]) < share:
            heapq.heappush(load, (total + (cost(batch) if batch else 0.0), rank))
    return plan


def collate(rows: Sequence[TrainSample], field_names: Sequence[str], device: torch.device | str = "cpu") -> MicroBatch:
    """Pad rows into a micro-batch. No rows give one row of one token outside the loss (a rank with nothing to train
    still takes part in the collectives)."""
    width = max((len(row.tokens) for row in rows), default=2) - 1
    shape = (max(len(rows), 1), width)
    tokens, labels = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    mask = np.zeros(shape, np.float32)
    fields = {name: np.zeros(shape, np.float32) for name in field_names}
    for i, row in enumerate(rows):
        n, first = len(row.tokens), row.prompt_len - 1
        tokens[i, : n - 1] = row.tokens[:-1]
        labels[i, : n - 1] = row.tokens[1:]
        mask[i, first : n - 1] = row.trained
        for name in field_names:
            fields[name][i, first : n - 1] = row.fields[name]

    def tensor(array: npt.NDArray) -> Tensor:
        return torch.from_numpy(array).to(device)

    batch = MicroBatch(tensor(tokens), tensor(labels), tensor(mask), {k: tensor(v) for k, v in fields.items()})
    shown = next((row.routing for row in rows if row.routing is not None), None)
    if shown is not None:
        routing = np.full((*shape, *shown.shape[1:]), -1, np.int16)
        for i, row in enumerate(rows):
            if row.routing is not None:
                routing[i, : len(row.routing)] = row.routing
        batch.routing = tensor(routing)
    return batch


def spread_fields(micro_batch: MicroBatch, updates: Mapping[str, Tensor]) -> MicroBatch:
    """A copy of the micro-batch with more fields (of the same [b, s] shape), zeroed outside the loss mask."""
    extra = {name: value * micro_batch.loss_mask for name, value in updates.items()}
    return replace(micro_batch, fields={**micro_batch.fields, **extra})
