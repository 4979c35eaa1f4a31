"""The heuristic quality rules of Gopher (Rae et al. 2021, A1.1) and C4, over many texts at once. Runs in executors: imports no Spark.

Every rule is a number per document, held against a bound; the first rule outside its bound, in the order of `REASONS`, is the reason.
Code and commits are held to the word counts only: symbols, short words, repeated lines and brackets are its nature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.data.documents import CODE, COMMIT
from tasks.data.words import Words, code_points, mix, ngram_hashes, span_hashes, split_words

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]
    F64 = NDArray[np.float64]
    Bools = NDArray[np.bool_]

CHUNK_CHARS = 2_000_000
BULLETS = "•‣⁃◦▪●○-*"
NEWLINE, HASH, DOT, ELLIPSIS = ord("\n"), ord("#"), ord("."), ord("…")
RULES = (
    # reason, measure, bound in FilterRecipe, is an upper bound, holds for code too
    ("too_few_words", "num_words", "min_words", False, True),
    ("too_many_words", "num_words", "max_words", True, True),
    ("words_too_short", "mean_word_length", "min_mean_word_length", False, False),
    ("words_too_long", "mean_word_length", "max_mean_word_length", True, False),
    ("too_many_symbols", "symbol_word_ratio", "max_symbol_word_ratio", True, False),
    ("too_many_bullet_lines", "bullet_line_share", "max_bullet_line_share", True, False),
    ("too_many_ellipsis_lines", "ellipsis_line_share", "max_ellipsis_line_share", True, False),
    ("too_few_alphabetic_words", "alphabetic_word_share", "min_alphabetic_word_share", False, False),
    ("repeated_lines", "duplicate_line_share", "max_duplicate_line_share", True, False),
    ("repeated_bigram", "top_bigram_share", "max_top_bigram_share", True, False),
)
REASONS = tuple(rule[0] for rule in RULES)


@dataclass(frozen=True)
class Measures:
    """One value per text."""

    num_words: F64
    mean_word_length: F64
    """Over words of scripts with spaces; NaN, which no bound refuses, where these are less than half of the words."""
    symbol_word_ratio: F64
    bullet_line_share: F64
    ellipsis_line_share: F64
    alphabetic_word_share: F64
    duplicate_line_share: F64
    top_bigram_share: F64


def name_reasons(texts: Sequence[str], is_code: Bools, bounds: dict[str, float]) -> list[str]:
    """The first broken rule of each text, empty where it passes all. A value on its bound passes."""
    measures = measure(texts)
    found = np.full(len(texts), len(RULES))
    for place, (_, name, bound, is_upper, holds_for_code) in reversed(list(enumerate(RULES))):
        values = getattr(measures, name)
        broken = values > bounds[bound] if is_upper else values < bounds[bound]
        found[broken & (holds_for_code | ~is_code)] = place
    return [(*REASONS, "")[place] for place in found]


def measure(texts: Sequence[str]) -> Measures:
    """All measures of some texts."""
    points, starts = code_points(texts)
    words = split_words(texts)
    num_words = words.counts.astype(np.float64)
    spaced = _sums(~words.is_single, words.offsets)
    spaced_length = _sums(np.where(words.is_single, 0, words.lengths), words.offsets)
    mean_length = np.divide(spaced_length, spaced, out=np.full(len(texts), np.nan), where=(spaced > 0) & (2 * spaced >= num_words))
    lines = _Lines(points, starts)
    return Measures(
        num_words=num_words,
        mean_word_length=mean_length,
        symbol_word_ratio=_share(_num_symbols(points, starts), num_words),
        bullet_line_share=_share(_sums(lines.starts_with_bullet(), lines.offsets), np.diff(lines.offsets)),
        ellipsis_line_share=_share(_sums(lines.ends_with_ellipsis(), lines.offsets), np.diff(lines.offsets)),
        alphabetic_word_share=_share(_sums(words.has_letter, words.offsets), num_words, empty=1.0),
        duplicate_line_share=lines.duplicate_share(),
        top_bigram_share=_top_bigram_share(words, np.diff(starts)),
    )


def filter_batches(batches: Iterator[pa.RecordBatch], bounds: dict[str, float]) -> Iterator[pa.RecordBatch]:
    """(id, reason) for documents (id, domain, text)."""
    import pyarrow as pa

    for batch in batches:
        texts = batch.column("text").to_pylist()
        is_code = np.isin(batch.column("domain").to_numpy(zero_copy_only=False).astype(str), (CODE, COMMIT))
        ends = np.cumsum([len(text) for text in texts]) // CHUNK_CHARS
        starts = np.flatnonzero(np.diff(ends, prepend=-1)).tolist()
        reasons: list[str] = []
        for start, stop in zip(starts, [*starts[1:], len(texts)], strict=True):
            reasons += name_reasons(texts[start:stop], is_code[start:stop], bounds)
        yield pa.RecordBatch.from_arrays([batch.column("id"), pa.array(reasons, pa.string())], names=["id", "reason"])


class _Lines:
    """The lines with visible characters of all texts, without the white space around them."""

    def __init__(self, points: NDArray[np.uint32], starts: I64) -> None:
        self.points = points
        visible = ~_is_space(points)
        text_of_point = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        line_of_point = np.cumsum(points == NEWLINE) + text_of_point
        places = np.flatnonzero(visible)
        lines = line_of_point[places]
        is_first = np.ones(len(places), dtype=bool)
        is_first[1:] = lines[1:] != lines[:-1]
        is_last = np.ones(len(places), dtype=bool)
        is_last[:-1] = is_first[1:]
        self.starts = places[is_first]
        self.stops = places[is_last] + 1
        self.offsets = np.searchsorted(self.starts, starts)

    def starts_with_bullet(self) -> Bools:
        return np.isin(self.points[self.starts], [ord(bullet) for bullet in BULLETS])

    def ends_with_ellipsis(self) -> Bools:
        last = self.points[self.stops - 1]
        dots = np.ones(len(last), dtype=bool)
        for back in (1, 2, 3):
            dots &= (self.stops - back >= self.starts) & (self.points[np.maximum(self.stops - back, 0)] == DOT)
        return (last == ELLIPSIS) | dots

    def duplicate_share(self) -> F64:
        """Share of the lines' characters in lines that stood before in the same text."""
        lengths = self.stops - self.starts
        hashes = mix(span_hashes(self.points, self.starts, self.stops))
        owners = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        order = np.lexsort((hashes, owners))
        repeated = np.zeros(len(order), dtype=bool)
        again = (hashes[order][1:] == hashes[order][:-1]) & (owners[order][1:] == owners[order][:-1])
        repeated[order[1:]] = again
        return _share(_sums(np.where(repeated, lengths, 0), self.offsets), _sums(lengths, self.offsets))


