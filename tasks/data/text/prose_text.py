"""Extracts the prose of a text: without code and formulas, its wrapped lines joined again.

Rules made for prose measure this text. Documentation holds code, mathematics holds TeX, and books hold line breaks
that end no sentence. Each would break rules that their prose passes. The content of a text decides, not its domain,
since a crawl names none. Runs in executors: imports no Spark.
"""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tasks.data.text.code_blocks import without_code
from tasks.data.text.formulas import STAND_IN, without_formulas
from tasks.data.text.words import SINGLE_RANGES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_WRAPPED_LINE = 120
"""Characters of the longest wrapped line; a longer one was not wrapped by hand or by a mail program."""
MIN_WRAPPED_LINE, MIN_WRAPPED_LINE_UNSPACED = 40, 15
"""Least width of a wrapped block; a narrower one is a list, a table or verse. Scripts without spaces need fewer
characters per line."""
MIN_FILLED_SHARE = 0.75
"""Least share of lines in a wrapped block that end where the next word would not have fitted. Verse and lists break
earlier."""
_WORDLESS = re.compile(r"^(?:(?!.*(?:\.\.\.|…))[^\w\n]+$|[ \t]*#{1,6}[ \t])", re.MULTILINE)
_LISTED = re.compile(r"(?:[•‣⁃◦▪●○*+-]\s|\(?\w{1,3}[.)]\s|[#|>])")
_UNSPACED_START = re.compile("[" + "".join(f"{chr(start)}-{chr(stop)}" for start, stop in SINGLE_RANGES) + "]")


MIN_FORMULA_SHARE = 0.1
"""Least share of words in formulas of a text that is mathematics."""


class Prose(NamedTuple):
    """A text as rules for prose see it."""

    text: str
    num_formula_words: int
    """Words in the formulas that were replaced."""

    @property
    def natural(self) -> str:
        """The text without the words that replace formulas: they belong to no language."""
        return STAND_IN.sub(" ", self.text) if self.num_formula_words else self.text


class Beginnings:
    """Texts and the prose of their first characters, which several scores read and which is computed once."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self._proses: dict[int, list[Prose]] = {}

    def proses(self, num_chars: int) -> list[Prose]:
        """The prose of the first `num_chars` characters of each text."""
        if num_chars not in self._proses:
            self._proses[num_chars] = [prose_of(text[:num_chars]) for text in self.texts]
        return self._proses[num_chars]


def prose_of(text: str) -> Prose:
    """The prose of a text in Unicode's composed form, in which word lists and models are written; lines without a word
    or an ellipsis, and the marks of headings, are no part of it."""
    replaced, num_formula_words = without_formulas(without_code(unicodedata.normalize("NFC", text)))
    return Prose(_unwrapped(_WORDLESS.sub("", replaced)), num_formula_words)


def are_mathematics(num_formula_words: Sequence[int], num_other_words: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each text has at least MIN_FORMULA_SHARE of its words in formulas."""
    in_formulas = np.array(num_formula_words, dtype=np.int64)
    return in_formulas >= MIN_FORMULA_SHARE * np.maximum(num_other_words + in_formulas, 1)


def _unwrapped(text: str) -> str:
    """The text with one line for each paragraph whose lines were wrapped."""
    if "\n" not in text:
        return text
    lines = text.split("\n")
    stripped = [line.strip() for line in lines]
    result: list[str] = []
    start = 0
    while start < len(lines):
        stop = start + 1
        while stripped[start] and stop < len(lines) and stripped[stop]:
            stop += 1
        result += _joined(stripped[start:stop]) if stop - start > 1 else [lines[start]]
        start = stop
    return "\n".join(result)


def _joined(lines: list[str]) -> list[str]:
    """The lines of a block, joined where it was wrapped; an item of a list begins a new one."""
    width = max(map(len, lines))
    is_unspaced = _UNSPACED_START.match(lines[0]) is not None
    if not (MIN_WRAPPED_LINE_UNSPACED if is_unspaced else MIN_WRAPPED_LINE) <= width <= MAX_WRAPPED_LINE:
        return lines
    continues = [_LISTED.match(line) is None for line in lines[1:]]
    needed = [2 if is_unspaced else 1 + len(line.partition(" ")[0]) for line in lines[1:]]
    is_filled = [len(line) + more > width for line, more in zip(lines[:-1], needed, strict=True)]
    num_filled = sum(filled for filled, does_continue in zip(is_filled, continues, strict=True) if does_continue)
    if num_filled < MIN_FILLED_SHARE * sum(continues):
        return lines
    joined = [lines[0]]
    for line, does_continue in zip(lines[1:], continues, strict=True):
        joined[-1:] = [f"{joined[-1]} {line}"] if does_continue else [joined[-1], line]
    return joined
