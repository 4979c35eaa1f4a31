"""HTML -> main text, by kept libraries. Runs in executors: imports no Spark.

`combined` is trafilatura without its fall-backs, and readability where that is clearly too little: fewer than half of the words that both
resiliparse and readability find. On 78 articles and 160 pages with marked segments it had the best F1 of everything tried (the table is
`python -m benchmarks.extraction`), and readability, the slow one, runs on one page in fifteen.
"""

from __future__ import annotations

import re
from collections.abc import Callable

NO_CONTENT, BROKEN, TOO_LARGE = "no_main_content", "broken_markup", "markup_too_large"
MIN_WORD_SHARE = 0.5
MAX_TAGS = 200_000
"""50,000 links or rows cost 2 s and the cost is linear; a page with more tags than this is a dump of a table."""
MAX_DEPTH = 500
MAX_SHALLOW_TAGS = 3_000
"""The parsers cost depth x tags: 5,000 nested divisions 0.5 s, 100,000 more than 100 s. Below this many tags no depth is a problem."""
MAX_TAG_ATTRIBUTES = 2_000
"""50,000 attributes in one tag cost 13 s, and the cost is quadratic."""

_NESTING = re.compile(r"<(/?)(?!(?:p|li|td|th|tr|dt|dd|option|br|img|hr|input|meta|link|area|col|wbr|source)\b)[a-z]", re.IGNORECASE)
_LONG_TAG = re.compile(r"<[^<>]{20000,}")
_PRE = re.compile(r"(<pre\b[^<>]*>)(.*?)(</pre\s*>)", re.IGNORECASE | re.DOTALL)
_BLANK_LINE = re.compile(r"\n[ \t]*(?=\n)")
_KEPT_BLANK = "\u2e3b"
"""Stands in a blank line of a code block, since trafilatura removes blank lines: a three-em dash, which no line of code consists of."""


def html_to_text(markup: str, extractor: str) -> tuple[str, str]:
    """(main text, "") or ("", reason). Bounds are on the markup, not on time: the same page has the same fate on any machine."""
    if not _is_bounded(markup):
        return "", TOO_LARGE
    try:
        text = EXTRACTORS[extractor](markup.replace("\x00", ""))
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


def _by_trafilatura(markup: str) -> str:
    from trafilatura import extract

    if "<pre" in markup or "<PRE" in markup:
        markup = _PRE.sub(lambda found: found[1] + _BLANK_LINE.sub(f"\n{_KEPT_BLANK}", found[2]) + found[3], markup)
    text = extract(markup, fast=True, include_comments=False) or ""
    return re.sub(rf"^{_KEPT_BLANK}$", "", text, flags=re.MULTILINE)


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

    return extract_plain_text(markup, main_content=main_content, alt_texts=False, preserve_formatting=True)


def _combined(markup: str) -> str:
    text = _by_trafilatura(markup)
    num_words = _num_words(text)
    if num_words >= MIN_WORD_SHARE * _num_words(_by_resiliparse(markup)):
        return text
    other = _by_readability(markup)
    return text if num_words >= MIN_WORD_SHARE * _num_words(other) else other


def _num_words(text: str) -> int:
    return len(re.findall(r"\w+", text))


EXTRACTORS: dict[str, Callable[[str], str]] = {
    "combined": _combined, "trafilatura": _by_trafilatura, "readability": _by_readability, "resiliparse": _by_resiliparse,
}  # fmt: skip
