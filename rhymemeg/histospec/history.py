"""History buffer: the responses of a prompt's last visit, kept compactly, one buffer a rollout engine.

In: token ids, rewards, weight versions of finished samples, by prompt id. Out: the same, as drafts for the next visit
(`HistoSpec`) and as lengths for planning. Keyed by prompt id, so prompts with equal text stay apart; a digest of the
prompt's tokens guards against an id that means another prompt in this run.

Storage: ids at ceil(log2(vocabulary)) bits each (18 bits, 2.25 bytes a token, for 151,936), all responses of a visit in
one byte string. A memory budget is kept by Belady's rule: since the order of prompts is known (`set_next_uses`), the prompt
dropped first is the one used furthest in the future, the one just recorded included; unknown next use counts as never.

The file and the bytes that move with prompts between engines are one format: a JSON header, the visits, a SHA-256 over all
of it. They are read whole or not at all (`CheckpointError` names the file and what is wrong) and hold data only, no pickle.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rhymemeg.errors import CheckpointError, DataError
from rhymemeg.histospec.index import pack, unpack
from rhymemeg.observe.files import write_atomically

MAGIC = b"rhymemeg history 1\n"
DIGEST_SIZE = 8
_VISIT = struct.Struct("<qI8s")  # step, number of responses, digest of the prompt
_ITEM = struct.Struct("<qI")  # prompt id, bytes of its visit
_RESPONSES = np.dtype([("length", "<u4"), ("version", "<i4"), ("reward", "<f4")])
# What a stored visit costs beside its bytes: entries in the dictionary, the heap and the list (measured, rounded up).
_OVERHEAD = 400


@dataclass(frozen=True)
class Visit:
    """The responses of a prompt in one step. `tokens` holds them one after another; the arrays have an entry a response."""

    step: int
    lengths: NDArray[np.int64]
    rewards: NDArray[np.float32]
    versions: NDArray[np.int32]
    tokens: NDArray[np.int32]

    def responses(self) -> list[NDArray[np.int32]]:
        """Token ids of each response."""
        return np.split(self.tokens, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


def prompt_digest(prompt_ids: Sequence[int] | NDArray[Any]) -> bytes:
    """Names the prompt's text; equal for equal token ids."""
    return hashlib.blake2b(np.asarray(prompt_ids, dtype="<i8").tobytes(), digest_size=DIGEST_SIZE).digest()


