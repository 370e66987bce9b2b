"""Samples as bytes: for the way to another rank and for checkpoints. Pure.

`pack_numbers` holds what training needs (ids, tokens, versions, log-probabilities) as one int64 array. `pack_samples` adds
the rest (finish reason, reward and its components as a line of JSON before it, the experts of `routing` after it); texts are
left out, since tokens give them again. Nothing is pickled. `unpack_samples` raises ValueError on anything that `pack_samples`
did not write.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rhymemeg.rollout.routing import pack_routing, unpack_routing
from rhymemeg.rollout.samples import Sample, SampleId


def pack_numbers(sample: Sample) -> npt.NDArray[np.int64]:
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


def unpack_numbers(buffer: npt.NDArray[np.int64]) -> list[Sample]:
    """Inverse of concatenated `pack_numbers`. ValueError where the numbers end early."""
    samples, at = [], 0

    def take(n: int) -> npt.NDArray[np.int64]:
        nonlocal at
        if n < 0 or at + n > len(buffer):
            raise ValueError("samples are cut short")
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


def pack_samples(samples: Sequence[Sample]) -> bytes:
    """Samples with everything but their text."""
    numbers = b"".join(pack_numbers(s).astype("<i8").tobytes() for s in samples)
    head = {
        "samples": [[s.finish_reason, s.reward, s.reward_components] for s in samples],
        "numbers": len(numbers),
    }
    return json.dumps(head).encode() + b"\n" + numbers + pack_routing(samples)


def unpack_samples(data: bytes) -> list[Sample]:
    """Inverse of `pack_samples`."""
    head, separator, body = data.partition(b"\n")
    if not separator:
        raise ValueError("not a list of samples")
    entries = json.loads(head)
    rest, size = entries["samples"], int(entries["numbers"])
    if size % 8 or size > len(body):
        raise ValueError("samples are cut short")
    samples = unpack_numbers(np.frombuffer(body[:size], "<i8").astype(np.int64))
    if len(rest) != len(samples):
        raise ValueError(f"{len(samples)} samples with {len(rest)} descriptions")
    for sample, (finish_reason, reward, components) in zip(samples, rest):
        if finish_reason not in (None, "stop", "length", "abort"):
            raise ValueError(f"finish reason {finish_reason!r}")
        sample.finish_reason, sample.reward, sample.reward_components = finish_reason, reward, dict(components)
    by_id = {sample.sample_id: sample for sample in samples}
    for sample_id, routing in unpack_routing(body[size:]).items():
        by_id[sample_id].routing = routing
    return samples
