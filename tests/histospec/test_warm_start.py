"""History from JSONL files, and what is said about files that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rhymemeg.errors import DataError
from rhymemeg.histospec.history import HistoryBuffer
from rhymemeg.histospec.warm_start import KnownPrompt, warm_start

PROMPTS = [KnownPrompt(0, "a?", [1]), KnownPrompt(1, "b?", [2]), KnownPrompt(2, "a?", [1])]


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def encode(text: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in text]


def test_reads_text_dumps(tmp_path: Path) -> None:
    """Lines with texts; prompts with equal text both get the responses; unknown prompts are counted."""
    path = write(
        tmp_path / "7.jsonl",
        {"input": "a?", "output": "abc", "gts": "x", "score": 1, "step": 7},
        {"input": "a?", "output": "b", "score": None, "step": 7},
        {"input": "z?", "output": "b", "score": 0.0, "step": 7},
    )
    history = HistoryBuffer(26)
    result = warm_start(history, path, PROMPTS, encode)
    assert (result.prompts, result.responses, result.unknown) == (2, 2, 1)
    for prompt in (0, 2):
        (visit,) = history.get(prompt, [1])
        assert [r.tolist() for r in visit.responses()] == [[0, 1, 2], [1]] and visit.rewards.tolist() == [1.0, 0.0]
        assert visit.step < 0, "older than any step of this run"
    assert 1 not in history


def test_reads_samples_of_another_run(tmp_path: Path) -> None:
    """Lines with token ids; the newest step wins; a prompt_id counts only where there is no input text."""
    path = write(
        tmp_path / "steps.jsonl",
        {
            "prompt_id": 0,
            "input": "b?",
            "output": "?",
            "output_token_ids": [3, 4],
            "score": 0.5,
            "step": 1,
            "version": [1, 1],
        },
        {"prompt_id": 0, "input": "b?", "output": "?", "output_token_ids": [5], "score": 0.5, "step": 2},
        {"prompt_id": 2, "output_token_ids": [6], "score": 1.0, "step": 2},
    )
    history = HistoryBuffer(26)
    warm_start(history, path, PROMPTS, None)
    assert {p: history.get(p)[0].tokens.tolist() for p in history} == {1: [5], 2: [6]}
    only_first = HistoryBuffer(26)
    warm_start(only_first, path, PROMPTS, None, step=1)
    assert {p: only_first.get(p)[0].tokens.tolist() for p in only_first} == {1: [3, 4]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 2: not JSON"),
        ([1], "line 2: expected an object, got list"),
        ({"input": "a?", "score": 1}, "line 2: neither 'output' nor 'output_token_ids'"),
        ({"input": "a?", "output": 5}, "line 2: 'output' must be text, got 5"),
        ({"input": "a?", "output": "a", "score": "high"}, "line 2: 'score' must be a number"),
        ({"output": "a", "score": 1}, "line 2: neither 'input' nor 'prompt_id'"),
        ({"input": "a?", "output_token_ids": [1, "x"]}, "line 2: 'output_token_ids' must be a list of token ids"),
        ({"input": "a?", "output_token_ids": [1, 26]}, "line 2: token id 26 is outside the vocabulary of 26"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path / "x.jsonl", {"input": "a?", "output": "a", "score": 1}, line)
    history = HistoryBuffer(26)
    with pytest.raises(DataError, match=message):
        warm_start(history, path, PROMPTS, encode)
    assert len(history) == 0


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*absent"):
        warm_start(HistoryBuffer(26), tmp_path / "absent.jsonl", PROMPTS, encode)
    (tmp_path / "x.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(DataError, match=r"cannot read .*x\.jsonl\.gz"):
        warm_start(HistoryBuffer(26), tmp_path / "x.jsonl.gz", PROMPTS, encode)
    path = write(tmp_path / "text.jsonl", {"input": "a?", "output": "a"})
    with pytest.raises(DataError, match="no tokenizer"):
        warm_start(HistoryBuffer(26), path, PROMPTS, None)
