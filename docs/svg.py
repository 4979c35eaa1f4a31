"""Lines, boxes and text that the pictures of docs/ are drawn with."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, LEFT, RIGHT = 980, 128, 16
INK, SOFT, LINE, BAND = "#1c2330", "#5b6575", "#dfe3ea", "#f3f5f9"
COLOURS = ("#3457d5", "#c2660c", "#13795b", "#8a3ffc", "#007d79", "#b3261e")


def box(x: float, y: float, width: float, fill: str, stroke: str, opacity: float = 1.0) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="26" rx="3" fill="{fill}" '
        f'fill-opacity="{opacity}" stroke="{stroke}"/>'
    )


def text(x: float, y: float, content: str, anchor: str = "start", colour: str = SOFT) -> str:
    return f'<text x="{x:.1f}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">{escape(content)}</text>'


def svg(height: float, label: str, parts: Sequence[str]) -> str:
    style = "<style>text{font:12px system-ui,sans-serif}</style>"
    body = "\n".join([style, f'<rect width="{WIDTH}" height="{height:g}" fill="#fff"/>', *parts])
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img"'
    return f'{opening} aria-label="{escape(label)}">\n{body}\n</svg>\n'
