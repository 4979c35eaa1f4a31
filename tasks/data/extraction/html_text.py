"""Extracts the main text of HTML pages with libraries. Runs in executors: imports no Spark.

`combined` is trafilatura's precise mode. It leaves the least boilerplate, but sometimes drops most of an article.
Where it has fewer than MIN_SHARE of the characters that resiliparse extracts, or almost none, what resiliparse adds is
the rest of the article, or comments and related posts. Three opinions decide: resiliparse, trafilatura's default mode
and readability. The text that is most like the other two is taken. Where that is the smaller part of resiliparse's and
the other two differ from each other, the page is no article (a forum, a list) and resiliparse's text is taken.
`python -m benchmarks.data.extraction` compares it with every library tried; docs/data.md has the figures.

A page is parsed once, here, and loses at once what trafilatura would remove later: half of the elements, and the text
is the same. Only the three opinions parse it again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from tasks.data.extraction.kept_content import keep_content, with_lettered_code, without_letters
from tasks.data.extraction.page_bounds import is_bounded, is_costly
from tasks.data.extraction.precise_text import precise_text
from tasks.data.extraction.removed_marks import frame_plain_page, remove_marks

if TYPE_CHECKING:
    from lxml.html import HtmlElement, HTMLParser

NO_CONTENT, BROKEN, TOO_LARGE = "no_main_content", "broken_markup", "markup_too_large"
MIN_SHARE = 0.45
"""Least share of resiliparse's characters with which trafilatura's text is taken. This and the next two were chosen on
the pages of benchmarks.data.extraction."""
MIN_LETTERS = 100
"""Letters of a text that is taken without another opinion: a page whose content is in its scripts has fewer."""
MIN_CONFIRMED_SHARE = 0.3
"""Least share of resiliparse's characters in the text that is most like the other two."""
MIN_AGREEMENT = 0.8
"""Likeness of trafilatura's and readability's texts from which on they overrule resiliparse."""
_PIECES = re.compile(r"\w{1,4}")
"""The parts by which texts are compared: pieces of words, so that scripts without spaces have several per sentence."""
_CONTROLS = bytes([*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20)])
_NONCHARACTERS = ("\ufffe", "\uffff")
"""Characters that XML does not allow, besides the controls."""
_REMOVED_LATER = frozenset({"figure", "form", "math"})
"""Elements that trafilatura keeps in part: a figure that holds a table, a form that holds the page, a formula's
source."""


def html_to_text(markup: str, extractor: str) -> tuple[str, str]:
    """(main text, "") or ("", reason). Limits apply to the markup, not to time: a page has the same result on any
    machine."""
    if not is_bounded(markup):
        return "", TOO_LARGE
    try:
        text = EXTRACTORS[extractor](_without_controls(markup))
    except (
        Exception
    ):  # libraries raise anything on hostile markup; the page is counted, and max_failed_share bounds how many fail
        return "", BROKEN
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.split("\n"))).strip("\n")
    return (text, "") if text.strip() else ("", NO_CONTENT)


def _without_controls(markup: str) -> str:
    data = markup.encode()
    kept = data.translate(None, _CONTROLS)
    text = markup if len(kept) == len(data) else kept.decode()
    for character in _NONCHARACTERS:
        text = text.replace(character, "")
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
    )


def _combined(markup: str) -> str:
    tree = _content_tree(with_lettered_code(markup))
    if tree is None:
        return ""
    if is_costly(markup, tree):
        return _by_resiliparse(markup)
    num_letters = _num_letters(str(tree.text_content()))
    text = without_letters(precise_text(tree), markup)
    num_kept = _num_letters(text)
    if max(MIN_SHARE * num_letters, MIN_LETTERS) <= num_kept:
        return text  # enough of the page: resiliparse's text, a part of the page, is not needed
    other = _by_resiliparse(markup)
    is_enough = num_kept >= max(MIN_SHARE * _num_letters(other), MIN_LETTERS)
    return text if is_enough else _confirmed(markup, other)


def _confirmed(markup: str, largest: str) -> str:
    """The one of three texts that is most like the others; `largest`, resiliparse's, where that one is a small part of
    it."""
    texts = (_by_trafilatura(markup), _by_readability(markup), largest)
    pieces = [Counter(_PIECES.findall(text)) for text in texts]
    agreement, *likeness = (_likeness(pieces[one], pieces[other]) for one, other in ((0, 1), (0, 2), (1, 2)))
    support = (agreement + likeness[0], agreement + likeness[1], sum(likeness))
    chosen = texts[support.index(max(support))]
    is_enough = agreement >= MIN_AGREEMENT or _num_letters(chosen) >= MIN_CONFIRMED_SHARE * _num_letters(largest)
    return chosen if is_enough else largest


def _likeness(one: Counter[str], other: Counter[str]) -> float:
    """F1 of two texts as multisets; two texts without words are not alike."""
    return 2 * (one & other).total() / max(one.total() + other.total(), 1)


def _content_tree(markup: str) -> HtmlElement | None:
    """The page without scripts, navigation and the like; None for an empty page."""
    from lxml.etree import ParserError, strip_elements
    from lxml.html import document_fromstring
    from trafilatura.settings import MANUALLY_CLEANED

    try:
        tree = document_fromstring(markup.encode(), parser=_parser())
    except ParserError:
        return None
    keep_content(tree)
    remove_marks(tree, markup)
    strip_elements(tree, *(name for name in MANUALLY_CLEANED if name not in _REMOVED_LATER), with_tail=False)
    frame_plain_page(tree)
    return tree


@cache
def _parser() -> HTMLParser:
    """A parser with trafilatura's settings and one class for all elements: the default looks up each element's class in
    Python."""
    from lxml.etree import ElementDefaultClassLookup
    from lxml.html import HtmlElement, HTMLParser

    parser = HTMLParser(
        collect_ids=False, default_doctype=False, encoding="utf-8", remove_comments=True, remove_pis=True
    )
    parser.set_element_class_lookup(ElementDefaultClassLookup(element=HtmlElement))
    return parser


def _num_letters(text: str) -> int:
    """Number of characters that are not white space: many scripts have no spaces between words."""
    return len(text) - sum(map(text.count, " \n\t\r\xa0"))


EXTRACTORS: dict[str, Callable[[str], str]] = {
    "combined": _combined,
    "trafilatura": _by_trafilatura,
    "readability": _by_readability,
    "resiliparse": _by_resiliparse,
}
