"""Small plots as inline SVG: lines or dots, linear axes with round ticks, and a legend."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import msgspec

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 34, 46
_LEGEND_WIDTH = 130
"""Width of the legend beside the plot, which is drawn for more than one series."""
_COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
MAX_POINTS = 600


class PlotSeries(msgspec.Struct, frozen=True):
    """Points of a series, drawn as a line or as dots."""

    name: str
    points: list[tuple[float, float]]
    dots: bool = False


def render_plot(title: str, x_label: str, y_label: str, series: Sequence[PlotSeries]) -> str:
    """Return an `<svg>` element. A series with more than `MAX_POINTS` points is thinned evenly."""
    drawn = [
        PlotSeries(item.name, _thin_points(item.points), item.dots)
        for item in series
        if item.points
    ]
    if not drawn:
        return ""
    points = [point for item in drawn for point in item.points]
    right = WIDTH - _RIGHT - (_LEGEND_WIDTH if len(drawn) > 1 else 0)
    x_axis = _Axis(min(0.0, *(p[0] for p in points)), max(p[0] for p in points), _LEFT, right)
    y_axis = _Axis(
        min(0.0, *(p[1] for p in points)), max(p[1] for p in points), HEIGHT - _BOTTOM, _TOP
    )
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">',
        _render_text(_LEFT, 16, title, 'class="title"'),
        _render_text((_LEFT + right) / 2, HEIGHT - 8, x_label, 'text-anchor="middle"'),
        _render_text(
            14, HEIGHT / 2, y_label, f'text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})"'
        ),
    ]
    for tick in x_axis.ticks():
        x = x_axis.to_pixel(tick)
        parts.append(_render_line(x, _TOP, x, HEIGHT - _BOTTOM))
        parts.append(_render_text(x, HEIGHT - _BOTTOM + 15, f"{tick:g}", 'text-anchor="middle"'))
    for tick in y_axis.ticks():
        y = y_axis.to_pixel(tick)
        parts.append(_render_line(_LEFT, y, right, y))
        parts.append(_render_text(_LEFT - 6, y + 4, f"{tick:g}", 'text-anchor="end"'))
    for index, item in enumerate(drawn):
        parts.append(_render_series(item, _COLORS[index % len(_COLORS)], x_axis, y_axis))
    if len(drawn) > 1:
        parts += _render_legend(drawn)
    return "\n".join([*parts, "</svg>"])


class _Axis:
    """Linear axis that maps values from `low` to `high` to pixels from `start` to `end`."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low = low
        self._span = (high - low) or 1.0
        self._start, self._end = start, end

    def to_pixel(self, value: float) -> float:
        share = (value - self._low) / self._span
        return round(self._start + share * (self._end - self._start), 1)

    def ticks(self) -> list[float]:
        """Return about five round values."""
        min_step = self._span / 5
        scale = 10.0 ** math.floor(math.log10(min_step))
        step = next(s * scale for s in (1, 2, 5, 10) if s * scale >= min_step * 0.999)
        first = math.ceil(self._low / step)
        last = math.floor((self._low + self._span) / step + 1e-9)
        return [round(n * step, 12) for n in range(first, last + 1)]


def _thin_points(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= MAX_POINTS:
        return points
    step = (len(points) - 1) / (MAX_POINTS - 1)
    return [points[round(index * step)] for index in range(MAX_POINTS)]


def _render_series(series: PlotSeries, color: str, x_axis: _Axis, y_axis: _Axis) -> str:
    pixels = [(x_axis.to_pixel(x), y_axis.to_pixel(y)) for x, y in series.points]
    circles = "".join(f'<circle cx="{x}" cy="{y}" r="2.2"/>' for x, y in pixels)
    if series.dots:
        return f'<g fill="{color}" fill-opacity="0.55">{circles}</g>'
    path = " ".join(f"{x},{y}" for x, y in pixels)
    line = f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>'
    return line + (f'<g fill="{color}">{circles}</g>' if len(pixels) <= 30 else "")


def _render_legend(series: Sequence[PlotSeries]) -> list[str]:
    parts = []
    for index, item in enumerate(series):
        y = _TOP + 12 + 15 * index
        color = _COLORS[index % len(_COLORS)]
        parts.append(
            f'<rect x="{WIDTH - _LEGEND_WIDTH}" y="{y - 8}" width="10" height="10" fill="{color}"/>'
        )
        parts.append(_render_text(WIDTH - _LEGEND_WIDTH + 15, y + 1, item.name[:22]))
    return parts


def _render_text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x}" y="{y}" {attributes}>{html.escape(text)}</text>'


def _render_line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="grid"/>'
