"""The pieces of the report as HTML text: page, sections, tables, folded lists.

There is no script and no outside request. The page has light, dark, narrow and print styles: on a narrow screen a row
of a table is a block, whose cells name their columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6575; --line: #dfe3ea; --back: #f6f7fa; --card: #ffffff; --band: #f3f5f9;
        --good: #13795b; --bad: #b3261e; --accent: #3457d5; --second: #c2660c; --third: #8a3ffc; --fourth: #007d79; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #9aa4b5; --line: #2d3442; --back: #12151c; --card: #191e28; --band: #1f2531;
          --good: #4cc38a; --bad: #ff8a80; --accent: #8ea6ff; --second: #f2a65a; --third: #be95ff; --fourth: #3ddbd9; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.55 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 28px; line-height: 1.25; margin: 0 0 4px; } h2 { font-size: 19px; margin: 0 0 12px; }
h3 { font-size: 15px; margin: 24px 0 8px; }
p { margin: 0 0 10px; } .soft { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); }
nav { margin: 14px 0 0; font-size: 14px; display: flex; flex-wrap: wrap; } nav a { color: var(--accent); text-decoration: none; margin-right: 16px; white-space: nowrap; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 20px 22px; margin-top: 20px;
          overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; margin: 0 0 12px; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 13px; vertical-align: bottom; }
th, td { padding: 5px 16px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; } tr:last-child td { border-bottom: 0; }
th.number, td.number { text-align: right; } td.number { white-space: nowrap; }
td small { display: block; color: var(--soft); font-size: 12px; white-space: nowrap; }
code, .code { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, monospace; overflow-wrap: anywhere; }
details { margin: 0 0 8px; } summary { cursor: pointer; } summary b { font-weight: 600; }
blockquote { margin: 6px 0 10px; padding: 6px 12px; border-left: 3px solid var(--line); background: var(--band); white-space: pre-wrap;
             overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, monospace; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; margin-top: 20px; }
.fact { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.fact b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; } .fact span { color: var(--soft); font-size: 13px; }
.box { background: var(--card); border: 1px solid var(--line); border-left-width: 5px; border-radius: 10px; padding: 14px 20px;
       margin-top: 20px; } .box.bad { border-color: var(--bad); color: inherit; } .box.good { border-color: var(--good); color: inherit; } .box p:first-child { font-size: 17px; font-weight: 600; }
.box p:last-child { margin: 0; }
.chips { display: flex; flex-wrap: wrap; gap: 6px; margin: 4px 0 12px; }
.chip { border: 1px solid var(--line); border-radius: 6px; padding: 1px 8px; font-size: 13px; background: var(--band); }
.chip.good { border-color: var(--good); } .chip.bad { border-color: var(--line); color: var(--soft); }
ul.tree { list-style: none; margin: 0; padding-left: 18px; border-left: 1px solid var(--line); }
ul.tree li { margin: 4px 0; } main > section > ul.tree { border-left: 0; padding-left: 0; }
.lead { margin-top: 16px; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); gap: 20px; } figure { margin: 0; }
figcaption { font-weight: 600; font-size: 14px; margin-bottom: 6px; }
svg { display: block; width: 100%; height: auto; margin: 4px 0 12px; } svg text { fill: var(--soft); font-size: 12px; }
svg text.strong { fill: var(--ink); }
@media screen and (max-width: 640px) {
  body { font-size: 14px; } main { display: flex; flex-direction: column; padding: 16px 12px 40px; } main > * { min-width: 0; }
  h1 { font-size: 22px; } section { padding: 14px 12px; margin-top: 12px; } .box { padding: 10px 14px; margin-top: 12px; }
  .lead { margin-top: 10px; } .lead p { margin-bottom: 6px; } .pictures { gap: 8px; } svg { margin-bottom: 4px; }
  #in-short { order: 1; } .facts { order: 2; } nav { order: 3; } main > section:not(#in-short) { order: 4; }
  .facts { grid-template-columns: 1fr 1fr; gap: 8px; margin-top: 12px; } .fact { padding: 8px 10px; } .fact b { font-size: 17px; }
  .pictures { grid-template-columns: minmax(0, 1fr); } svg.wide { min-width: 760px; }
  thead { display: none; } table, tbody { display: block; }
  tr { display: block; padding: 6px 0; border-bottom: 1px solid var(--line); } tr:last-child { border-bottom: 0; }
  td { display: flow-root; padding: 2px 0; border-bottom: 0; overflow-wrap: anywhere; } td.number { white-space: normal; }
  td::before { content: attr(data-label); float: left; max-width: 55%; margin-right: 14px; color: var(--soft); font-size: 13px;
               text-align: left; }
  td:first-child { font-weight: 600; text-align: left; } td:first-child::before { content: none; } td:empty { display: none; }
  td small { white-space: normal; } .chip { overflow-wrap: anywhere; } }
@media print {
  :root { color-scheme: light; --ink: #000; --soft: #444; --line: #ccc; --back: #fff; --card: #fff; --band: #f3f5f9; --good: #13795b;
          --bad: #b3261e; --accent: #3457d5; --second: #c2660c; --third: #8a3ffc; --fourth: #007d79; }
  body { font-size: 12px; } main { max-width: none; padding: 0; } nav { display: none; }
  section { border: 0; border-radius: 0; border-top: 1px solid #ccc; padding: 12px 0; overflow: visible; }
  h2, h3 { break-after: avoid; } tr, svg, blockquote { break-inside: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""  # noqa: E501


@dataclass(frozen=True)
class Section:
    """A framed part; the body is HTML, and one without a body is left out of the page."""

    title: str
    body: str

    @property
    def anchor(self) -> str:
        return self.title.lower().replace(" ", "-")


@dataclass(frozen=True)
class Html:
    """A table cell that is HTML already."""

    text: str


@dataclass(frozen=True)
class Figure:
    """A table cell that holds a number as text: it is aligned right."""

    text: str


Cell = str | int | float | Html | Figure


def page(title: str, subtitle: str, lead: str, facts: Iterable[tuple[str, str]], sections: Iterable[Section]) -> str:
    """The whole file. Titles and facts are texts; `lead`, HTML or empty, comes before everything else."""
    shown = [section for section in sections if section.body]
    tiles = "".join(
        f'<div class="fact"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in facts
    )
    links = "".join(f'<a href="#{section.anchor}">{escape(section.title)}</a>' for section in shown)
    parts = "\n".join(
        f'<section id="{part.anchor}"><h2>{escape(part.title)}</h2>{part.body}</section>' for part in shown
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main><h1>{escape(title)}</h1>"
        f'<p class="soft">{escape(subtitle)}</p>{lead}'
        f'<div class="facts">{tiles}</div><nav>{links}</nav>\n{parts}\n</main></body></html>\n'
    )


def heading(text: str) -> str:
    """The heading of a part of a section."""
    return f"<h3>{escape(text)}</h3>"


def paragraph(text: str, style: str = "") -> str:
    """A text of its own; style: soft, good, bad or none."""
    return f'<p class="{style}">{escape(text)}</p>' if style else f"<p>{escape(text)}</p>"


def boxed(body: str, style: str) -> str:
    """HTML in a frame that is seen first; style: good or bad."""
    return f'<div class="box {style}">{body}</div>'


def framed(body: str) -> str:
    """Text above the figures, at a distance from what is before it."""
    return f'<div class="lead">{body}</div>'


def side_by_side(pictures: Iterable[tuple[str, str]]) -> str:
    """Titled pictures in a row, one below the other on a narrow screen."""
    cells = (f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>" for title, drawn in pictures)
    return f'<div class="pictures">{"".join(cells)}</div>'


def folded(summary: str, body: str, is_open: bool = False) -> str:
    """A list to unfold; in print it is always shown."""
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{body}</details>"


def quote(text: str) -> str:
    """A text as someone or something wrote it."""
    return f"<blockquote>{escape(text)}</blockquote>"


def code(text: str) -> Html:
    """A digest or a name, as a cell."""
    return Html(f"<code>{escape(text)}</code>")


def with_note(text: str, note: str) -> Html:
    """A cell with a small second line."""
    return Html(f"{escape(text)}<small>{escape(note)}</small>" if note else escape(text))


def chips(entries: Iterable[tuple[str, str]]) -> str:
    """Short texts side by side, each with its style: good, bad or none."""
    shown = (f'<span class="chip {style}">{escape(text)}</span>' for text, style in entries)
    return f'<div class="chips">{"".join(shown)}</div>'


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Numbers are aligned right, texts left; a float is shown with four digits. Empty where there is no row."""
    lines = [[(_shown(cell), isinstance(cell, int | float | Figure)) for cell in row] for row in rows]
    if not lines:
        return ""
    numeric = [all(line[column][1] for line in lines) for column in range(len(columns))]
    # Names of phases may break at their underscores: seven of them share a page's width.
    names = [escape(name).replace("_", "_<wbr>") for name in columns]
    head = "".join(f"<th{_number(is_number)}>{name}</th>" for name, is_number in zip(names, numeric, strict=True))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td{_number(is_number)} data-label="{escape(name)}">{text}</td>'
            for name, (text, is_number) in zip(columns, line, strict=True)
        )
        + "</tr>"
        for line in lines
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _number(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _shown(cell: Cell) -> str:
    if isinstance(cell, Html):
        return cell.text
    if isinstance(cell, Figure):
        return escape(cell.text)
    if isinstance(cell, float):
        return f"{cell:,.4f}"
    return f"{cell:,}" if isinstance(cell, int) else escape(cell)
