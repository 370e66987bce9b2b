"""Response lengths for the simulator: per step, the lengths of last epoch and of this one. Pure but for reading files.

A workload is an iterator of `StepLengths`. Sources:

    lognormal   a named synthetic distribution, see `Lognormal`
    trace       a JSONL file (.gz too) with a line a response: prompt_id, step, and its length (see `read_trace`)
    samples     a run's samples/ folder: the same, a file a step

Trace and samples are resampled: each simulated prompt draws one of the trace's prompts, its history from that prompt's
responses at one visit and its new responses from those at the following one.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from rhymemeg.errors import ConfigError, DataError
from rhymemeg.histopipe.predict import Floats, Ints

WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, eq=False)
class StepLengths:
    """`prompt_ids` [P]; `history` [P, n] lengths of last epoch (NaN: none); `actual` [P, n] lengths now, 1 .. cap."""

    prompt_ids: Ints
    history: Floats
    actual: Ints


@dataclass(frozen=True)
class Lognormal:
    """log length = log(median) + sigma x (parts of unit total variance): prompt 65 %, epoch 2 %, prompt in epoch 7 %,
    sample 26 % (the shares that TailSieve reports for real RL rollouts). sigma = 0.99 is its ratio of the 90th
    percentile to the median (4,115 to 1,160 tokens)."""

    median: float = 1160.0
    sigma: float = 0.99
    growth: float = 1.0
    """Mean length against last epoch."""
    shares: tuple[float, float, float, float] = (0.648, 0.022, 0.069, 0.261)

    def steps(self, prompts: int, samples: int, cap: int, seed: int) -> Iterator[StepLengths]:
        rng = np.random.default_rng(seed)
        prompt, epoch, both, noise = (self.sigma * math.sqrt(s) for s in self.shares)
        for step in range(1 << 62):
            base = math.log(self.median) + prompt * rng.standard_normal((prompts, 1))
            drawn = [
                base
                + epoch * rng.standard_normal()
                + both * rng.standard_normal((prompts, 1))
                + noise * rng.standard_normal((prompts, samples))
                for _ in range(2)
            ]
            last, now = np.exp(drawn[0]), np.exp(drawn[1]) * self.growth
            yield StepLengths(
                np.arange(step * prompts, (step + 1) * prompts),
                np.clip(np.rint(last), 1, cap),
                np.clip(np.rint(now), 1, cap).astype(np.int64),
            )


@dataclass(frozen=True, eq=False)
class Trace:
    """Lengths by epoch and prompt: `epochs[k][prompt_id]` is the array of the lengths at the prompt's k-th visit."""

    epochs: tuple[dict[Any, Floats], ...]

    def steps(self, prompts: int, samples: int, cap: int, seed: int) -> Iterator[StepLengths]:
        rng = np.random.default_rng(seed)
        pairs = [(a, b, sorted(a.keys() & b.keys(), key=str)) for a, b in zip(self.epochs, self.epochs[1:])]
        pairs = [pair for pair in pairs if pair[2]]
        if not pairs:
            raise DataError("the trace has no prompt with responses at two steps")
        for step in range(1 << 62):
            last, now, ids = pairs[step % len(pairs)]
            # Every prompt of the trace equally often: an epoch visits each once.
            chosen = [ids[i] for i in np.resize(rng.permutation(len(ids)), prompts)]
            yield StepLengths(
                np.arange(step * prompts, (step + 1) * prompts),
                np.array([np.clip(_draw(rng, last[i], samples), 1, cap) for i in chosen]),
                np.array([np.clip(_draw(rng, now[i], samples), 1, cap) for i in chosen]).astype(np.int64),
            )


def _draw(rng: np.random.Generator, lengths: Floats, number: int) -> Floats:
    """Without replacement where there are enough."""
    return rng.choice(lengths, number, replace=len(lengths) < number)


