"""How much of a text repeats itself in word n-grams (Rae et al. 2021, table A1). Runs in executors: imports no Spark.

An n-gram can only be repeated where the (n-1)-grams at its place and behind it are, so each size looks at what the last one left:
in prose one sort of all bigrams, and hardly anything above.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tasks.data.words import BASE, Words, mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]
    F64 = NDArray[np.float64]
    Bools = NDArray[np.bool_]

TOP_SIZES = (2, 3, 4)
COVERED_SIZES = (5, 6, 7, 8, 9, 10)


def top_ngram_name(size: int) -> str:
    return f"top_{size}gram_share"


def repeated_ngrams_name(size: int) -> str:
    return f"repeated_{size}grams_share"


def measure_repetition(words: Words, num_chars: I64) -> dict[str, F64]:
    """Of 2 to 4 words: share of a text's characters in its most frequent n-gram (the longest of equally frequent ones, with its inner
    spaces); 0 where none is repeated. Of 5 to 10: share of the characters in words of n-grams that stood before in the text, no word
    counted twice."""
    num_words = len(words.hashes)
    owner = np.repeat(np.arange(len(words.counts)), words.counts)
    raw = words.hashes.copy()
    repeated = np.ones(num_words, dtype=bool)
    length_sums = np.concatenate(([0], np.cumsum(words.lengths)))
    found: dict[str, F64] = {}
    for size in range(TOP_SIZES[0], COVERED_SIZES[-1] + 1):
        starts = np.flatnonzero(repeated[:-1] & repeated[1:])
        starts = starts[starts <= num_words - size]
        starts = starts[owner[starts] == owner[starts + size - 1]]
        raw[starts] = raw[starts] * BASE + words.hashes[starts + size - 1]
        order, firsts = _groups(mix(raw[starts]), owner[starts])
        counts = np.diff(np.append(firsts, len(order)))
        kept = np.repeat(counts > 1, counts)
        repeated[:] = False
        repeated[starts[order[kept]]] = True
        if size in TOP_SIZES:
            lengths = length_sums[starts[order[firsts]] + size] - length_sums[starts[order[firsts]]] + size - 1
            chars = _most_frequent(owner[starts[order[firsts]]], counts, lengths, len(words.counts))
            found[top_ngram_name(size)] = _share(chars, num_chars)
        else:
            is_again = kept.copy()
            is_again[firsts] = False
            chars = _covered(starts[order[is_again]], size, words, length_sums)
            found[repeated_ngrams_name(size)] = _share(chars, num_chars)
    return found


def _groups(hashes: NDArray[np.uint64], owners: I64) -> tuple[I64, I64]:
    """An order in which equal n-grams of one text follow one another as they stand in it, and where each group begins in that order.

    Owners ascend already, so a stable sort by hash alone leaves them ascending among equal hashes."""
    order = np.argsort(hashes, kind="stable")
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (hashes[order[1:]] != hashes[order[:-1]]) | (owners[order[1:]] != owners[order[:-1]])
    return order, np.flatnonzero(is_first)


def _most_frequent(owners: I64, counts: I64, lengths: I64, num_texts: int) -> I64:
    """Characters in the most frequent repeated n-gram of each text."""
    chars = np.zeros(num_texts, dtype=np.int64)
    several = np.flatnonzero(counts > 1)
    owners, counts, lengths = owners[several], counts[several], lengths[several]
    best = np.lexsort((lengths, counts, owners))
    chosen = best[np.append(owners[best][1:] != owners[best][:-1], True)] if len(best) else best
    chars[owners[chosen]] = counts[chosen] * lengths[chosen]
    return chars


def _covered(starts: I64, size: int, words: Words, length_sums: I64) -> I64:
    """Characters of the words that lie in n-grams which start here, per text."""
    covered = np.unique((starts[:, None] + np.arange(size)).ravel())
    sums = np.concatenate(([0], np.cumsum(words.lengths[covered])))
    edges = np.searchsorted(covered, words.offsets)
    return sums[edges[1:]] - sums[edges[:-1]]


def _share(part: I64, whole: I64) -> F64:
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)