def _num_symbols(points: NDArray[np.uint32], starts: I64) -> I64:
    """Hash signs, ellipsis characters and full groups of three dots per text."""
    symbols = (points == HASH) | (points == ELLIPSIS)
    dots = np.flatnonzero(points == DOT)
    text_of_dot = np.searchsorted(starts, dots, side="right")
    begins = np.ones(len(dots), dtype=bool)
    begins[1:] = (np.diff(dots) > 1) | (np.diff(text_of_dot) > 0)
    firsts = np.flatnonzero(begins)
    groups = np.diff(np.append(firsts, len(dots))) // 3
    threes = np.zeros(len(points), dtype=np.int64)
    threes[dots[firsts]] = groups
    return _sums(symbols + threes, starts)


def _top_bigram_share(words: Words, num_chars: I64) -> F64:
    """Share of a text's characters in its most frequent word bigram (the longest of equally frequent ones); 0 where none is repeated."""
    hashes, owners = ngram_hashes(words, 2)
    starts = np.arange(max(len(words.hashes) - 1, 0))
    owner_of_word = np.repeat(np.arange(len(words.counts)), words.counts)
    starts = starts[owner_of_word[:-1] == owner_of_word[1:]] if len(starts) else starts
    lengths = words.lengths[starts] + words.lengths[starts + 1] if len(starts) else np.empty(0, dtype=np.int64)
    order = np.lexsort((hashes, owners))
    hashes, owners, lengths = hashes[order], owners[order], lengths[order]
    is_first = np.ones(len(hashes), dtype=bool)
    is_first[1:] = (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1])
    firsts = np.flatnonzero(is_first)
    counts = np.diff(np.append(firsts, len(hashes)))
    share = np.zeros(len(words.counts))
    if not len(firsts):
        return share
    best = np.lexsort((lengths[firsts], counts, owners[firsts]))
    best_owner = owners[firsts][best]
    is_best = np.append(best_owner[1:] != best_owner[:-1], True)
    chosen = best[is_best]
    chars = np.where(counts[chosen] > 1, counts[chosen] * lengths[firsts][chosen], 0)
    share[owners[firsts][chosen]] = chars
    return _share(share, num_chars)


def _is_space(points: NDArray[np.uint32]) -> Bools:
    return (points <= 32) | (points == 0x85) | (points == 0xA0) | (points == 0x3000) | ((points >= 0x2000) & (points <= 0x200A))


def _sums(values: NDArray[Any], offsets: I64) -> I64:
    """Integer sums of values[offsets[i]:offsets[i + 1]]."""
    sums = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    return sums[offsets[1:]] - sums[offsets[:-1]]


def _share(part: NDArray[Any], whole: NDArray[Any], empty: float = 0.0) -> F64:
    return np.divide(part, whole, out=np.full(len(part), empty), where=whole > 0)
