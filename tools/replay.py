"""Replay a trace of real responses through history, index and draft length, without a model.

A trace is JSONL with the responses of the same prompts at two or more steps (`output` or `output_token_ids`, `input` or
`prompt_id`, `score`, `step`; .gz too), such as a run's samples/step_N.jsonl files joined. Responses of the history step
fill the history buffer; those of the live step are "generated" again, in groups of `--group` samples, `--batch` requests at
a time, taking from each draft the tokens that agree with the response, plus one. What comes out is what an engine would
have seen if it had produced these responses: coverage, acceptance, tokens per request-step, and the speed that the step
times predict.

Texts become tokens by splitting them into words, numbers and single other characters; lines with `output_token_ids` use
those (`rhymemeg.histospec.trace`).

    tools/replay.py trace.jsonl.gz --history-step 400 --live-step 800 --policy paper fixed:4 goodput --batch 8 32
    tools/replay.py trace.jsonl.gz --epochs                  every step with the one before as its history
    tools/replay.py trace.jsonl.gz --exhaustive              the same drafts from exhaustive search (slow; an upper reference)
    --sources history siblings both       --plot replay.png      --json
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rhymemeg.errors import RhymeMegError
from rhymemeg.histospec.cost_model import CostModel
from rhymemeg.histospec.drafter import Drafter, DrafterOptions, Rows
from rhymemeg.histospec.history import HistoryBuffer
from rhymemeg.histospec.trace import Trace, read_trace_file, steps_of


@dataclasses.dataclass
class Engine:
    """Requests that "generate" known responses: at most `batch` at a time, in order."""

    drafter: Drafter
    batch: int
    cost: CostModel
    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0

    def run(self, work: Sequence[tuple[str, int, list[int], list[int]]]) -> None:
        """Each item is (request id, prompt id, prompt, response)."""
        queue = list(reversed(work))
        running: list[tuple[str, int, list[int], list[int]]] = []
        done: dict[str, int] = {}
        drafts: dict[str, list[int]] = {}
        while queue or running:
            emitted: list[list[int]] = []
            if running:
                queries = len(running) + sum(len(drafts[request_id]) for request_id, *_ in running)
                self.seconds += float(self.cost.predict(len(running), queries))
                self.steps += 1
            for request_id, _, _, response in running:
                at, draft = done[request_id], drafts[request_id]
                agree = 0
                while agree < len(draft) and at + agree < len(response) and draft[agree] == response[at + agree]:
                    agree += 1
                emitted.append(response[at : at + agree + 1])
            while queue and len(running) < self.batch:  # its prefill ends with the first token
                item = queue.pop()
                running.append(item)
                done[item[0]] = 0
                emitted.append(item[3][:1])
            for (request_id, *_), tokens in zip(running, emitted):
                done[request_id] += len(tokens)
                self.tokens += len(tokens)
            batch = list(running)
            proposals = self.drafter.step(
                Rows(
                    request_ids=[item[0] for item in batch],
                    new_tokens=emitted,
                    lengths=[len(item[2]) + done[item[0]] for item in batch],
                    rooms=[len(item[3]) - done[item[0]] for item in batch],
                    prompt_id=lambda row, batch=batch: batch[row][1],  # type: ignore[misc]
                    context=lambda row, batch=batch: (
                        batch[row][2] + batch[row][3][: done[batch[row][0]]],
                        len(batch[row][2]),
                    ),  # type: ignore[misc]
                )
            )
            drafts = {item[0]: draft for item, draft in zip(batch, proposals)}
            for request_id, prompt, _, response in batch:
                if done[request_id] >= len(response):
                    self.drafter.finish(request_id, prompt)
            running = [item for item in running if done[item[0]] < len(item[3])]


class Exhaustive:
    """The draft index's interface by exhaustive search: every position of every document, all occurrences vote."""

    def __init__(self) -> None:
        self.documents: dict[int, list[tuple[list[int], int, float, bool]]] = {}
        self.slots: list[tuple[int, int]] = []
        self.num_tokens, self.memory_bytes = 0, 0

    def load(
        self,
        prompt_id: int,
        *,
        context: Any,
        tokens: Any,
        lengths: Any,
        weights: Any,
        prompt_tokens: Any,
        prompt_weight: float,
    ) -> None:
        kept = self.documents[prompt_id] = [(list(prompt_tokens), 0, prompt_weight, True)] if len(prompt_tokens) else []
        for response, weight in zip(
            np.split(np.asarray(tokens, int), np.cumsum(np.asarray(lengths, int))[:-1]) if len(lengths) else [], weights
        ):
            kept.append((list(context) + response.tolist(), len(context), float(weight), True))

    def open(self, prompt_id: int, *, context: Any, weight: float = 1.0, searchable: bool = True) -> int:
        documents = self.documents.setdefault(prompt_id, [])
        documents.append((list(context), len(context), weight, searchable))
        self.slots.append((prompt_id, len(documents) - 1))
        return len(self.slots) - 1

    def append(self, slots: Any, offsets: Any, tokens: Any) -> None:
        for i, slot in enumerate(slots.tolist()):
            prompt, document = self.slots[slot]
            self.documents[prompt][document][0].extend(tokens[offsets[i] : offsets[i + 1]].tolist())

    def draft(self, slots: Any, limits: Any, *, min_match: int, max_match: int, min_path_probability: float) -> Any:
        flat: list[int] = []
        offsets, matches, votes, shares = [0], [], [], []
        for slot, limit in zip(slots.tolist(), limits.tolist()):
            prompt, own = self.slots[slot]
            tokens, match, vote, share = self._row(prompt, own, limit, min_match, max_match, min_path_probability)
            flat += tokens
            shares += share
            votes.append(vote if tokens else 0)
            matches.append(match if tokens else 0)
            offsets.append(len(flat))
        return (
            np.array(flat, np.int32),
            np.array(offsets),
            np.array(matches, np.int32),
            np.array(votes, np.int32),
            np.array(shares, np.float32),
        )

    def _row(
        self, prompt: int, own: int, limit: int, least: int, most: int, floor: float
    ) -> tuple[list[int], int, int, list[float]]:
        documents = self.documents[prompt]
        query = documents[own][0]
        found: list[tuple[NDArray[np.int64], NDArray[np.int64], float]] = []
        best = least
        for text, context, weight, searchable in documents:
            if not searchable or len(text) < 2 or not query:
                continue
            array = np.asarray(text)
            ends = np.arange(max(context, 1), len(array))  # position of the successor
            match = 0
            while match < min(most, len(query)):
                ends_next = ends[(ends > match)]
                ends_next = ends_next[array[ends_next - 1 - match] == query[-1 - match]]
                if not len(ends_next):
                    break
                ends, match = ends_next, match + 1
            if match < best:
                continue
            if match > best:
                found, best = [], match
            found.append((array, ends, weight))
        walkers = [(array, int(end), weight) for array, ends, weight in found for end in ends]
        tokens: list[int] = []
        shares: list[float] = []
        path = 1.0
        while walkers and len(tokens) < limit:
            votes: dict[int, list[float]] = {}
            for array, at, weight in walkers:
                vote = votes.setdefault(int(array[at]), [0.0, 0.0])
                vote[0] += weight
                vote[1] += 1
            positive = any(vote[0] > 0 for vote in votes.values())
            token = max(votes, key=lambda t: (votes[t][0], votes[t][1]) if positive else (votes[t][1], 0.0))
            path *= votes[token][1] / len(walkers)
            if path < floor:
                break
            tokens.append(token)
            shares.append(path)
            walkers = [(a, at + 1, w) for a, at, w in walkers if a[at] == token and at + 1 < len(a)]
        return tokens, best if tokens else 0, sum(len(ends) for _, ends, _ in found), shares

    def close(self, slot: int) -> None: ...

    def release(self, prompt_id: int) -> None:
        self.documents.pop(prompt_id, None)


