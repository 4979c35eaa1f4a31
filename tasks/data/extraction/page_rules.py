"""Answers trafilatura's XPath expressions in one pass over a page's elements. Runs in executors: imports no Spark.

The expressions ask the same of every element some fifteen times a page (does its class, its id, its style match one of
150 patterns). Each time they call Python from libxml2: half of the time that trafilatura takes. Here each distinct
set of attributes is examined once a page, before trafilatura runs. Every run of conditions on attributes in an
expression has a letter. The letters that are true are written to the element as an attribute MARKS. The expressions,
otherwise as they are, ask for the letter. They select the same elements: tests/data/extraction/test_page_content.py
compares them. A tree without marks is asked as before.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lxml.etree import XPath
    from lxml.html import HtmlElement

MARKS = "MARKS"
"""No page can have this attribute: an HTML parser puts names in lower case."""
LISTS = (
    "BODY_XPATH",
    "RAW_TREE_PRUNE_XPATH",
    "REMOVE_COMMENTS_AND_LISTS_XPATH",
    "REMOVE_COMMENTS_XPATH",
    "OVERALL_DISCARD_XPATH",
    "TEASER_DISCARD_XPATH",
    "PRECISION_DISCARD_XPATH",
    "DISCARD_IMAGE_ELEMENTS",
)
"""Lists of expressions in trafilatura.xpaths that its precise mode uses."""
_NAMES = r"(@[a-z-]+(?:\|@[a-z-]+)*)"
_CONDITION = "|".join(
    (
        rf"re:test\({_NAMES}, '([^']*)'(?:, '(i)')?\)",
        rf"(contains|starts-with)\((?:{_NAMES}|translate\({_NAMES}, '(\w+)', ?'(\w+)'\)), '([^']*)'\)",
        rf"{_NAMES}='([^']*)'",
        _NAMES,
    )
)
_CONDITIONS = re.compile(rf"(?:{_CONDITION})(?:\s+or\s+(?:{_CONDITION}))*")
_NO_LITERAL = re.compile(r"\((?:[^()]|\([^()]*\))*\)\??|\[[^]]*\]\??|.\?|\\.|[$^]")
_FIRST_LETTER = 0x41
_SEVERAL = (("id", "class"), ("id", "style"))
"""Pairs of attributes of which a condition tests the first one that the element has."""

Values = tuple[tuple[str, str], ...]
Condition = tuple[str, str, re.Pattern[str]]
"""A letter, a literal that must be in the value, a pattern that must match it."""


class MarkedExpression:
    """An expression of trafilatura's, and the one that selects the same elements in a tree with marks."""

    def __init__(self, original: XPath, marked: XPath) -> None:
        self.original, self.marked = original, marked

    def __call__(self, tree: HtmlElement) -> list[HtmlElement]:
        return (self.original if tree.getroottree().getroot().get(MARKS) is None else self.marked)(tree)


def mark(root: HtmlElement) -> None:
    """Write MARKS to the root, and to every element for which a condition holds."""
    rules, watched = _rules()
    elements: dict[Values, list[HtmlElement]] = {}
    for element in root.iter():
        values = tuple([item for item in element.items() if item[0] in watched])
        if values:
            elements.setdefault(values, []).append(element)
    asked: dict[tuple[str, ...], dict[str, list[Values]]] = {names: {} for names in rules}
    for values in elements:
        for name, value in values:
            asked[(name,)].setdefault(value, []).append(values)
        for names in _SEVERAL:  # of several attributes XPath takes the first in the source
            for name, value in values:
                if name in names:
                    asked[names].setdefault(value, []).append(values)
                    break
    marks = dict.fromkeys(elements, "")
    for names, wanted in asked.items():
        for value, letter in _matches(list(wanted), rules[names]):
            for values in wanted[value]:
                marks[values] += letter
    root.set(MARKS, "")
    for values, letters in marks.items():
        for element in elements[values] if letters else ():
            element.set(MARKS, letters)


def _matches(values: list[str], conditions: list[Condition]) -> Iterator[tuple[str, str]]:
    """(value, letter) of every condition that a value meets. A condition's literal is searched for in all values
    at once."""
    ends = list(accumulate([len(value) + 1 for value in values]))
    together = "\n".join(values)
    for letter, literal, pattern in conditions if values else ():
        at = together.find(literal)
        while at >= 0:
            index = bisect_right(ends, at)
            if pattern.search(values[index]):
                yield values[index], letter
            at = together.find(literal, ends[index]) if index + 1 < len(values) else -1


@cache
def _rules() -> tuple[dict[tuple[str, ...], list[Condition]], frozenset[str]]:
    """Attributes -> the conditions on them, one per alternative; all attributes. Puts the marked expressions into
    trafilatura's lists."""
    from lxml.etree import XPath
    from trafilatura import xpaths

    letters: dict[str, str] = {}
    for name in LISTS:
        expressions = getattr(xpaths, name)
        for index, original in enumerate(expressions):
            for run in _CONDITIONS.finditer(original.path):
                letters.setdefault(run[0], chr(_FIRST_LETTER + len(letters)))
            path = _CONDITIONS.sub(lambda run: f"contains(@{MARKS}, '{letters[run[0]]}')", original.path)
            if path != original.path:  # visits only elements with marks: most have none
                path = path.replace(".//*[", f"descendant::*/@{MARKS}/parent::*[")
            expressions[index] = MarkedExpression(original, XPath(path))
    rules: dict[tuple[str, ...], list[Condition]] = {names: [] for names in _SEVERAL}
    for run, letter in letters.items():
        for condition in re.finditer(_CONDITION, run):
            names, wanted = _wanted(*condition.groups(""))
            rule = rules.setdefault(tuple(names.replace("@", "").split("|")), [])
            rule += [(letter, max(_NO_LITERAL.split(one), key=len), re.compile(one)) for one in wanted]
    watched = frozenset(name for names in rules for name in names)
    return {(name,): [] for name in watched} | rules, watched


def _wanted(
    matched: str,
    pattern: str,
    flags: str,
    function: str,
    names: str,
    translated: str,
    upper: str,
    lower: str,
    part: str,
    equal: str,
    whole: str,
    present: str,
) -> tuple[str, list[str]]:
    """(attributes, regular expressions of which one must match) of one condition, from the groups of _CONDITION."""
    if matched:
        return matched, [f"(?i:{pattern})"] if flags else _split(pattern)
    if function:
        start = "^" if function == "starts-with" else ""
        letters = dict(zip(lower, upper, strict=True))
        return names or translated, [
            start + "".join(f"[{letter}{letters[letter]}]" if letter in letters else letter for letter in part)
        ]
    return (equal, [rf"^{whole}\Z"]) if equal else (present, [""])


def _split(pattern: str) -> list[str]:
    """The alternatives of a pattern, which holds no escaped brackets."""
    depth, parts = 0, [""]
    for letter in pattern:
        depth += (letter == "(") - (letter == ")")
        if letter == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    whole = re.fullmatch(r"\^\(\?:(.*)\)", pattern) if len(parts) == 1 else None
    return [f"^{part}" for part in _split(whole[1])] if whole else parts
