"""SVG charts of the HTML report, with escaped names.

Colors are CSS classes of the page (``s0`` to ``s6``), so that a chart works in light and dark mode.
"""

from __future__ import annotations

import html
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedrax.escaping import printable_line
from fedrax.report.runs import log_limits, needs_log_axis

COLORS, DASHES = 7, ("", "7 4", "2 3", "9 3 2 3")
WIDTH, HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 14, 46
_MARKED = 26
"""Number of points of a curve up to which each is marked by a dot."""
_LARGEST = sys.float_info.max / 4
"""Limit of the values on a scale, so that margins do not overflow."""


def shown(text: object) -> str:
    """Text escaped for an element or an attribute in double quotes."""
    return html.escape(printable_line(str(text)))


def breakable(path: str) -> str:
    """The dotted name of a setting, with line breaks allowed after dots and underscores."""
    return shown(path).replace(".", ".<wbr>").replace("_", "_<wbr>")


def number(value: float) -> str:
    """A value with four digits."""
    return f"{value:.4g}"


def series_class(index: int) -> str:
    """CSS classes of the method at ``index``: its color, and the class by which it is hidden."""
    return f"s{index % COLORS} m{index}"


def dash(index: int) -> str:
    """The dash attribute, for methods that share a color."""
    pattern = DASHES[(index // COLORS) % len(DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


@dataclass(frozen=True)
class AxisScale:
    """Maps values to positions along an axis."""

    low: float
    """Value at ``start``."""
    high: float
    """Value at ``end``."""
    start: float
    """Position in pixels."""
    end: float
    """Position in pixels."""
    log: bool = False
    """Whether the scale is logarithmic."""

    @classmethod
    def over(
        cls, values: Iterable[float], start: float, end: float, log: bool = False, margin: float = 0.0
    ) -> AxisScale:
        """The scale that covers finite ``values``, with a relative margin at both ends."""
        sound = (value for value in values if math.isfinite(value) and (value > 0 or not log))
        found = [max(-_LARGEST, min(_LARGEST, value)) for value in sound]
        low, high = (min(found), max(found)) if found else (0.0, 1.0)
        if log:
            return cls(low / (1 + 2 * margin), high * (1 + 2 * margin) if high > low else 10 * low, start, end, True)
        room = margin * (high - low) if high > low else max(abs(high) * 0.1, 1e-9)
        return cls(low - room, high + room, start, end)

    def __call__(self, value: float) -> float:
        """The position of a value, clipped to the ends of the axis."""
        value = min(self.high, max(self.low, value))
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            share = (math.log(value) - low) / (high - low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share

    def ticks(self, wanted: int = 5) -> list[float]:
        """About ``wanted`` round values on the axis."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in ((1, 2, 5), (1, 3), (1,)):
                found = [s * 10.0**d for d in decades for s in steps if self.low <= s * 10.0**d <= self.high]
                if len(found) <= wanted + 2:
                    break
            return found[:: -(-len(found) // (wanted + 2)) or 1]
        rough = (self.high - self.low) / wanted
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * f for f in (1, 2, 2.5, 5, 10) if unit * f >= 0.999 * rough)
        first = math.ceil(self.low / step - 1e-9)
        return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class ChartCurve:
    """The curve of a method."""

    label: str
    index: int
    """Number of the method, which determines its color."""
    points: Sequence[tuple[float, float, float]]
    """(x, mean, standard deviation)."""
    runs: Sequence[Sequence[tuple[float, float]]] = ()
    """(x, y) of the single runs, if they differ in length."""
    ring: tuple[float, float] | None = None
    """A point to mark by a ring."""
    lost: Sequence[float] = ()
    """Values of x at which every run diverged."""
    joined: bool = True
    """Whether points are joined by a line."""


def chart(
    curves: Sequence[ChartCurve],
    x_label: str,
    y_label: str,
    *,
    target: float | None = None,
    share: bool = False,
    log_x: bool = False,
    ticks: Sequence[float] = (),
    names: Sequence[str] = (),
    css: str = "",
) -> str:
    """Draw curves with bands of one standard deviation.

    Args:
        curves: The curves.
        x_label: Label of the x axis.
        y_label: What is drawn, for screen readers.
        target: Value of a horizontal line.
        share: Whether values are in [0, 1].
        log_x: Whether the x axis is logarithmic.
        ticks: Positions of ticks on the x axis.
        names: Labels of the ticks of a categorical x axis.
        css: CSS class of the chart.

    Returns:
        The SVG element.
    """
    xs = [x for c in curves for x in (*(p[0] for p in c.points), *(p[0] for run in c.runs for p in run), *c.lost)]
    means = [p[1] for c in curves for p in c.points] + [p[1] for c in curves for run in c.runs for p in run]
    lows, highs = ([p[1] + s * p[2] for c in curves for p in c.points] for s in (-1, 1))
    log_y = not share and needs_log_axis(means)
    edges = [*log_limits(means, lows, highs)] if log_y else [*means, *lows, *highs]
    edges += [target] if target is not None else []
    x = AxisScale.over(
        xs if log_x or names else [0, *xs], _LEFT, WIDTH - _RIGHT, log_x, 0.06 if log_x or names else 0.0
    )
    y = AxisScale.over(edges, HEIGHT - _BOTTOM, _TOP, log_y, 0.0 if log_y else 0.05)
    if share:
        y = AxisScale(max(0.0, y.low), min(1.0, y.high), y.start, y.end) if y.low < 1 and y.high > 0 else y
    parts = [_frame(x, y, x_label, ticks or x.ticks(), names)]
    if target is not None:
        at = y(target)
        parts.append(f'<line class="target" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
    parts += [_line(curve, x, y) for curve in curves]
    if target is not None:  # above the lines
        parts.append(f'<text class="target" x="{_LEFT + 5}" y="{y(target) - 5:.1f}">target {number(target)}</text>')
    data = {
        "x": [x.low, x.high, x.start, x.end, int(x.log)],
        "y": [y.low, y.high, y.start, y.end, int(y.log)],
        "name": printable_line(x_label),
        "names": [printable_line(name) for name in names],
        "series": [
            {"label": printable_line(c.label), "m": c.index, "points": [[_short(v) for v in p] for p in c.points]}
            for c in curves
        ],
    }
    label = f"{y_label} against {x_label}"
    return (
        f'<svg class="chart {css}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{shown(label)}"'
        f' data-curves="{html.escape(json.dumps(data, separators=(",", ":")))}">{"".join(parts)}</svg>'
    )


def _short(value: float) -> float | None:
    """A number for JSON: integers in full, others with six digits, None if not finite."""
    if not math.isfinite(value):
        return None
    return value if float(value).is_integer() else float(f"{value:.6g}")


def _place(value: float) -> str:
    """An x value as text, integers in full."""
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:g}"


def _frame(x: AxisScale, y: AxisScale, x_label: str, ticks: Sequence[float], names: Sequence[str]) -> str:
    """Grid, ticks and labels of the axes."""
    parts = []
    for value in y.ticks():
        at = y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for value in ticks:
        at, label = x(value), names[int(value)] if names else f"{value:g}"
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{y.start + 18:.1f}" text-anchor="middle">{shown(label)}</text>'
        )
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{y.start:.1f}" y2="{y.start + 4:.1f}"/>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y.start:.1f}" y2="{y.start:.1f}"/>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="name" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{shown(x_label)}</text>')
    return "".join(parts)


def _line(curve: ChartCurve, x: AxisScale, y: AxisScale) -> str:
    """The band, line and dots of a method, and its single runs."""
    places = [(x(a), y(b)) for a, b, _ in curve.points]
    parts = [f'<g class="{series_class(curve.index)}"><title>{shown(curve.label)}</title>']
    if any(spread for *_, spread in curve.points):
        upper = [f"{x(a):.1f},{y(b + s):.1f}" for a, b, s in curve.points]
        lower = [f"{x(a):.1f},{y(b - s):.1f}" for a, b, s in reversed(curve.points)]
        parts.append(f'<polygon class="band" points="{" ".join(upper + lower)}"/>')
    for run in curve.runs:
        parts.append(f'<polyline class="run" points="{" ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in run)}"/>')
    if curve.joined:
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline class="mean" points="{points}"{dash(curve.index)}/>')
    if len(places) <= _MARKED or not curve.joined:
        for (a, b), (at, mean, spread) in zip(places, curve.points, strict=True):
            deviation = f" ± {number(spread)}" if spread else ""
            text = f"{curve.label}, {_place(at)}: {number(mean)}{deviation}"
            parts.append(f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="2.6"><title>{shown(text)}</title></circle>')
    if curve.ring is not None:
        parts.append(f'<circle class="ring" cx="{x(curve.ring[0]):.1f}" cy="{y(curve.ring[1]):.1f}" r="7.5"/>')
    for at in curve.lost:
        a, b = x(at), _TOP + 8 + 11 * (curve.index % 6)
        cross = f"M{a - 4:.1f} {b - 4}l8 8m0 -8l-8 8"
        text = f"{curve.label}, {_place(at)}: every run diverged"
        parts.append(f'<path class="lost" d="{cross}"><title>{shown(text)}</title></path>')
    return "".join([*parts, "</g>"])


def swatch(index: int) -> str:
    """The line of a method in the legend."""
    line = f'<line class="mean" x1="1" x2="27" y1="7" y2="7"{dash(index)}/>'
    return f'<svg class="swatch s{index % COLORS}" viewBox="0 0 28 14" aria-hidden="true">{line}</svg>'


@dataclass(frozen=True)
class ClientQuantiles:
    """Quantiles of a method's metric over its clients."""

    label: str
    index: int
    low: float
    """10th percentile of the clients."""
    median: float
    high: float
    """90th percentile."""
    worst: float
    """The worst client."""
    worst_samples: str
    """Number of samples of the worst client, as text."""


def spreads(rows: Sequence[ClientQuantiles], name: str) -> str:
    """Draw a row for each method: 10th to 90th percentile of clients, the median and the worst client."""
    names, height = 150, 34 * len(rows) + 52
    x = AxisScale.over([v for r in rows for v in (r.low, r.high, r.worst)], names, WIDTH - 18, margin=0.04)
    parts = []
    for value in x.ticks():
        at = x(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="6" y2="{height - 42}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{height - 26}" text-anchor="middle">{number(value)}</text>')
    for i, row in enumerate(rows):
        at = 24 + 34 * i
        text = f"{row.label}: 10th percentile {number(row.low)}, median {number(row.median)}, 90th {number(row.high)}"
        worst = f"{row.label}: worst client {number(row.worst)}, of {row.worst_samples} samples"
        label = row.label if len(row.label) <= 20 else row.label[:19] + "…"
        parts.append(
            f'<text class="tick" x="{names - 12}" y="{at + 4}" text-anchor="end">{shown(label)}</text>'
            f'<g class="{series_class(row.index)}"><title>{shown(text)}</title>'
            f'<line class="reach" x1="{x(row.low):.1f}" x2="{x(row.high):.1f}" y1="{at}" y2="{at}"/>'
            f'<line class="median" x1="{x(row.median):.1f}" x2="{x(row.median):.1f}" y1="{at - 9}" y2="{at + 9}"/>'
            f'<circle class="worst" cx="{x(row.worst):.1f}" cy="{at}" r="5"><title>{shown(worst)}</title></circle></g>'
        )
    middle = (names + WIDTH - 18) / 2
    parts.append(f'<text class="name" x="{middle}" y="{height - 6}" text-anchor="middle">{shown(name)}</text>')
    head = f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{shown(name)}">'
    return f"{head}{''.join(parts)}</svg>"


def dots(columns: Sequence[str], rows: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """Draw classes against clients; the area of a dot is the number of samples, ``counts[column][row]``."""
    cell = 11 if len(rows) > 30 else 24 if len(columns) <= 30 and len(rows) <= 15 else 17
    left = 12 + 7 * min(18, max(map(len, rows), default=1))
    numbered = all(name.isdecimal() for name in columns)
    below = 26 if numbered else 16 + 6 * min(18, max(map(len, columns), default=1))
    width, height = left + cell * len(columns) + 14, cell * len(rows) + below + 24
    top = max((n for column in counts for n in column), default=0) or 1
    parts: list[str] = []
    step = 1 if cell >= 17 else 5
    for j, name in enumerate(rows):
        at = 8 + cell * (j + 0.5)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - 12}" y1="{at}" y2="{at}"/>')
        if j % step == 0:
            parts.append(f'<text class="tick" x="{left - 6}" y="{at + 4}" text-anchor="end">{shown(name[:18])}</text>')
    for i, (name, column) in enumerate(zip(columns, counts, strict=True)):
        at, under = left + cell * (i + 0.5), 8 + cell * len(rows) + 12
        if not numbered:
            turned = f'transform="rotate(-90 {at + 4} {under})" text-anchor="end"'
            parts.append(f'<text class="tick" x="{at + 4}" y="{under}" {turned}>{shown(name[:18])}</text>')
        elif i % (1 if len(columns) <= 25 else 5) == 0:
            parts.append(f'<text class="tick" x="{at}" y="{under + 4}" text-anchor="middle">{shown(name)}</text>')
        for j, count in enumerate(column):
            if count:
                text = f"client {name}, class {rows[j]}: {count:,} samples"
                radius = max(0.8, 0.48 * cell * math.sqrt(count / top))
                dot = f'<circle cx="{at}" cy="{8 + cell * (j + 0.5)}" r="{radius:.1f}">'
                parts.append(f"{dot}<title>{shown(text)}</title></circle>")
    return _plain_chart("classes against clients", width, height, "partition", parts)


def bars(columns: Sequence[str], values: Sequence[int]) -> str:
    """Draw a bar for each client: its number of samples."""
    cell, tall = 15, 150
    below = 16 + 6 * min(18, max(map(len, columns), default=1))
    width, height, top = 70 + cell * len(columns), tall + below + 20, max(values, default=0) or 1
    scale = AxisScale(0, top, tall + 8, 8)
    parts: list[str] = []
    for value in scale.ticks(4):
        at = scale(value)
        parts.append(f'<line class="grid" x1="56" x2="{width - 10}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="50" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    for i, (name, value) in enumerate(zip(columns, values, strict=True)):
        at, under = 58 + cell * i, tall + 20
        text = f"client {name}: {value:,} samples"
        parts.append(
            f'<rect x="{at}" y="{scale(value):.1f}" width="{cell - 4}" height="{tall + 8 - scale(value):.1f}">'
            f"<title>{shown(text)}</title></rect>"
            f'<text class="tick" x="{at + 9}" y="{under}" transform="rotate(-90 {at + 9} {under})" text-anchor="end">'
            f"{shown(name[:18])}</text>"
        )
    return _plain_chart("samples of each client", width, height, "partition", parts)


def _plain_chart(label: str, width: float, height: float, css: str, parts: Any) -> str:
    """An SVG of fixed size, for a frame that scrolls."""
    return (
        f'<svg class="{css}" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
        f' role="img" aria-label="{shown(label)}">{"".join(parts)}</svg>'
    )
