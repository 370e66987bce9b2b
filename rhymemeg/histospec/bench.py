"""Cost of drafting: RhymeMeg's index, arctic-inference's suffix cache and vLLM's n-gram proposer, one process, same data.

    python -m rhymemeg.histospec.bench
    python -m rhymemeg.histospec.bench --trace trace.jsonl.gz --history-step 400 --live-step 800 --json

Data: groups of 16 responses of 1K, 4K and 16K tokens that share most of their text, as responses to one prompt do: each goes
through an earlier one in runs of about 12 tokens and departs from it in between. Half of the batch's requests are live
siblings of each of two prompts; each of them is fed in steps of 4 tokens and asked for a draft of up to 16 after each.

    append    microseconds a token appended to the running requests, and a token of history loaded
    draft     microseconds a request of one draft call for the batch (1, 16, 64, 256 requests); one thread
    memory    bytes a token of history: growth of the resident set over loading 32 prompts, divided by their tokens
    trace     tokens per request-step on a trace of real responses (tools/replay.py has the details), if one is given

Figures are medians over `--repeats` runs, in CPU time of the one thread that does it all, so that a busy machine does not
change them much. Packages that are not installed are left out; n-gram has no history and no append: it
searches each request's own text anew.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rhymemeg.histospec.index import DraftIndex

GROUP = 16
STEP = 4
DRAFT = 16
VOCAB = 32_000
Tokens = NDArray[np.int32]


def group(seed: int, length: int, size: int = GROUP) -> list[Tokens]:
    """Responses of one prompt: the first is text with a natural distribution of tokens, each other one follows an earlier
    one in runs, with new tokens in between."""
    rng = np.random.default_rng(seed)

    def fresh(n: int) -> Tokens:
        return np.minimum(rng.zipf(1.3, n), VOCAB - 1).astype(np.int32)

    responses = [fresh(length)]
    while len(responses) < size:
        source = responses[int(rng.integers(len(responses)))]
        parts: list[Tokens] = []
        at = 0
        while at < length:
            run = int(rng.geometric(1 / 12))
            parts += [source[at : at + run], fresh(int(rng.integers(0, 4)))]
            at += run
        responses.append(np.concatenate(parts)[:length])
    return responses


class Contender(Protocol):
    """One implementation. Requests are numbered; request i belongs to prompt i % prompts."""

    name: str

    def load(self, prompt: int, responses: list[Tokens]) -> None: ...
    def open(self, requests: int, prompts: int) -> None: ...
    def form(self, tokens: list[Tokens]) -> Any:
        """New tokens of all requests in the form that `append` takes; not timed."""

    def append(self, formed: Any) -> None: ...
    def draft(self) -> int: ...


class Ours:
    """The draft index of this package."""

    name = "rhymemeg"

    def __init__(self) -> None:
        self.index = DraftIndex()
        self.slots = np.empty(0, np.int32)

    def load(self, prompt: int, responses: list[Tokens]) -> None:
        self.index.load(
            prompt,
            context=[],
            tokens=np.concatenate(responses),
            lengths=[len(r) for r in responses],
            weights=np.ones(len(responses), np.float32),
        )

    def open(self, requests: int, prompts: int) -> None:
        self.slots = np.array([self.index.open(i % prompts, context=[]) for i in range(requests)], np.int32)
        self.limits = np.full(requests, DRAFT, np.int32)

    def form(self, tokens: list[Tokens]) -> Any:
        return np.cumsum([0] + [len(t) for t in tokens]), np.concatenate(tokens)

    def append(self, formed: Any) -> None:
        self.index.append(self.slots, *formed)

    def draft(self) -> int:
        return len(self.index.draft(self.slots, self.limits)[0])


class Arctic:
    """arctic-inference's suffix cache, depth 24: one tree for all prompts, and one of its own for each request. Drafts are
    as long as ours; `ArcticDefaults` has vLLM's defaults."""

    name = "arctic"
    factor, least_probability = 16.0, 0.0

    def __init__(self) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache: Any = SuffixDecodingCache(max_tree_depth=24, max_cached_requests=100_000)
        self.texts: list[list[int]] = []

    def load(self, prompt: int, responses: list[Tokens]) -> None:
        for i, response in enumerate(responses):
            name = f"history-{prompt}-{i}"
            self.cache.start_request(name, np.empty(0, np.int32))
            self.cache.add_active_response(name, response)
            self.cache.stop_request(name)

    def open(self, requests: int, prompts: int) -> None:
        self.texts = [[] for _ in range(requests)]
        for i in range(requests):
            self.cache.start_request(f"live-{i}", np.empty(0, np.int32))

    def form(self, tokens: list[Tokens]) -> Any:
        for text, new in zip(self.texts, tokens):  # the caller of the cache keeps the texts
            text += new.tolist()
        return tokens

    def append(self, formed: Any) -> None:
        for i, new in enumerate(formed):
            self.cache.add_active_response(f"live-{i}", new)

    def draft(self) -> int:
        total = 0
        for i, text in enumerate(self.texts):
            found = self.cache.speculate(
                f"live-{i}",
                text[-24:],
                max_spec_tokens=DRAFT,
                max_spec_factor=self.factor,
                min_token_prob=self.least_probability,
            )
            total += len(found.token_ids)
        return total


