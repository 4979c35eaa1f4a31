"""Removes from a page what its text does not contain, and frames a page that has no frame. Runs in executors: imports
no Spark.

trafilatura takes for text: the sign of a link to a heading (`walk¶`), the numbers beside the lines of a program, the
word `[edit]` after a heading of a wiki, a template of a script, and elements with the attribute `hidden`. Of a page
whose body holds its paragraphs directly, it takes the paragraphs without their headings and lists.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lxml.etree import XPath
    from lxml.html import HtmlElement

_HEADING_LINKS = frozenset("¶#§∞⚓🔗")
"""Texts of links from a heading to itself: Sphinx, MkDocs, Docusaurus, rustdoc."""
_LINE_NUMBERS = re.compile(r"[\d\s\u2e4d-\u2e4f]+")
"""Only digits and white space, which in code are letters (kept_content.py)."""
_NUMBERED = ("lineno", "linenum", "line-num", "gutter", "lnt", "crayon-num")
_NUMBERS = " or ".join(f"contains(@class, '{name}')" for name in _NUMBERED)
_MAX_HIDDEN_SHARE = 0.5
"""Largest share of a page's text in hidden elements: above it a script shows the page."""
_BLOCKS = frozenset({"p", "ul", "ol", "dl", "pre", "table", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6"})
_MIN_DIRECT_SHARE = 0.5
"""Least share of a page's text in blocks that the body holds directly."""


def remove_marks(tree: HtmlElement, markup: str) -> None:
    """Remove from a whole page what is no text of it; `markup` tells which rules may apply."""
    paths = _paths()
    if any(sign in markup for sign in _HEADING_LINKS):
        for link in paths["links"](tree):
            if "".join(link.itertext()).strip() in _HEADING_LINKS:
                link.drop_tree()
    if any(name in markup for name in _NUMBERED):
        for element in paths["numbers"](tree):
            if element.getparent() is not None and _LINE_NUMBERS.fullmatch("".join(element.itertext())):
                element.drop_tree()
    if "mw-editsection" in markup:
        for element in paths["edits"](tree):
            element.drop_tree()
    if ("hidden" in markup or "<template" in markup) and (hidden := paths["hidden"](tree)):
        sizes = [_num_chars(element) for element in (tree, *hidden)]
        if sum(sizes[1:]) <= _MAX_HIDDEN_SHARE * sizes[0]:
            for element in hidden:
                element.drop_tree()


def frame_plain_page(tree: HtmlElement) -> None:
    """Put what the body holds into an <article>, if most of the text is in blocks that it holds directly."""
    body = tree.find("body")
    if body is None or body.find("p") is None or next(tree.iter("article", "main"), None) is not None:
        return
    if sum(_num_chars(block) for block in body if block.tag in _BLOCKS) >= _MIN_DIRECT_SHARE * _num_chars(body):
        frame = body.makeelement("article")
        frame.text, body.text = body.text, None
        frame.extend(list(body))
        body.append(frame)


def _num_chars(element: HtmlElement) -> int:
    return sum(map(len, element.itertext()))


@cache
def _paths() -> dict[str, XPath]:
    from lxml.etree import XPath

    return {
        "links": XPath("//a[contains(@href, '#') and string-length(normalize-space(.)) = 1]"),
        "numbers": XPath(f"//*[({_NUMBERS}) and not(self::pre and contains(@class, 'line-num'))]"),
        "edits": XPath("//*[contains(@class, 'mw-editsection')]"),
        "hidden": XPath(
            "//*[(@hidden and not(@hidden = 'until-found') and not(@role = 'tabpanel') or self::template)"
            " and not(ancestor::*[@hidden or self::template])]"
        ),
    }
