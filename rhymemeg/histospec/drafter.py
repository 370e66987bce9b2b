"""The drafter of one rollout engine, without the engine: history, index, branch choice and draft length put together.

Once an engine step it is told what every row of the batch emitted and answers with a draft a row:

    drafter.load({prompt_id: prompt token ids, ...})     before a window: index the prompts' history (threads, no GIL)
    drafts = drafter.step(rows)                          every engine step; a possibly empty list of token ids a row
    drafter.finish(request_id, prompt_id)                optional: the length of a finished request refines budgets
    drafter.release()                                    after the window: all prompts, or those given

Where `drafter.rests(tokens of each row)` is true, no draft can pay: the step may be left out, and what its rows
emitted is read later, from their contexts.

Requests are recognised by their id; one that appears for the first time, or whose tokens do not follow on from the last
step (resumed, preempted), is read from its full context. A draft never exceeds the row's room. Requests of a prompt that
was not loaded draft from their siblings and themselves alone.

Deterministic: drafts depend on the sequence of calls and the state of the cost model, never on clocks, hashes or threads, so
all ranks of a tensor-parallel engine draft alike as long as their cost models agree (`CostModel.state`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rhymemeg.histospec.branch import BranchChoice, check_branch_choice, document_weights, live_weight
from rhymemeg.histospec.budget import Remaining, token_weights
from rhymemeg.histospec.cost_model import CostModel
from rhymemeg.histospec.history import HistoryBuffer
from rhymemeg.histospec.index import MAX_DOCUMENTS, DraftIndex
from rhymemeg.histospec.metrics import Counters
from rhymemeg.histospec.policy import LengthPolicy, Proposals, make_policy

_WEIGHTS_EVERY = 16  # steps between two estimates of what is left of the running requests


def step_clock(device_type: str) -> Callable[[], float]:
    """The clock, in seconds, that tells best what an engine step costs: on CPU the time of the thread that runs it, which
    other programs on the machine do not lengthen; elsewhere elapsed time."""
    return time.thread_time if device_type == "cpu" else time.perf_counter


@dataclass
class DrafterOptions:
    """What can be chosen about drafting."""

    policy: str = "goodput"
    max_draft: int = 32
    branch: BranchChoice = "count"
    siblings: bool = True
    """Draft from the running group (and from the request's own tokens) as it grows, besides the history."""
    prompt_weight: float = 0.0
    """Weight of the prompt's own text as one more document; 0: not drafted from."""
    context: int = 8
    """Prompt tokens that precede every response in the index, so that drafts start with the first token."""
    budget_power: float = 1.0
    """How strongly requests with much left to generate are preferred once none waits; 0: not at all. goodput only."""


@dataclass
class Rows:
    """A batch after an engine step. All sequences have an entry a row."""

    request_ids: Sequence[str]
    new_tokens: Sequence[Sequence[int]]
    """Tokens emitted in this step; empty for a row that is still in its prefill: it gets no draft."""
    lengths: Sequence[int] | NDArray[Any]
    """Tokens of the row in all, prompt and new ones included."""
    rooms: Sequence[int] | NDArray[Any]
    """Most tokens that a draft may have."""
    prompt_id: Callable[[int], int]
    """Prompt of a row; asked once a request."""
    context: Callable[[int], tuple[Sequence[int] | NDArray[Any], int]]
    """(all tokens of a row, length of its prompt); asked where the index does not have them."""
    scheduled: Sequence[int] | None = None
    """Drafted tokens that this step really verified; None: all of the last draft."""


@dataclass(slots=True)
class _Request:
    slot: int
    prompt_id: int
    known: int  # tokens of the row in the index or before it
    prompt_length: int
    drafted: int = 0
    last_step: int = 0


@dataclass(slots=True)
class _Prompt:
    length: int
    live_weight: float
    remaining: Remaining
    documents: int  # in the index
    requests: set[str] = field(default_factory=set)


class Drafter:
    """See the module. `history` and `cost` may be shared with whoever fills and saves them. `clock` times the engine's
    steps, from one call to the next (`step_clock`)."""

    def __init__(
        self,
        options: DrafterOptions,
        history: HistoryBuffer | None,
        cost: CostModel,
        index: DraftIndex | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_branch_choice(options.branch)
        self.options, self.history, self.cost, self.clock = options, history, cost, clock
        self.index = index or DraftIndex()
        self.learner = cost
        """Takes in measured step times; set apart from `cost` where ranks must agree before anything is decided by them."""
        self.policy: LengthPolicy = make_policy(options.policy, cost, options.max_draft)
        self.counters = Counters()
        self.enabled = True
        self._requests: dict[str, _Request] = {}
        self._prompts: dict[int, _Prompt] = {}
        self._weights = np.ones(64)
        self._step = 0
        self._peak = 0  # most rows since the last release
        self._last: tuple[float, int, int] | None = None  # start of the last step, its requests and query tokens

    # ------------------------------------------------------------------------------------------------------- the window

    def load(self, prompts: Mapping[int, Sequence[int] | NDArray[Any]], threads: int = 1) -> None:
        """Index what history holds of these prompts (id -> token ids). Those loaded already are left as they are."""
        new = [prompt_id for prompt_id in prompts if prompt_id not in self._prompts]
        if threads > 1 and len(new) > 1:
            with ThreadPoolExecutor(threads) as pool:
                prepared = list(pool.map(lambda prompt_id: self._load(prompt_id, prompts[prompt_id]), new))
        else:
            prepared = [self._load(prompt_id, prompts[prompt_id]) for prompt_id in new]
        self._prompts.update(zip(new, prepared))

    @property
    def prompts(self) -> Collection[int]:
        """Prompts that are loaded."""
        return self._prompts.keys()

    def _load(self, prompt_id: int, prompt_ids: Sequence[int] | NDArray[Any]) -> _Prompt:
        visits = [] if self.history is None else self.history.get(prompt_id, prompt_ids)
        o = self.options
        weights = [document_weights(o.branch, visit.rewards, ago) for ago, visit in enumerate(visits)]
        rewards = visits[0].rewards if visits else np.empty(0, np.float32)
        self.index.load(
            prompt_id,
            context=self._tail(prompt_ids),
            tokens=np.concatenate([visit.tokens for visit in visits]) if visits else [],
            lengths=np.concatenate([visit.lengths for visit in visits]) if visits else [],
            weights=np.concatenate(weights) if visits else [],
            prompt_tokens=prompt_ids if o.prompt_weight > 0 else [],
            prompt_weight=o.prompt_weight,
        )
        return _Prompt(
            len(prompt_ids),
            live_weight(o.branch, rewards),
            Remaining(visits[0].lengths.tolist() if visits else ()),
            sum(len(visit.lengths) for visit in visits) + (o.prompt_weight > 0),
        )

    def _tail(self, prompt_ids: Sequence[int] | NDArray[Any]) -> Sequence[int] | NDArray[Any]:
        return prompt_ids[-self.options.context :] if self.options.context else []

    def finish(self, request_id: str, prompt_id: int) -> None:
        """A request has ended (as opposed to being paused). What it generated stays with its prompt; its length refines
        budgets. The engine may have appended "-" and more to the id."""
        prompt = self._prompts.get(prompt_id)
        for name in [] if prompt is None else [n for n in prompt.requests if f"{n}-".startswith(f"{request_id}-")]:
            request = self._requests.pop(name)
            prompt.requests.discard(name)  # type: ignore[union-attr]
            prompt.remaining.add(request.known - request.prompt_length)  # type: ignore[union-attr]
            self.index.close(request.slot)

    def release(self, prompt_ids: Iterable[int] | None = None) -> None:
        """Forget these prompts (default: all) and their requests; the history buffer keeps what was recorded."""
        for prompt_id in list(self._prompts) if prompt_ids is None else list(prompt_ids):
            prompt = self._prompts.pop(prompt_id, None)
            if prompt is not None:
                for request_id in prompt.requests:
                    del self._requests[request_id]
                self.index.release(prompt_id)
        if not self._prompts:
            self._peak = 0
        self._last = None

    # --------------------------------------------------------------------------------------------------------- the step

    def rests(self, emitted: Sequence[Sequence[int]]) -> bool:
        """Whether to leave out the step of a batch that emitted these tokens, a row a request; it is counted."""
        if not self.enabled or not self.policy.rests(len(emitted)):
            return False
        c = self.counters
        got = [len(new) for new in emitted if new]
        c.steps += 1
        c.request_steps += len(got)
        c.tokens += sum(got)
        c.verify_cost += 1
        self._last = None
        return True

    def step(self, rows: Rows) -> list[list[int]]:
        """Take in what the rows emitted, and draft what may follow."""
        start, now = time.perf_counter_ns(), self.clock()
        drafts: list[list[int]] = [[] for _ in rows.request_ids]
        if not self.enabled:
            return drafts
        self._step += 1
        active, requests, tokens, decode = self._take_in(rows)
        if active:
            slots = np.fromiter((request.slot for request in requests), np.int32, len(requests))
            self._append(slots, tokens)
            if decode:
                self._verify(rows, active, requests, slots, decode, now)
            self._propose(rows, active, requests, slots, drafts)
            queries = len(rows.request_ids) + sum(map(len, drafts))
            self._last = (now, len(rows.request_ids), queries)
            self.learner.observe_drafting(len(active), self.clock() - now)
        self.counters.draft_ns += time.perf_counter_ns() - start
        self.counters.draft_rows += len(active)
        return drafts

    def _take_in(self, rows: Rows) -> tuple[list[int], list[_Request], list[Sequence[int]], list[int]]:
        """Rows that emitted something, their requests, their tokens new to the index; positions (in that list) of rows
        that did a decode step, as opposed to the end of a prefill."""
        active: list[int] = []
        requests: list[_Request] = []
        tokens: list[Sequence[int]] = []
        decode: list[int] = []
        for row, new in enumerate(rows.new_tokens):
            if not new:
                continue
            request_id, length = rows.request_ids[row], int(rows.lengths[row])
            request = self._requests.get(request_id)
            if request is not None and request.known + len(new) == length:
                decode.append(len(active))
                tokens.append(new)
            else:
                context, prompt_length = rows.context(row)
                if request is None or request.known > length:
                    request = self._open(request_id, rows.prompt_id(row), context, prompt_length)
                    if request is None:
                        continue
                request.drafted = 0
                tokens.append(context[request.known : length])  # type: ignore[arg-type]
            request.known = length
            request.last_step = self._step
            active.append(row)
            requests.append(request)
        return active, requests, tokens, decode

    def _open(
        self, request_id: str, prompt_id: int, context: Sequence[int] | NDArray[Any], prompt_length: int
    ) -> _Request | None:
        if prompt_id not in self._prompts:
            self.load({prompt_id: context[:prompt_length]})
        prompt = self._prompts[prompt_id]
        if prompt.documents == MAX_DOCUMENTS:
            return None  # as many requests as the index can tell apart: more of this prompt get no drafts
        prompt.documents += 1
        # A resumed request hands in what it has generated as part of its prompt; the loaded prompt knows better.
        prompt_length = prompt.length
        old = self._requests.pop(request_id, None)
        if old is not None:
            self.index.close(old.slot)
        slot = self.index.open(
            prompt_id,
            context=self._tail(context[:prompt_length]),
            weight=prompt.live_weight,
            searchable=self.options.siblings,
        )
        self.policy.start(slot, prompt_id)
        if slot >= len(self._weights):
            self._weights = np.concatenate([self._weights, np.ones(slot + 1)])
        self._weights[slot] = 1.0
        prompt.requests.add(request_id)
        request = self._requests[request_id] = _Request(slot, prompt_id, prompt_length, prompt_length)
        return request

    def _append(self, slots: NDArray[np.int32], tokens: list[Sequence[int]]) -> None:
        offsets = np.array([0, *accumulate(map(len, tokens))])
        self.index.append(slots, offsets, np.fromiter(chain.from_iterable(tokens), np.int32, int(offsets[-1])))

    def _verify(
        self, rows: Rows, active: list[int], requests: list[_Request], slots: NDArray[np.int32], decode: list[int],
        now: float,
    ) -> None:  # fmt: skip
        """Count what the last drafts gave, teach the policy and the cost model."""
        emitted = np.array([len(rows.new_tokens[active[i]]) for i in decode])
        drafted = np.array([requests[i].drafted for i in decode])
        if rows.scheduled is not None:
            drafted = np.minimum(drafted, [rows.scheduled[active[i]] for i in decode])
        accepted = np.minimum(emitted - 1, drafted)
        self.policy.observe(slots[decode], drafted, accepted)
        c, total = self.counters, int(drafted.sum())
        c.steps += 1
        c.request_steps += len(decode)
        c.covered += int((drafted > 0).sum())
        c.drafted += total
        c.accepted += int(accepted.sum())
        c.tokens += int(emitted.sum())
        n = len(decode)
        plain, verify = self.cost.predict(n, [n, n + total])
        c.verify_cost += float(verify / plain)
        # The time between two calls is that of the step between them, if it verified just what was drafted then and did
        # no prefill beside it.
        if self._last is not None and self._last[1:] == (n, n + total) and n == len(rows.request_ids):
            self.learner.observe(n, n + total, now - self._last[0])

    def _propose(
        self, rows: Rows, active: list[int], requests: list[_Request], slots: NDArray[np.int32], drafts: list[list[int]]
    ) -> None:
        rooms = np.maximum(np.asarray(rows.rooms, np.int64)[active], 0)
        n = len(rows.request_ids)
        match = self.policy.match
        flat, offsets, matches, occurrences, probabilities = self.index.draft(
            slots,
            self.policy.limits(slots, rooms, n),
            min_match=match.min_match,
            max_match=match.max_match,
            min_path_probability=match.min_path_probability,
        )
        chosen = self.policy.choose(
            slots, Proposals(offsets, matches, occurrences, probabilities), n, self._budgets(requests, slots)
        )
        found = matches > 0
        self.counters.proposals += int(found.sum())
        self.counters.match_tokens += int(matches.sum())
        tokens, starts = flat.tolist(), offsets.tolist()
        for i, length in enumerate(chosen.tolist()):
            requests[i].drafted = length
            if length:
                drafts[active[i]] = tokens[starts[i] : starts[i] + length]

    def _budgets(self, requests: list[_Request], slots: NDArray[np.int32]) -> NDArray[np.float64] | None:
        # While requests wait, every accepted token is worth the same. They have stopped waiting when the batch shrinks.
        self._peak = max(self._peak, len(requests))
        if self.options.budget_power == 0 or len(requests) == self._peak:
            return None
        if self._step % _WEIGHTS_EVERY == 1:
            left = [self._prompts[r.prompt_id].remaining.expect(r.known - r.prompt_length) for r in requests]
            self._weights[slots] = token_weights(np.array(left), self.options.budget_power)
        return self._weights[slots]

    # ----------------------------------------------------------------------------------------------------------- report

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call (see `histospec.metrics`); the counters start again from zero."""
        metrics = self.counters.metrics()
        self.counters = Counters()
        tokens = self.index.num_tokens
        metrics["histospec/index_bytes"] = float(self.index.memory_bytes)
        metrics["histospec/index_bytes_per_token"] = self.index.memory_bytes / tokens if tokens else 0.0
        if self.history is not None:
            metrics["histospec/history_bytes"] = float(self.history.num_bytes)
            metrics["histospec/history_bytes_per_token"] = self.history.bytes_per_token
            metrics["histospec/history_evicted"] = float(self.history.evicted)
        return metrics