class ArcticDefaults(Arctic):
    """A draft at most as long as its match, path probability at least 0.1."""

    name = "arctic-vllm"
    factor, least_probability = 1.0, 0.1


class NGram:
    """vLLM's n-gram search over a request's own text of `length` tokens and more (matches of 3 to 7 tokens)."""

    name = "ngram"

    def __init__(self, length: int) -> None:
        import numba
        from vllm.v1.spec_decode.ngram_proposer import batch_propose_numba

        numba.set_num_threads(1)
        self.search = batch_propose_numba
        self.length = length

    def load(self, prompt: int, responses: list[Tokens]) -> None:
        self.history = responses[0]

    def open(self, requests: int, prompts: int) -> None:
        room = self.length + 512
        self.texts = np.zeros((requests, room), np.int32)
        self.texts[:, : self.length] = self.history[: self.length]
        self.lengths = np.full(requests, self.length, np.int32)
        self.drafts = np.zeros((requests, DRAFT), np.int32)
        self.counts = np.zeros(requests, np.int32)
        self.draft()  # compiles

    def form(self, tokens: list[Tokens]) -> Any:
        return tokens

    def append(self, formed: Any) -> None:
        for i, new in enumerate(formed):
            self.texts[i, self.lengths[i] : self.lengths[i] + len(new)] = new
            self.lengths[i] += len(new)

    def draft(self) -> int:
        rows = list(range(len(self.lengths)))
        self.search(rows, self.lengths, self.texts, 3, 7, self.texts.shape[1], DRAFT, self.drafts, self.counts)
        return int(self.counts.sum())


def contenders(length: int, only: Sequence[str] | None) -> list[Callable[[], Contender]]:
    """Constructors of those that are installed (and in `only`, if given)."""
    known: dict[str, Callable[[], Contender]] = {
        "rhymemeg": Ours,
        "arctic": Arctic,
        "arctic-vllm": ArcticDefaults,
        "ngram": lambda: NGram(length),
    }
    found: list[Callable[[], Contender]] = []
    for name, make in known.items():
        if only and name not in only:
            continue
        try:
            make()
            found.append(make)
        except ImportError:
            continue
    return found


