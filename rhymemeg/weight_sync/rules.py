"""How one Megatron parameter corresponds to Hugging Face tensors and to a vLLM parameter. Pure Python.

A rule is a small class. It knows the Hugging Face tensors that the parameter holds (`parts`), how Megatron shards and
fuses them over tensor-parallel ranks (`local_shape`, `pieces`) and how vLLM shards each of them over the ranks of an
engine (`Part.split`) and fuses them (`Part.engine_param`). A model family is a table of rules (`families.py`).

`pieces(rank, size, padded_vocab)` lists what the shard of one rank holds, as `(part index, box in the Hugging Face
tensor, box in the local shard)`. Over the ranks of a rule that is not `Replicated`, the boxes of each Hugging Face
tensor cover it exactly once. Sizes are in elements; a size that does not divide is a ValueError that names the tensor.

Names may hold `{L}` (global layer index from 0) and `{E}` (global expert index from 0).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from rhymemeg.weight_sync.boxes import Box, Shape, even, rows, whole

Split = Callable[[str, Shape, int, int], Box]
"""(name, shape, rank in the engine, engine size) -> the box of the Hugging Face tensor that this engine rank needs."""

PieceIndex = tuple[int, Box, Box]

VLLM_VOCAB_UNIT = 64
"""vLLM pads the vocabulary to a multiple of this before it splits it over an engine's ranks."""


# ---------------------------------------------------------------------------------------------------- splits in vLLM


def every_rank(name: str, shape: Shape, rank: int, size: int) -> Box:
    """Replicated over the engine's ranks."""
    return whole(shape)


def by_row(name: str, shape: Shape, rank: int, size: int) -> Box:
    """Equal blocks of the first dimension (vLLM's column parallel linear layer)."""
    return rows(*even(shape[0], rank, size, name), shape)


def by_column(name: str, shape: Shape, rank: int, size: int) -> Box:
    """Equal blocks of the second dimension (vLLM's row parallel linear layer)."""
    return ((0, shape[0]), even(shape[1], rank, size, name))


