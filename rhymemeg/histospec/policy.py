"""Draft length: how many tokens to draft for each running request in a step. Pure; numbers in, numbers out.

    paper       start at 2; +2 after a step in which all drafted tokens were accepted, cap 32; back to 2 at any rejection;
                suffixes of 7 down to 3 tokens (arXiv 2508.18588, section on HistoSpec)
    published   start at 2; x2 up to 16 when the step returned more tokens than the window, else half of it, at least 2;
                suffixes of 7 down to 4; a draft stops before its path probability falls under 0.1 (the authors' code)
    fixed:K     K tokens
    goodput     lengths for the whole batch that maximise expected emitted tokens per second (default)

A policy keeps its record by slot (the draft index's small integers). A step goes

    limits(slots, room)                    most tokens worth asking the index for, per row
    choose(slots, proposals, requests)     tokens kept of each proposal; `requests` runs in the step, drafts or not
    observe(slots, drafted, accepted)      after verification: what was drafted and accepted, per row

goodput. The j-th token of a proposal is accepted with conditional probability a_j, so with n tokens a request emits
1 + sum over j <= n of S_j in expectation, S_j = a_1 ... a_j. T depends only on the total number of query tokens, and S falls
along a proposal, so for any total the best choice is its largest S over all rows: sort all S once, and take the prefix that
maximises (sum of w + sum of w S) / T(requests, requests + k). w favours requests with much left to generate (see `budget`).
a_j comes from counts of accepted and rejected tokens by (length of the match, j, whether the occurrences agree), shifted in
log-odds by this prompt's and this request's record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rhymemeg.errors import ConfigError
from rhymemeg.histospec.cost_model import CostModel

MAX_DRAFT = 127  # vLLM verifies at most 128 tokens a request


@dataclass(frozen=True)
class MatchOptions:
    """What a policy asks of the index; see `DraftIndex.draft`."""

    min_match: int = 1
    max_match: int = 64
    min_path_probability: float = 0.0


@dataclass
class Proposals:
    """What the index found for the rows of a step: row i's draft is offsets[i] to offsets[i + 1] of the flat arrays."""

    offsets: NDArray[np.int64]
    matches: NDArray[np.int32]
    probabilities: NDArray[np.float32]

    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


