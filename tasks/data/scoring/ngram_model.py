"""An n-gram language model as arrays of hashes: counts, probabilities, perplexity.

It uses interpolated Witten-Bell smoothing (Chen and Goodman 1998, section 2.6) over the words of
tasks/data/text/words.py, numbers by their length. c(hw) is the count of word w after context h, C(h) the sum and T(h)
the number of different words after it. D(h) is the pruned count after it, and h' the context without its first word:

    p(w|h) = (c(hw) + (T(h) + D(h)) p(w|h')) / (C(h) + T(h))

The shortest context shares the mass of what was pruned or never seen evenly over the known words and as many unknown
ones as training saw different words. So probabilities add up to one, and text of nothing but unknown words is the
least probable of all. With one <unk> token that follows itself, it would be the most probable.

KenLM gives the same perplexities of this model to 5e-5 and takes 1.8 times as long from text to perplexity; its
trainer, 1.7 times as fast on 3 MB of text, is in no package (benchmarks/data/ngram_model.py). Runs in executors:
imports no Spark.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.text.words import BASE, Words, mix, split_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    F64 = NDArray[np.float64]
    I64 = NDArray[np.int64]
    U64 = NDArray[np.uint64]

ROW_DTYPE = np.dtype([("hash", "<u8"), ("log_probability", "<f8"), ("log_backoff", "<f8")])
LONGEST_NUMBER = 8
"""Digits of a number from which on all numbers count as the same word."""


@dataclass(frozen=True)
class Ngrams:
    """The n-grams of a batch of texts, dense: index i of order n holds the n words from word i on."""

    hashes: list[U64]
    """Hashes per order, beginning with order 1."""
    is_whole: list[NDArray[np.bool_]]
    """Whether the n words belong to one text."""
    text_of_word: I64


@dataclass(frozen=True)
class NgramModel:
    """Rows of ROW_DTYPE sorted by hash, of all orders together."""

    rows: NDArray[np.void]
    log_unknown: float
    """Log probability of a word without a row."""
    order: int

    @cached_property
    def _shift(self) -> np.uint64:
        return np.uint64(64 - max(1, len(self.rows).bit_length()))

    @cached_property
    def _bucket_starts(self) -> I64:
        """First row of each range of leading bits: hashes are uniform, so a range holds about one."""
        leading = (self.rows["hash"] >> self._shift).astype(np.int64)
        return np.searchsorted(leading, np.arange((1 << (64 - int(self._shift))) + 1))

    @cached_property
    def _hashes(self) -> U64:
        """The rows' hashes, and a larger one at the end that no n-gram has."""
        return np.append(self.rows["hash"], np.uint64(2**64 - 1))

    def rows_of(self, hashes: U64) -> I64:
        """Row of each hash, or -1."""
        bucket = (hashes >> self._shift).astype(np.int64)
        row = self._bucket_starts[bucket]
        ahead = np.flatnonzero(self._hashes[row] < hashes)
        while len(ahead):
            row[ahead] += 1
            ahead = ahead[self._hashes[row[ahead]] < hashes[ahead]]
        return np.where((self._hashes[row] == hashes) & (row < len(self.rows)), row, -1)

    def log_probabilities(self, ngrams: Ngrams) -> F64:
        """Log probability of each word, given the words before it in its text."""
        row = self.rows_of(ngrams.hashes[0])
        result = np.where(row >= 0, self.rows["log_probability"][row], self.log_unknown)
        for order in range(2, self.order + 1):
            starts = np.flatnonzero(ngrams.is_whole[order - 1])
            context = row[starts]
            row = np.full(len(row), -1)
            row[starts] = longer = self.rows_of(ngrams.hashes[order - 1][starts])
            backoff = np.where(context >= 0, self.rows["log_backoff"][context], 0.0)
            ends = starts + order - 1
            result[ends] = np.where(longer >= 0, self.rows["log_probability"][longer], result[ends] + backoff)
        return result

    def perplexities(self, texts: Sequence[str]) -> F64:
        """Perplexity per word of each text; NaN where a text has no word."""
        ngrams = ngrams_of(texts, self.order)
        sums = np.bincount(ngrams.text_of_word, self.log_probabilities(ngrams), minlength=len(texts))
        counts = np.bincount(ngrams.text_of_word, minlength=len(texts))
        return np.exp(np.divide(-sums, counts, out=np.full(len(texts), np.nan), where=counts > 0))


@cache
def load_model(path: str, log_unknown: float, order: int) -> NgramModel:
    """The model of a file of rows, read once per process; processes of one machine share its pages."""
    return NgramModel(np.load(path, mmap_mode="r"), log_unknown, order)


def ngrams_of(texts: Sequence[str], order: int) -> Ngrams:
    """All n-grams up to an order."""
    words = split_words(texts)
    tokens = _token_hashes(words)
    text_of_word = np.repeat(np.arange(len(words.counts)), words.counts)
    raw = tokens
    hashes, is_whole = [mix(tokens)], [np.ones(len(tokens), dtype=np.bool_)]
    for size in range(2, order + 1):
        moved = np.zeros(len(tokens), dtype=np.uint64)
        same = np.zeros(len(tokens), dtype=np.bool_)
        moved[: -size + 1] = tokens[size - 1 :]
        same[: -size + 1] = text_of_word[: -size + 1] == text_of_word[size - 1 :]
        raw = raw * BASE + moved
        hashes.append(mix(raw))
        is_whole.append(same)
    return Ngrams(hashes, is_whole, text_of_word)


