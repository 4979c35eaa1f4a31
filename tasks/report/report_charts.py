"""Charts of the report as inline SVG: curves, heat strips, intervals, bars, in the page's colours (light and dark)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 980, 64, 16, 26, 30
CURVE_HEIGHT = 280
SMALL_WIDTH, SMALL_HEIGHT = 400, 190
"""Of pictures that stand beside each other."""
MAX_TICKS = 5
ROW_HEIGHT = 22
MAX_STRIP_CELLS = 160
CHARACTER_WIDTH = 6.6
"""Approximate width in pixels of a character of 12 px text: decides whether a label fits."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One curve; its points are drawn as given, and those that are not finite left out."""

    name: str
    points: Sequence[Point]
    colour: str = "accent"
    """A colour of the page's style: accent, second, third, fourth, soft, good, bad."""
    width: float = 2
    opacity: float = 1.0


@dataclass(frozen=True)
class Span:
    """A named part of the horizontal axis."""

    name: str
    start: float
    stop: float


def curves(
    x_label: str,
    y_label: str,
    lines: Sequence[Line],
    spans: Sequence[Span] = (),
    width: int = WIDTH,
    height: int = CURVE_HEIGHT,
) -> str:
    """Lines over one pair of axes; every other span is shaded. Raises ValueError where a line has no finite point."""
    finite = [[(x, y) for x, y in line.points if math.isfinite(y)] for line in lines]
    for line, points in zip(lines, finite, strict=True):
        if not points:
            raise ValueError(f"curve {line.name} has no finite point: training logged none, lower log_interval_steps")
    xs = [x for points in finite for x, _ in points] + [end for span in spans for end in (span.start, span.stop)]
    ys = [y for points in finite for _, y in points]
    step = _tick(max(ys) - min(ys))
    low, high = math.floor(min(ys) / step) * step, math.ceil(max(ys) / step) * step
    axis = _Axis(min(xs), max(xs), low, high, height, width)
    parts = [_shade(axis, spans, height - TOP - BOTTOM), _grid(axis, step)]
    for line, points in zip(lines, finite, strict=True):
        path = " ".join(f"{x},{y}" for x, y in (axis.point(*point) for point in points))
        parts.append(
            f'<polyline fill="none" stroke="var(--{line.colour})" stroke-width="{line.width}" '
            f'stroke-opacity="{line.opacity}" '
            f'stroke-linejoin="round" points="{path}"><title>{escape(line.name)}</title></polyline>'
        )
    named = list({(line.name, line.colour): line for line in lines})
    legend = " ".join(f'<tspan fill="var(--{colour})">■ {escape(name)}</tspan>' for name, colour in named)
    parts += [_x_ends(axis, x_label, height), _text(width / 2, height - 8, f"{legend} ({escape(y_label)})", "middle")]
    return _svg(height, y_label, parts, width)


def strips(
    x_label: str,
    title: str,
    rows: Sequence[tuple[str, Sequence[Point]]],
    low: float,
    high: float,
    spans: Sequence[Span],
) -> str:
    """One strip per row, the darker the nearer its value is to `high`; many points share a cell, which shows their
    mean."""
    start, stop = min(span.start for span in spans), max(span.stop for span in spans)
    height = TOP + ROW_HEIGHT * len(rows) + BOTTOM
    axis = _Axis(start, stop, 0.0, 1.0, height)
    parts = [_shade(axis, spans, ROW_HEIGHT * len(rows))]
    for number, (name, points) in enumerate(rows):
        top = TOP + number * ROW_HEIGHT
        parts.append(_text(LEFT - 8, top + 15, escape(name), "end"))
        for x0, x1, mean in _cells(points, start, stop):
            opacity = min(1.0, max(0.0, (mean - low) / (high - low)))
            left, right = axis.point(x0, 0)[0], axis.point(x1, 0)[0]
            parts.append(
                f'<rect x="{left}" y="{top + 1}" width="{round(right - left + 0.3, 1)}" height="{ROW_HEIGHT - 2}" '
                f'fill="var(--accent)" '
                f'fill-opacity="{opacity:.2f}"><title>{escape(name)}: {mean:.2f}</title></rect>'
            )
    parts += [_x_ends(axis, x_label, height), _text(WIDTH / 2, height - 8, escape(title), "middle")]
    return _svg(height, title, parts)


def intervals(title: str, rows: Sequence[tuple[str, float, tuple[float, float] | None]]) -> str:
    """One row per name: a dot, its interval as a line, and both in figures at the right."""
    ends = [end for _, value, interval in rows for end in (interval or (value, value))]
    label_width, figure_width = max(len(name) for name, _, _ in rows) * CHARACTER_WIDTH + 12, 170
    low, high = min(ends), max(ends)
    scale = (WIDTH - label_width - figure_width) / ((high - low) or 1.0)

    def x_of(value: float) -> float:
        return (
            round(label_width + (value - low) * scale, 1)
            if high > low
            else round((WIDTH + label_width - figure_width) / 2, 1)
        )

    parts = []
    for number, (name, value, interval) in enumerate(rows):
        y = number * ROW_HEIGHT + ROW_HEIGHT / 2 + 22
        parts.append(_text(0, y + 4, escape(name)))
        figures = f"{value:.4f}"
        if interval is not None:
            figures += f"  [{interval[0]:.4f}, {interval[1]:.4f}]"
            x0, x1 = x_of(interval[0]), x_of(interval[1])
            parts.append(
                f'<line x1="{x0}" x2="{x1}" y1="{y}" y2="{y}" stroke="var(--accent)" stroke-width="2" '
                f'stroke-opacity="0.5"/>'
            )
        parts.append(
            f'<circle cx="{x_of(value)}" cy="{y}" r="4.5" fill="var(--accent)"><title>{escape(name)}: '
            f"{figures}</title></circle>"
        )
        parts.append(_text(WIDTH, y + 4, figures, "end"))
    parts.append(f'<text class="strong" x="0" y="13">{escape(title)}</text>')
    return _svg(len(rows) * ROW_HEIGHT + 24, title, parts)


