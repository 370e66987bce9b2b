"""Read a run directory back: metrics.jsonl, windows.jsonl, config.yaml, summary.json. Pure but for the files.

    run = read_run("runs/quickstart")
    steps, values = run.series("reward/mean")

Only metrics.jsonl must be there. A last line that was cut off (a run that was killed, or that is still writing) is left
out and `notes` says so; any other line that is not an object of numbers with a step, in rising order, is a DataError that
names the file and the line. JSON has no NaN: a metric that was not finite is null in the file and missing here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from rhymemeg.errors import DataError
from rhymemeg.histopipe.record import WindowRecord

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """One window without its spans, and where its line begins in the file, to read the spans later."""

    record: WindowRecord
    offset: int
    spans: int


@dataclass
class RunData:
    """`rows`: the lines of metrics.jsonl, each {name: finite number} with "step". `windows` in the order of the file."""

    path: Path
    rows: list[dict[str, float]]
    windows: list[Line] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.resolve().name

    def names(self, prefix: str = "") -> list[str]:
        """Metrics with this prefix that any line has, in the order in which they first appear."""
        found: dict[str, None] = {}
        for row in self.rows:
            found.update((name, None) for name in row if name.startswith(prefix) and name != "step")
        return list(found)

    def series(self, name: str) -> tuple[Floats, Floats]:
        """Steps and values of a metric where it is there; both empty where it never is."""
        pairs = [(row["step"], row[name]) for row in self.rows if name in row]
        table = np.array(pairs, np.float64).reshape(len(pairs), 2)
        return table[:, 0].copy(), table[:, 1].copy()

    def option(self, name: str) -> Any:
        """The value of an option in config.yaml, whatever its section; None where unknown."""
        for section in self.config.values():
            if isinstance(section, dict) and name in section:
                return section[name]
        return self.config.get(name)

    def full_window(self, line: Line) -> WindowRecord:
        """The window with its spans."""
        with open(self.path / "windows.jsonl", "rb") as file:
            file.seek(line.offset)
            return WindowRecord.from_json(file.readline().decode("utf-8"))


def read_run(folder: str | Path) -> RunData:
    """See the module. Raises DataError."""
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"{path}: no such run directory")
    metrics = path / "metrics.jsonl"
    if not metrics.is_file():
        raise DataError(f"{path}: not a run directory: it has no metrics.jsonl")
    notes: list[str] = []
    run = RunData(path, read_metrics(metrics, notes), notes=notes)
    if not run.rows:
        raise DataError(f"{metrics}: holds no step yet")
    if (path / "windows.jsonl").is_file():
        run.windows = _read_windows(path / "windows.jsonl", notes)
    run.config = _read_yaml(path / "config.yaml", notes)
    run.summary = _read_summary(path / "summary.json", notes)
    return run


def read_metrics(file: Path, notes: list[str] | None = None) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, null values left out. What had to be left out is added to `notes`."""
    rows: list[dict[str, float]] = []
    data = _bytes(file)
    lines = data.split(b"\n")
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        last = number == len(lines)  # a whole line ends in a newline, so what follows the last one was cut off
        try:
            row = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            if last:
                if notes is not None:
                    notes.append(f"{file.name}: the last line ({number}) is cut off and left out")
                break
            raise DataError(f"{file}, line {number}: not a line of metrics: {error}") from None
        rows.append(_numbers(row, f"{file}, line {number}"))
        if len(rows) > 1 and rows[-1]["step"] <= rows[-2]["step"]:
            raise DataError(
                f"{file}, line {number}: step {rows[-1]['step']:g} comes after step {rows[-2]['step']:g}: "
                "lines of more than one run"
            )
    return rows


def _numbers(row: Any, where: str) -> dict[str, float]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a line of metrics: expected an object, got {type(row).__name__}")
    kept: dict[str, float] = {}
    for name, value in row.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(f"{where}: metric {name!r} is not a number: {value!r}")
        if not math.isfinite(value):  # 1e999
            raise DataError(f"{where}: metric {name!r} is not finite")
        kept[name] = float(value)
    if "step" not in kept:
        raise DataError(f"{where}: not a line of metrics: it has no step")
    return kept


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON (a number that is not finite is written as null)")


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None


def _read_windows(file: Path, notes: list[str]) -> list[Line]:
    """All windows without their spans: those of a long run would not fit into memory as objects."""
    found: list[Line] = []
    offset, number = 0, 0
    try:
        with open(file, "rb") as stream:
            for text in stream:
                number += 1
                try:
                    entry = json.loads(text.decode("utf-8"))
                    spans = entry.pop("spans", [])
                    record = WindowRecord.from_json(json.dumps(entry))
                    if len(record.idle_seconds) != record.num_engines:
                        raise ValueError(
                            f"idle_seconds of {len(record.idle_seconds)} engines, not {record.num_engines}"
                        )
                    found.append(Line(record, offset, len(spans)))
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                    if not text.endswith(b"\n"):
                        notes.append(f"{file.name}: the last line ({number}) is cut off and left out")
                        break
                    raise DataError(f"{file}, line {number}: not a window record: {error}") from None
                offset += len(text)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None
    return found


def _read_yaml(file: Path, notes: list[str]) -> dict[str, Any]:
    import yaml

    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"no {file.name}")
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read: {str(error).splitlines()[0]}") from None
    return tree if isinstance(tree, dict) else {}


def _read_summary(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"no {file.name}: the run has not ended, or was killed")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from None
    return tree if isinstance(tree, dict) else {}