def time_steps(make: Callable[[], Contender], length: int, requests: int, steps: int) -> dict[str, float]:
    """One run: microseconds a token and a request."""
    prompts = max(1, min(2, requests))
    histories = [group(prompt, length) for prompt in range(prompts)]
    live = [group(prompt, length, GROUP + requests) for prompt in range(prompts)]  # the same first 16, and new ones
    contender = make()
    begin = time.thread_time()
    for prompt in range(prompts):
        contender.load(prompt, histories[prompt])
    load = time.thread_time() - begin
    contender.open(requests, prompts)
    append = draft = 0.0
    drafted = 0
    for step in range(steps):
        tokens = [live[i % prompts][GROUP + i // prompts][step * STEP : (step + 1) * STEP] for i in range(requests)]
        formed = contender.form(tokens)
        t0 = time.thread_time()
        contender.append(formed)
        t1 = time.thread_time()
        drafted += contender.draft()
        t2 = time.thread_time()
        append += t1 - t0
        draft += t2 - t1
    return {
        "load_us_per_token": 1e6 * load / sum(len(r) for h in histories for r in h),
        "append_us_per_token": 1e6 * append / (steps * STEP * requests),
        "draft_us_per_request": 1e6 * draft / (steps * requests),
        "drafted_per_request": drafted / (steps * requests),
    }


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def memory(make: Callable[[], Contender], length: int, prompts: int) -> float:
    """Bytes a token of `prompts` prompts' histories."""
    histories = [group(prompt, length) for prompt in range(prompts)]
    contender = make()
    contender.load(prompts, [np.arange(100, dtype=np.int32)] * 2)  # whatever is allocated once
    gc.collect()
    before = resident()
    for prompt, responses in enumerate(histories):
        contender.load(prompt, responses)
    return (resident() - before) / sum(len(r) for h in histories for r in h)


def memory_apart(name: str, length: int, prompts: int) -> float:
    """`memory` in a new process, so that nothing freed before is used again."""
    import subprocess

    code = (
        "from rhymemeg.histospec import bench;"
        f"print(bench.memory(bench.{'Ours' if name == 'rhymemeg' else 'Arctic'}, {length}, {prompts}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1800, check=True)
    return float(done.stdout.split()[-1])


def trace_tokens_per_step(
    path: str, history_step: int | None, live_step: int | None, size: int, only: Sequence[str] | None
) -> dict[str, float]:
    """Tokens per request-step of each contender on a trace: drafts of up to 16 tokens from the history and from the group
    as it grows, a group at a time."""
    from rhymemeg.histospec.trace import read_trace_file, steps_of

    trace = read_trace_file(path, size)
    history, live = steps_of(trace, history_step, live_step)
    results: dict[str, float] = {}
    for make in contenders(1, only):
        contender = make()
        if contender.name == "ngram":
            continue
        results[contender.name] = _replay(contender, trace, history, live)
    return results


def _replay(contender: Contender, trace: Any, history: int | None, live: int) -> float:
    """All prompts' groups one after another, the group's requests at once."""
    steps = tokens = 0
    for prompt, items in sorted(trace.responses[live].items()):
        one: Contender = type(contender)()
        if history is not None:
            one.load(0, [np.array(ids, np.int32) for ids, _ in trace.responses[history].get(prompt, [])])
        texts = [np.array(ids, np.int32) for ids, _ in items if ids]
        one.open(len(texts), 1)
        done = [1] * len(texts)
        new = [text[:1] for text in texts]
        while any(len(n) for n in new):
            one.append(one.form(new))
            drafts = _drafts(one, len(texts))
            for i, text in enumerate(texts):
                if done[i] >= len(text):
                    new[i] = text[:0]
                    continue
                agree = 0
                left = text[done[i] :]
                while agree < min(len(drafts[i]), len(left)) and drafts[i][agree] == left[agree]:
                    agree += 1
                new[i] = left[: agree + 1]
                done[i] += len(new[i])
                steps += 1
                tokens += len(new[i])
    return tokens / steps


def _drafts(contender: Contender, requests: int) -> list[list[int]]:
    if isinstance(contender, Ours):
        tokens, offsets, *_ = contender.index.draft(contender.slots, contender.limits)
        return [tokens[offsets[i] : offsets[i + 1]].tolist() for i in range(requests)]
    assert isinstance(contender, Arctic)
    found = []
    for i, text in enumerate(contender.texts):
        best = contender.cache.speculate(
            f"live-{i}",
            text[-24:],
            max_spec_tokens=DRAFT,
            max_spec_factor=contender.factor,
            min_token_prob=contender.least_probability,
        )
        found.append(list(best.token_ids))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="rhymemeg.histospec.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-prompts", type=int, default=32)
    parser.add_argument("--only", nargs="+", help="names of contenders: rhymemeg, arctic, arctic-vllm, ngram")
    parser.add_argument("--trace", help="JSONL of real responses")
    parser.add_argument("--history-step", type=int)
    parser.add_argument("--live-step", type=int)
    parser.add_argument("--group", type=int, default=GROUP, help="responses a prompt of the trace")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []

    def say(text: str) -> None:
        if not a.json:
            print(text, flush=True)

    say("implementation  history    batch  load us/token  append us/token  draft us/request  tokens drafted")
    for length in a.lengths:
        for make in contenders(length, a.only):
            name = make().name
            for batch in a.batches:
                runs = [time_steps(make, length, batch, a.steps) for _ in range(a.repeats)]
                row: dict[str, Any] = {"name": name, "length": length, "batch": batch}
                row |= {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                rows.append(row)
                say(
                    f"{name:<14} {GROUP:>3} x {length:>5}  {batch:>5}  {row['load_us_per_token']:>13.3f}  "
                    f"{row['append_us_per_token']:>15.3f}"
                    f"  {row['draft_us_per_request']:>16.2f}  {row['drafted_per_request']:>14.2f}"
                )
    say("\nimplementation  history    bytes/token (resident)")
    for length in a.lengths:
        for name in sorted({row["name"] for row in rows} - {"ngram", "arctic-vllm"}):
            row = {"name": name, "length": length, "bytes_per_token": memory_apart(name, length, a.memory_prompts)}
            rows.append(row)
            say(f"{name:<14} {GROUP:>3} x {length:>5}  {row['bytes_per_token']:>11.2f}")
    if a.trace:
        say("\nimplementation  tokens per request-step on the trace, drafts of up to 16")
        for name, value in trace_tokens_per_step(a.trace, a.history_step, a.live_step, a.group, a.only).items():
            rows.append({"name": name, "trace": a.trace, "tokens_per_request_step": value})
            say(f"{name:<14} {value:>11.3f}")
    if a.json:
        print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
