"""Charts as inline SVG: lines with a band, stacked areas, heat maps. Pure: numbers in, markup out.

Every chart is `WIDTH` units wide (`WIDE` across the page) and scales with the page. Series longer than `POINTS` are drawn
as means of bins, with the smallest and the largest value of each bin as a band, so that a chart's size does not grow with
the run. Numbers that are not finite are gaps. All text is escaped here and nowhere else.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

WIDTH, HEIGHT = 640, 230
WIDE = 1310  # of a chart that takes the width of the page
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 32
POINTS = 400
# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999999")
REFERENCE = "#999999"


@dataclass(frozen=True)
class Series:
    """One line. `error`: half height of a bar at each point, or None. `dashed`: of the run compared with."""

    name: str
    x: Floats
    y: Floats
    error: Floats | None = None
    dashed: bool = False
    points: bool = False


@dataclass(frozen=True)
class Binned:
    """Means of bins of about equal numbers of points, and the range in each."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def binned(x: Floats, y: Floats, most: int = POINTS) -> Binned:
    """`x`, `y` in at most `most` bins, in order. Where they are fewer, each is its own bin."""
    if len(x) <= most:
        return Binned(x, y, y, y)
    cuts = np.linspace(0, len(x), most + 1).round().astype(np.int64)[:-1]
    count = np.diff([*cuts, len(x)])
    mean = np.add.reduceat(y, cuts) / count
    return Binned(np.add.reduceat(x, cuts) / count, mean, np.minimum.reduceat(y, cuts), np.maximum.reduceat(y, cuts))


def escape(text: object) -> str:
    """Text that may stand anywhere in the page, attributes included."""
    return html.escape(str(text), quote=True)


def number(value: float) -> str:
    """A number for people: three significant digits, thousands as K, M, G."""
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    for bound, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "K")):
        if size >= bound:
            return f"{value / (1e3 if unit == 'K' else bound):.3g}{unit}"
    if size >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}" if size >= 1e-3 or size == 0 else f"{value:.1e}"


def ticks(low: float, high: float, most: int = 5, whole: bool = False) -> list[float]:
    """Round numbers between `low` and `high`: steps of 1, 2 or 5 times a power of ten (`whole`: of at least 1), at most
    `most` + 1 of them."""
    span = high - low
    if not math.isfinite(span) or span <= 1e-9 * max(abs(low), abs(high)):
        return [low]
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [step * k for k in range(first, math.floor(high / step + 1e-9) + 1)] or [low]


class Axes:
    """Scales of one chart and its frame."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        log: bool = False,
        height: int = HEIGHT,
        width: int = WIDTH,
    ) -> None:
        self.log, self.height, self.width = log, height, width
        self.x0, self.x1 = x if x[1] > x[0] else (x[0] - 0.5, x[0] + 0.5)
        if log:
            y = (math.floor(math.log10(y[0]) + 1e-9), math.ceil(math.log10(y[1]) - 1e-9))
        self.y0, self.y1 = y if y[1] > y[0] else (y[0] - 0.5, y[0] + 0.5)

    def px(self, x: Floats | float) -> Floats | float:
        return LEFT + (x - self.x0) / (self.x1 - self.x0) * (self.width - LEFT - RIGHT)

    def py(self, y: Floats | float) -> Floats | float:
        if self.log:
            y = np.log10(y)
        return self.height - BOTTOM - (y - self.y0) / (self.y1 - self.y0) * (self.height - TOP - BOTTOM)

    def frame(self, x_label: str) -> str:
        """Grid lines, numbers at both axes, and the name of x."""
        parts = []
        marks = ticks(self.y0, self.y1)
        if self.log:  # whole decades
            marks = [10.0**k for k in marks if abs(k - round(k)) < 1e-9]
        for value in marks:
            y = float(self.py(value))
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{self.width - RIGHT}"/>')
            parts.append(f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{number(value)}</text>')
        return "".join(parts) + self.below(ticks(self.x0, self.x1, 8, x_label == "step"), x_label)

    def below(self, values: Sequence[float], label: str, centre: float = 0.0) -> str:
        """The numbers under the x axis, each `centre` to the right of its value, and the axis' name."""
        parts = [
            f'<text x="{float(self.px(value + centre)):.1f}" y="{self.height - 17}" text-anchor="middle">'
            f"{number(value)}</text>"
            for value in values
        ]
        end = f'<text x="{self.width - RIGHT}" y="{self.height - 4}" text-anchor="end">{escape(label)}</text>'
        return "".join(parts) + end


