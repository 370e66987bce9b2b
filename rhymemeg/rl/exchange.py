"""Moves samples from the ranks that generated them to the ranks that train them.

No rank ever holds the tokens of the whole step: all ranks share a summary line a sample (`SampleSummary`: id, lengths,
reward), from which each computes the same plan; then one all-to-all brings the tokens where the plan wants them.

Tokens travel as one byte buffer a pair of ranks, numbers only (numpy), nothing pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from rhymemeg.rollout.routing import pack_routing, unpack_routing
from rhymemeg.rollout.samples import Sample, SampleId
from rhymemeg.rollout.wire import pack_numbers, unpack_numbers


class Fabric(Protocol):
    """The part of `parallel.runtime.Runtime` that is used here."""

    rank: int
    world_size: int
    control_group: dist.ProcessGroup


@dataclass(frozen=True, order=True)
class SampleSummary:
    """What every rank knows of every sample. `holder` is the rank that has its tokens; `oldest_version` that of the
    weights that made its first token (-1: no token)."""

    sample_id: SampleId
    holder: int
    prompt_len: int
    response_len: int
    reward: float
    truncated: bool
    oldest_version: int


def share_summaries(samples: Sequence[Sample], fabric: Fabric) -> list[SampleSummary]:
    """Summaries of the samples of all ranks, ordered by sample id; `samples` are those that this rank holds."""
    rows = np.array(
        [
            (s.sample_id.step, s.sample_id.prompt_id, s.sample_id.sample_index, fabric.rank, len(s.prompt_ids),
             len(s.response_ids), float("nan") if s.reward is None else s.reward, s.truncated,
             min(s.versions, default=-1))
            for s in samples
        ],
        np.float64,
    ).reshape(-1, 9)  # fmt: skip
    parts = all_gather_rows(rows, fabric)
    return sorted(
        SampleSummary(
            SampleId(int(r[0]), int(r[1]), int(r[2])),
            int(r[3]),
            int(r[4]),
            int(r[5]),
            float(r[6]),
            bool(r[7]),
            int(r[8]),
        )
        for r in parts
    )


def all_gather_rows(rows: npt.NDArray[np.float64], fabric: Fabric) -> npt.NDArray[np.float64]:
    """Concatenate [n_r, k] arrays of all ranks, in rank order."""
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(fabric.world_size)]
    dist.all_gather(counts, torch.tensor([len(rows)]), group=fabric.control_group)
    most = max(int(c) for c in counts)
    padded = torch.zeros(most, rows.shape[1], dtype=torch.float64)
    padded[: len(rows)] = torch.from_numpy(rows)
    parts = [torch.empty_like(padded) for _ in range(fabric.world_size)]
    dist.all_gather(parts, padded, group=fabric.control_group)
    return np.concatenate([part.numpy()[: int(count)] for part, count in zip(parts, counts)])


def exchange(outgoing: Sequence[Sequence[Sample]], fabric: Fabric) -> dict[SampleId, Sample]:
    """All-to-all of samples: `outgoing[r]` are this rank's samples that rank r needs. Returns what this rank received
    (with what it keeps itself), by id. Rewards and text stay behind: the summaries carry what training needs."""
    buffers = [
        np.concatenate([pack_numbers(s) for s in samples]) if samples else np.zeros(0, np.int64) for samples in outgoing
    ]
    return {s.sample_id: s for part in _all_to_all(buffers, fabric) for s in unpack_numbers(part)}


def exchange_routing(outgoing: Sequence[Sequence[Sample]], received: dict[SampleId, Sample], fabric: Fabric) -> None:
    """All-to-all of the engines' experts, after `exchange` of the same samples: sets `routing` of those received."""
    for part in exchange_bytes([pack_routing(samples) for samples in outgoing], fabric):
        for sample_id, routing in unpack_routing(part).items():
            received[sample_id].routing = routing


def exchange_bytes(outgoing: Sequence[bytes], fabric: Fabric) -> list[bytes]:
    """All-to-all of byte strings: `outgoing[r]` goes to rank r; returns what each rank sent here."""
    return [part.tobytes() for part in _all_to_all([np.frombuffer(data, np.uint8) for data in outgoing], fabric)]


def _all_to_all(buffers: Sequence[npt.NDArray], fabric: Fabric) -> list[npt.NDArray]:
    """The arrays that each rank sent here, for one array to each rank, all of one type."""
    sizes = torch.tensor([len(b) for b in buffers])
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes, group=fabric.control_group)
    sent = torch.from_numpy(np.concatenate(buffers))
    received = torch.empty(int(incoming.sum()), dtype=sent.dtype)
    dist.all_to_all_single(received, sent, incoming.tolist(), sizes.tolist(), group=fabric.control_group)
    return np.split(received.numpy(), np.cumsum(incoming.numpy())[:-1])