def bars(title: str, rows: Sequence[tuple[str, float, str]], width: int = WIDTH) -> str:
    """Horizontal bars: name, length, and the text after the bar."""
    return timeline(title, [(name, 0.0, length, figure) for name, length, figure in rows], width)


def timeline(title: str, rows: Sequence[tuple[str, float, float, str]], width: int = WIDTH) -> str:
    """Horizontal bars on one axis: name, beginning, end, and the text after the bar."""
    label_width = max(len(name) for name, *_ in rows) * CHARACTER_WIDTH + 12
    first = min(begin for _, begin, _, _ in rows)
    scale = (width - label_width - 90) / ((max(end for _, _, end, _ in rows) - first) or 1.0)
    parts = []
    for number, (name, begin, end, figure) in enumerate(rows):
        y, extent = number * ROW_HEIGHT, round(max((end - begin) * scale, 1.0), 1)
        x = round(label_width + (begin - first) * scale, 1)
        parts.append(_text(label_width - 8, y + 15, escape(name), "end"))
        parts.append(
            f'<rect x="{x}" y="{y + 4}" width="{extent}" height="{ROW_HEIGHT - 8}" rx="2" fill="var(--accent)"/>'
        )
        parts.append(_text(x + extent + 6, y + 15, escape(figure)))
    return _svg(len(rows) * ROW_HEIGHT + 4, title, parts, width)


@dataclass(frozen=True)
class _Axis:
    left: float
    right: float
    low: float
    high: float
    height: int
    width: int = WIDTH

    def point(self, x: float, y: float) -> Point:
        across = (x - self.left) / (self.right - self.left) if self.right > self.left else 0.5
        up = (y - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(LEFT + across * (self.width - LEFT - RIGHT), 1), round(
            TOP + (1 - up) * (self.height - TOP - BOTTOM), 1
        )


def _shade(axis: _Axis, spans: Sequence[Span], height: float) -> str:
    parts = []
    for number, span in enumerate(spans):
        x0, x1 = axis.point(span.start, axis.low)[0], axis.point(span.stop, axis.low)[0]
        if number % 2:
            parts.append(f'<rect x="{x0}" y="{TOP}" width="{round(x1 - x0, 1)}" height="{height}" fill="var(--band)"/>')
        if len(span.name) * CHARACTER_WIDTH < x1 - x0:
            parts.append(_text((x0 + x1) / 2, TOP - 8, escape(span.name), "middle"))
        hover = f'<rect x="{x0}" y="0" width="{round(x1 - x0, 1)}" height="{TOP}" fill="transparent">'
        parts.append(f"{hover}<title>{escape(span.name)}</title></rect>")
    return "".join(parts)


def _tick(extent: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that gives at most MAX_TICKS steps."""
    power = 10.0 ** math.floor(math.log10(extent / MAX_TICKS)) if extent > 0 else 1.0
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * MAX_TICKS >= extent)


def _grid(axis: _Axis, step: float) -> str:
    parts = []
    for number in range(round((axis.high - axis.low) / step) + 1):
        value = axis.low + number * step
        _, y = axis.point(axis.left, value)
        parts.append(f'<line x1="{LEFT}" x2="{axis.width - RIGHT}" y1="{y}" y2="{y}" stroke="var(--line)"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{value:,.6g}", "end"))
    return "".join(parts)


def _x_ends(axis: _Axis, x_label: str, height: int) -> str:
    right = _text(axis.width - RIGHT, height - 8, f"{axis.right:,.0f} {escape(x_label)}", "end")
    return _text(LEFT, height - 8, f"{axis.left:,.0f}") + right


def _cells(points: Sequence[Point], start: float, stop: float) -> list[tuple[float, float, float]]:
    """(from, to, mean) of each cell that holds a point; a point covers the tokens from the point before it up to it."""
    cells: list[tuple[float, float, float]] = []
    width = (stop - start) / MAX_STRIP_CELLS
    before, values, begin = points[0][0] - width if len(points) > 1 else start, [], None
    for x, value in points:
        begin = before if begin is None else begin
        values.append(value)
        if x - begin >= width or x == points[-1][0]:
            cells.append((max(begin, start), x, sum(values) / len(values)))
            values, begin = [], None
        before = x
    return cells


def _text(x: float, y: float, content: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{content}</text>'


def _svg(height: float, label: str, parts: Sequence[str], width: int = WIDTH) -> str:
    wide = ' class="wide"' if width == WIDTH else ""
    return f'<svg{wide} viewBox="0 0 {width} {height:g}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