def path(xs: Floats, ys: Floats) -> str:
    """SVG path data; a gap where a number is not finite."""
    parts, pen = [], False
    for x, y in zip(xs.tolist(), ys.tolist()):
        ok = math.isfinite(x) and math.isfinite(y)
        if ok:
            parts.append(f"{'L' if pen else 'M'}{x:.1f} {y:.1f}")
        pen = ok
    return "".join(parts)


def figure(
    title: str, body: str, legend: Sequence[tuple[str, str, bool]] = (), note: str = "", wide: bool = False
) -> str:
    """The box around a chart: title, legend as (name, colour, dashed), and a remark."""
    keys = "".join(
        f'<span class="key"><i style="background:{colour}{";opacity:.55" if dashed else ""}"></i>{escape(name)}</span>'
        for name, colour, dashed in legend
    )
    remark = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f"<figure{' class=wide' if wide else ''}><figcaption>{escape(title)}</figcaption>"
        f'<div class="legend">{keys}</div>{body}{remark}</figure>'
    )


def svg(body: str, height: int = HEIGHT, label: str = "", data: str = "", width: int = WIDTH) -> str:
    """The drawing area. `data`: attribute for the page's script."""
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}"{data}>{body}</svg>'


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    zero: bool = False,
    log: bool = False,
    note: str = "",
    x_label: str = "step",
) -> str:
    """Lines over steps; '' when there is nothing to draw. `zero`: the axis begins at 0. `log`: logarithmic, of the
    positive values."""
    drawn = []
    for one in series:
        keep = np.isfinite(one.y) & ((one.y > 0) if log else True)
        if keep.any():
            error = None if one.error is None else one.error[keep]
            drawn.append(Series(one.name, one.x[keep], one.y[keep], error, one.dashed, one.points))
    if not drawn:
        return ""
    lows = [float((s.y - (0 if s.error is None else s.error)).min()) for s in drawn]
    highs = [float((s.y + (0 if s.error is None else s.error)).max()) for s in drawn]
    low, high = (min(0.0, *lows) if zero else min(lows)), max(highs)
    if not log:
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        low, high = (low if zero and low == 0 else low - margin), high + margin
    axes = Axes((min(s.x.min() for s in drawn), max(s.x.max() for s in drawn)), (low, high), log)
    parts = [axes.frame(x_label)]
    hover: list[dict[str, object]] = []
    legend: list[tuple[str, str, bool]] = []
    solid = iter(COLOURS * 4)
    colour_of: dict[str, str] = {}
    for one in drawn:
        if one.name not in colour_of:
            colour_of[one.name] = next(solid)
        colour = colour_of[one.name]
        b = binned(one.x, one.y)
        x = np.asarray(axes.px(b.x))
        if len(one.x) > POINTS and not one.dashed:
            band = path(
                np.concatenate([x, x[::-1]]), np.concatenate([axes.py(b.high), np.asarray(axes.py(b.low))[::-1]])
            )
            parts.append(f'<path d="{band}Z" fill="{colour}" opacity=".15"/>')
        y = np.asarray(axes.py(b.mean))
        style = ' stroke-dasharray="5 4" opacity=".55"' if one.dashed else ""
        parts.append(f'<path d="{path(x, y)}" fill="none" stroke="{colour}" stroke-width="1.6"{style}/>')
        if one.points or len(x) == 1:
            parts += [f'<circle cx="{a:.1f}" cy="{c:.1f}" r="3" fill="{colour}"{style}/>' for a, c in zip(x, y)]
        if one.error is not None:
            tops, ends = np.asarray(axes.py(one.y + one.error)), np.asarray(axes.py(one.y - one.error))
            bars = "".join(f"M{a:.1f} {t:.1f}V{e:.1f}" for a, t, e in zip(np.asarray(axes.px(one.x)), tops, ends))
            parts.append(f'<path d="{bars}" stroke="{colour}" stroke-width="1.2" fill="none"{style}/>')
        if not any(name == one.name for name, *_ in legend):
            legend.append((one.name, colour, False))
        hover.append(
            {
                "n": one.name + (" (compared run)" if one.dashed else ""),
                "x": [float(f"{v:.6g}") for v in b.x],
                "p": [round(float(v), 1) for v in x],
                "y": [float(f"{v:.4g}") for v in b.mean],
            }
        )
    if any(one.dashed for one in drawn):
        legend.append(("dashed: compared run", REFERENCE, True))
    data = f' data-hover="{escape(json.dumps(hover, separators=(",", ":")))}"'
    return figure(title, svg("".join(parts), label=title, data=data), legend, note)