class HistoryBuffer:
    """See the module. `tokenizer` is any string that names the tokenizer (say a hash of its file); histories of another
    one are refused. `visits` is how many visits of a prompt are kept. Not thread-safe."""

    def __init__(
        self, vocab_size: int, *, tokenizer: str = "", budget_bytes: int | None = None, visits: int = 1
    ) -> None:
        if not 1 <= vocab_size <= 2**21 - 1:
            raise ValueError(f"vocab_size must be between 1 and 2097151, got {vocab_size}")
        if visits < 1:
            raise ValueError(f"visits must be at least 1, got {visits}")
        self.vocab_size, self.tokenizer, self.visits = vocab_size, tokenizer, visits
        self.budget_bytes = budget_bytes
        self.bits = max(1, (vocab_size - 1).bit_length())
        self.evicted = 0
        """Prompts dropped for the budget so far."""
        self._stored: dict[int, list[bytes]] = {}  # newest visit first
        self._bytes = 0
        self._tokens = 0
        self._next_use: dict[int, int] = {}
        self._furthest: list[tuple[int, int]] = []  # heap of (-next use, -prompt id); stale entries are skipped

    # ---------------------------------------------------------------------------------------------------------- content

    def record(
        self,
        prompt_id: int,
        prompt_ids: Sequence[int] | NDArray[Any],
        responses: Sequence[Sequence[int] | NDArray[Any]],
        rewards: Sequence[float],
        *,
        step: int,
        versions: Sequence[int] | None = None,
    ) -> None:
        """Keep the responses of a prompt's visit at `step`, replacing the oldest visit beyond `visits`. Responses recorded for
        the same step before (samples that came a window late) are added to. Empty responses count with length 0.

        DataError, with nothing changed: no responses, sizes that differ, a reward that is not finite, a token outside the
        vocabulary.
        """
        where = f"history of prompt {prompt_id}, step {step}"
        if not responses:
            raise DataError(f"{where}: no responses")
        if len(rewards) != len(responses) or (versions is not None and len(versions) != len(responses)):
            raise DataError(f"{where}: {len(responses)} responses but {len(rewards)} rewards")
        digest = prompt_digest(prompt_ids)
        table = np.zeros(len(responses), _RESPONSES)
        table["length"] = [len(response) for response in responses]
        table["version"] = -1 if versions is None else versions
        table["reward"] = rewards
        if not np.isfinite(table["reward"]).all():
            raise DataError(f"{where}: reward of response {int(np.argmin(np.isfinite(table['reward'])))} is not finite")
        tokens = np.concatenate([np.asarray(response, dtype=np.int64) for response in responses])
        self._check_tokens(tokens, table["length"], where)

        kept = [visit for visit in self._stored.get(prompt_id, []) if _VISIT.unpack_from(visit)[2] == digest]
        for position, visit in enumerate(kept):
            if _VISIT.unpack_from(visit)[0] == step:
                earlier = self._decode(visit)
                table = np.concatenate([_table_of(earlier), table])
                tokens = np.concatenate([earlier.tokens, tokens])
                del kept[position]
                break
        blob = _VISIT.pack(step, len(table), digest) + table.tobytes() + pack(tokens, self.bits, self.vocab_size)
        kept.append(blob)
        kept.sort(key=lambda visit: -_VISIT.unpack_from(visit)[0])
        self._put(prompt_id, kept[: self.visits])
        self._evict()

    def get(self, prompt_id: int, prompt_ids: Sequence[int] | NDArray[Any] | None = None) -> list[Visit]:
        """Visits of the prompt, newest first; empty if there are none, or if `prompt_ids` is given and the history was
        recorded for another text under the same id."""
        stored = self._stored.get(prompt_id, [])
        if prompt_ids is not None and stored:
            digest = prompt_digest(prompt_ids)
            stored = [visit for visit in stored if _VISIT.unpack_from(visit)[2] == digest]
        return [self._decode(visit) for visit in stored]

    def lengths(self, prompt_id: int) -> list[int]:
        """Lengths of the last visit's responses, without decoding them; empty if there is none."""
        stored = self._stored.get(prompt_id)
        return _read_table(stored[0])["length"].tolist() if stored else []

    def discard(self, prompt_id: int) -> None:
        """Forget a prompt; unknown ones are ignored."""
        self._put(prompt_id, [])

    def __contains__(self, prompt_id: int) -> bool:
        return prompt_id in self._stored

    def __len__(self) -> int:
        return len(self._stored)

    def __iter__(self) -> Iterator[int]:
        return iter(self._stored)

    @property
    def num_tokens(self) -> int:
        return self._tokens

    @property
    def num_bytes(self) -> int:
        """Memory held, Python's own overhead included."""
        return self._bytes

    @property
    def bytes_per_token(self) -> float:
        return self._bytes / self._tokens if self._tokens else 0.0

    # ----------------------------------------------------------------------------------------------------------- budget

    def set_next_uses(self, order: Iterable[int]) -> None:
        """Prompts in the order in which they will be used from now on (repeats allowed, the first counts). Prompts not in
        it are taken as never used again."""
        self._next_use = {}
        for position, prompt_id in enumerate(order):
            self._next_use.setdefault(prompt_id, position)
        self._furthest = [(-self._when(prompt_id), -prompt_id) for prompt_id in self._stored]
        heapq.heapify(self._furthest)
        self._evict()

    def _when(self, prompt_id: int) -> int:
        return self._next_use.get(prompt_id, sys.maxsize)

    def _evict(self) -> None:
        while self.budget_bytes is not None and self._bytes > self.budget_bytes and self._furthest:
            when, negative_id = heapq.heappop(self._furthest)
            prompt_id = -negative_id
            if prompt_id in self._stored and -when == self._when(prompt_id):
                self._put(prompt_id, [])
                self.evicted += 1

    def _put(self, prompt_id: int, visits: list[bytes]) -> None:
        old = self._stored.pop(prompt_id, [])
        for sign, group in ((-1, old), (1, visits)):
            self._bytes += sign * sum(sys.getsizeof(visit) + _OVERHEAD for visit in group)
            self._tokens += sign * sum(int(_read_table(visit)["length"].sum()) for visit in group)
        if visits:
            self._stored[prompt_id] = visits
            if not old:
                heapq.heappush(self._furthest, (-self._when(prompt_id), -prompt_id))

    # ------------------------------------------------------------------------------------------------ moving and storing

    def export(self, prompt_ids: Iterable[int] | None = None, *, compress: bool = False) -> bytes:
        """All visits of these prompts (default: all), for another engine or a file. Unknown prompts are left out."""
        items = []
        for prompt_id in sorted(self._stored if prompt_ids is None else set(prompt_ids)):
            for visit in self._stored.get(prompt_id, []):
                items.append(_ITEM.pack(prompt_id, len(visit)) + visit)
        body = b"".join(items)
        header = json.dumps(
            {"vocab_size": self.vocab_size, "tokenizer": self.tokenizer, "visits": len(items), "compressed": compress}
        ).encode()
        data = MAGIC + struct.pack("<I", len(header)) + header + (zlib.compress(body, 6) if compress else body)
        return data + hashlib.sha256(data).digest()

    def merge(self, data: bytes, where: str = "moved history") -> int:
        """Take over what another buffer exported; its visits replace those of the same prompt. Returns the number of prompts.

        CheckpointError naming `where`, with nothing changed: damaged bytes, another vocabulary or tokenizer.
        """
        header, body = _open(data, where)
        if header["vocab_size"] != self.vocab_size:
            raise CheckpointError(
                f"{where}: history of a vocabulary of {header['vocab_size']} tokens, this run has {self.vocab_size}"
            )
        if header["tokenizer"] != self.tokenizer:
            raise CheckpointError(
                f"{where}: history of tokenizer {header['tokenizer']!r}, this run has {self.tokenizer!r}"
            )
        merged: dict[int, list[bytes]] = {}
        at = 0
        try:
            while at < len(body):
                prompt_id, size = _ITEM.unpack_from(body, at)
                at += _ITEM.size
                visit = body[at : at + size]
                at += size
                decoded = self._decode(visit)
                if len(visit) != size or len(decoded.tokens) != decoded.lengths.sum():
                    raise ValueError("cut short")
                self._check_tokens(decoded.tokens, decoded.lengths, f"{where}: prompt {prompt_id}")
                merged.setdefault(prompt_id, []).append(visit)
        except (struct.error, ValueError, DataError) as error:
            raise CheckpointError(f"{where}: damaged history: {error}") from None
        for prompt_id, visits in merged.items():
            self._put(prompt_id, visits[: self.visits])
        self._evict()
        return len(merged)

    def save(self, path: str | Path, *, compress: bool = False) -> None:
        """Write everything to a file that appears whole or not at all."""
        write_atomically(path, self.export(compress=compress))

    def load(self, path: str | Path) -> int:
        """Merge a saved file; returns the number of prompts. CheckpointError as in `merge`, naming the file."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read history {path}: {error.strerror}") from None
        return self.merge(data, str(path))

    # --------------------------------------------------------------------------------------------------------- encoding

    def _check_tokens(self, tokens: NDArray[Any], lengths: NDArray[Any], where: str) -> None:
        bad = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if len(bad):
            response = int(np.searchsorted(np.cumsum(lengths), bad[0], side="right"))
            raise DataError(
                f"{where}: response {response} has token id {int(tokens[bad[0]])}, outside the vocabulary of {self.vocab_size}"
            )

    def _decode(self, visit: bytes) -> Visit:
        table = _read_table(visit)
        start = _VISIT.size + table.nbytes
        tokens = unpack(memoryview(visit)[start:], int(table["length"].sum()), self.bits)
        return Visit(
            _VISIT.unpack_from(visit)[0],
            table["length"].astype(np.int64),
            table["reward"].copy(),
            table["version"].copy(),
            tokens,
        )


def _read_table(visit: bytes) -> NDArray[Any]:
    return np.frombuffer(visit, _RESPONSES, count=_VISIT.unpack_from(visit)[1], offset=_VISIT.size)


def _table_of(visit: Visit) -> NDArray[Any]:
    table = np.zeros(len(visit.lengths), _RESPONSES)
    table["length"], table["version"], table["reward"] = visit.lengths, visit.versions, visit.rewards
    return table


def _open(data: bytes, where: str) -> tuple[Mapping[str, Any], bytes]:
    """Header and body of exported bytes. CheckpointError if anything about them is wrong."""
    if not data.startswith(MAGIC):
        raise CheckpointError(f"{where}: not a history file of this format")
    start = len(MAGIC) + 4
    if len(data) < start + 32 or hashlib.sha256(data[:-32]).digest() != data[-32:]:
        raise CheckpointError(f"{where}: damaged or cut short (checksum differs)")
    size = struct.unpack_from("<I", data, len(MAGIC))[0]
    try:
        header = json.loads(data[start : start + size])
        body = data[start + size : -32]
        return header, zlib.decompress(body) if header["compressed"] else body
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise CheckpointError(f"{where}: damaged history: {error}") from None
