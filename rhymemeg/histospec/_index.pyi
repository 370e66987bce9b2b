"""Draft index: finds what may follow the tail of each running response, in the documents of its prompt.

A *prompt* (any 64-bit id; equal texts under two ids stay apart) has *documents*: responses of earlier visits, the prompt
itself if wanted, and one for each request that was opened, which grows as tokens are appended. A draft for a request is
the continuation of the longest suffix of its tokens that occurs in a searchable document of the same prompt (its own
earlier tokens included). Where occurrences disagree, they vote at each fork with their document's weight; if no branch
has a positive sum, by count; ties go to the higher count, then to the occurrence with the longer common context.

Token ids are int32 in [0, 2**21 - 2]; a document holds at most MAX_DOCUMENT_LENGTH tokens, a prompt 4,096 documents.
Arrays are one-dimensional; int32 and contiguous ones are used in place, others converted. Every call releases the GIL and
holds one lock; `load` works outside the lock, so it may run in threads while drafting goes on. Results depend on nothing
but the sequence of calls: tensor-parallel ranks that make equal calls get equal drafts.
ValueError: bad arguments or token ids, prompt loaded twice. IndexError: slot not open. Nothing is changed in either case.

    index = DraftIndex()
    index.load(7, context=prompt[-8:], tokens=flat, lengths=lengths, weights=rewards)
    slot = index.open(7, context=prompt[-8:])
    index.append([slot], [0, 2], [15, 3])
    tokens, offsets, matches, occurrences, probabilities = index.draft([slot], [16])
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Ints = Sequence[int] | NDArray[np.integer[Any]]
_Floats = Sequence[float] | NDArray[np.floating[Any]]

MAX_CONTEXT: int
"""Tokens over which contexts are compared (64): longer agreement makes no difference."""
MAX_DOCUMENT_LENGTH: int

class DraftIndex:
    def __init__(self) -> None: ...
    def load(
        self,
        prompt_id: int,
        *,
        context: _Ints,
        tokens: _Ints,
        lengths: _Ints,
        weights: _Floats,
        prompt_tokens: _Ints = ...,
        prompt_weight: float = 0.0,
    ) -> None:
        """Index a prompt's frozen documents at once (about half the time a token of `append`).

        `tokens` holds the responses one after another, `lengths` and `weights` have one entry a response. Every response
        is preceded by `context`, the prompt's last tokens, which is matched against but never drafted. `prompt_tokens`,
        if given, is one more document with `prompt_weight`.
        """

    def open(self, prompt_id: int, *, context: _Ints, weight: float = 1.0, searchable: bool = True) -> int:
        """Start a request's document after `context`; returns its slot. `searchable=False` keeps it out of everyone's
        drafts (history-only drafting). A prompt that was not loaded starts without documents."""

    def append(self, slots: _Ints, offsets: _Ints, tokens: _Ints) -> None:
        """Append tokens[offsets[i]:offsets[i + 1]] to slots[i]; offsets has one entry more than slots."""

    def draft(
        self,
        slots: _Ints,
        limits: _Ints,
        *,
        min_match: int = 1,
        max_match: int = 64,
        max_occurrences: int = 64,
        min_path_probability: float = 0.0,
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
        """Draft at most limits[i] tokens for slots[i]. Returns (tokens, offsets, matches, occurrences, probabilities).

        Row i's draft is tokens[offsets[i]:offsets[i + 1]], empty where no suffix of at least `min_match` tokens occurs.
        matches[i] is the length of that suffix, at most `max_match` (occurrences that agree further are not preferred);
        occurrences[i] of its occurrences vote, at most `max_occurrences`, those with the longest common context first;
        both are 0 where the draft is empty. probabilities[j] is the share of the votes' count on the path up to token j;
        a draft stops before it falls under `min_path_probability`."""

    def close(self, slot: int) -> None:
        """The request has ended; its tokens stay a document of the prompt until `release`."""

    def release(self, prompt_id: int) -> None:
        """Free the prompt's documents and close its slots. Unknown prompts are ignored."""

    def __contains__(self, prompt_id: int) -> bool: ...
    @property
    def num_prompts(self) -> int: ...
    @property
    def num_open(self) -> int: ...
    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, contexts included."""
    @property
    def memory_bytes(self) -> int:
        """Bytes allocated for all of it, capacity included."""

class AcceptanceModel:
    """Acceptance of drafted tokens, learnt while running; the method is described in `policy` (goodput). Arrays as returned
    by `DraftIndex.draft`. ValueError if their sizes do not agree. Not thread-safe."""

    def __init__(self) -> None: ...
    def start(self, slot: int, prompt_id: int) -> None:
        """A request takes a slot: its record starts empty."""

    def survival(
        self, slots: _Ints, offsets: _Ints, matches: _Ints, occurrences: _Ints, probabilities: _Floats
    ) -> NDArray[np.float64]:
        """Probability that each proposed token and all before it in its row are accepted."""

    def choose(
        self,
        slots: _Ints,
        offsets: _Ints,
        matches: _Ints,
        occurrences: _Ints,
        probabilities: _Floats,
        *,
        weights: _Floats,
        base: float,
        times: _Floats,
        explore: int = 0,
    ) -> NDArray[np.int64]:
        """Length a row so that (base + sum of weights[row] * survival over the chosen tokens) / times[number of chosen tokens]
        is largest. If that is no draft at all, the `explore` best tokens are chosen. Remembered until `observe`."""

    def observe(self, slots: _Ints, drafted: _Ints, accepted: _Ints) -> None:
        """What the engine verified of the last choice, a row a slot."""

    @property
    def trials(self) -> NDArray[np.float64]: ...
    @property
    def successes(self) -> NDArray[np.float64]: ...

def pack(tokens: _Ints, bits: int, limit: int) -> bytes:
    """Pack token ids at `bits` bits each. ValueError naming the first id outside [0, limit)."""

def unpack(packed: bytes | memoryview, n: int, bits: int) -> NDArray[np.int32]:
    """Inverse of `pack`. ValueError if `packed` is too short for n ids."""
