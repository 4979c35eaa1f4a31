"""The pieces of the report as HTML text: page, sections, tables, a loss curve as inline SVG. No script, no outside request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

CURVE_WIDTH, CURVE_HEIGHT = 860, 260
CURVE_LEFT, CURVE_RIGHT, CURVE_TOP, CURVE_BOTTOM = 56, 12, 14, 34
NUM_GRID_LINES = 4

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6575; --line: #dfe3ea; --back: #fbfcfe; --card: #ffffff;
        --good: #13795b; --bad: #b3261e; --accent: #3457d5; --second: #c2660c; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #9aa4b5; --line: #2d3442; --back: #12151c; --card: #191e28;
          --good: #4cc38a; --bad: #ff8a80; --accent: #8ea6ff; --second: #f2a65a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.55 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 28px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 0 0 14px; }
p { margin: 0 0 10px; } .soft { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
          padding: 20px 22px; margin-top: 20px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
table + p { margin-top: 12px; } table + table { margin-top: 24px; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 13px; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } th.number, td.number { text-align: right; }
code { font: 13px ui-monospace, SFMono-Regular, Menlo, monospace; overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 14px; margin-top: 22px; }
.fact { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.fact b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; } .fact span { color: var(--soft); font-size: 13px; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
"""


def page(title: str, subtitle: str, facts: Iterable[tuple[str, str]], sections: Iterable[str]) -> str:
    """The whole file. Titles and facts are texts, sections are HTML."""
    tiles = "".join(f'<div class="fact"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in facts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main><h1>{escape(title)}</h1>"
        f'<p class="soft">{escape(subtitle)}</p><div class="facts">{tiles}</div>\n' + "\n".join(sections) + "\n</main></body></html>\n"
    )


def section(title: str, *body: str) -> str:
    """A framed part; the body is HTML."""
    return f"<section><h2>{escape(title)}</h2>{''.join(body)}</section>"


def paragraph(text: str, style: str = "") -> str:
    """A text of its own; style: soft, good, bad or none."""
    return f'<p class="{style}">{escape(text)}</p>' if style else f"<p>{escape(text)}</p>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str | int | float]]) -> str:
    """Numbers stand right, texts left; a float is shown with four digits."""
    lines = [[(_shown(cell), isinstance(cell, int | float)) for cell in row] for row in rows]
    numeric = [bool(lines) and all(line[column][1] for line in lines) for column in range(len(columns))]
    head = "".join(f"<th{_number(is_number)}>{escape(name)}</th>" for name, is_number in zip(columns, numeric, strict=True))
    body = "".join("<tr>" + "".join(f"<td{_number(is_number)}>{text}</td>" for text, is_number in line) + "</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _number(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _shown(cell: str | int | float) -> str:
    if isinstance(cell, float):
        return f"{cell:,.4f}"
    return f"{cell:,}" if isinstance(cell, int) else escape(cell)


def curves(x_label: str, y_label: str, series: dict[str, list[tuple[float, float]]]) -> str:
    """Lines over a shared axis as SVG, coloured in the order given: at most two. Raises ValueError where a line has no finite point."""
    colours = ("var(--accent)", "var(--second)")
    assert 1 <= len(series) <= len(colours), sorted(series)
    finite = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in series.items()}
    for name, points in finite.items():
        if not points:
            raise ValueError(f"curve {name} has no finite point: training logged none, lower log_interval_steps")
    xs = [x for points in finite.values() for x, _ in points]
    ys = [y for points in finite.values() for _, y in points]
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    width, height = CURVE_WIDTH - CURVE_LEFT - CURVE_RIGHT, CURVE_HEIGHT - CURVE_TOP - CURVE_BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left) if right > left else 0.5
        up = (y - low) / (high - low) if high > low else 0.5
        return round(CURVE_LEFT + across * width, 1), round(CURVE_TOP + (1 - up) * height, 1)

    parts = []
    for number in range(NUM_GRID_LINES + 1):
        value = low + (high - low) * number / NUM_GRID_LINES
        _, y = place(left, value)
        parts.append(f'<line x1="{CURVE_LEFT}" x2="{CURVE_WIDTH - CURVE_RIGHT}" y1="{y}" y2="{y}" stroke="var(--line)"/>')
        parts.append(f'<text x="{CURVE_LEFT - 8}" y="{y + 4}" text-anchor="end">{value:.2f}</text>')
    for colour, (name, points) in zip(colours, finite.items(), strict=False):
        path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"><title>{escape(name)}</title></polyline>')
    base = CURVE_HEIGHT - 10
    parts.append(f'<text x="{CURVE_LEFT}" y="{base}">{left:,.0f}</text>')
    parts.append(f'<text x="{CURVE_WIDTH - CURVE_RIGHT}" y="{base}" text-anchor="end">{right:,.0f} {escape(x_label)}</text>')
    legend = " ".join(
        f'<tspan fill="{colour}">■ {escape(name)}</tspan>' for colour, name in zip(colours, finite, strict=False)
    )  # fmt: skip
    parts.append(f'<text x="{CURVE_LEFT + width / 2:.0f}" y="{base}" text-anchor="middle">{legend} ({escape(y_label)})</text>')
    return f'<svg viewBox="0 0 {CURVE_WIDTH} {CURVE_HEIGHT}" role="img" aria-label="{escape(y_label)}">{"".join(parts)}</svg>'
