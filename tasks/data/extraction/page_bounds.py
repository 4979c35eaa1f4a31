"""Estimates the cost of a page from its markup and its tree. Runs in executors: imports no Spark.

`is_bounded` refuses pages that no parser reads in linear time. `is_costly` names pages that only resiliparse reads in
linear time, so that trafilatura is not run on them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lxml.html import HtmlElement

MAX_TAGS = 200_000
"""50,000 links or rows cost 2 s and the cost is linear; a page with more tags than this is a dump of a table."""
MAX_DEPTH = 500
MAX_SHALLOW_TAGS = 3_000
"""The parsers take time in proportion to depth x tags: 5,000 nested divisions 0.5 s, 100,000 more than 100 s. Below
this many tags no depth is a problem, nor is trafilatura's work per tag and pair of tags."""
LONG_TAG_CHARS = 20_000
MAX_TAG_ATTRIBUTES = 2_000
"""50,000 attributes in one tag cost 13 s, and the cost is quadratic."""
MAX_PARAGRAPH_PAIRS = 10_000_000
"""trafilatura's cost is quadratic in the tags of one paragraph: 4,000 cost 1 s."""
MAX_CELLS = 500_000
"""trafilatura pads tables: 45,000 rows of one cell below one row of 100 become 4.5 million cells, 29 s and 13 MB of
bars."""
MAX_ROW_CELLS = 5_000
"""trafilatura counts a row's cells again for each: 16,000 take 0.7 s, 64,000 take 12 s."""
MAX_COPIED_CHARS = 500_000_000
"""resiliparse copies a text once per element around it: 1,000 divisions around 500 KB cost 2 s, 2,900 more than 10
s."""
_LARGEST_SPAN = 100
"""trafilatura's own bound on colspan and rowspan."""

_NESTING = re.compile(
    r"<(/?)(?!(?:p|li|td|th|tr|dt|dd|option|br|img|hr|input|meta|link|area|col|wbr|source"
    r"|path|circle|rect|line|use|polygon|polyline|ellipse|stop)\b)[a-z]",
    re.IGNORECASE,
)
"""Tags that open an element around others: not those that need no end, nor the shapes of a drawing."""
_LONG_TAG = re.compile(rf"<[^<>]{{{LONG_TAG_CHARS},}}")


def is_bounded(markup: str) -> bool:
    """Whether parsers take linear time and memory."""
    num_tags = markup.count("<")
    if num_tags > MAX_TAGS:
        return False
    half = LONG_TAG_CHARS // 2  # a tag of that length leaves a whole window of half of it without `<`
    if any(markup.find("<", at, at + half) < 0 for at in range(0, len(markup) - half, half)) and any(
        tag[0].count("=") > MAX_TAG_ATTRIBUTES for tag in _LONG_TAG.finditer(markup)
    ):
        return False
    if num_tags <= MAX_SHALLOW_TAGS and num_tags * len(markup) <= MAX_COPIED_CHARS:
        return True
    depth, num_copied = _nesting(markup)
    return num_copied <= MAX_COPIED_CHARS and (num_tags <= MAX_SHALLOW_TAGS or depth <= MAX_DEPTH)


def is_costly(markup: str, tree: HtmlElement) -> bool:
    """Whether trafilatura would take more than linear time or memory for a page that is bounded."""
    if markup.count("<") <= MAX_SHALLOW_TAGS:
        return False
    num_pairs = sum(sum(1 for _ in paragraph.iterdescendants()) ** 2 for paragraph in tree.iter("p"))
    if num_pairs > MAX_PARAGRAPH_PAIRS or any(len(row) > MAX_ROW_CELLS for row in tree.iter("tr")):
        return True
    return sum(map(_num_cells, tree.iter("table"))) > MAX_CELLS


def _nesting(markup: str) -> tuple[int, int]:
    """The largest depth of nested tags, and the sum of the depths of all characters, if every tag is closed."""
    depth = deepest = num_copied = last = 0
    for tag in _NESTING.finditer(markup):
        num_copied += depth * (tag.start() - last)
        last = tag.start()
        depth = max(depth + (-1 if tag[1] else 1), 0)
        deepest = max(deepest, depth)
    return deepest, num_copied + depth * (len(markup) - last)


def _num_cells(table: HtmlElement) -> int:
    """Cells of a padded table: every row as wide as the widest, and a cell repeated as often as it spans."""
    widths = [sum(min(_span(cell), _LARGEST_SPAN) for cell in row) for row in table.iter("tr")]
    return max(sum(widths), len(widths) * min(max(widths, default=0), _LARGEST_SPAN))


def _span(cell: HtmlElement) -> int:
    spans = [value for name in ("colspan", "rowspan") if (value := cell.get(name, "1")).isdecimal()]
    return max([int(value.lstrip("0")[:4] or 0) for value in spans], default=1)
