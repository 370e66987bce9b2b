"""Traces: real responses to the same prompts at several steps, from a JSONL file, as token ids. Pure.

Lines are those of `warm_start`. Texts become tokens by splitting them into words, numbers and single other characters (spaces
are dropped), numbered as they appear and ended by END, so a trace needs no tokenizer; lines with `output_token_ids` use those.
DataError names the file and what is wrong.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rhymemeg.errors import DataError
from rhymemeg.histospec.warm_start import read_trace

WORDS = re.compile(r"\w+|[^\w\s]")
END = 0

Group = list[tuple[list[int], float]]


@dataclass
class Trace:
    """prompts[p]: token ids of prompt p; responses[step][p]: (token ids, score) of its responses at that step."""

    path: Path
    prompts: dict[int, list[int]]
    responses: dict[int, dict[int, Group]]
    vocab_size: int


def read_trace_file(path: str | Path, group: int) -> Trace:
    """The first `group` responses of every prompt at every step. A line's `input` is its prompt; without one, its `prompt_id`."""
    words: dict[str, int] = {"": END}

    def encode(text: str) -> list[int]:
        return [words.setdefault(word, len(words)) for word in WORDS.findall(text)]

    prompts: dict[int, list[int]] = {}
    names: dict[Any, int] = {}
    responses: dict[int, dict[int, Group]] = defaultdict(lambda: defaultdict(list))
    largest = 0
    for _, line in read_trace(path):
        prompt = names.setdefault(line.prompt_id if line.prompt_id is not None else line.input, len(names))
        if prompt not in prompts:
            prompts[prompt] = encode(line.input or "") or [END]
        kept = responses[line.step][prompt]
        if len(kept) < group:
            ids = line.token_ids if line.token_ids is not None else [*encode(line.output or ""), END]
            largest = max(largest, max(ids, default=0))
            kept.append((ids, line.score))
    if not responses:
        raise DataError(f"trace {path} is empty")
    return Trace(Path(path), prompts, responses, max(largest + 1, len(words)))


def steps_of(trace: Trace, history: int | None, live: int | None) -> tuple[int | None, int]:
    """(history step, live step): those asked for, by default the last step and the one before it."""
    steps = sorted(trace.responses)
    chosen = steps[-1] if live is None else live
    earlier = [step for step in steps if step < chosen]
    before = (earlier[-1] if earlier else None) if history is None else history
    for step in (chosen, before):
        if step is not None and step not in trace.responses:
            raise DataError(f"trace {trace.path} has no step {step} (it has {steps})")
    return before, chosen
