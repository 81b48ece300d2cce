"""Small plots as inline SVG: lines or dots, linear axes with round ticks, a legend."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import msgspec

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 34, 46
_LEGEND = 130
"""Beside the plot, where there is more than one series."""
_COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
MOST_POINTS = 600


class Series(msgspec.Struct, frozen=True):
    """Points to draw: a line, or dots."""

    name: str
    points: list[tuple[float, float]]
    dots: bool = False


def plot(title: str, x: str, y: str, series: Sequence[Series]) -> str:
    """An `<svg>` element. More than `MOST_POINTS` points of a series are thinned evenly."""
    drawn = [Series(each.name, _thin(each.points), each.dots) for each in series if each.points]
    if not drawn:
        return ""
    points = [point for each in drawn for point in each.points]
    right = WIDTH - _RIGHT - (_LEGEND if len(drawn) > 1 else 0)
    x_axis = _Axis(min(0.0, *(p[0] for p in points)), max(p[0] for p in points), _LEFT, right)
    y_axis = _Axis(
        min(0.0, *(p[1] for p in points)), max(p[1] for p in points), HEIGHT - _BOTTOM, _TOP
    )
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">',
        _text(_LEFT, 16, title, 'class="title"'),
        _text((_LEFT + right) / 2, HEIGHT - 8, x, 'text-anchor="middle"'),
        _text(14, HEIGHT / 2, y, f'text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})"'),
    ]
    for tick in x_axis.ticks():
        at = x_axis.place(tick)
        parts.append(_line(at, _TOP, at, HEIGHT - _BOTTOM))
        parts.append(_text(at, HEIGHT - _BOTTOM + 15, f"{tick:g}", 'text-anchor="middle"'))
    for tick in y_axis.ticks():
        at = y_axis.place(tick)
        parts.append(_line(_LEFT, at, right, at))
        parts.append(_text(_LEFT - 6, at + 4, f"{tick:g}", 'text-anchor="end"'))
    for place, each in enumerate(drawn):
        parts.append(_draw(each, _COLORS[place % len(_COLORS)], x_axis, y_axis))
    if len(drawn) > 1:
        parts += _legend(drawn)
    return "\n".join([*parts, "</svg>"])


class _Axis:
    """Values from `low` to `high` on pixels from `start` to `end`."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low = low
        self._span = (high - low) or 1.0
        self._start, self._end = start, end

    def place(self, value: float) -> float:
        share = (value - self._low) / self._span
        return round(self._start + share * (self._end - self._start), 1)

    def ticks(self) -> list[float]:
        """About five round values."""
        rough = self._span / 5
        scale = 10.0 ** math.floor(math.log10(rough))
        step = next(s * scale for s in (1, 2, 5, 10) if s * scale >= rough * 0.999)
        first = math.ceil(self._low / step)
        last = math.floor((self._low + self._span) / step + 1e-9)
        return [round(n * step, 12) for n in range(first, last + 1)]


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= MOST_POINTS:
        return points
    step = (len(points) - 1) / (MOST_POINTS - 1)
    return [points[round(place * step)] for place in range(MOST_POINTS)]


def _draw(series: Series, color: str, x_axis: _Axis, y_axis: _Axis) -> str:
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in series.points]
    circles = "".join(f'<circle cx="{x}" cy="{y}" r="2.2"/>' for x, y in places)
    if series.dots:
        return f'<g fill="{color}" fill-opacity="0.55">{circles}</g>'
    path = " ".join(f"{x},{y}" for x, y in places)
    line = f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>'
    return line + (f'<g fill="{color}">{circles}</g>' if len(places) <= 30 else "")


def _legend(series: Sequence[Series]) -> list[str]:
    parts = []
    for place, each in enumerate(series):
        y = _TOP + 12 + 15 * place
        color = _COLORS[place % len(_COLORS)]
        parts.append(
            f'<rect x="{WIDTH - _LEGEND}" y="{y - 8}" width="10" height="10" fill="{color}"/>'
        )
        parts.append(_text(WIDTH - _LEGEND + 15, y + 1, each.name[:22]))
    return parts


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x}" y="{y}" {attributes}>{html.escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="grid"/>'
