"""Draft length: how many tokens to draft for each running request in a step. Pure; numbers in, numbers out.

    paper       start at 2; +2 after a step in which all drafted tokens were accepted, cap 32; back to 2 at any rejection;
                suffixes of 7 down to 3 tokens (arXiv 2508.18588, section on HistoSpec)
    published   start at 2; x2 up to 16 when the step returned more tokens than the window, else half of it, at least 2;
                suffixes of 7 down to 4; a draft stops before its path probability falls under 0.1 (the authors' code)
    fixed:K     K tokens
    goodput     lengths for the whole batch that maximise expected emitted tokens per second (default)

A policy keeps its record by slot (the draft index's small integers). A step goes

    rests(requests)                        True: no draft in this step, whatever could be proposed; nothing else is called
    limits(slots, room)                    most tokens worth asking the index for, per row
    choose(slots, proposals, requests)     tokens kept of each proposal; `requests` runs in the step, drafts or not
    observe(slots, drafted, accepted)      after verification: what was drafted and accepted, per row

goodput. The j-th token of a proposal is accepted with conditional probability a_j, so with n tokens a request emits
1 + sum over j <= n of S_j in expectation, S_j = a_1 ... a_j. T depends only on the total number of query tokens, and S falls
along a proposal, so for any total the best choice is its largest S over all rows: sort all S once, and take the prefix that
maximises (sum of w + sum of w S) / T(requests, requests + k). w favours requests with much left to generate (see `budget`).
a_j comes from counts of accepted and rejected tokens by (length of the match, j, share of the occurrences that agree, their
number), shifted in log-odds by this prompt's and this request's record (`AcceptanceModel`, C++).

All these are estimates, so drafts must promise `_GAIN` to be made at all. Where they have not for some steps, even looking
for them is a loss: the policy tries a few, then rests for a while, or until the batch has shrunk, and looks again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rhymemeg.errors import ConfigError
from rhymemeg.histospec.cost_model import CostModel
from rhymemeg.histospec.index import AcceptanceModel

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
    occurrences: NDArray[np.int32]
    probabilities: NDArray[np.float32]

    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


class LengthPolicy(Protocol):
    """See the module."""

    match: MatchOptions

    def rests(self, requests: int) -> bool: ...

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

    def __init__(self, length: int, match: MatchOptions = MatchOptions()) -> None:
        self.length, self.match = length, match

    def rests(self, requests: int) -> bool:
        return False

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

    def rests(self, requests: int) -> bool:
        return False

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

    def __init__(self, cost: CostModel, cap: int = 32, match: MatchOptions = MatchOptions()) -> None:
        self.cost, self.cap, self.match = cost, cap, match
        self.acceptance = AcceptanceModel()
        self._step = 0
        self._longest = cap
        self._quiet = 0  # steps in a row for which drafts did not promise enough
        self._rest = 0  # steps still to rest
        self._next_rest = _FIRST_REST
        self._resting_at = 0  # requests when the rest began

    def rests(self, requests: int) -> bool:
        if self._rest and requests > _SHRUNK * self._resting_at:
            self._rest -= 1
            return True
        self._rest = 0
        return False

    def start(self, slot: int, prompt_id: int) -> None:
        self.acceptance.start(slot, prompt_id)

    def limits(self, slots: NDArray[np.int32], room: NDArray[np.int64], requests: int) -> NDArray[np.int32]:
        # What is never chosen need not be found: ask for somewhat more than the longest draft chosen lately.
        return np.minimum(room, min(self.cap, self._longest + 2)).astype(np.int32)

    def choose(
        self, slots: NDArray[np.int32], proposals: Proposals, requests: int, weights: NDArray[np.float64] | None
    ) -> NDArray[np.int64]:
        self._step += 1
        # A plain step now and then: without its time the gain of any other is a guess.
        plain = self._step % _PLAIN_EVERY == 0 or (
            self.cost.observations > 0 and self.cost.plain_steps_seen(requests) < 1
        )
        total = 0 if plain else int(proposals.offsets[-1])
        if total == 0:
            return np.zeros(len(slots), np.int64)
        values = np.ones(len(slots)) if weights is None else weights
        times = self.cost.predict(requests, np.arange(requests, requests + total + 1))
        # Without drafts there is no need to look for them either.
        times[0] = max(times[0] - self.cost.drafting * requests, times[0] / 2) / _GAIN
        base = float(values.sum()) + requests - len(slots)
        chosen = self._choose(slots, proposals, values, base, times, explore=0)
        longest = int(chosen.max(initial=0))
        self._longest = max(longest, self._longest - 1) if longest < self._longest else min(self.cap, 2 * longest)
        if longest:
            self._quiet, self._next_rest = 0, _FIRST_REST
        else:
            self._quiet += 1
            if self._quiet == _QUIET:
                self._quiet, self._rest, self._resting_at = 0, self._next_rest, requests
                self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
                # Is it still true that drafts do not pay? Their time and acceptance are learnt from these.
                chosen = self._choose(slots, proposals, values, base, times, explore=-(-requests // 4))
        return chosen

    def _choose(
        self, slots: NDArray[np.int32], proposals: Proposals, weights: NDArray[np.float64], base: float,
        times: NDArray[np.float64], explore: int,
    ) -> NDArray[np.int64]:  # fmt: skip
        p = proposals
        return self.acceptance.choose(
            slots, p.offsets, p.matches, p.occurrences, p.probabilities,
            weights=weights, base=base, times=times, explore=explore,
        )  # fmt: skip

    def observe(self, slots: NDArray[np.int32], drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        self.acceptance.observe(slots, drafted, accepted)


_GAIN = 1.03  # tokens per second with drafts over those without
_PLAIN_EVERY = 256
_QUIET = 4  # steps
_FIRST_REST, _LONGEST_REST = 28, 252  # steps; doubled each time that the rest was right
_SHRUNK = 0.9


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
