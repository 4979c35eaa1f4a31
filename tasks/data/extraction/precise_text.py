"""Runs trafilatura's precise mode step by step on a tree that the caller gives up.

The result is that of `trafilatura.extract(tree, fast=True, include_comments=False, favor_precision=True)`. It omits
that call's other work: four of its five copies of the tree, reading its settings again, metadata, a second body for
comments. The steps are those of trafilatura 2.3.1, which pyproject.toml pins.
tests/data/extraction/test_extraction.py compares the two. Runs in executors: imports no Spark.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from tasks.data.extraction.page_rules import mark

if TYPE_CHECKING:
    from lxml.html import HtmlElement
    from trafilatura.settings import Extractor


def precise_text(tree: HtmlElement) -> str:
    """The main text, or "". The tree must have no scripts; it is changed and cannot be used again."""
    from trafilatura import xpaths
    from trafilatura.htmlprocessing import convert_tags, prune_unwanted_nodes, tree_cleaning
    from trafilatura.main_extractor import extract_content
    from trafilatura.utils import normalize_unicode
    from trafilatura.xml import xmltotxt

    mark(tree)
    options = _options()
    for expressions in (xpaths.RAW_TREE_PRUNE_XPATH, xpaths.REMOVE_COMMENTS_AND_LISTS_XPATH):
        prune_unwanted_nodes(tree, expressions)
    tree = convert_tags(tree_cleaning(tree, options), options)
    prune_unwanted_nodes(tree, xpaths.REMOVE_COMMENTS_XPATH)
    body, _ = extract_content(tree, options)
    return normalize_unicode(xmltotxt(body, include_formatting=False)).strip()


@cache
def _options() -> Extractor:
    from trafilatura.settings import Extractor

    return Extractor(fast=True, precision=True, comments=False)
