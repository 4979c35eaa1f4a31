"""Measures how much of a text repeats itself in word n-grams (Rae et al. 2021, table A1).

An n-gram can only be repeated where the (n-1)-grams at its position and after it are. So each size examines only
positions that the size before left: in prose that is one sort of all bigrams, and hardly anything above.

The bounds are for words. In scripts without spaces a word of ours is a character, and five Thai characters are hardly
one word. Bounds for words would drop every Thai, Lao, Khmer and Burmese page. There an n-gram has as many characters
as carry the information of its words (`CHARS_PER_WORD`). Runs in executors: imports no Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tasks.data.text.text_lines import share, sums
from tasks.data.text.words import BASE, Words, mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]
    F64 = NDArray[np.float64]
    Bools = NDArray[np.bool_]

TOP_SIZES = (2, 3, 4)
COVERED_SIZES = (5, 6, 7, 8, 9, 10)
CHARS_PER_WORD = {"kana": 2, "southeast_asian": 5}
"""Characters per word by script: with these the Declaration of Human Rights repeats itself in Japanese, Thai, Lao,
Khmer and Burmese about as much as in 22 languages with spaces (5-grams: 0.03 to 0.06; with spaces 0.03, at most 0.10;
with single characters as words 0.21 to 0.69). Chinese needs no factor: 0.07."""
SOUTHEAST_ASIAN = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF))
KANA = (0x3040, 0x30FF)
KANA_SHARE = 0.1
"""Least share of kana among a Japanese text's words: Japanese has 0.3 and more, Chinese that quotes a name less."""


def top_ngram_name(size: int) -> str:
    return f"top_{size}gram_share"


def repeated_ngrams_name(size: int) -> str:
    return f"repeated_{size}grams_share"


def chars_per_word(words: Words, points: NDArray[np.uint32]) -> I64:
    """Number of `Words` that count as one word, per text; `points` are the code points of the joined texts."""
    first = points[words.starts]
    is_asian = np.zeros(len(first), dtype=bool)
    for low, high in SOUTHEAST_ASIAN:
        is_asian |= (first >= low) & (first <= high)
    is_kana = (first >= KANA[0]) & (first <= KANA[1])
    is_mostly_asian = 2 * sums(is_asian, words.offsets) > words.counts
    has_kana = sums(is_kana, words.offsets) > KANA_SHARE * words.counts
    return np.where(is_mostly_asian, CHARS_PER_WORD["southeast_asian"], np.where(has_kana, CHARS_PER_WORD["kana"], 1))


def measure_repetition(words: Words, num_chars: I64, factors: I64) -> dict[str, F64]:
    """Measures per text. For 2 to 4 words: share of a text's characters in its most frequent n-gram (the longest of
    equally frequent ones, with its inner spaces); 0 where none is repeated. For 5 to 10: share of the characters in
    words of n-grams that repeat an earlier one of the text, no word counted twice. `factors` (chars_per_word) lengthen
    the n-grams of their text."""
    num_words = len(words.hashes)
    owner = np.repeat(np.arange(len(words.counts)), words.counts)
    raw = words.hashes.copy()
    repeated = np.ones(num_words, dtype=bool)
    length_sums = np.concatenate(([0], np.cumsum(words.lengths)))
    spaced = np.concatenate(([0], np.cumsum(~words.is_single)))
    names = {size: top_ngram_name(size) for size in TOP_SIZES} | {
        size: repeated_ngrams_name(size) for size in COVERED_SIZES
    }
    shares = {name: np.zeros(len(words.counts)) for name in names.values()}
    present = np.unique(factors).tolist()
    for size in range(2, COVERED_SIZES[-1] * max(present, default=1) + 1):
        starts = np.flatnonzero(repeated[:-1] & repeated[1:])
        starts = starts[starts <= num_words - size]
        starts = starts[
            (owner[starts] == owner[starts + size - 1]) & (size <= COVERED_SIZES[-1] * factors[owner[starts]])
        ]
        raw[starts] = raw[starts] * BASE + words.hashes[starts + size - 1]
        order, firsts = _groups(mix(raw[starts]), owner[starts])
        counts = np.diff(np.append(firsts, len(order)))
        kept = np.repeat(counts > 1, counts)
        repeated[:] = False
        repeated[starts[order[kept]]] = True
        for factor in present:
            num_in_words, rest = divmod(size, factor)
            if rest or num_in_words not in names:
                continue
            if num_in_words in TOP_SIZES:
                begins = starts[order[firsts]]
                spaces = spaced[begins + size - 1] - spaced[begins]
                lengths = length_sums[begins + size] - length_sums[begins] + spaces
                chars = _most_frequent(owner[begins], counts, lengths, len(words.counts))
            else:
                is_again = kept.copy()
                is_again[firsts] = False
                chars = _covered(starts[order[is_again]], size, words, length_sums)
            own = factors == factor
            shares[names[num_in_words]][own] = share(chars, num_chars)[own]
    return shares


def _groups(hashes: NDArray[np.uint64], owners: I64) -> tuple[I64, I64]:
    """An order that groups equal n-grams of one text, in the order of the text, and the index at which each group
    begins.

    Owners ascend already, so a stable sort by hash leaves them ascending among equal hashes."""
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
    """Characters of the words in n-grams that begin at `starts`, per text."""
    covered = np.unique((starts[:, None] + np.arange(size)).ravel())
    return sums(words.lengths[covered], np.searchsorted(covered, words.offsets))
