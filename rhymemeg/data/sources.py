"""Where prompts come from: JSONL files, Parquet files, generators. Each is a `Source` of `Row`s.

Files are checked line by line when they are opened; the first bad line is a DataError with file and line (or row)
number. A JSONL file stays on disk: only where its lines begin is kept in memory, and a line is read again when it is
used. Parquet columns stay in Arrow's memory.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rhymemeg.config import did_you_mean
from rhymemeg.errors import ConfigError, DataError

ID_KEY = "prompt_id"
MAX_ID = 999_999_999


@dataclass(frozen=True)
class Row:
    """A prompt as it was found: `prompt` is text or a list of chat messages, `place` names it in messages to the
    user, `source` is the data set that it says it is of, if it does."""

    prompt_id: int
    prompt: str | list[dict[str, Any]]
    label: Any
    place: str
    source: str = ""


class Source(Protocol):
    """Rows by index. `fingerprint` depends on all of their content."""

    name: str
    default_reward: str
    fingerprint: str

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row: ...

    def rows(self) -> Iterator[Row]: ...


@dataclass(frozen=True)
class Fields:
    """Which fields of a line hold the prompt and the label; with an empty `label` there are no labels. `chat`:
    prompts may be lists of messages. `source`: the field that may name a data set."""

    prompt: str
    label: str
    chat: bool
    source: str = "data_source"

    def read(self, record: Any, place: str, default_id: int) -> Row:
        """The row that a record stands for; raises DataError saying what is wrong with it."""
        if not isinstance(record, Mapping):
            raise DataError(f"{place}: expected an object with fields, got {type(record).__name__}")
        for key, option in ((self.prompt, "--prompt-key"), (self.label, "--label-key")):
            if key and key not in record:
                raise DataError(
                    f"{place}: no field {key!r} ({option}); there are {', '.join(map(repr, record)) or 'none'}"
                )
        prompt = record[self.prompt]
        self._check_prompt(prompt, f"{place}: field {self.prompt!r}")
        prompt_id = record.get(ID_KEY, default_id)
        if type(prompt_id) is not int or not 0 <= prompt_id <= MAX_ID:
            raise DataError(f"{place}: field {ID_KEY!r} must be an integer from 0 to {MAX_ID}, got {prompt_id!r}")
        source = record.get(self.source, "")
        if not isinstance(source, str):
            raise DataError(f"{place}: field {self.source!r} must be text, got {type(source).__name__}")
        return Row(prompt_id, prompt, record[self.label] if self.label else None, place, source)

    def _check_prompt(self, prompt: Any, what: str) -> None:
        if isinstance(prompt, str):
            if not prompt.strip():
                raise DataError(f"{what} is empty")
            return
        if not isinstance(prompt, list):
            raise DataError(f"{what} must be text or a list of chat messages, got {type(prompt).__name__}")
        if not prompt:
            raise DataError(f"{what} is empty")
        for message in prompt:
            if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
                raise DataError(f"{what}: a chat message needs 'role' and 'content', both text; got {message!r:.100}")
        if not self.chat:
            raise DataError(f"{what} holds chat messages: set --apply-chat-template")


class _Ids:
    """Refuses an id that has been there before, and data in which only some rows have one."""

    def __init__(self) -> None:
        self._seen: dict[int, str] = {}
        self._given: bool | None = None

    def add(self, row: Row, given: bool) -> None:
        if self._given is None:
            self._given = given
        if given != self._given:
            raise DataError(f"{row.place}: {'a' if given else 'no'} field {ID_KEY!r}, unlike the lines before")
        if not given:
            return  # line numbers are unique
        if row.prompt_id in self._seen:
            raise DataError(f"{row.place}: {ID_KEY} {row.prompt_id} occurs before, at {self._seen[row.prompt_id]}")
        self._seen[row.prompt_id] = row.place


def file_source(path: str, fields: Fields) -> Source:
    """The source for a file: Parquet by its suffix (.parquet, .pq), else JSONL."""
    try:
        if not os.path.exists(path):
            raise DataError(f"{path} does not exist")
        if os.path.isdir(path):
            raise DataError(f"{path} is a folder; expected a JSONL or Parquet file")
        source = ParquetSource(path, fields) if Path(path).suffix in (".parquet", ".pq") else JsonlSource(path, fields)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    if not len(source):
        raise DataError(f"{path} holds no prompts")
    return source


class JsonlSource:
    """A file with one JSON object a line; blank lines are passed over. The file must not change during the run."""

    default_reward = "exact_match"

    def __init__(self, path: str, fields: Fields) -> None:
        self.name = path
        self._fields = fields
        self._starts, self._lines = array("Q"), array("Q")
        ids, content = _Ids(), hashlib.blake2b(digest_size=16)
        position = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    record = self._parse(line, number)
                    ids.add(fields.read(record, f"{path}:{number}", number), ID_KEY in record)
                    content.update(line.strip() + b"\n")
                    self._starts.append(position)
                    self._lines.append(number)
                position += len(line)
        self.fingerprint = content.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Row:
        try:
            with open(self.name, "rb") as file:
                file.seek(self._starts[index])
                return self._read(file.readline(), self._lines[index])
        except OSError as error:
            raise DataError(f"cannot read {self.name}: {error.strerror or error}") from None

    def rows(self) -> Iterator[Row]:
        with open(self.name, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield self._read(line, number)

    def _read(self, line: bytes, number: int) -> Row:
        return self._fields.read(self._parse(line, number), f"{self.name}:{number}", number)

    def _parse(self, line: bytes, number: int) -> Any:
        try:
            return json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{self.name}:{number}: not UTF-8 text (byte {error.start + 1} of the line)") from None
        except json.JSONDecodeError as error:
            raise DataError(f"{self.name}:{number}: not JSON: {error.msg} (column {error.colno})") from None
        except (RecursionError, ValueError) as error:
            raise DataError(f"{self.name}:{number}: not JSON that can be read: {error}") from None


class ParquetSource:
    """A Parquet file; rows are numbered from 1, as lines are."""

    default_reward = "exact_match"

    def __init__(self, path: str, fields: Fields) -> None:
        import pyarrow
        import pyarrow.parquet

        self.name, self._fields = path, fields
        try:
            names = pyarrow.parquet.read_schema(path).names
            for key, option in ((fields.prompt, "--prompt-key"), (fields.label, "--label-key")):
                if key and key not in names:
                    raise DataError(f"{path}: no column {key!r} ({option}); there are {', '.join(map(repr, names))}")
            self._keys = [name for name in dict.fromkeys((fields.prompt, fields.label, ID_KEY)) if name in names]
            self._table = pyarrow.parquet.read_table(path, columns=self._keys, memory_map=True)
        except pyarrow.ArrowException as error:
            raise DataError(f"{path} is not a Parquet file that can be read: {error}") from None
        ids, content = _Ids(), hashlib.blake2b(digest_size=16)
        for row in self.rows():
            ids.add(row, ID_KEY in self._keys)
            content.update(repr((row.prompt_id, row.prompt, row.label)).encode())
        self.fingerprint = content.hexdigest()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> Row:
        return self._read(self._table.slice(index, 1).to_pylist()[0], index)

    def rows(self) -> Iterator[Row]:
        index = 0
        for batch in self._table.to_batches(max_chunksize=1024):
            for record in batch.to_pylist():
                yield self._read(record, index)
                index += 1

    def _read(self, record: dict[str, Any], index: int) -> Row:
        return self._fields.read(record, f"{self.name}: row {index + 1}", index + 1)


class TaskSource:
    """Prompts that a generator made: (text, label) in order."""

    def __init__(self, task: str, default_reward: str, made: list[tuple[str, Any]]) -> None:
        self.name, self.default_reward, self._made = f"task:{task}", default_reward, made
        self.fingerprint = hashlib.blake2b(repr(made).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self._made)

    def row(self, index: int) -> Row:
        text, label = self._made[index]
        return Row(index, text, label, f"{self.name}: prompt {index}")

    def rows(self) -> Iterator[Row]:
        return (self.row(index) for index in range(len(self)))


# ------------------------------------------------------------------------------------------------------- generators

INSTRUCTION = "\n\nGive the final answer between <answer> and </answer>.\n"


def task_source(
    task: str, count: int, seed: int, arguments: Mapping[str, Any], unlike: Source | None = None
) -> TaskSource:
    """`count` prompts of a task, none of which is among those of `unlike` (the training prompts, when these are held
    out). The prompts depend on the task, its arguments, `seed` and `unlike`; fewer prompts are the beginning of
    more."""
    stream = _ledger_stream if task == "ledger" else _reasoning_gym_stream
    taken = {row.prompt for row in unlike.rows() if isinstance(row.prompt, str)} if unlike is not None else set()
    made: list[tuple[str, Any]] = []
    for text, label in itertools.islice(stream(task, seed, arguments), 10 * count + 100):
        if text not in taken:
            made.append((text, label))
        if len(made) == count:
            break
    else:
        fresh = "that are not training prompts " if taken else ""
        raise DataError(
            f"task:{task} has too few different prompts: {count} {fresh}are asked for, {len(made)} were found; "
            "lower --num-prompts or --eval-num-prompts, or widen --task-args"
        )
    return TaskSource(task, "ledger" if task == "ledger" else "reasoning_gym", made)


def _ledger_stream(task: str, seed: int, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    from rhymemeg.data.tasks.ledger import ledgers

    known = ("min_terms", "max_terms")
    for name, value in arguments.items():
        if name not in known:
            raise ConfigError(f"--task-args: task:{task} has no argument {name!r}{did_you_mean(name, known)}")
        if type(value) is not int:
            raise ConfigError(f"--task-args: {name} must be an integer, got {value!r}")
    return ((ledger.prompt, ledger.label) for ledger in ledgers(seed, **arguments))


def _reasoning_gym_stream(task: str, seed: int, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Prompts of a reasoning-gym task, without end. Its label is all that its verifier needs."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError(f"--prompt-data task:{task} needs the package {error.name}, which is not installed") from None
    if task not in DATASETS:
        names = ["ledger", *DATASETS]
        raise ConfigError(f"--prompt-data: unknown task {task!r}{did_you_mean(task, names)}")
    known = [name for name in DATASETS[task][1].__dataclass_fields__ if name not in ("seed", "size")]
    for name in arguments:
        if name in ("seed", "size"):
            option = {"seed": "--data-seed", "size": "--num-prompts"}[name]
            raise ConfigError(f"--task-args: {name} is set by {option}")
        if name not in known:
            raise ConfigError(f"--task-args: task:{task} has no argument {name!r}{did_you_mean(name, known)}")
    try:
        dataset = reasoning_gym.create_dataset(task, seed=seed, size=1_000_000_000, **arguments)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--task-args: task:{task} refuses {dict(arguments)}: {error or type(error).__name__}"
        ) from None
    index = 0
    while True:
        try:
            entry = dataset[index]
        except Exception as error:
            raise DataError(f"task:{task}: making prompt {index} raised {type(error).__name__}: {error}") from error
        yield entry["question"] + INSTRUCTION, {"task": task, "task_args": dict(arguments), "entry": entry}
        index += 1
