"""Pictures for HTML pages, as SVG text: no library, nothing to load."""

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

COLORS: Final = (
    *("#3b6fd8", "#e07b28", "#2e9e5b", "#c43c55"),
    *("#7f5bd1", "#0f9aa8", "#b08a1e", "#8a8f98"),
)
_WIDTH, _HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 36
_MAX_POINTS: Final = 600


class Curve(NamedTuple):
    """One line of a chart."""

    label: str
    points: Sequence[tuple[float, float]]
    color: str
    kind: str = "line"
    """"line", "dots" for a line with a dot at every point, or "faint"."""


def line_chart(title: str, curves: Iterable[Curve], xlabel: str) -> str:
    """A chart with axes, a legend and the values under the pointer."""
    shown = []
    for curve in curves:
        points = [p for p in curve.points if all(map(math.isfinite, p))]
        if points:
            shown.append(curve._replace(points=_thinned(points)))
    if not shown:
        return ""
    xs = [x for curve in shown for x, _ in curve.points]
    ys = [y for curve in shown for _, y in curve.points]
    logarithmic = min(ys) > 0 and max(ys) > 100 * min(ys)
    x_scale = _Scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    y_scale = _Scale(
        min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP, logarithmic=logarithmic, pad=0.06
    )
    parts = [_axes(x_scale, y_scale, xlabel)]
    for curve in shown:
        places = [(x_scale(x), y_scale(y)) for x, y in curve.points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        opacity = ' opacity="0.3" stroke-width="1"' if curve.kind == "faint" else ""
        if len(places) > 1:
            parts.append(f'<polyline points="{line}" stroke="{curve.color}"{opacity}/>')
        if curve.kind == "dots" and len(places) <= 60 or len(places) == 1:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{curve.color}"/>'
                for x, y in places
            ]
    legend = "".join(
        f'<span><i style="background:{curve.color};'
        f'{"opacity:.35" if curve.kind == "faint" else ""}"></i>'
        f"{html.escape(curve.label)}</span>"
        for curve in shown
    )
    data = html.escape(
        _json([[c.label, [[x, y] for x, y in c.points]] for c in shown]), quote=True
    )
    scale = html.escape(_json([x_scale.low, x_scale.high, _LEFT, _WIDTH - _RIGHT]))
    name = html.escape(title)
    return (
        f'<figure class="chart" data-curves="{data}" data-x="{scale}">'
        f"<figcaption>{name}{' (logarithmic)' if logarithmic else ''}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}">'
        f"{''.join(parts)}"
        f'<line class="cursor" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" x1="-9" x2="-9"/>'
        f'</svg><div class="legend">{legend}</div><div class="tip"></div></figure>'
    )


def share_bar(shares: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """One bar cut into shares of a whole, the largest first."""
    total = sum(shares.values()) or 1.0
    ordered = sorted(shares, key=lambda name: -shares[name])
    colors = dict(zip(shares, COLORS, strict=False))
    bar = "".join(
        f'<span style="width:{100 * shares[name] / total:.2f}%;'
        f'background:{colors[name]}" title="{html.escape(labels[name])}"></span>'
        for name in ordered
        if shares[name] > 0
    )
    legend = "".join(
        f'<span><i style="background:{colors[name]}"></i>{html.escape(labels[name])}'
        f" <b>{shares[name] / total:.1%}</b></span>"
        for name in ordered
        if shares[name] / total >= 0.0005
    )
    return f'<div class="bar">{bar}</div><div class="legend">{legend}</div>'


def split_box(splits: Sequence[int], copies: int, width: int, height: int) -> str:
    """An array as a box, cut as it is over devices; hatched where all have it whole."""
    rows, columns = ([*splits, 1, 1] if len(splits) < 2 else splits)[:2]
    if len(splits) == 1:
        rows, columns = 1, splits[0]
    rows, columns = max(rows, 1), max(columns, 1)
    whole = rows * columns == 1
    rows, columns = min(rows, 16), min(columns, 16)
    cells = []
    for row in range(rows):
        for column in range(columns):
            color = "var(--whole)" if whole else COLORS[(row * columns + column) % 7]
            cells.append(
                f'<rect x="{column * width / columns:.1f}"'
                f' y="{row * height / rows:.1f}" width="{width / columns:.1f}"'
                f' height="{height / rows:.1f}" fill="{color}"/>'
            )
    what = f"{copies} whole copies" if whole and copies > 1 else "cut by device"
    return (
        f'<svg class="box" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" role="img" aria-label="{what}">{"".join(cells)}</svg>'
    )


class _Scale:
    """From values to places on the page."""

    def __init__(
        self,
        low: float,
        high: float,
        start: float,
        stop: float,
        *,
        logarithmic: bool = False,
        pad: float = 0.0,
    ):
        self.logarithmic = logarithmic
        if logarithmic:
            low, high = math.log10(low), math.log10(high)
        if low == high:
            margin = abs(low) * 0.1 or 1.0
            low, high = low - margin, high + margin
        margin = pad * (high - low)
        self.low, self.high = low - margin, high + margin
        self.start, self.stop = start, stop

    def __call__(self, value: float) -> float:
        value = math.log10(value) if self.logarithmic else value
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        if self.logarithmic:
            powers = range(math.ceil(self.low), math.floor(self.high) + 1)
            if len(powers) >= 2:
                step = -(-len(powers) // (count + 1))
                return [10.0**p for p in powers[::step] if 10.0**p > 0]
            found = [
                digit * 10.0**p
                for p in range(math.floor(self.low), math.ceil(self.high) + 1)
                for digit in (1, 2, 5)
            ]
            return [v for v in found if self.low <= math.log10(v) <= self.high]
        raw = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def _axes(x_scale: _Scale, y_scale: _Scale, xlabel: str) -> str:
    parts = []
    for value in y_scale.ticks():
        y = y_scale(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}"'
            f' y2="{y:.1f}"/><text x="{_LEFT - 6}" y="{y + 3.5:.1f}"'
            f' text-anchor="end">{number(value)}</text>'
        )
    for value in x_scale.ticks(7):
        parts.append(
            f'<text x="{x_scale(value):.1f}" y="{_HEIGHT - _BOTTOM + 15}"'
            f' text-anchor="middle">{number(value)}</text>'
        )
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 4}"'
        f' text-anchor="middle">{html.escape(xlabel)}</text>'
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}"'
        f' y1="{_HEIGHT - _BOTTOM}" y2="{_HEIGHT - _BOTTOM}"/>'
    )
    return "".join(parts)


def number(value: float) -> str:
    """Short: 0.001, 12, 3.4k, 5M, 1e-07."""
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * factor or factor > 1e3 and abs(value) >= factor:
            return f"{value / factor:.4g}{suffix}"
    return f"{round(value, 12):.4g}"


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of neighbours, where there are more points than the page has pixels."""
    size = -(-len(points) // _MAX_POINTS)
    if size == 1:
        return points
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [
        (sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups
    ]


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