def read_trace(path: str | Path, scale: float = 1.0) -> Trace:
    """A JSONL file or a folder of them. A line's length is `length`, else the number of `output_token_ids`, else the
    number of words and punctuation marks of `output`; times `scale`. DataError names the file and the line."""
    path = Path(path)
    files = sorted(path.glob("*.jsonl*")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: no .jsonl file in this folder")
    visits: dict[Any, dict[int, list[float]]] = {}
    for file in files:
        number = 0
        try:
            with _open(file) as lines:
                for number, line in enumerate(lines, 1):  # noqa: B007 (told with an error)
                    entry = json.loads(line.decode("utf-8"))
                    step, prompt = int(entry["step"]), entry["prompt_id"]
                    visits.setdefault(prompt, {}).setdefault(step, []).append(_length(entry) * scale)
        except (EOFError, zlib.error, OSError) as error:
            raise DataError(f"{file}: cannot be read after line {number}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{file}, line {number}: not a response with prompt_id, step and a length or output: {error!r}"
            ) from None
    # An epoch takes many steps, so what counts is how often a prompt has come before.
    epochs: list[dict[Any, Floats]] = [{} for _ in range(max(map(len, visits.values()), default=0))]
    for prompt, by_step in visits.items():
        for epoch, step in zip(epochs, sorted(by_step)):
            epoch[prompt] = np.array(by_step[step])
    return Trace(tuple(epochs))


def _open(file: Path) -> IO[bytes]:
    return gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb")  # type: ignore[return-value]


def _length(entry: dict[str, Any]) -> int:
    if entry.get("length") is not None:
        if int(entry["length"]) < 0:
            raise ValueError(f"length {entry['length']} is negative")
        return int(entry["length"])
    if entry.get("output_token_ids") is not None:
        return len(entry["output_token_ids"])
    return len(WORD.findall(entry["output"]))


HISTORIES = ("epoch", "none", "adversarial", "shuffled")


def degrade(lengths: StepLengths, history: str, seed: int) -> StepLengths:
    """Other predictions for the same responses. `epoch`: last epoch's lengths; `none`: a first epoch; `adversarial`:
    the rank order turned around with knowledge of what comes, so that what will be longest is predicted shortest;
    `shuffled`: another prompt's lengths."""
    if history == "epoch":
        return lengths
    if history == "none":
        return StepLengths(lengths.prompt_ids, np.full_like(lengths.history, np.nan), lengths.actual)
    if history == "shuffled":
        order = np.random.default_rng((seed, int(lengths.prompt_ids[0]))).permutation(len(lengths.history))
        return StepLengths(lengths.prompt_ids, lengths.history[order], lengths.actual)
    if history == "adversarial":
        by_truth = np.argsort(lengths.actual.mean(axis=1), kind="stable")
        by_history = np.argsort(-lengths.history.mean(axis=1), kind="stable")
        turned = np.empty_like(lengths.history)
        turned[by_truth] = lengths.history[by_history]
        return StepLengths(lengths.prompt_ids, turned, lengths.actual)
    raise ConfigError(f"--history: {history!r} is none of {', '.join(HISTORIES)}")


def workload(text: str, scale: float = 1.0) -> Lognormal | Trace:
    """`lognormal:median=1160,sigma=0.99,growth=1`, or a path."""
    if not text.startswith("lognormal"):
        if not Path(text).exists():
            raise ConfigError(f"--lengths: {text!r} is neither lognormal:... nor a file or folder")
        return read_trace(text, scale)
    options: dict[str, float] = {}
    for part in filter(None, text.partition(":")[2].split(",")):
        name, _, value = part.partition("=")
        try:
            options[name] = float(value)
        except ValueError:
            raise ConfigError(f"--lengths: {part!r} is not NAME=NUMBER") from None
        if name not in ("median", "sigma", "growth") or not 0 < options[name] < 1e9:
            raise ConfigError(f"--lengths: {part!r}: want median, sigma or growth, and a positive number")
    return Lognormal(**options)  # type: ignore[arg-type]