def _token_hashes(words: Words) -> U64:
    """Words by their hash, numbers by their number of digits."""
    lengths = np.minimum(words.lengths, LONGEST_NUMBER).astype(np.uint64)
    return np.where(words.has_letter, words.hashes, lengths)


def count_ngrams(texts: Sequence[str], order: int) -> dict[str, NDArray]:
    """The different n-grams of texts: `size`, `hash`, `context` (without its last word), `suffix` (without its first)
    and how often."""
    ngrams = ngrams_of(texts, order)
    parts = []
    for size, (hashes, is_whole) in enumerate(zip(ngrams.hashes, ngrams.is_whole, strict=True), 1):
        starts = np.flatnonzero(is_whole)
        unique, first, counts = np.unique(hashes[starts], return_index=True, return_counts=True)
        shorter = ngrams.hashes[size - 2] if size > 1 else np.zeros(len(hashes) + 1, dtype=np.uint64)
        positions = starts[first]
        parts.append(
            (
                np.full(len(unique), size),
                unique,
                shorter[positions],
                shorter[positions + 1 if size > 1 else positions],
                counts,
            )
        )
    names = ("size", "hash", "context", "suffix", "num_occurrences")
    return {name: np.concatenate(columns) for name, columns in zip(names, zip(*parts, strict=True), strict=True)}


@dataclass(frozen=True)
class NgramCounts:
    """The counts from which a model of one language is built; n-grams of two words and more may be pruned."""

    sizes: I64
    hashes: U64
    contexts: U64
    suffixes: U64
    counts: I64
    context_hashes: U64
    """Sorted hashes of contexts, at least those of all n-grams above. The next two fields count before pruning."""
    context_counts: I64
    context_types: I64


def build_model(counted: NgramCounts, order: int, min_count: int) -> NgramModel:
    """Probabilities of all kept n-grams; words with fewer than `min_count` occurrences become unknown ones."""
    rows = []
    log_unknown, hashes, probabilities = _word_probabilities(counted, min_count)
    for size in range(1, order + 1):
        if size > 1:
            hashes, probabilities = _longer_probabilities(counted, size, hashes, probabilities)
        part = np.zeros(len(hashes), dtype=ROW_DTYPE)
        part["hash"], part["log_probability"] = hashes, np.log(probabilities)
        rows.append(part)
    table = np.concatenate(rows)
    table = table[np.argsort(table["hash"], kind="stable")]
    kept = np.searchsorted(table["hash"], counted.context_hashes)
    inside = (kept < len(table)) & (table["hash"][np.minimum(kept, len(table) - 1)] == counted.context_hashes)
    table["log_backoff"][kept[inside]] = np.log(_backoffs(counted)[inside])
    return NgramModel(table, log_unknown, order)


def _word_probabilities(counted: NgramCounts, min_count: int) -> tuple[float, U64, F64]:
    is_word = counted.sizes == 1
    hashes, counts = counted.hashes[is_word], counted.counts[is_word]
    is_kept = counts >= min_count
    total, num_types = int(counts.sum()), len(counts)
    num_kept, pruned = int(is_kept.sum()), int(counts[~is_kept].sum())
    share = (pruned + num_kept) / (num_kept + num_types)
    by_hash = np.argsort(hashes[is_kept])
    probabilities = (counts[is_kept] + share) / (total + num_kept)
    return float(np.log(share / (total + num_kept))), hashes[is_kept][by_hash], probabilities[by_hash]


def _longer_probabilities(counted: NgramCounts, size: int, shorter: U64, probabilities: F64) -> tuple[U64, F64]:
    is_size = counted.sizes == size
    by_hash = np.flatnonzero(is_size)[np.argsort(counted.hashes[is_size])]
    suffix = np.searchsorted(shorter, counted.suffixes[by_hash])
    assert len(shorter) or not len(by_hash), "the suffix of a kept n-gram is at least as frequent"
    context = np.searchsorted(counted.context_hashes, counted.contexts[by_hash])
    totals = counted.context_counts[context] + counted.context_types[context]
    return counted.hashes[by_hash], counted.counts[by_hash] / totals + _backoffs(counted)[context] * probabilities[
        suffix
    ]


def _backoffs(counted: NgramCounts) -> F64:
    """Per context the probability mass of the shorter one: (T + D) / (C + T)."""
    is_longer = counted.sizes > 1
    index = np.searchsorted(counted.context_hashes, counted.contexts[is_longer])
    kept = np.bincount(index, counted.counts[is_longer], minlength=len(counted.context_hashes))
    pruned = counted.context_counts - kept
    return (counted.context_types + pruned) / (counted.context_counts + counted.context_types)
