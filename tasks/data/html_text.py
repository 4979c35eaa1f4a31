"""HTML -> main text, by kept libraries. Runs in executors: imports no Spark.

`combined` is trafilatura's precise mode, and resiliparse where that is clearly too little: fewer than half of the words that resiliparse
finds. The precise mode leaves the least boilerplate and now and then most of an article; resiliparse misses next to nothing. On 78
articles and 160 pages with marked segments no library is better at either (the table is `python -m benchmarks.extraction`).

Time goes into trafilatura's XPath expressions, which call Python for every element. So a page is parsed once, here, and loses at once
what trafilatura would remove later: half of the elements, and the text is the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lxml.html import HtmlElement, HTMLParser

NO_CONTENT, BROKEN, TOO_LARGE = "no_main_content", "broken_markup", "markup_too_large"
MIN_WORD_SHARE = 0.5
MAX_TAGS = 200_000
"""50,000 links or rows cost 2 s and the cost is linear; a page with more tags than this is a dump of a table."""
MAX_DEPTH = 500
MAX_SHALLOW_TAGS = 3_000
"""The parsers cost depth x tags: 5,000 nested divisions 0.5 s, 100,000 more than 100 s. Below this many tags no depth is a problem."""
MAX_TAG_ATTRIBUTES = 2_000
"""50,000 attributes in one tag cost 13 s, and the cost is quadratic."""
MAX_PARAGRAPH_PAIRS = 10_000_000
"""trafilatura's cost is quadratic in the tags of one paragraph, 4,000 cost 1 s; a page with more pairs of them is left to resiliparse."""

_NESTING = re.compile(r"<(/?)(?!(?:p|li|td|th|tr|dt|dd|option|br|img|hr|input|meta|link|area|col|wbr|source)\b)[a-z]", re.IGNORECASE)
_LONG_TAG = re.compile(r"<[^<>]{20000,}")
_PRE = re.compile(r"(<pre\b[^<>]*>)(.*?)(</pre\s*>)", re.IGNORECASE | re.DOTALL)
_BLANK_LINE = re.compile(r"\n[ \t]*(?=\n)")
_KEPT_BLANK = "\u2e3b"
"""Stands in a blank line of a code block, since trafilatura removes blank lines: a three-em dash, which no line of code consists of."""
_CONTROLS = bytes([*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20)])
_NONCHARACTERS = ("\ufffe".encode(), "\uffff".encode())
"""With the controls, what XML has no place for."""
_REMOVED_LATER = frozenset({"figure", "form", "math"})
"""Of these trafilatura keeps some: a figure that holds a table, a form that holds the page, a formula's source."""


def html_to_text(markup: str, extractor: str) -> tuple[str, str]:
    """(main text, "") or ("", reason). Bounds are on the markup, not on time: the same page has the same fate on any machine."""
    if not _is_bounded(markup):
        return "", TOO_LARGE
    try:
        text = EXTRACTORS[extractor](_without_controls(markup))
    except Exception:  # whatever the libraries raise on hostile markup, the page is counted; the ceiling on failures bounds how many
        return "", BROKEN
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.split("\n"))).strip("\n")
    return (text, "") if text.strip() else ("", NO_CONTENT)


def _is_bounded(markup: str) -> bool:
    num_tags = markup.count("<")
    if num_tags > MAX_TAGS or any(found[0].count("=") > MAX_TAG_ATTRIBUTES for found in _LONG_TAG.finditer(markup)):
        return False
    if num_tags <= MAX_SHALLOW_TAGS:
        return True
    depth = 0
    for closing in _NESTING.findall(markup):
        depth += -1 if closing else 1
        if depth > MAX_DEPTH:
            return False
        depth = max(depth, 0)
    return True


def _without_controls(markup: str) -> str:
    data = markup.encode().translate(None, _CONTROLS)
    for found in _NONCHARACTERS:
        data = data.replace(found, b"")
    return data.decode()


def _by_trafilatura(markup: str) -> str:
    from trafilatura import extract

    return _blank_lines_back(extract(_marked_blank_lines(markup), fast=True, include_comments=False) or "")


def _marked_blank_lines(markup: str) -> str:
    if "<pre" not in markup and "<PRE" not in markup:
        return markup
    return _PRE.sub(lambda found: found[1] + _BLANK_LINE.sub(f"\n{_KEPT_BLANK}", found[2]) + found[3], markup)


def _blank_lines_back(text: str) -> str:
    return re.sub(rf"^{_KEPT_BLANK}$", "", text, flags=re.MULTILINE) if _KEPT_BLANK in text else text


def _by_readability(markup: str) -> str:
    from readability import Document
    from readability.readability import Unparseable

    try:
        summary = Document(markup).summary(html_partial=True)
    except Unparseable:
        return ""
    return _plain(summary, main_content=False)


def _by_resiliparse(markup: str) -> str:
    return _plain(markup, main_content=True)


def _plain(markup: str, main_content: bool) -> str:
    from resiliparse.extract.html2text import extract_plain_text

    return extract_plain_text(
        markup, main_content=main_content, alt_texts=False, preserve_formatting=True, comments=False, post_meta=False
    )  # fmt: skip


def _combined(markup: str) -> str:
    from trafilatura import extract

    tree = _content_tree(_marked_blank_lines(markup))
    if tree is None:
        return ""
    if sum(sum(1 for _ in paragraph.iterdescendants()) ** 2 for paragraph in tree.iter("p")) > MAX_PARAGRAPH_PAIRS:
        return _by_resiliparse(markup)
    text = _blank_lines_back(extract(tree, fast=True, include_comments=False, favor_precision=True) or "")
    num_words = _num_words(text)
    if 0 < MIN_WORD_SHARE * _num_words(" ".join(tree.itertext())) <= num_words:
        return text  # half of the page: resiliparse, which takes a part of it, need not be asked
    other = _by_resiliparse(markup)
    return text if num_words >= MIN_WORD_SHARE * _num_words(other) else other


def _content_tree(markup: str) -> HtmlElement | None:
    """The page without scripts, navigation and the like; None where there is nothing at all."""
    from lxml.etree import ParserError, strip_elements
    from lxml.html import document_fromstring
    from trafilatura.settings import MANUALLY_CLEANED

    try:
        tree = document_fromstring(markup.encode(), parser=_parser())
    except ParserError:
        return None
    strip_elements(tree, *(name for name in MANUALLY_CLEANED if name not in _REMOVED_LATER), with_tail=False)
    return tree


@cache
def _parser() -> HTMLParser:
    """Trafilatura's settings, and one class for all elements: the default looks it up in Python, for every element."""
    from lxml.etree import ElementDefaultClassLookup
    from lxml.html import HtmlElement, HTMLParser

    parser = HTMLParser(collect_ids=False, default_doctype=False, encoding="utf-8", remove_comments=True, remove_pis=True)
    parser.set_element_class_lookup(ElementDefaultClassLookup(element=HtmlElement))
    return parser


def _num_words(text: str) -> int:
    return len(re.findall(r"\w+", text))


EXTRACTORS: dict[str, Callable[[str], str]] = {
    "combined": _combined, "trafilatura": _by_trafilatura, "readability": _by_readability, "resiliparse": _by_resiliparse,
}  # fmt: skip
