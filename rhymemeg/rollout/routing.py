"""The experts that an engine sent tokens to, as they travel with a sample. Pure (numpy).

`Sample.routing` is [prompt + response - 1, layers, k]: row t are the experts of the pass that read token t (the last token of
a response is never read). Layers are all layers of the model, dense ones with anything. Numbers are uint8, or uint16 for more
than 255 experts, and the largest number of the type stands for a row that no engine reported.

A response that was paused keeps the rows it has: they belong to the weights that made its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rhymemeg.rollout.samples import Sample, SampleId

Rows = npt.NDArray[np.unsignedinteger]
Part = tuple[int, Rows]
"""Position of the first token, and the experts of tokens from there on."""


def expert_dtype(num_experts: int) -> np.dtype:
    """The type of the numbers."""
    return np.dtype(np.uint8 if num_experts <= 255 else np.uint16)


def assemble(length: int, parts: Iterable[Part], known: Rows | None, num_experts: int) -> Rows | None:
    """The routing of a sample of `length` read tokens: `parts` in their order (a later one counts), but rows of `known` stay.
    None if there is nothing."""
    given = list(parts)
    if known is not None:
        given.append((0, known))
    if not given:
        return None
    dtype = expert_dtype(num_experts)
    whole: Rows = np.full((length, *given[0][1].shape[1:]), np.iinfo(dtype).max, dtype)
    for start, rows in given:
        fits = rows[: max(length - start, 0)].astype(dtype)
        reported = fits[:, 0, 0] != np.iinfo(dtype).max
        whole[start : start + len(fits)][reported] = fits[reported]
    return whole


def replayable(routing: Rows, moe_layers: Sequence[int], num_experts: int) -> npt.NDArray[np.int16]:
    """For the trainer: int16, -1 in rows that no engine reported. ValueError for experts that the model does not have, or the
    same one twice, in a layer of `moe_layers`."""
    unknown = routing == np.iinfo(routing.dtype).max
    out = routing.astype(np.int16)
    out[unknown.any(axis=(1, 2))] = -1
    reported = out[out[:, 0, 0] >= 0][:, list(moe_layers)]
    ordered = np.sort(reported, axis=-1)
    if (reported >= num_experts).any() or (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ValueError(f"experts beyond {num_experts - 1}, or one expert twice for a token")
    return out


def pack_routing(samples: Sequence[Sample]) -> bytes:
    """The routing of samples, those without one left out."""
    parts = []
    for s in samples:
        if s.routing is not None:
            sid = s.sample_id
            header = (sid.step, sid.prompt_id, sid.sample_index, *s.routing.shape, s.routing.dtype.itemsize)
            parts += [np.array(header, "<i8").tobytes(), np.ascontiguousarray(s.routing).tobytes()]
    return b"".join(parts)


def unpack_routing(data: bytes) -> dict[SampleId, Rows]:
    """Inverse of `pack_routing`. ValueError where the bytes end early."""
    found, at = {}, 0
    while at < len(data):
        if at + 56 > len(data):
            raise ValueError("routing is cut short")
        step, prompt, index, rows, layers, k, itemsize = np.frombuffer(data, "<i8", 7, at).tolist()
        at += 56
        size = rows * layers * k * itemsize
        if min(rows, layers, k) < 0 or itemsize not in (1, 2) or at + size > len(data):
            raise ValueError("routing is cut short")
        numbers = np.frombuffer(data, f"<u{itemsize}", rows * layers * k, at)
        found[SampleId(step, prompt, index)] = numbers.reshape(rows, layers, k)
        at += size
    return found
