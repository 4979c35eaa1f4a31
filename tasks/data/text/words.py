"""Words of many texts at once, as NumPy arrays over code points: hashes, lengths, n-grams. Runs in executors: imports
no Spark.

A word is a maximal run of letters, digits, marks and underscores, in lower case; a character of a script that is
written without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese) is a word of its own. A word's hash is that of its
code points, whatever the batch. The pass over the code points is compiled (words.cpp).
"""

from __future__ import annotations

import ctypes
import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from model.kernels.native_library import array_pointers, load_library

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]

SOURCE = Path(__file__).with_suffix(".cpp")
SEPARATOR, LETTER, NUMBER, SINGLE, OPERATOR = 0, 1, 2, 3, 4
"""Classes of code points; NUMBER: characters that continue a word without being a letter: digits, marks, underscore."""
OPERATORS = "+-*/=<>^%"
"""Signs that are words with `with_operators`, if no other sign is next to them: without them `12 + 7 = 19` would match
`... = 12`, `7 + 19 = 26`. Runs such as `==` or an underline stay separators."""
SINGLE_RANGES = (
    (0x0E00, 0x0E7F),
    (0x0E80, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x3040, 0x30FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x323AF),
)
NUM_CODE_POINTS = 0x110000
BASE = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that it has an inverse modulo 2^64."""
BASE_INVERSE = np.uint64(pow(int(BASE), -1, 1 << 64))


@dataclass(frozen=True)
class Words:
    """The words of a batch of texts, in order."""

    hashes: U64
    lengths: I64
    """Code points per word."""
    offsets: I64
    """Words of text i are offsets[i]:offsets[i + 1]."""
    is_single: NDArray[np.bool_]
    """Whether the word is one character of a script without spaces."""
    has_letter: NDArray[np.bool_]
    starts: I64
    """Position of each word's first code point in the joined texts."""

    @property
    def counts(self) -> I64:
        """Words per text."""
        return np.diff(self.offsets)


def code_points(texts: Sequence[str]) -> tuple[NDArray[np.uint32], I64]:
    """Code points of all texts joined, and where each text starts (one entry more than texts)."""
    joined = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return joined, np.concatenate(([0], np.cumsum([len(text) for text in texts], dtype=np.int64)))


def split_words(texts: Sequence[str], with_operators: bool = False, with_signs: bool = False) -> Words:
    """The words of each text; with `with_signs` every visible character between words is one, too."""
    points, text_starts = code_points(texts)
    classes, lower = _tables()
    hashes, offsets = np.empty(len(points), np.uint64), np.empty(len(text_starts), np.int64)
    lengths, starts = np.empty((2, len(points)), np.int64)
    is_single, has_letter = np.empty((2, len(points)), np.bool_)
    cut = load_library(SOURCE).cut_words
    cut.restype = ctypes.c_int64
    num_words = cut(
        *array_pointers(points, text_starts),
        ctypes.c_int64(len(texts)),
        *array_pointers(classes, lower, _visible() if with_signs else None),
        ctypes.c_int(with_operators),
        *array_pointers(hashes, lengths, starts, is_single, has_letter, offsets),
    )
    hashes, lengths, is_single, has_letter, starts = (
        column[:num_words].copy() for column in (hashes, lengths, is_single, has_letter, starts)
    )
    return Words(hashes, lengths, offsets, is_single, has_letter, starts)


def joined_words(parts: Sequence[Words]) -> Words:
    """The words of several batches as one; their starts stay those of each batch."""
    offsets = np.concatenate(([0], np.cumsum(np.concatenate([part.counts for part in parts]))))
    names = ("hashes", "lengths", "is_single", "has_letter", "starts")
    return Words(offsets=offsets, **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def span_hashes(values: NDArray[np.uint32], starts: I64, stops: I64) -> U64:
    """A polynomial hash of each span values[start:stop], equal for equal spans at any position."""
    powers, inverse_powers = base_powers(len(values) + 1)
    sums = np.zeros(len(values) + 1, dtype=np.uint64)
    np.cumsum((values.astype(np.uint64) + np.uint64(1)) * powers[: len(values)], out=sums[1:])
    return (sums[stops] - sums[starts]) * inverse_powers[starts]


def mix(values: U64) -> U64:
    """A bijection of 64-bit values without visible structure (splitmix64's finaliser)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def ngram_hashes(words: Words, size: int, whole_if_shorter: bool = False) -> tuple[U64, I64]:
    """Hashes of every run of `size` words, and the text each belongs to. A text with fewer words has none; with
    `whole_if_shorter` it has one hash, of all its words."""
    text_of_word = np.repeat(np.arange(len(words.counts)), words.counts)
    num_runs = max(len(words.hashes) - size + 1, 0)
    hashes = np.zeros(num_runs, dtype=np.uint64)
    for offset in range(size):
        hashes *= BASE
        hashes += words.hashes[offset : offset + num_runs]
    texts = text_of_word[:num_runs]
    is_inside = texts == text_of_word[size - 1 : size - 1 + num_runs]
    hashes, texts = hashes[is_inside], texts[is_inside]
    if whole_if_shorter:
        short = np.flatnonzero((words.counts > 0) & (words.counts < size))
        if len(short):
            hashes = np.concatenate((hashes, [_whole_hash(words, text) for text in short]))
            texts = np.concatenate((texts, short))
    return mix(hashes), texts


def _whole_hash(words: Words, text: np.intp) -> np.uint64:
    """The hash of all words of a text, equal to that of ngram_hashes for a run of as many words."""
    value = 0
    for word in words.hashes[words.offsets[text] : words.offsets[text + 1]].tolist():
        value = (value * int(BASE) + word) % (1 << 64)
    return np.uint64(value)


@cache
def _powers_cached(length: int) -> tuple[U64, U64]:
    """Of a power of two; the arrays of all shorter ones together are as long as the longest."""
    bases = np.full((2, length), BASE, dtype=np.uint64)
    bases[1] = BASE_INVERSE
    bases[:, 0] = 1
    powers = np.cumprod(bases, axis=1, dtype=np.uint64)
    return powers[0], powers[1]


def base_powers(length: int) -> tuple[U64, U64]:
    """BASE and its inverse to the powers 0 to length - 1, modulo 2**64."""
    rounded = 1 << max(16, (length - 1).bit_length())
    powers, inverse_powers = _powers_cached(rounded)
    return powers[:length], inverse_powers[:length]


@cache
def _visible() -> NDArray[np.bool_]:
    """Whether a code point is visible: all but white space, control and format characters."""
    visible = np.ones(NUM_CODE_POINTS, dtype=np.bool_)
    visible[[point for point in range(0x20000) if unicodedata.category(chr(point))[0] in "ZC"]] = False
    return visible


@cache
def _tables() -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """Class and simple lower case of every code point; beyond planes 0 and 1 all are SINGLE, or letters
    without a lower case."""
    classes = np.full(NUM_CODE_POINTS, LETTER, dtype=np.uint8)
    lower = np.arange(NUM_CODE_POINTS, dtype=np.uint32)
    for point in range(0x20000):
        character = chr(point)
        if not character.isalpha():
            continues = character.isalnum() or character == "_" or unicodedata.category(character).startswith("M")
            classes[point] = NUMBER if continues else SEPARATOR
        lowered = character.lower()
        if len(lowered) == 1:
            lower[point] = ord(lowered)
    for start, end in SINGLE_RANGES:
        span = classes[start : end + 1]
        span[span != SEPARATOR] = SINGLE
    classes[[ord(operator) for operator in OPERATORS]] = OPERATOR
    return classes, lower
