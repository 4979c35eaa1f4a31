r"""Cuts texts into the normalised words that decontamination compares. Runs in executors: imports no Spark.

Words are in lower case and without signs (words.py). LaTeX's layout commands and thousands separators are left out, so
that `$\frac{1}{2}$` is `1/2` and `1,000` is `1000`. `seven` is `7`. Escapes of JSON, of programs and of HTML are the
characters that they encode. Tags of HTML and invisible characters are removed. Words broken at a line's end are joined.
Digits of all scripts are alike. The letters and numbers of choices are all alike: `(B) grass`, `b grass` and `2) grass`
are one text (letters A to H are alike wherever they are words of their own).
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.text.words import NUM_CODE_POINTS, OPERATORS, Words, code_points, split_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]

LATEX_LAYOUT = re.compile(
    r"\\(?:[dtc]?frac|left|right|text(?:bf|it|rm)?|math(?:rm|bf|bb|it|cal|sf)|operatorname|displaystyle|cdot|times|div|q?quad|begin|end"
    r"|boxed)(?![a-zA-Z])|\\[,;!: ]|\{,\}(?=\d{3})"
)
THOUSANDS = re.compile(r",(?<=\d,)(?=\d{3}(?!\d))")

ESCAPE = re.compile(r"\\(?:[nrt]|u([0-9a-fA-F]{4}))")
SURROGATE = re.compile("[\ud800-\udfff]")
PADDING = "\n\n"
"""Added around every text, so that a word's neighbours never belong to another text."""
CHOICE_LETTER, CHOICE_NUMBER, SIGN, BLANK, LINE_START, OPENING = 1, 2, 3, 4, 5, 6
"""Roles of code points in the marker of a choice."""
NUMBER_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
)
ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,30});")
BLOCK_TAG = re.compile(
    r"</?(?:p|br|div|li|ul|ol|dl|dt|dd|td|th|tr|table|thead|tbody|h[1-6]|blockquote|pre|hr)\b[^<>]{0,500}>",
    re.IGNORECASE,
)
INLINE_TAG = re.compile(
    r"</?(?:b|i|u|s|q|a|em|strong|span|font|code|tt|kbd|var|samp|sub|sup|small|big|mark|abbr|cite|del|ins|wbr|img)\b[^<>]{0,500}>",
    re.IGNORECASE,
)
"""HTML's tags by name: `a < b` and `List<T>` are no tags."""
BROKEN_WORD = re.compile(r"(?<=[^\W\d_])[-\u2010]\r?\n[ \t>]*(?=[^\W\d_])")
OTHER_DIGIT = re.compile(r"(?![0-9])\d")
"""A digit of another script: Arabic, Devanagari, Thai."""
INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")


def normalise(texts: Sequence[str]) -> list[str]:
    """The texts without the differences in spelling that do not matter."""
    plain = (THOUSANDS.sub("", _unescaped(_unmarked(text))) for text in texts)
    return [f"{PADDING}{text}{PADDING}" for text in plain]


def _unmarked(text: str) -> str:
    """The text without HTML's entities and tags and without invisible characters, its letters in their plain form."""
    if "&" in text:
        text = ENTITY.sub(lambda match: html.unescape(match[0]), text.replace("&amp;", "&"))
    if "<" in text:
        text = INLINE_TAG.sub("", BLOCK_TAG.sub("\n", text))
    if not text.isascii():
        text = unicodedata.normalize("NFKC", INVISIBLE.sub("", text))
        text = OTHER_DIGIT.sub(lambda match: str(unicodedata.decimal(match[0])), text)
    return BROKEN_WORD.sub("", text)


def _unescaped(text: str) -> str:
    if "\\" not in text and "{," not in text:
        return text
    plain = ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else "\n", LATEX_LAYOUT.sub(" ", text))
    if SURROGATE.search(plain):
        # JSON escapes an emoji as a pair of surrogates. Half of a pair is no text: no column holds it.
        plain = plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return plain


def quoted_words(plain: Sequence[str]) -> Words:
    """The words of normalised texts: number words as digits, every marker of a choice as `1`."""
    words = split_words(plain, with_operators=True)
    spelled, digits, one = _number_words()
    index = np.minimum(np.searchsorted(spelled, words.hashes), len(spelled) - 1)
    is_number = spelled[index] == words.hashes
    hashes = np.where(is_number, digits[index], words.hashes)
    single = np.flatnonzero(words.lengths == 1)
    markers = single[_are_markers(code_points(plain)[0], words.starts[single])]
    hashes[markers] = one
    has_letter = words.has_letter & ~is_number
    has_letter[markers] = False
    return replace(words, hashes=hashes, has_letter=has_letter)


def _are_markers(points: NDArray[np.uint32], positions: I64) -> NDArray[np.bool_]:
    """Whether a word of one character marks a choice: A to H as words of their own, (2) anywhere, 2) and 2. at the
    start of a line."""
    kinds = _marker_kinds()
    before, own, after, last = (kinds[points[positions + step]] for step in (-1, 0, 1, 2))
    is_bracketed = (before == OPENING) & (points[positions + 1] == ord(")"))
    is_listed = (before == LINE_START) & (after == SIGN) & ((last == BLANK) | (last == LINE_START))
    return (own == CHOICE_LETTER) | ((own == CHOICE_NUMBER) & (is_bracketed | is_listed))


@cache
def _marker_kinds() -> NDArray[np.uint8]:
    kinds = np.zeros(NUM_CODE_POINTS, dtype=np.uint8)
    members = {
        CHOICE_LETTER: "ABCDEFGHabcdefgh",
        CHOICE_NUMBER: "123456789",
        SIGN: ").:",
        BLANK: " \t\xa0",
        LINE_START: "\n",
        OPENING: "(",
    }
    for kind, characters in members.items():
        kinds[[ord(character) for character in characters]] = kind
    return kinds


@cache
def _number_words() -> tuple[U64, U64, np.uint64]:
    """Sorted hashes of NUMBER_WORDS, the hashes of their digits, and the hash of 1."""
    spelled, digits = (
        split_words([" ".join(NUMBER_WORDS)]).hashes,
        split_words([" ".join(map(str, range(len(NUMBER_WORDS))))]).hashes,
    )
    order = np.argsort(spelled)
    return spelled[order], digits[order], digits[NUMBER_WORDS.index("one")]


def choice_hash() -> np.uint64:
    """The hash of every marker of a choice."""
    return _number_words()[2]


def without_operators(words: Words) -> Words:
    """The words without single signs: `a+b` and `a b` are the same text."""
    kept = (
        words.has_letter
        | (words.lengths > 1)
        | ~np.isin(words.hashes, split_words([" ".join(OPERATORS)], with_operators=True).hashes)
    )
    before = np.concatenate(([0], np.cumsum(kept)))
    members = {name: getattr(words, name)[kept] for name in ("hashes", "lengths", "is_single", "has_letter", "starts")}
    return replace(words, offsets=before[words.offsets], **members)
