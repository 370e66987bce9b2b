"""What happened in each window: one line of `windows.jsonl`, and the metrics made from it. Pure but for the file.

The simulator and the trainer write the same lines, so one Gantt chart (`figures`) draws both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from rhymemeg.errors import DataError
from rhymemeg.histopipe.plan import Plan
from rhymemeg.histopipe.predict import Floats, rank_correlation

KINDS = ("new", "resumed", "early")


@dataclass(frozen=True)
class Span:
    """One stay of a response on an engine in one window. `begin` and `end` in seconds from the start of the window;
    `tokens` made in this stay. kind: new, resumed, early. outcome: finished, carried (paused at the close), moved."""

    engine: int
    sample: str
    begin: float
    end: float
    tokens: int
    kind: str
    outcome: str


@dataclass(frozen=True)
class WindowRecord:
    """One window. Shares are of the numbers they stand beside; tokens are generated tokens unless named otherwise.

    seconds             from the first engine's start to the close
    idle_seconds        per engine: time without a running request
    engine_steps        per engine; empty where not counted
    idle_steps          per engine: steps that an engine which had nothing to run at the close made less than the busiest.
                        An engine that ran to the close has none, however slow its steps are
    samples             of this step that are complete after this window; `tokens` of them in all, `stale_tokens` made
                        before this window
    mean_length         of these samples; `mean_length_started` of all that this step drew, complete or not:
                        where the two part over many windows, carrying biases the lengths that are trained
    carried_in/_out     responses with tokens that came in and that were left at the close (of this step)
    max_unfinished      what could have been left
    early_started       samples of the next step that started in this window
    stolen, migrated    requests that changed engine before they started, and while they had tokens
    recomputed_tokens   tokens of resumed responses whose keys and values were computed again
    generated_tokens    all tokens made in this window
    prediction_error, rank_correlation, growth      see `predict.Feedback`, of this window's samples
    """

    step: int
    policy: str
    layout: str
    num_engines: int
    seconds: float
    idle_seconds: tuple[float, ...]
    samples: int
    tokens: int
    generated_tokens: int
    stale_tokens: int
    recomputed_tokens: int
    mean_length: float
    mean_length_started: float
    carried_in: int
    carried_out: int
    max_unfinished: int
    early_started: int
    stolen: int
    migrated: int
    growth: float
    prediction_error: float
    rank_correlation: float
    plan_digest: str = ""
    engine_steps: tuple[int, ...] = ()
    idle_steps: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def idle_share(self) -> float:
        """Share of all engines' time in which they had nothing to run."""
        total = self.seconds * self.num_engines
        return sum(self.idle_seconds) / total if total > 0 else 0.0

    @property
    def step_idle_share(self) -> float:
        """The same counted in engine steps, which noise on the machine does not touch. NaN where not counted."""
        idle, busy = sum(self.idle_steps), sum(self.engine_steps)
        return idle / (idle + busy) if busy else math.nan

    def metrics(self) -> dict[str, float]:
        """For the step's log; what is not known (NaN) is left out."""
        shares = [idle / self.seconds for idle in self.idle_seconds] if self.seconds > 0 else []
        values = {
            "histopipe/window_time": self.seconds,
            "histopipe/idle_share": self.idle_share,
            "histopipe/idle_share_max": max(shares, default=0.0),
            "histopipe/step_idle_share": self.step_idle_share,
            "histopipe/carried_in": float(self.carried_in),
            "histopipe/carried_out": float(self.carried_out),
            "histopipe/max_unfinished": float(self.max_unfinished),
            "histopipe/early_started": float(self.early_started),
            "histopipe/stolen": float(self.stolen),
            "histopipe/migrated": float(self.migrated),
            "histopipe/stale_tokens": float(self.stale_tokens),
            "histopipe/stale_token_share": self.stale_tokens / self.tokens if self.tokens else 0.0,
            "histopipe/recomputed_token_share": self.recomputed_tokens / self.generated_tokens
            if self.generated_tokens
            else 0.0,
            "histopipe/mean_length": self.mean_length,
            "histopipe/mean_length_started": self.mean_length_started,
            "histopipe/length_growth": self.growth,
            "histopipe/prediction_error": self.prediction_error,
            "histopipe/rank_correlation": self.rank_correlation,
        }
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def to_json(self) -> str:
        """One line. Numbers that are not finite become null."""
        entry = asdict(self)
        entry["spans"] = [[*vars(span).values()] for span in self.spans]
        return json.dumps({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()})

    @classmethod
    def from_json(cls, line: str) -> WindowRecord:
        """Inverse of `to_json`. ValueError, KeyError or TypeError on anything else."""
        entry: dict[str, Any] = _load(line)
        names = {f.name: f.type for f in fields(cls)}
        values: dict[str, Any] = {k: (math.nan if v is None else v) for k, v in entry.items() if k in names}
        values["idle_seconds"] = tuple(map(float, entry["idle_seconds"]))
        for name in ("engine_steps", "idle_steps"):
            values[name] = tuple(map(int, entry.get(name, ())))
        values["spans"] = tuple(Span(*span) for span in entry.get("spans", ()))
        record = cls(**values)
        for name, kind in names.items():
            if kind in ("int", "float"):
                _check_number(name, values.get(name, 0), whole=kind == "int")
        for span in record.spans:
            _check_number("engine of a span", span.engine, whole=True)
            _check_number("times of a span", span.begin + span.end)
            if span.kind not in KINDS:
                raise ValueError(f"kind of a span: {span.kind!r} is none of {', '.join(KINDS)}")
        if not math.isfinite(record.seconds):
            raise ValueError("seconds are not finite")
        return record


