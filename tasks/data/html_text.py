"""HTML -> main text, by kept libraries. Runs in executors: imports no Spark.

`combined` is trafilatura's precise mode, and resiliparse where that is clearly too little: fewer than MIN_SHARE of the characters that
resiliparse finds. The precise mode leaves the least boilerplate and now and then most of an article; resiliparse misses next to
nothing. On 78 articles and 160 pages with marked segments no library is better at either (the table is `python -m benchmarks.extraction`).

A page is parsed once, here, and loses at once what trafilatura would remove later: half of the elements, and the text is the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from tasks.data.kept_content import keep_content, with_lettered_code, without_letters
from tasks.data.page_bounds import is_bounded, is_costly
from tasks.data.precise_text import precise_text

if TYPE_CHECKING:
    from lxml.html import HtmlElement, HTMLParser

NO_CONTENT, BROKEN, TOO_LARGE = "no_main_content", "broken_markup", "markup_too_large"
MIN_SHARE = 0.45
"""Chosen on the half of the pages whose id's hash is even: F1 0.9746 and 0.9455 over segments there, 0.4 and 0.5 are worse. On the other
half 0.9802 and 0.9347; at 0.5 0.9802 and 0.9309."""
_CONTROLS = bytes([*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20)])
_NONCHARACTERS = ("\ufffe", "\uffff")
"""With the controls, what XML has no place for."""
_REMOVED_LATER = frozenset({"figure", "form", "math"})
"""Of these trafilatura keeps some: a figure that holds a table, a form that holds the page, a formula's source."""


def html_to_text(markup: str, extractor: str) -> tuple[str, str]:
    """(main text, "") or ("", reason). Bounds are on the markup, not on time: the same page has the same fate on any machine."""
    if not is_bounded(markup):
        return "", TOO_LARGE
    try:
        text = EXTRACTORS[extractor](_without_controls(markup))
    except Exception:  # whatever the libraries raise on hostile markup, the page is counted; the ceiling on failures bounds how many
        return "", BROKEN
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.split("\n"))).strip("\n")
    return (text, "") if text.strip() else ("", NO_CONTENT)


def _without_controls(markup: str) -> str:
    data = markup.encode()
    kept = data.translate(None, _CONTROLS)
    text = markup if len(kept) == len(data) else kept.decode()
    for found in _NONCHARACTERS:
        text = text.replace(found, "")
    return text


def _by_trafilatura(markup: str) -> str:
    from trafilatura import extract

    return without_letters(extract(with_lettered_code(markup), fast=True, include_comments=False) or "", markup)


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
    tree = _content_tree(with_lettered_code(markup))
    if tree is None:
        return ""
    if is_costly(markup, tree):
        return _by_resiliparse(markup)
    num_letters = _num_letters(str(tree.text_content()))
    text = without_letters(precise_text(tree), markup)
    found = _num_letters(text)
    if 0 < MIN_SHARE * num_letters <= found:
        return text  # enough of the page: resiliparse, which takes a part of it, need not be asked
    other = _by_resiliparse(markup)
    return text if found >= MIN_SHARE * _num_letters(other) else other


def _content_tree(markup: str) -> HtmlElement | None:
    """The page without scripts, navigation and the like; None where there is nothing at all."""
    from lxml.etree import ParserError, strip_elements
    from lxml.html import document_fromstring
    from trafilatura.settings import MANUALLY_CLEANED

    try:
        tree = document_fromstring(markup.encode(), parser=_parser())
    except ParserError:
        return None
    keep_content(tree)
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


def _num_letters(text: str) -> int:
    """Characters that are no white space: words have no bounds in half of the world's writing."""
    return len(text) - sum(map(text.count, " \n\t\r\xa0"))


EXTRACTORS: dict[str, Callable[[str], str]] = {
    "combined": _combined, "trafilatura": _by_trafilatura, "readability": _by_readability, "resiliparse": _by_resiliparse,
}  # fmt: skip
