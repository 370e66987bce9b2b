"""What a plan is made from and what it is: frozen, plain data (numbers, strings, numpy arrays).

Arrays rather than lists of objects: a step of 65,536 prompts has a million samples, and every rank plans all of them.
`Plan.start_order(engine)` turns the part of one engine into sample ids.

Units: lengths and work in tokens, times in seconds of the cost model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from rhymemeg.histopipe.cost import ENGINE_STEPS, CostModel
from rhymemeg.histopipe.predict import Feedback, Floats, Ints, Prediction
from rhymemeg.rollout.samples import SampleId

Layout = Literal["spread", "group"]


@dataclass(frozen=True, eq=False)
class Requests:
    """Responses that have tokens already, one entry a response in each array: carried over from the step before or
    started early. `engine` holds their keys and values (-1: none). `references` [K, R]: lengths that tell how long they
    may get (finished siblings, last epoch), NaN-padded."""

    step: Ints
    prompt_id: Ints
    sample_index: Ints
    engine: Ints
    tokens: Ints
    references: Floats

    @classmethod
    def of(cls, entries: Iterable[tuple[SampleId, int, int, Iterable[float]]] = ()) -> Requests:
        """From (sample id, engine, tokens, reference lengths)."""
        rows = [
            (s.step, s.prompt_id, s.sample_index, engine, tokens, list(refs)) for s, engine, tokens, refs in entries
        ]
        width = max((len(row[5]) for row in rows), default=0)
        references = np.array([row[5] + [math.nan] * (width - len(row[5])) for row in rows], np.float64)
        numbers = np.array([row[:5] for row in rows], np.int64).reshape(len(rows), 5)
        step, prompt_id, sample_index, at, tokens = numbers.T.copy()
        return cls(step, prompt_id, sample_index, at, tokens, references.reshape(len(rows), width))

    def __len__(self) -> int:
        return len(self.step)

    def take(self, index: npt.NDArray[np.intp]) -> Requests:
        """The entries at `index`, in that order."""
        return Requests(
            self.step[index],
            self.prompt_id[index],
            self.sample_index[index],
            self.engine[index],
            self.tokens[index],
            self.references[index],
        )

    def sample_ids(self) -> list[SampleId]:
        return [SampleId(*ids) for ids in zip(self.step.tolist(), self.prompt_id.tolist(), self.sample_index.tolist())]


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """Everything a plan depends on. The order of `prompt_ids`, of the columns of `history` and of the entries of
    `resumed` and `finished_early` does not matter.

    step, seed          `random` draws its order from these two
    prompt_ids [P]      the step's prompts, distinct; each has `samples_per_prompt` samples
    history [P, H]      lengths of last epoch, see `predict`
    resumed             responses with tokens that are trained with this step
    finished_early      (prompt id, sample index) [F, 2] of this step's samples that are complete already
    carry_share         rho: at the close at most floor(rho x P x n) samples of this step may be unfinished; 0: strict
    early_share         engines that run out of work may start this share of the next step's samples; 0: none
    next_*              the next step, needed where early_share > 0
    keep_place          resumed responses stay on their engine, for engines that keep keys and values over a weight
                        update. Otherwise these are computed again wherever the response resumes, so it costs nothing to
                        spread them anew, longest first
    two_tier            `paper` only: tier 2; without it every ranking group gets the same number of engines
    """

    step: int
    num_engines: int
    slots: int
    samples_per_prompt: int
    prompt_ids: Ints
    history: Floats
    max_response_len: int
    policy: str = "complement"
    layout: Layout = "spread"
    cost: CostModel = ENGINE_STEPS
    feedback: Feedback = field(default_factory=Feedback)
    resumed: Requests = field(default_factory=Requests.of)
    finished_early: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    carry_share: float = 0.0
    early_share: float = 0.0
    next_prompt_ids: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    next_history: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    keep_place: bool = False
    seed: int = 0
    ranking_groups: int = 8
    two_tier: bool = True


@dataclass(frozen=True, eq=False)
class Queue:
    """Samples in start order, engine after engine: engine e starts entries offsets[e] .. offsets[e + 1]. `row` indexes
    the plan's prompts. A shared queue has one part only, from which every engine pulls."""

    offsets: Ints
    row: Ints
    sample: Ints

    def part(self, index: int) -> tuple[Ints, Ints]:
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.row[span], self.sample[span]

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, eq=False)
class RankingGroups:
    """What `paper` decided: ranking group of each prompt [P], engines of each group [N] (first, number), its predicted
    and its target time [N], and the slope d of the targets."""

    of_prompt: Ints
    first_engine: Ints
    engines: Ints
    seconds: Floats
    target: Floats
    slope: float


@dataclass(frozen=True, eq=False)
class Plan:
    """Who runs what in one window, in which order. The same bytes on every rank (`digest`)."""

    step: int
    policy: str
    layout: str
    num_engines: int
    slots: int
    samples_per_prompt: int
    prompt_ids: Ints
    """[P], ascending; `queue.row` points into it."""
    prediction: Prediction
    queue: Queue
    """New samples of this step."""
    shared: bool
    """One queue for all engines."""
    resumed: Requests
    """Sorted by engine and start order; `engine` is where each resumes."""
    resumed_offsets: Ints
    resumed_remaining: Floats
    moved: int
    """Resumed responses that change engine."""
    max_unfinished: int
    """floor(rho x P x n)"""
    early_prompt_ids: Ints
    early: Queue
    """Samples of the next step that an engine without other work may start, in that order."""
    engine_work: Floats
    """Predicted tokens of each engine [E]; of a shared queue, only what it resumes."""
    engine_seconds: Floats
    groups: RankingGroups | None = None

    def resumed_of(self, engine: int) -> Requests:
        """What `engine` resumes, in order; before anything new."""
        return self.resumed.take(np.arange(self.resumed_offsets[engine], self.resumed_offsets[engine + 1]))

    def queue_of(self, engine: int) -> list[SampleId]:
        """New samples of `engine` in start order; with a shared queue, that queue."""
        return self._ids(self.queue, self.prompt_ids, self.step, 0 if self.shared else engine)

    def early_of(self, engine: int) -> list[SampleId]:
        """Samples of the next step that `engine` may start when it has nothing else to start."""
        return self._ids(self.early, self.early_prompt_ids, self.step + 1, 0 if self.shared else engine)

    def start_order(self, engine: int) -> list[SampleId]:
        """All that `engine` starts in this step: what it resumes, then what is new."""
        return self.resumed_of(engine).sample_ids() + self.queue_of(engine)

    @staticmethod
    def _ids(queue: Queue, prompt_ids: Ints, step: int, part: int) -> list[SampleId]:
        rows, samples = queue.part(part)
        return [SampleId(step, p, s) for p, s in zip(prompt_ids[rows].tolist(), samples.tolist())]

    def to_bytes(self) -> bytes:
        """Every decision of the plan, for comparison between ranks."""
        head = f"{self.step}/{self.policy}/{self.layout}/{self.num_engines}/{self.shared}/{self.max_unfinished}/"
        arrays = (
            *(self.prompt_ids, self.queue.offsets, self.queue.row, self.queue.sample),
            *(self.resumed_offsets, self.resumed.step, self.resumed.prompt_id, self.resumed.sample_index),
            *(self.early_prompt_ids, self.early.offsets, self.early.row, self.early.sample),
        )
        return head.encode() + b"".join(np.ascontiguousarray(a).astype("<i8").tobytes() for a in arrays)

    @property
    def digest(self) -> str:
        """16 hex digits that differ where two plans differ."""
        return hashlib.blake2b(self.to_bytes(), digest_size=8).hexdigest()