def stack_chart(title: str, x: Floats, layers: Mapping[str, Floats], note: str = "") -> str:
    """Areas on top of each other, the first at the bottom; '' for no layers. Bins are means, so the top line is the mean
    of the sum."""
    if not layers or not len(x):
        return ""
    parts_binned = {name: binned(x, y) for name, y in layers.items()}
    xs = next(iter(parts_binned.values())).x
    bottom = np.zeros(len(xs))
    top = bottom + sum(b.mean for b in parts_binned.values())
    axes = Axes((float(xs[0]), float(xs[-1])), (0.0, float(top.max()) * 1.05 or 1.0))
    px = np.asarray(axes.px(xs))
    if len(px) == 1:  # one step: a bar
        px, bottom = np.array([LEFT, WIDTH - RIGHT], np.float64), np.zeros(2)
    parts = [axes.frame("step")]
    hover: list[dict[str, object]] = []
    legend: list[tuple[str, str, bool]] = []
    for (name, b), colour in zip(parts_binned.items(), COLOURS * 4):
        upper = bottom + b.mean
        edge = path(np.concatenate([px, px[::-1]]), np.concatenate([axes.py(upper), np.asarray(axes.py(bottom))[::-1]]))
        parts.append(f'<path d="{edge}Z" fill="{colour}" opacity=".8"/>')
        legend.append((name, colour, False))
        hover.append(
            {"n": name, "x": [float(f"{v:.6g}") for v in xs], "p": [round(float(v), 1) for v in px[: len(xs)]],
             "y": [float(f"{v:.4g}") for v in b.mean]}
        )  # fmt: skip
        bottom = upper
    data = f' data-hover="{escape(json.dumps(hover, separators=(",", ":")))}"'
    return figure(title, svg("".join(parts), label=title, data=data), legend, note)


SHADES = 12


def shade(value: float) -> str:
    """Colour of a share from 0 (pale) to 1 (dark)."""
    t = min(max(value, 0.0), 1.0)
    r, g, b = (round(a + (z - a) * t) for a, z in zip((238, 243, 248), (165, 30, 20)))
    return f"#{r:02x}{g:02x}{b:02x}"


def heat_map(
    title: str,
    matrix: Floats,
    rows: Sequence[str],
    edges: tuple[float, float],
    *,
    x_label: str,
    centre: float = 0.0,
    most: float = 1.0,
    unit: str = "%",
    note: str = "",
) -> str:
    """Cells [rows, columns] coloured by value / `most`; NaN stays empty. `edges`: x where the first column begins and the
    last one ends. A number of the axis stands `centre` to the right of its value (0.5: under its column)."""
    height = TOP + BOTTOM + max(60, min(14 * len(rows), 420))
    axes = Axes(edges, (0.0, float(len(rows))), height=height, width=WIDE)
    cell_w = (WIDE - LEFT - RIGHT) / matrix.shape[1]
    cell_h = (height - TOP - BOTTOM) / len(rows)
    levels = np.where(np.isfinite(matrix), np.clip(matrix / most, 0, 1) * (SHADES - 1), -1).round().astype(int)
    parts = []
    for level in range(SHADES):
        cells = []
        for r, c in zip(*np.nonzero(levels == level)):
            cells.append(f"M{LEFT + c * cell_w:.1f} {TOP + r * cell_h:.1f}h{cell_w:.2f}v{cell_h:.2f}h-{cell_w:.2f}z")
        if cells:
            parts.append(f'<path d="{"".join(cells)}" fill="{shade(level / (SHADES - 1))}"/>')
    every = max(1, math.ceil(len(rows) * 11 / (height - TOP - BOTTOM)))
    parts += [
        f'<text x="{LEFT - 5}" y="{TOP + (r + 0.5) * cell_h + 3.5:.1f}" text-anchor="end">{escape(rows[r])}</text>'
        for r in range(0, len(rows), every)
    ]
    parts.append(axes.below(ticks(edges[0], edges[1] - 2 * centre, 12, centre > 0), x_label, centre))
    scale = 100 if unit == "%" else 1
    legend = [(f"{number(scale * most * t)} {unit}", shade(t), False) for t in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return figure(title, svg("".join(parts), height, title, width=WIDE), legend, note, wide=True)
