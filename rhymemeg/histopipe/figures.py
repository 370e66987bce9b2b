"""Figures, with matplotlib (imported only here and only when drawing): the Gantt chart of one window, and bars that
compare settings. Both are written as the file name's ending says (.png, .svg, .pdf)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rhymemeg.errors import ConfigError, RhymeMegError
from rhymemeg.histopipe.record import WindowRecord, read_windows

if TYPE_CHECKING:
    from rhymemeg.histopipe.simulate import Summary

COLOURS = {"new": "#4c78a8", "resumed": "#f58518", "early": "#72b7b2"}


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _save(figure: Any, path: str | Path) -> None:
    """Whole or not at all."""
    path = Path(path)
    aside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(aside, dpi=120)
        os.replace(aside, path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"figure {path}: cannot be written: {error}") from None
    finally:
        aside.unlink(missing_ok=True)


def lanes(record: WindowRecord) -> list[tuple[int, int, int]]:
    """Where each span is drawn: (row of its engine, lane in the row, lanes of the row), one for each of `record.spans`.
    A lane holds spans one after the other, as a slot of the engine does."""
    engines = sorted({span.engine for span in record.spans})
    row = {engine: i for i, engine in enumerate(engines)}
    free: dict[int, list[float]] = {engine: [] for engine in engines}
    placed: list[tuple[int, int]] = [(0, 0)] * len(record.spans)
    for i in sorted(range(len(record.spans)), key=lambda i: (record.spans[i].begin, i)):
        span = record.spans[i]
        ends = free[span.engine]
        lane = next((k for k, end in enumerate(ends) if end <= span.begin + 1e-9), len(ends))
        ends[lane : lane + 1] = [span.end]
        placed[i] = (row[span.engine], lane)
    return [(r, lane, len(free[span.engine])) for (r, lane), span in zip(placed, record.spans)]


def draw_gantt(axes: Any, record: WindowRecord) -> None:
    """A row an engine, a lane a slot; the colour says whether the response was new, resumed or early, a dark end that
    it was carried on. White between spans is an idle slot."""
    if not record.spans:
        axes.text(0.5, 0.5, "no spans recorded", ha="center", va="center", transform=axes.transAxes)
    for span, (row, lane, number) in zip(record.spans, lanes(record)):
        height = 0.9 / number
        y = row - 0.45 + lane * height
        axes.barh(y, span.end - span.begin, height, span.begin, align="edge", color=COLOURS[span.kind], linewidth=0)
        if span.outcome != "finished":
            width = 0.008 * record.seconds
            axes.barh(y, width, height, max(span.begin, span.end - width), align="edge", color="black", linewidth=0)
    engines = sorted({span.engine for span in record.spans})
    axes.set_yticks(range(len(engines)), [str(e) for e in engines])
    axes.set_xlim(0, record.seconds or 1.0)
    axes.set_xlabel("seconds in the window")
    axes.set_ylabel("engine")
    axes.set_title(
        f"{record.policy}, step {record.step}: {record.seconds:.0f} s, idle {100 * record.idle_share:.1f} %, "
        f"carried {record.carried_out}",
        fontsize=9,
    )
    for kind, colour in COLOURS.items():
        axes.barh(0, 0, color=colour, label=kind)
    axes.barh(0, 0, color="black", label="carried on")
    axes.legend(fontsize=7, ncol=4, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)


def gantt(record: WindowRecord, path: str | Path) -> None:
    """The chart of one window in a file."""
    rows = len({span.engine for span in record.spans})
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(10, 2 + 0.5 * min(rows, 40)), layout="constrained")
    draw_gantt(axes, record)
    _save(figure, path)
    pyplot.close(figure)


def comparison(summaries: Sequence[Summary], chart: WindowRecord | None, path: str | Path) -> None:
    """Bars of speed, idle share and stale share by setting, and one window as a Gantt chart below."""
    pyplot = _pyplot()
    rows = 2 if chart is not None and chart.spans else 1
    figure = pyplot.figure(figsize=(11, 3.6 * rows), layout="constrained")
    grid = figure.add_gridspec(rows, 3)
    panels = (
        ("speed against random", [s.speed for s in summaries]),
        ("idle %", [100 * s.idle_share for s in summaries]),
        ("stale tokens %", [100 * s.stale_share for s in summaries]),
    )
    names = [s.name for s in summaries]
    for i, (title, values) in enumerate(panels):
        axes = figure.add_subplot(grid[0, i])
        bars = axes.barh(range(len(names)), values, color="#4c78a8")
        axes.bar_label(bars, [f"{v:.2f}" if i == 0 else f"{v:.1f}" for v in values], fontsize=8, padding=2)
        axes.set_yticks(range(len(names)), names if i == 0 else [""] * len(names), fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title(title, fontsize=9)
    if rows == 2 and chart is not None:
        draw_gantt(figure.add_subplot(grid[1, :]), chart)
    _save(figure, path)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m rhymemeg.histopipe.figures windows.jsonl --step 12 --output window.png`"""
    parser = argparse.ArgumentParser(
        prog="python -m rhymemeg.histopipe.figures", description="Gantt chart of one window."
    )
    parser.add_argument("windows", help="windows.jsonl of a run or of the simulator")
    parser.add_argument("--step", type=int, help="which window; default: the last")
    parser.add_argument("--output", default="window.png", help="file to write; its ending chooses the format")
    options = parser.parse_args(arguments)
    try:
        records = read_windows(options.windows)
        chosen = [r for r in records if options.step is None or r.step == options.step]
        if not chosen:
            raise ConfigError(
                f"{options.windows}: no window" + ("" if options.step is None else f" of step {options.step}")
            )
        gantt(chosen[-1], options.output)
    except RhymeMegError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