def by_vocabulary(name: str, shape: Shape, rank: int, size: int) -> Box:
    """Equal blocks of the padded vocabulary, without the padding."""
    padded = -(-shape[0] // VLLM_VOCAB_UNIT) * VLLM_VOCAB_UNIT
    start, stop = even(padded, rank, size, name)
    return rows(min(start, shape[0]), min(stop, shape[0]), shape)


def by_query_head(heads: int) -> Split:
    """Equal runs of whole heads."""

    def split(name: str, shape: Shape, rank: int, size: int) -> Box:
        even(heads, rank, size, f"heads of {name}")
        return by_row(name, shape, rank, size)

    return split


def by_kv_head(heads: int) -> Split:
    """Key or value heads: split while there are enough of them, else each is replicated over size / heads ranks."""

    def split(name: str, shape: Shape, rank: int, size: int) -> Box:
        if size <= heads:
            return by_row(name, shape, rank, size)
        if size % heads:
            raise ValueError(f"{name}: an engine of {size} ranks is no multiple of {heads} key/value heads")
        return by_row(name, shape, rank * heads // size, heads)

    return split


# ------------------------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True)
class Part:
    """One Hugging Face tensor of a rule: its name, shape, and place in the engine.

    engine_param: vLLM's parameter that receives it; parts of one rule with the same one follow each other along the
    first dimension. float32: kept in this precision whatever the model's.
    """

    name: str
    shape: Shape
    split: Split
    engine_param: str
    float32: bool = False


@dataclass(frozen=True)
class Rule(ABC):
    """Base: `parts` and the two functions of the module's contract."""

    parts: tuple[Part, ...] = field(init=False)

    def _set(self, *parts: Part) -> None:
        object.__setattr__(self, "parts", parts)

    @abstractmethod
    def local_shape(self, size: int, padded_vocab: int) -> Shape:
        """Shape of the parameter on each of `size` tensor-parallel ranks."""

    @abstractmethod
    def pieces(self, rank: int, size: int, padded_vocab: int) -> list[PieceIndex]:
        """What the shard of one rank holds, see the module."""


@dataclass(frozen=True)
class Replicated(Rule):
    """The same on every rank, here and in the engine: norms, routers, MLA's down-projections."""

    hf: str
    shape: Shape
    engine: str = ""
    float32: bool = False

    def __post_init__(self) -> None:
        self._set(Part(self.hf, self.shape, every_rank, self.engine or self.hf, self.float32))

    def local_shape(self, size: int, padded_vocab: int) -> Shape:
        return self.shape

    def pieces(self, rank: int, size: int, padded_vocab: int) -> list[PieceIndex]:
        return [(0, whole(self.shape), whole(self.shape))]


@dataclass(frozen=True)
class Column(Rule):
    """Output rows in equal blocks over the ranks."""

    hf: str
    shape: Shape

    def __post_init__(self) -> None:
        self._set(Part(self.hf, self.shape, by_row, self.hf))

    def local_shape(self, size: int, padded_vocab: int) -> Shape:
        start, stop = even(self.shape[0], 0, size, self.hf)
        return (stop - start, *self.shape[1:])

    def pieces(self, rank: int, size: int, padded_vocab: int) -> list[PieceIndex]:
        return [(0, rows(*even(self.shape[0], rank, size, self.hf), self.shape), whole(self.local_shape(size, 0)))]


@dataclass(frozen=True)
class Row(Rule):
    """Input columns in equal blocks over the ranks."""

    hf: str
    shape: Shape
    engine: str = ""

    def __post_init__(self) -> None:
        self._set(Part(self.hf, self.shape, by_column, self.engine or self.hf))

    def local_shape(self, size: int, padded_vocab: int) -> Shape:
        start, stop = even(self.shape[1], 0, size, self.hf)
        return (self.shape[0], stop - start)

    def pieces(self, rank: int, size: int, padded_vocab: int) -> list[PieceIndex]:
        box = ((0, self.shape[0]), even(self.shape[1], rank, size, self.hf))
        return [(0, box, whole(self.local_shape(size, 0)))]


@dataclass(frozen=True)
class Vocabulary(Rule):
    """Rows of the vocabulary, padded by Megatron to `padded_vocab` and split in equal blocks over the ranks.

    The padding has no counterpart outside Megatron, so a rank may hold less than its block, or nothing.
    """

    hf: str
    shape: Shape

    def __post_init__(self) -> None:
        self._set(Part(self.hf, self.shape, by_vocabulary, self.hf))

    def local_shape(self, size: int, padded_vocab: int) -> Shape:
        start, stop = even(padded_vocab, 0, size, f"padded vocabulary of {self.hf}")
        return (stop - start, self.shape[1])

    def pieces(self, rank: int, size: int, padded_vocab: int) -> list[PieceIndex]:
        if padded_vocab < self.shape[0]:
            raise ValueError(f"{self.hf}: padded vocabulary {padded_vocab} is less than the vocabulary {self.shape[0]}")
        start, stop = even(padded_vocab, rank, size, f"padded vocabulary of {self.hf}")
        stop = min(stop, self.shape[0])
        return [(0, rows(start, stop, self.shape), rows(0, stop - start, self.shape))] if start < stop else []


@dataclass(frozen=True)
class GatedMlp(Rule):
    """Gate and up projection in one parameter: each rank holds its block of the gate, then its block of up."""

    gate: str
    up: str
    shape: Shape
    engine: str

    def __post_init__(self) -> None:
        self._set(Part(self.gate, self.shape, by_row, self.engine), Part(self.up, self.shape, by_row, self.engine))

    def local_shape(self, size: int, padded_vocab: int) -> Shape:
        start, stop = even(self.shape[0], 0, size, self.gate)
        return (2 * (stop - start), *self.shape[1:])

    def pieces(self, rank: int, size: int, padded_vocab: int) -> list[PieceIndex]:
        start, stop = even(self.shape[0], rank, size, self.gate)
        block = stop - start
        return [(i, rows(start, stop, self.shape), rows(i * block, (i + 1) * block, self.shape)) for i in (0, 1)]


@dataclass(frozen=True)
class QkvGroups(Rule):
    """Query, key and value in one parameter, a key/value group after the other: [queries of the group, key, value].

    Megatron cuts the fused rows in equal blocks over the ranks. With at most as many ranks as groups a block is a run
    of groups; with more (Megatron then gathers the activations) it is a part of one group. Works for weights
    (`columns` = input size) and biases (`columns` = None).
    """

    query: str
    key: str
    value: str
    heads: int
    kv_heads: int
    head_dim: int
    columns: int | None
    engine: str

    def __post_init__(self) -> None:
        kv = by_kv_head(self.kv_heads)
        self._set(
            Part(self.query, self._shape(self.heads), by_query_head(self.heads), self.engine),
            Part(self.key, self._shape(self.kv_heads), kv, self.engine),
            Part(self.value, self._shape(self.kv_heads), kv, self.engine),
        )

    def _shape(self, heads: int) -> Shape:
        return (heads * self.head_dim,) if self.columns is None else (heads * self.head_dim, self.columns)

    def _rows(self, rank: int, size: int) -> tuple[int, int]:
        return even((self.heads + 2 * self.kv_heads) * self.head_dim, rank, size, f"fused rows of {self.query}")

    def local_shape(self, size: int, padded_vocab: int) -> Shape:
        start, stop = self._rows(0, size)
        return (stop - start, *self._shape(1)[1:])

    def pieces(self, rank: int, size: int, padded_vocab: int) -> list[PieceIndex]:
        start, stop = self._rows(rank, size)
        query, head = self.heads // self.kv_heads * self.head_dim, self.head_dim
        found: list[PieceIndex] = []
        group = query + 2 * head
        for g in range(start // group, -(-stop // group)):
            # (part, rows in the fused tensor, first row in the Hugging Face tensor)
            for part, first, length, hf in (
                (0, g * group, query, g * query),
                (1, g * group + query, head, g * head),
                (2, g * group + query + head, head, g * head),
            ):
                a, b = max(start, first), min(stop, first + length)
                if a < b:
                    shape = self.parts[part].shape
                    box = rows(hf + a - first, hf + b - first, shape)
                    found.append((part, box, rows(a - start, b - start, shape)))
        return found
