"""Cuts texts into pre-tokens by GLM's regular expression, whole Arrow columns at once.

The cuts are those of `tokenizers` with `Split(PRETOKENIZER_PATTERN, isolated)`, some twenty times as fast. The
beginning of a pre-token follows from the runs of letters, digits, white space and other characters around it. A test
compares every rule with the library. Runs in executors: imports no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_BYTES = 2**20
"""Bytes of text processed at once: the arrays of a chunk fit the processor's cache, and memory stays a small multiple
of the longest document."""

LETTER, DIGIT, OTHER, SPACE, NEWLINE = range(5)
"""Classes of characters: \\p{L}, \\p{N}, none of these, \\s without line breaks, [\\r\\n]. In runs NEWLINE counts as
SPACE."""
LAST_LETTER = 0x33800
"""From this code point on Unicode has no letters, digits or white space: tags, private use, unassigned."""
TEXT_END = 9
"""The kind before a document's first run and after its last."""


@dataclass(frozen=True)
class Pretokens:
    """The pre-tokens of some documents, one after the other."""

    words: pa.StringArray
    document_starts: np.ndarray
    """Index of each document's first word, and the number of words at the end."""


@dataclass(frozen=True)
class _Runs:
    """Longest stretches of one kind inside a document; positions count characters."""

    kind: np.ndarray
    start: np.ndarray
    end: np.ndarray
    kind_before: np.ndarray
    kind_after: np.ndarray


def cut_pretokens(texts: pa.Array) -> Iterator[Pretokens]:
    """The pre-tokens of a column of texts, in chunks of whole documents."""
    import pyarrow as pa

    texts = texts.cast(pa.string())
    assert texts.null_count == 0, f"{texts.null_count} documents without text"
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
    first = 0
    while first < len(texts):
        last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + CHUNK_BYTES, side="right")) - 1)
        bounds = offsets[first : last + 1]
        yield _pretokens(data[bounds[0] : bounds[-1]], bounds - bounds[0])
        first = last


def _pretokens(data: np.ndarray, bounds: np.ndarray) -> Pretokens:
    """The pre-tokens of UTF-8 bytes that hold documents from each of `bounds` to the next."""
    import pyarrow as pa

    starts = pretoken_starts(data, bounds[:-1])
    offsets = np.append(starts, len(data)).astype(np.int32)
    words = pa.StringArray.from_buffers(len(starts), pa.py_buffer(offsets), pa.py_buffer(data))
    return Pretokens(words, np.searchsorted(starts, bounds))


def pretoken_starts(data: np.ndarray, document_starts: np.ndarray) -> np.ndarray:
    """The bytes at which pre-tokens begin, ascending."""
    if not len(data):
        return np.zeros(0, np.int64)
    characters, offsets = _characters(data)
    if offsets is not None:
        document_starts = np.searchsorted(offsets, document_starts)
    classes = character_classes()[characters]
    runs = _runs(classes, document_starts[document_starts < len(classes)])
    begins = np.zeros(len(classes) + 1, dtype=bool)
    begins[runs.start] = True
    _cut_digits(runs, begins)
    attached = _cut_space(runs, classes, characters, begins)
    _attach_sign(runs, characters, attached, begins)
    starts = np.flatnonzero(begins[:-1])
    return starts if offsets is None else offsets[starts]


@cache
def character_classes() -> np.ndarray:
    """The class of every code point by the library's own regular expressions, so by its version of Unicode."""
    from tokenizers import Regex, pre_tokenizers

    points = np.concatenate([np.arange(0xD800), np.arange(0xE000, LAST_LETTER)])
    text = "".join(map(chr, points))
    table = np.full(0x110000, OTHER, dtype=np.uint8)
    for pattern, value in ((r"[^\p{L}]+", LETTER), (r"[^\p{N}]+", DIGIT), (r"[^\s]+", SPACE)):
        for _, (start, end) in pre_tokenizers.Split(Regex(pattern), behavior="removed").pre_tokenize_str(text):
            table[points[start:end]] = value
    table[[ord("\r"), ord("\n")]] = NEWLINE
    return table