class LengthPolicy(Protocol):
    """See the module."""

    match: MatchOptions

    def start(self, slot: int, prompt_id: int) -> None:
        """A request takes `slot`; whatever was known about the slot is forgotten."""

    def limits(self, slots: NDArray[np.int32], room: NDArray[np.int64], requests: int) -> NDArray[np.int32]: ...

    def choose(
        self, slots: NDArray[np.int32], proposals: Proposals, requests: int, weights: NDArray[np.float64] | None
    ) -> NDArray[np.int64]: ...

    def observe(self, slots: NDArray[np.int32], drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None: ...


class BySlot:
    """A number a slot, growing as needed."""

    def __init__(self, initial: float) -> None:
        self.initial = initial
        self.values = np.full(64, initial)

    def reset(self, slot: int) -> None:
        if slot >= len(self.values):
            self.values = np.concatenate([self.values, np.full(max(slot + 1, len(self.values)), self.initial)])
        self.values[slot] = self.initial


class FixedLength:
    """`fixed:K`."""

    def __init__(self, length: int, match: MatchOptions = MatchOptions()) -> None:  # noqa: B008 (frozen)
        self.length, self.match = length, match

    def start(self, slot: int, prompt_id: int) -> None:
        pass

    def limits(self, slots: NDArray[np.int32], room: NDArray[np.int64], requests: int) -> NDArray[np.int32]:
        return np.minimum(room, self.length).astype(np.int32)

    def choose(
        self, slots: NDArray[np.int32], proposals: Proposals, requests: int, weights: NDArray[np.float64] | None
    ) -> NDArray[np.int64]:
        return proposals.lengths()

    def observe(self, slots: NDArray[np.int32], drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        pass


class WindowLength:
    """`paper` and `published`: a window a request, moved by `update(window, drafted, accepted)` after each draft."""

    def __init__(
        self,
        update: Callable[[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]],
        match: MatchOptions,
    ) -> None:
        self.update, self.match = update, match
        self.window = BySlot(2.0)

    def start(self, slot: int, prompt_id: int) -> None:
        self.window.reset(slot)

    def limits(self, slots: NDArray[np.int32], room: NDArray[np.int64], requests: int) -> NDArray[np.int32]:
        return np.minimum(room, self.window.values[slots]).astype(np.int32)

    def choose(
        self, slots: NDArray[np.int32], proposals: Proposals, requests: int, weights: NDArray[np.float64] | None
    ) -> NDArray[np.int64]:
        return proposals.lengths()

    def observe(self, slots: NDArray[np.int32], drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        moved = slots[drafted > 0]
        window = self.window.values
        window[moved] = self.update(window[moved], drafted[drafted > 0], accepted[drafted > 0])


def paper_window(
    window: NDArray[np.float64], drafted: NDArray[np.int64], accepted: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Additive increase, reset at any rejection."""
    return np.where(accepted == drafted, np.minimum(window + 2, 32), 2)


def published_window(
    window: NDArray[np.float64], drafted: NDArray[np.int64], accepted: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Multiplicative both ways; the step returned accepted + 1 tokens."""
    return np.where(accepted + 1 > window, np.minimum(window * 2, 16), np.maximum(window // 2, 2))


class GoodputLength:
    """`goodput`; see the module. Deterministic given the cost model's state and the calls."""

    def __init__(self, cost: CostModel, cap: int = 32, match: MatchOptions = MatchOptions()) -> None:  # noqa: B008
        self.cost, self.cap, self.match = cost, cap, match
        self.acceptance = AcceptanceModel()
        self._step = 0
        self._longest = cap
        self._last_drafted = 0

    def start(self, slot: int, prompt_id: int) -> None:
        self.acceptance.start(slot, prompt_id)

    def limits(self, slots: NDArray[np.int32], room: NDArray[np.int64], requests: int) -> NDArray[np.int32]:
        # What is never chosen need not be found: ask for somewhat more than the longest draft chosen lately.
        return np.minimum(room, min(self.cap, self._longest + 2)).astype(np.int32)

    def choose(
        self, slots: NDArray[np.int32], proposals: Proposals, requests: int, weights: NDArray[np.float64] | None
    ) -> NDArray[np.int64]:
        self._step += 1
        lengths = proposals.lengths()
        chosen = np.zeros_like(lengths)
        # A plain step now and then: without its time the gain of any other is a guess.
        explore = self._step % _PLAIN_EVERY == 0 or (self.cost.observations > 0 and self.cost.plain_steps_seen(requests) < 1)
        if proposals.offsets[-1] > 0 and not explore:
            row, survival = self.acceptance.predict(slots, proposals)
            value = survival if weights is None else survival * weights[row]
            order = np.argsort(-value, kind="stable")
            base = float(requests) if weights is None else float(weights.sum()) + (requests - len(slots))
            gain = base + np.concatenate([[0.0], np.cumsum(value[order])])
            rate = gain / self.cost.predict(requests, requests + np.arange(len(gain)))
            best = int(np.argmax(rate))
            if best == 0 and self._step % _DRAFT_EVERY == 0:
                best = min(len(order), requests)  # is it still true that drafts do not pay?
            chosen = np.bincount(row[order[:best]], minlength=len(lengths))
        self.acceptance.remember(slots, chosen)
        longest = int(chosen.max(initial=0))
        self._longest = max(longest, self._longest - 1) if longest < self._longest else min(self.cap, 2 * longest)
        return chosen

    def observe(self, slots: NDArray[np.int32], drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        self.acceptance.observe(slots, drafted, accepted)


_PLAIN_EVERY = 256
_DRAFT_EVERY = 64


class AcceptanceModel:
    """Probability that the j-th drafted token is accepted given that those before it were; learnt while running."""

    _MATCH = np.digitize(np.arange(65), [1, 2, 3, 4, 6, 9, 16, 32]).astype(np.int64)  # length of match -> class 0..8
    _PLACE = np.digitize(np.arange(1 + MAX_DRAFT), [1, 2, 3, 4, 5, 7, 9, 13, 17]).astype(np.int64)  # j -> class 0..9
    _SHARE = np.array([0.35, 0.55, 0.8, 0.999])  # share of the occurrences that agree -> class 0..4
    _KEPT = 1 << 15  # trials of a class after which older ones fade

    def __init__(self) -> None:
        match, place, share = 9, 10, 5
        # Start: longer matches, later places (the draft has survived) and agreement raise the odds.
        m, j, s = np.meshgrid(np.arange(match), np.arange(place), np.arange(share), indexing="ij")
        start = _sigmoid(-0.9 + 0.3 * m + 0.1 * j + 0.35 * (s - 2))
        self.trials = np.full(start.shape, 8.0).reshape(-1)
        self.successes = (8.0 * start).reshape(-1)
        self._shape = start.shape
        self.request = BySlot(0.0)
        self.prompt: dict[int, float] = {}
        self._prompt_of: dict[int, int] = {}
        self._memory: dict[int, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        self._predicted: tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]] | None = None

    def start(self, slot: int, prompt_id: int) -> None:
        self.request.reset(slot)
        self._prompt_of[slot] = prompt_id
        self._memory.pop(slot, None)

    def predict(self, slots: NDArray[np.int32], proposals: Proposals) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """(row, survival) of every proposed token: which row it belongs to, and S_j."""
        lengths = proposals.lengths()
        row = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(row)) - proposals.offsets[row]  # from 0
        path = proposals.probabilities.astype(np.float64)
        before = np.concatenate([[1.0], path[:-1]])
        before[place == 0] = 1.0
        share = np.digitize(path / before, self._SHARE)
        kind = (self._MATCH[proposals.matches[row]] * self._shape[1] + self._PLACE[place + 1]) * self._shape[2] + share
        shift = self.request.values[slots] + np.array([self.prompt.get(self._prompt_of[s], 0.0) for s in slots.tolist()])
        mean = self.successes[kind] / self.trials[kind]
        accept = _sigmoid(np.log(mean / (1 - mean)) + shift[row])
        total = np.cumsum(np.log(accept))
        total = np.concatenate([[0.0], total])
        survival = np.exp(total[1:] - total[proposals.offsets[row]])
        self._predicted = (kind, accept, proposals.offsets)
        return row, survival

    def remember(self, slots: NDArray[np.int32], chosen: NDArray[np.int64]) -> None:
        """Keep the predictions of what was chosen until it is verified."""
        predicted, self._predicted = self._predicted, None
        for i, slot in enumerate(slots.tolist()):
            if predicted is not None and chosen[i]:
                kind, accept, offsets = predicted
                span = slice(offsets[i], offsets[i] + chosen[i])
                self._memory[slot] = (kind[span], accept[span])
            else:
                self._memory.pop(slot, None)

    def observe(self, slots: NDArray[np.int32], drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        kinds: list[NDArray[np.int64]] = []
        hits: list[NDArray[np.float64]] = []
        for slot, n, k in zip(slots.tolist(), drafted.tolist(), accepted.tolist()):
            remembered = self._memory.pop(slot, None)
            if remembered is None or n == 0:
                continue
            kind, accept = remembered
            tried = min(k + 1, n, len(kind))  # tokens after the first rejection say nothing
            hit = np.zeros(tried)
            hit[:k] = 1.0
            kinds.append(kind[:tried])
            hits.append(hit)
            error = float(hit.sum() - accept[:tried].sum())
            self.request.values[slot] = np.clip(0.98 * self.request.values[slot] + 0.15 * error, -2.0, 2.0)
            prompt = self._prompt_of[slot]
            self.prompt[prompt] = min(max(self.prompt.get(prompt, 0.0) + 0.03 * error, -1.5), 1.5)
        if kinds:
            kind, hit = np.concatenate(kinds), np.concatenate(hits)
            np.add.at(self.trials, kind, 1.0)
            np.add.at(self.successes, kind, hit * (1 - 1e-3) + 5e-4)  # never quite 0 or 1
            full = self.trials > self._KEPT
            self.trials[full] *= 0.5
            self.successes[full] *= 0.5


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-x))


def make_policy(name: str, cost: CostModel, max_draft: int = 32) -> LengthPolicy:
    """The policy of that name (see the module), drafting at most `max_draft` tokens. ConfigError for an unknown name."""
    if name == "paper":
        return WindowLength(paper_window, MatchOptions(min_match=3, max_match=7))
    if name == "published":
        return WindowLength(published_window, MatchOptions(min_match=4, max_match=7, min_path_probability=0.1))
    if name == "goodput":
        return GoodputLength(cost, cap=max_draft)
    kind, _, number = name.partition(":")
    if kind == "fixed" and number.isdecimal() and 1 <= int(number) <= MAX_DRAFT:
        return FixedLength(min(int(number), max_draft))
    raise ConfigError(
        f"draft length policy {name!r}: known are goodput, paper, published and fixed:K with K from 1 to {MAX_DRAFT}"
    )
