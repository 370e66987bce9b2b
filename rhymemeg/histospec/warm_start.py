"""History from JSONL files of responses: another run's `samples/step_N.jsonl`, or the rollout dumps of other trainers.

A line is an object with `output` (text) or `output_token_ids`, `score` (number, null counts as 0), optionally `step`,
`prompt_id`, `version` ([oldest, newest] or a number) and `input` (the prompt's text). A line belongs to the prompts whose
text equals its `input` (all of them, if several prompts share a text); only without an `input` its `prompt_id` is used, so
that ids of another data set cannot mislead. Lines of prompts that this run does not have are counted, not kept.
DataError names the file and the line: not JSON, fields missing or of the wrong type, tokens outside the vocabulary.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rhymemeg.errors import DataError
from rhymemeg.histospec.history import HistoryBuffer


@dataclass(frozen=True)
class KnownPrompt:
    """A prompt of this run: id, text, token ids."""

    prompt_id: int
    text: str
    token_ids: Sequence[int]


@dataclass
class TraceLine:
    """One response of a JSONL file."""

    step: int
    input: str | None
    prompt_id: int | None
    output: str | None
    token_ids: list[int] | None
    score: float
    version: int


@dataclass
class WarmStart:
    """What a file gave."""

    prompts: int = 0
    responses: int = 0
    unknown: int = 0
    steps: set[int] = field(default_factory=set)


def read_trace(path: str | Path) -> Iterable[tuple[int, TraceLine]]:
    """(line number, response) of every line of a JSONL file (.gz too)."""
    path = Path(path)
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, _parse(text, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def _parse(text: str, where: str) -> TraceLine:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(line, dict):
        raise DataError(f"{where}: expected an object, got {type(line).__name__}")

    def take(name: str, kinds: type | tuple[type, ...], expected: str, default: Any = None) -> Any:
        value = line.get(name)
        if value is None:
            return default
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise DataError(f"{where}: {name!r} must be {expected}, got {value!r:.60}")
        return value

    output, ids = take("output", str, "text"), take("output_token_ids", list, "a list of token ids")
    if output is None and ids is None:
        raise DataError(f"{where}: neither 'output' nor 'output_token_ids'")
    if ids is not None and not all(type(token) is int for token in ids):
        raise DataError(f"{where}: 'output_token_ids' must be a list of token ids")
    version = take("version", (int, list), "a number or [oldest, newest]", -1)
    if isinstance(version, list):
        version = version[-1] if version and type(version[-1]) is int else -1
    return TraceLine(
        step=take("step", int, "a whole number", 0),
        input=take("input", str, "text"),
        prompt_id=take("prompt_id", int, "a whole number"),
        output=output,
        token_ids=ids,
        score=float(take("score", (int, float), "a number", 0.0)),
        version=version,
    )


def warm_start(
    history: HistoryBuffer,
    path: str | Path,
    prompts: Iterable[KnownPrompt],
    encode: Callable[[str], Sequence[int]] | None,
    *,
    step: int | None = None,
) -> WarmStart:
    """Record a file's responses in `history`. `encode` turns an output text into token ids where a line has none; `step`
    keeps lines of that step only. Steps are recorded as -1 - (newest - step): before any step of this run.
    """
    by_text: dict[str, list[KnownPrompt]] = defaultdict(list)
    by_id: dict[int, KnownPrompt] = {}
    for prompt in prompts:
        by_text[prompt.text].append(prompt)
        by_id[prompt.prompt_id] = prompt
    result = WarmStart()
    groups: dict[tuple[int, int], list[tuple[Sequence[int], float, int]]] = defaultdict(list)
    for number, line in read_trace(path):
        if step is not None and line.step != step:
            continue
        if line.input is not None:
            owners = by_text.get(line.input, [])
        elif line.prompt_id is not None:
            owners = [by_id[line.prompt_id]] if line.prompt_id in by_id else []
        else:
            raise DataError(f"{path}, line {number}: neither 'input' nor 'prompt_id' says whose response it is")
        if not owners:
            result.unknown += 1
            continue
        ids: Sequence[int]
        if line.token_ids is not None:
            ids = line.token_ids
        elif encode is not None and line.output is not None:
            ids = encode(line.output)
        else:
            raise DataError(f"{path}, line {number}: no 'output_token_ids', and no tokenizer to encode 'output' with")
        bad = next((token for token in ids if not 0 <= token < history.vocab_size), None)
        if bad is not None:
            raise DataError(
                f"{path}, line {number}: token id {bad} is outside the vocabulary of {history.vocab_size} (another tokenizer?)"
            )
        result.responses += 1
        result.steps.add(line.step)
        for owner in owners:
            groups[(line.step, owner.prompt_id)].append((ids, line.score, line.version))
    newest = max(result.steps, default=0)
    for (at, prompt_id), items in sorted(groups.items()):
        responses, rewards, _ = zip(*items)
        history.record(prompt_id, by_id[prompt_id].token_ids, responses, rewards, step=at - newest - 1)
    result.prompts = len({prompt_id for _, prompt_id in groups})
    return result
