"""Charts of engines over windows, readable from one engine to thousands.

    idle_map     the whole run: a row an engine (or a band of engines), a column a window (or several), colour the idle share
    timeline     the last windows in seconds: what each engine did, and what happened between windows
    gantt        one window: every stay of a response on an engine, or, with too many, how full each engine was

What is left out or averaged is said under the chart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rhymemeg.histopipe.figures import COLOURS as KINDS
from rhymemeg.histopipe.figures import lanes
from rhymemeg.histopipe.record import Span, WindowRecord
from rhymemeg.observe.read_run import Floats, RunData
from rhymemeg.report.charts import (
    BOTTOM,
    COLOURS,
    LEFT,
    RIGHT,
    TOP,
    WIDE,
    Axes,
    figure,
    heat_map,
    svg,
    ticks,
)

ROWS = 64
COLUMNS = 240
TIMELINE_WINDOWS = 8
TIMELINE_ENGINES = 32
LANES = 500
SPANS = 6000
CARRIED = "#222222"


def idle_map(run: RunData) -> str:
    """Idle share of engines over windows; '' without windows."""
    if not run.windows:
        return ""
    engines = max(line.record.num_engines for line in run.windows)
    matrix = np.full((engines, len(run.windows)), math.nan)
    for column, line in enumerate(run.windows):
        record = line.record
        if record.seconds > 0:
            matrix[: record.num_engines, column] = np.array(record.idle_seconds) / record.seconds
    rows, labels = _bands(matrix, ROWS)
    table, _ = _bands(rows.T, COLUMNS)
    table = table.T
    notes = []
    if engines > ROWS:
        notes.append(f"each row is the mean of up to {math.ceil(engines / ROWS)} of {engines} engines")
    if matrix.shape[1] > COLUMNS:
        notes.append(f"each column is the mean of {math.ceil(matrix.shape[1] / COLUMNS)} windows")
    worst = np.nanmean(matrix, axis=1)
    order = np.argsort(-np.nan_to_num(worst))[:5]
    notes.append(
        f"mean {100 * np.nanmean(matrix):.1f} %; most idle engines over the run: "
        + ", ".join(f"{e} ({100 * worst[e]:.1f} %)" for e in order.tolist())
    )
    top = float(np.nanmax(table)) if np.isfinite(table).any() else 1.0
    first, last = run.windows[0].record.step, run.windows[-1].record.step
    return heat_map(
        "Idle share of each engine in each window",
        table,
        labels,
        (float(first), float(last + 1)),
        x_label="step",
        centre=0.5,
        most=max(top, 0.01),
        note="; ".join(notes),
    )


def _bands(matrix: Floats, most: int) -> tuple[Floats, list[str]]:
    """Rows averaged in groups of equal size, so that at most `most` are left, and the names of the groups."""
    size = math.ceil(len(matrix) / most)
    if size <= 1:
        return matrix, [str(i) for i in range(len(matrix))]
    parts = [matrix[i : i + size] for i in range(0, len(matrix), size)]
    with np.errstate(invalid="ignore"):
        means = np.array([np.nansum(p, axis=0) / np.isfinite(p).sum(axis=0) for p in parts])
    return means, [f"{i}–{min(i + size, len(matrix)) - 1}" for i in range(0, len(matrix), size)]


def chosen_engines(idle: Floats, most: int = TIMELINE_ENGINES) -> list[int]:
    """All engines, or of many the most and the least idle ones, in order."""
    if len(idle) <= most:
        return list(range(len(idle)))
    order = np.argsort(-idle, kind="stable")
    return sorted([*order[: most // 2].tolist(), *order[-(most - most // 2) :].tolist()])


def timeline(run: RunData) -> str:
    """The last windows one after another, in seconds: an engine's bar is what it was busy, the gap behind it idle; between
    windows the phases of the step that rank 0 logged."""
    lines = run.windows[-TIMELINE_WINDOWS:]
    if not lines:
        return ""
    by_step = {row["step"]: row for row in run.rows}
    phases = [n for n in run.names("timing_s/") if n not in ("timing_s/rollout", "timing_s/other")]
    total_of = {n: sum(by_step.get(line.record.step, {}).get(n, 0.0) for line in lines) for n in phases}
    phases = sorted((n for n in phases if total_of[n] > 0), key=lambda n: -total_of[n])[:4]
    engines = lines[-1].record.num_engines
    idle = np.zeros(engines)
    for line in lines:
        for e, seconds in enumerate(line.record.idle_seconds[:engines]):
            idle[e] += seconds
    shown = chosen_engines(idle)
    row_height = max(5, min(14, 420 // len(shown)))
    height = TOP + BOTTOM + row_height * len(shown)
    bars: list[tuple[str, float, float, float, float]] = []  # colour, begin, seconds, row, rows
    at, marks = 0.0, []
    for line in lines:
        record = line.record
        marks.append((at, record.step))
        for place, e in enumerate(shown):
            if e < record.num_engines:
                bars.append((COLOURS[0], at, max(record.seconds - record.idle_seconds[e], 0.0), place, 1))
        at += record.seconds
        for name, colour in zip(phases, COLOURS[1:]):
            seconds = by_step.get(record.step, {}).get(name, 0.0)
            bars.append((colour, at, seconds, 0, len(shown)))
            at += seconds
    axes = Axes((0.0, at or 1.0), (0.0, float(len(shown))), height=height, width=WIDE)
    scale = (WIDE - LEFT - RIGHT) / (at or 1.0)
    paths: dict[str, list[str]] = {}
    for colour, begin, seconds, row, rows in bars:
        if seconds * scale < 0.05:
            continue
        y, h = TOP + row * row_height + (0.5 if rows == 1 else 0), rows * row_height - (1 if rows == 1 else 0)
        paths.setdefault(colour, []).append(
            f"M{LEFT + begin * scale:.2f} {y:.1f}h{seconds * scale:.2f}v{h:.1f}h-{seconds * scale:.2f}z"
        )
    parts = [f'<path d="{"".join(d)}" fill="{colour}"/>' for colour, d in paths.items()]
    every = max(1, math.ceil(11 / row_height))
    parts += [
        f'<text x="{LEFT - 5}" y="{TOP + (row + 0.5) * row_height + 3.5:.1f}" text-anchor="end">{e}</text>'
        for row, e in enumerate(shown)
        if row % every == 0
    ]
    parts += [
        f'<text x="{float(axes.px(x)):.1f}" y="{height - 17}">step {step}</text>' for x, step in marks if x < 0.95 * at
    ]
    parts.append(f'<text x="{WIDE - RIGHT}" y="{height - 4}" text-anchor="end">{at:.1f} seconds in all</text>')
    legend = [("busy", COLOURS[0], False)]
    legend += [(n.removeprefix("timing_s/"), c, False) for n, c in zip(phases, COLOURS[1:])]
    notes = ["the gap behind a bar is time without a running request, drawn at the end of the window wherever it was"]
    if len(shown) < engines:
        notes.append(f"{len(shown)} of {engines} engines: the most and the least idle ones")
    title = f"Engines over the last {len(lines)} windows"
    return figure(title, svg("".join(parts), height, title, width=WIDE), legend, "; ".join(notes), wide=True)


def gantt(record: WindowRecord, title: str) -> str:
    """One window in detail; '' where no spans were recorded."""
    if not record.spans:
        return ""
    engines = sorted({span.engine for span in record.spans})
    if len(engines) > ROWS:
        engines = engines[:ROWS]
    kept = [span for span in record.spans if span.engine in set(engines)]
    part = [] if len(engines) == record.num_engines else [f"{len(engines)} of {record.num_engines} engines"]
    placed = lanes(WindowRecord(**{**vars(record), "spans": tuple(kept)}))
    slots = {row: number for row, _, number in placed}
    if sum(slots.values()) > LANES or len(kept) > SPANS:
        return _occupancy(record, kept, engines, title, part)
    first = np.concatenate([[0], np.cumsum([slots[r] for r in sorted(slots)])])
    total = int(first[-1])
    lane_height = max(2.0, min(10.0, 480 / total))
    gap = 4.0
    height = int(TOP + BOTTOM + lane_height * total + gap * len(engines))
    scale = (WIDE - LEFT - RIGHT) / (record.seconds or 1.0)
    paths: dict[str, list[str]] = {}
    for span, (row, lane, _) in zip(kept, placed):
        y = TOP + (first[row] + lane) * lane_height + gap * row
        width = max((span.end - span.begin) * scale, 0.3)
        box = f"h{width:.1f}v{max(lane_height - 0.5, 1):.1f}h-{width:.1f}z"
        paths.setdefault(KINDS.get(span.kind, COLOURS[-1]), []).append(f"M{LEFT + span.begin * scale:.1f} {y:.1f}{box}")
        if span.outcome != "finished":
            end = LEFT + span.end * scale - 2
            paths.setdefault(CARRIED, []).append(f"M{end:.1f} {y:.1f}h2v{max(lane_height - 0.5, 1):.1f}h-2z")
    parts = [f'<path d="{"".join(d)}" fill="{colour}"/>' for colour, d in sorted(paths.items(), reverse=True)]
    parts += [
        f'<text x="{LEFT - 5}" y="{TOP + (first[r] + slots[r] / 2) * lane_height + gap * r + 3.5:.1f}" '
        f'text-anchor="end">{engines[r]}</text>'
        for r in range(len(engines))
    ]
    axes = Axes((0.0, record.seconds or 1.0), (0.0, 1.0), height=height, width=WIDE)
    parts.append(axes.below(ticks(axes.x0, axes.x1, 12), "seconds in the window"))
    legend = [(kind, colour, False) for kind, colour in KINDS.items()] + [("carried or moved on", CARRIED, False)]
    return figure(
        title, svg("".join(parts), height, title, width=WIDE), legend, "; ".join([_says(record), *part]), wide=True
    )


def _says(record: WindowRecord) -> str:
    return (
        f"{record.policy}: {record.seconds:.2f} s, idle {100 * record.idle_share:.1f} %, {record.samples} samples trained, "
        f"{record.carried_in} carried in, {record.carried_out} carried out, {record.early_started} started early"
    )


def _occupancy(record: WindowRecord, spans: Sequence[Span], engines: list[int], title: str, part: list[str]) -> str:
    """How many responses ran on each engine over time."""
    bins = 160
    row = {engine: i for i, engine in enumerate(engines)}
    begin = np.array([span.begin for span in spans])
    end = np.array([span.end for span in spans])
    at = np.array([row[span.engine] for span in spans])
    edges = np.linspace(0, record.seconds or 1.0, bins + 1)
    width = edges[1]
    table = np.zeros((len(engines), bins))
    for i in range(bins):
        inside = np.clip(np.minimum(end, edges[i + 1]) - np.maximum(begin, edges[i]), 0, None) / width
        table[:, i] = np.bincount(at, weights=inside, minlength=len(engines))
    note = "; ".join([_says(record), f"{len(spans)} stays, drawn as the number of responses that run", *part])
    labels = [str(e) for e in engines]
    return heat_map(
        title, table, labels, (0.0, record.seconds or 1.0), x_label="seconds in the window",
        most=max(float(table.max()), 1.0), unit="running", note=note,
    )  # fmt: skip