def oracle_reuse(sources: list[list[int]], response: list[int], prefix: int = 3) -> int:
    """Tokens of `response` that a drafter with foresight takes from `sources`: the last `prefix` tokens are looked up, the
    longest agreeing continuation of all occurrences is taken; where there is none, one token is generated."""
    places: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    for s, source in enumerate(sources):
        for at in range(prefix, len(source)):
            places[tuple(source[at - prefix : at])].append((s, at))
    at, reused = 0, 0
    while at < len(response):
        longest = 0
        for s, start in places.get(tuple(response[max(0, at - prefix) : at]), ()):
            n, source = 0, sources[s]
            while start + n < len(source) and at + n < len(response) and source[start + n] == response[at + n]:
                n += 1
            longest = max(longest, n)
        reused += longest
        at += max(longest, 1)
    return reused


def replay(
    trace: Trace,
    history_step: int | None,
    live_step: int,
    policy: str,
    sources: str,
    batch: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """One replay; a dictionary of its numbers."""
    history = HistoryBuffer(trace.vocab_size)
    if history_step is not None and sources in ("history", "both"):
        for prompt, items in trace.responses[history_step].items():
            history.record(
                prompt,
                trace.prompts[prompt],
                [ids for ids, _ in items],
                [score for _, score in items],
                step=history_step,
            )
    live = trace.responses[live_step]
    if arguments.shift_prompts:  # control: another prompt's history must not help
        order = sorted(live)
        history = _shifted(history, trace, order)
    options = DrafterOptions(
        policy=policy,
        max_draft=arguments.max_draft,
        branch=arguments.branch,
        siblings=sources in ("siblings", "both"),
        context=arguments.context,
        prompt_weight=arguments.prompt_weight,
        budget_power=arguments.budget_power,
    )
    cost = CostModel.load(arguments.profile) if arguments.profile else CostModel.built_in(arguments.device)
    drafter = Drafter(options, history, cost, Exhaustive() if arguments.exhaustive else None)  # type: ignore[arg-type]
    drafter.learner = copy.deepcopy(cost)  # a replay's own speed teaches nothing
    drafter.load({prompt: trace.prompts[prompt] for prompt in live})
    engine = Engine(drafter, batch, cost)
    engine.run(
        [
            (f"{live_step}-{prompt}-{i}", prompt, trace.prompts[prompt], ids)
            for prompt in sorted(live)
            for i, (ids, _) in enumerate(live[prompt])
            if ids
        ]
    )
    metrics = drafter.take_metrics()
    plain = _plain_seconds(live, batch, cost)
    return {
        "history_step": history_step,
        "live_step": live_step,
        "policy": policy,
        "sources": sources,
        "batch": batch,
        "engine_steps": engine.steps,
        "predicted_tokens_per_second": engine.tokens / engine.seconds,
        "predicted_speedup": plain / engine.seconds,
        **{name.removeprefix("histospec/"): value for name, value in metrics.items()},
    }


def _shifted(history: HistoryBuffer, trace: Trace, order: list[int]) -> HistoryBuffer:
    moved = HistoryBuffer(trace.vocab_size)
    for prompt, other in zip(order, order[1:] + order[:1]):
        for visit in history.get(other):
            moved.record(prompt, trace.prompts[prompt], visit.responses(), visit.rewards.tolist(), step=visit.step)
    return moved


def _plain_seconds(live: dict[int, list[tuple[list[int], float]]], batch: int, cost: CostModel) -> float:
    """The same work without drafts."""
    queue = [len(ids) for prompt in sorted(live) for ids, _ in live[prompt] if ids][::-1]
    running: list[int] = []
    seconds = 0.0
    while queue or running:
        if running:
            seconds += float(cost.predict(len(running), len(running)))
        running = [left - 1 for left in running]
        while queue and len(running) < batch:
            running.append(queue.pop() - 1)
        running = [left for left in running if left]
    return seconds


def pairs(trace: Trace, arguments: argparse.Namespace) -> Iterator[tuple[int | None, int]]:
    steps = sorted(trace.responses)
    if arguments.epochs:
        yield from zip([None, *steps[:-1]], steps)
    else:
        yield steps_of(trace, arguments.history_step, arguments.live_step)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens per request-step against predicted speed-up, a point a replay; over epochs, lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2))
    labels = list(dict.fromkeys((r["policy"], r["sources"], r["batch"]) for r in rows))
    for label in labels:
        mine = [r for r in rows if (r["policy"], r["sources"], r["batch"]) == label]
        x = [str(r["live_step"]) for r in mine]
        text = f"{label[0]}, {label[1]}, batch {label[2]}"
        axes[0].plot(x, [r["tokens_per_request_step"] for r in mine], "o-", label=text)
        axes[1].plot(x, [r["predicted_speedup"] for r in mine], "o-", label=text)
    axes[0].set(xlabel="live step", ylabel="tokens per request-step")
    axes[1].set(xlabel="live step", ylabel="predicted speed-up over no speculation")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--history-step", type=int, help="default: the step before the live one")
    parser.add_argument("--live-step", type=int, help="default: the last")
    parser.add_argument("--epochs", action="store_true", help="every step, with the one before as its history")
    parser.add_argument("--group", type=int, default=16, help="responses a prompt (the first ones)")
    parser.add_argument(
        "--policy", nargs="+", default=["paper", "published", "fixed:4", "fixed:8", "fixed:16", "goodput"]
    )
    parser.add_argument("--sources", nargs="+", default=["history", "both"], choices=["history", "siblings", "both"])
    parser.add_argument("--batch", nargs="+", type=int, default=[32], help="running requests")
    parser.add_argument("--branch", default="count", help="branch choice: count, paper, recency, reward_recency")
    parser.add_argument("--context", type=int, default=8, help="prompt tokens before every response")
    parser.add_argument("--max-draft", type=int, default=32)
    parser.add_argument("--prompt-weight", type=float, default=0.0, help="draft from the prompt's text too")
    parser.add_argument("--budget-power", type=float, default=1.0)
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu", help="built-in step times")
    parser.add_argument("--profile", type=Path, help="step times measured by rhymemeg.histospec.profile")
    parser.add_argument("--exhaustive", action="store_true", help="search exhaustively instead of with the index")
    parser.add_argument("--shift-prompts", action="store_true", help="control: every prompt gets another one's history")
    parser.add_argument("--oracle", action="store_true", help="also print the oracle reuse of the responses")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    try:
        trace = read_trace_file(arguments.trace, arguments.group)
        if not arguments.json:
            print(
                "history  live  policy      sources   batch  coverage  accepted  tokens/step  match  predicted    draft us"
                "  index B/tok\n                                                   /drafted               speed-up"
            )
        for history_step, live_step in pairs(trace, arguments):
            if arguments.oracle and history_step is not None:
                reused = total = 0
                for prompt, items in trace.responses[live_step].items():
                    old = [ids for ids, _ in trace.responses[history_step].get(prompt, [])]
                    reused += sum(oracle_reuse(old, ids) for ids, _ in items)
                    total += sum(len(ids) for ids, _ in items)
                print(
                    f"oracle reuse of step {live_step} from step {history_step}: {reused / total:.3f}", file=sys.stderr
                )
            for sources in arguments.sources:
                for batch in arguments.batch:
                    for policy in arguments.policy:
                        row = replay(trace, history_step, live_step, policy, sources, batch, arguments)
                        rows.append(row)
                        if not arguments.json:
                            print(
                                f"{history_step!s:>7} {live_step:>5}  {policy:<10}  {sources:<8} {batch:>6}  "
                                f"{row['coverage']:8.3f}  {row['acceptance']:8.3f}  {row['tokens_per_request_step']:11.3f}  "
                                f"{row['match_length']:5.1f}  {row['predicted_speedup']:9.3f}  "
                                f"{row['draft_us_per_request']:10.2f}  "
                                f"{row['index_bytes_per_token']:11.1f}",
                                flush=True,
                            )
    except RhymeMegError as error:
        print(f"replay: error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(rows, indent=1))
    if arguments.plot:
        plot(rows, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
