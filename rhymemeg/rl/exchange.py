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

from rhymemeg.rollout.samples import Sample, SampleId


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
    parts = _all_gather_rows(rows, fabric)
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


def _all_gather_rows(rows: npt.NDArray[np.float64], fabric: Fabric) -> npt.NDArray[np.float64]:
    """Concatenate [n_r, k] arrays of all ranks, in rank order."""
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(fabric.world_size)]
    dist.all_gather(counts, torch.tensor([len(rows)]), group=fabric.control_group)
    most = max(int(c) for c in counts)
    padded = torch.zeros(most, rows.shape[1], dtype=torch.float64)
    padded[: len(rows)] = torch.from_numpy(rows)
    parts = [torch.empty_like(padded) for _ in range(fabric.world_size)]
    dist.all_gather(parts, padded, group=fabric.control_group)
    return np.concatenate([part.numpy()[: int(count)] for part, count in zip(parts, counts)])


def pack(sample: Sample) -> npt.NDArray[np.int64]:
    """A sample as one int64 array: header, prompt, response, versions, log-probabilities (as the bits of float64)."""
    sid = sample.sample_id
    header = (
        sid.step,
        sid.prompt_id,
        sid.sample_index,
        sample.engine,
        len(sample.prompt_ids),
        len(sample.response_ids),
    )
    return np.concatenate(
        [
            np.array(header, np.int64),
            np.array(sample.prompt_ids, np.int64),
            np.array(sample.response_ids, np.int64),
            np.array(sample.versions, np.int64),
            np.array(sample.log_probs, np.float64).view(np.int64),
        ]
    )


def unpack_all(buffer: npt.NDArray[np.int64]) -> list[Sample]:
    """Inverse of concatenated `pack`s."""
    samples, at = [], 0

    def take(n: int) -> npt.NDArray[np.int64]:
        nonlocal at
        at += n
        return buffer[at - n : at]

    while at < len(buffer):
        step, prompt_id, index, engine, p, r = (int(x) for x in take(6))
        prompt, response, versions, log_probs = take(p), take(r), take(r), take(r)
        samples.append(
            Sample(
                SampleId(step, prompt_id, index),
                tuple(prompt.tolist()),
                response.tolist(),
                log_probs.view(np.float64).tolist(),
                versions.tolist(),
                engine=engine,
            )
        )
    return samples


def exchange(outgoing: Sequence[Sequence[Sample]], fabric: Fabric) -> dict[SampleId, Sample]:
    """All-to-all of samples: `outgoing[r]` are this rank's samples that rank r needs. Returns what this rank received
    (with what it keeps itself), by id. Rewards and text stay behind: the summaries carry what training needs."""
    buffers = [np.concatenate([pack(s) for s in samples]) if samples else np.zeros(0, np.int64) for samples in outgoing]
    return {s.sample_id: s for part in _all_to_all(buffers, fabric) for s in unpack_all(part)}


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