def _load(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(entry, dict):
        raise TypeError(f"expected an object, got {type(entry).__name__}")
    return entry


def _check_number(name: str, value: Any, whole: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise TypeError(f"{name}: {value!r} is not a {'whole ' if whole else ''}number")


@dataclass(frozen=True)
class EngineReport:
    """What one engine's leader tells at the close: plain numbers, gathered once a window. `steps` is 0 where not
    counted; `stolen` and `migrated` count requests that came to this engine. `ran_dry`: it had nothing to run at the
    close."""

    engine: int
    idle_seconds: float
    generated_tokens: int
    recomputed_tokens: int = 0
    steps: int = 0
    early_started: int = 0
    stolen: int = 0
    migrated: int = 0
    spans: tuple[Span, ...] = ()
    ran_dry: bool = False


def window_record(
    plan: Plan,
    seconds: float,
    reports: Sequence[EngineReport],
    lengths: Floats,
    stale_tokens: int,
    last_epoch: Floats,
    mean_length_started: float,
    carried_out: int,
    growth: float,
) -> WindowRecord:
    """The record of a closed window. Of the samples trained after it, `lengths` [N] and `last_epoch` [N], the mean
    length of the same prompt in last epoch without growth (NaN: unknown); `growth` is what the plan used."""
    known = np.isfinite(last_epoch)
    error = correlation = math.nan
    if known.any():
        error = float(np.abs(last_epoch * growth - lengths)[known].mean() / lengths[known].mean())
        correlation = rank_correlation(last_epoch[known], lengths[known])
    ordered = sorted(reports, key=lambda report: report.engine)
    most = max((r.steps for r in ordered), default=0)
    return WindowRecord(
        step=plan.step,
        policy=plan.policy,
        layout=plan.layout,
        num_engines=plan.num_engines,
        seconds=seconds,
        idle_seconds=tuple(r.idle_seconds for r in ordered),
        samples=len(lengths),
        tokens=int(lengths.sum()),
        generated_tokens=sum(r.generated_tokens for r in ordered),
        stale_tokens=stale_tokens,
        recomputed_tokens=sum(r.recomputed_tokens for r in ordered),
        mean_length=float(lengths.mean()) if len(lengths) else math.nan,
        mean_length_started=mean_length_started,
        carried_in=len(plan.resumed),
        carried_out=carried_out,
        max_unfinished=plan.max_unfinished,
        early_started=sum(r.early_started for r in ordered),
        stolen=sum(r.stolen for r in ordered),
        migrated=sum(r.migrated for r in ordered) + plan.moved,
        growth=growth,
        prediction_error=error,
        rank_correlation=correlation,
        plan_digest=plan.digest,
        engine_steps=tuple(r.steps for r in ordered) if most else (),
        idle_steps=tuple(most - r.steps if r.ran_dry else 0 for r in ordered) if most else (),
        spans=tuple(span for r in ordered for span in r.spans),
    )


def read_windows(path: str | Path) -> list[WindowRecord]:
    """All records of a windows.jsonl. A last line that was cut off (a run that was killed) is left out; DataError names
    the file and the line of any other that is not a record."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(WindowRecord.from_json(line.decode("utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):  # a whole line ends in a newline, so what follows the last one was cut off
                break
            raise DataError(f"{path}, line {number}: not a window record: {error!r}") from None
    return records


def write_windows(path: str | Path, records: Iterable[WindowRecord]) -> None:
    """A new file with these records."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(record.to_json() + "\n" for record in records)


def append_window(path: str | Path, record: WindowRecord) -> None:
    """Add one record, as a whole line."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(record.to_json() + "\n")