def _characters(data: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Code points of UTF-8, and the byte at which each begins: None for ASCII, where both indices are equal."""
    if data.max() < 0x80:
        return data, None
    offsets = np.flatnonzero((data & 0xC0) != 0x80)
    points = data[offsets].astype(np.int32)
    for low, width, mask in ((0xC0, 2, 0x1F), (0xE0, 3, 0x0F), (0xF0, 4, 0x07)):
        high = (0xE0, 0xF0, 0x100)[width - 2]
        some = np.flatnonzero((points >= low) & (points < high) & (data[offsets] >= low))
        value = points[some] & mask
        for number in range(1, width):
            value = value << 6 | data[offsets[some] + number] & 0x3F
        points[some] = value
    return points, offsets


def _runs(classes: np.ndarray, document_starts: np.ndarray) -> _Runs:
    kinds = np.minimum(classes, SPACE)
    is_start = np.empty(len(kinds), dtype=bool)
    np.not_equal(kinds[1:], kinds[:-1], out=is_start[1:])
    is_start[0] = True
    is_start[document_starts] = True
    start = np.flatnonzero(is_start)
    kind = kinds[start]
    first = np.searchsorted(start, document_starts)
    before, after = np.roll(kind, 1), np.roll(kind, -1)
    before[first] = after[first - 1] = TEXT_END
    return _Runs(kind, start, np.append(start[1:], len(kinds)), before, after)


def _cut_digits(runs: _Runs, begins: np.ndarray) -> None:
    """Cut runs of digits into threes, as the pattern's `\\p{N}{1,3}` does."""
    long = np.flatnonzero((runs.kind == DIGIT) & (runs.end - runs.start > 3))
    more = (runs.end[long] - runs.start[long] - 1) // 3
    numbers = np.arange(more.sum()) - np.repeat(np.cumsum(more) - more, more)
    begins[np.repeat(runs.start[long], more) + 3 * (numbers + 1)] = True


def _cut_space(runs: _Runs, classes: np.ndarray, characters: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Cut white space, and return a mask of the runs of signs that begin with a blank.

    Line breaks after a sign belong to the sign. `\\s*[\\r\\n]+` ends at the last line break. The last character of the
    rest is its own pre-token, begins the letters that follow, or is the blank before signs.
    """
    space = np.flatnonzero(runs.kind == SPACE)
    start, end, after = runs.start[space], runs.end[space], runs.kind_after[space]
    breaks = np.flatnonzero(classes == NEWLINE)
    if len(breaks):
        # The end of the stretch of consecutive line breaks that each line break is in.
        stretch_ends = np.append(breaks[:-1][np.diff(breaks) > 1], breaks[-1]) + 1
        taken = (runs.kind_before[space] == OTHER) & (classes[start] == NEWLINE)
        begins[start[taken]] = False
        stretch = stretch_ends[np.searchsorted(stretch_ends, start[taken], side="right")]
        start[taken] = np.minimum(stretch, end[taken])
        begins[start[taken]] = True
        before_end = np.searchsorted(breaks, end) - 1
        last = np.where(before_end >= 0, breaks[before_end], -1)
        has_break = last >= start
        start[has_break] = last[has_break] + 1
        begins[start[has_break]] = True
    left = (start < end) & (after != TEXT_END)
    begins[end[left] - 1] = True
    before_letters = left & (after == LETTER)
    before_signs = left & (after == OTHER) & (characters[end - 1] == ord(" "))
    begins[end[before_letters | before_signs]] = False
    attached = np.zeros(len(runs.kind) + 1, dtype=bool)
    attached[space[before_signs] + 1] = True
    return attached


def _attach_sign(runs: _Runs, characters: np.ndarray, attached: np.ndarray, begins: np.ndarray) -> None:
    """Join a single sign with the letters after it; after an apostrophe only with an English ending."""
    single = np.flatnonzero(
        (runs.kind == OTHER) & (runs.kind_after == LETTER) & (runs.end - runs.start == 1) & ~attached[:-1]
    )
    begins[runs.end[single]] = False
    apostrophe = single[characters[runs.start[single]] == ord("'")]
    start, end = runs.end[apostrophe], runs.end[apostrophe + 1]
    first = characters[start] | 0x20
    second = np.where(start + 1 < end, characters[np.minimum(start + 1, len(characters) - 1)] | 0x20, 0)
    begins[start[np.isin(first, [*b"stmd"])] + 1] = True
    two = ((first == ord("r")) | (first == ord("v"))) & (second == ord("e")) | (first == ord("l")) & (
        second == ord("l")
    )
    begins[start[two] + 2] = True
