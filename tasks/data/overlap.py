"""Overlap of documents with evaluation items, by n-grams of normalised words. Runs in executors: imports no Spark.

An item of at least n words protects each of its n-grams; a shorter one protects the sequence of all its words, if it has enough of
them to be no everyday phrase. N-grams that mostly repeat themselves (rows of zeros, rules) protect nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.data.words import Words, ngram_hashes, split_words

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]

HIT_COLUMNS = "id string, item long"
CHUNK_CHARS = 2_000_000
MIN_WORDS_OF_TEXT = 8
"""Shorter evaluation texts (a five-word sentence) occur in honest documents by chance."""
MIN_WORDS_OF_PROBLEM = 5
"""`12 + 7 = 19` has five words, signs included; equations do not occur by chance."""


@dataclass(frozen=True)
class OverlapIndex:
    """Protected n-grams by length: sorted hashes, and the number of the first item that holds each."""

    grams: dict[int, tuple[U64, I64]]

    def first_hits(self, texts: Sequence[str]) -> I64:
        """The smallest item number that each text overlaps with, or -1."""
        words = split_words(texts, with_operators=True)
        none = np.iinfo(np.int64).max
        found = np.full(len(texts), none)
        for length, (protected, items) in self.grams.items():
            hashes, owners = ngram_hashes(words, length)
            places = np.minimum(np.searchsorted(protected, hashes), len(protected) - 1)
            hit = protected[places] == hashes
            np.minimum.at(found, owners[hit], items[places[hit]])
        return np.where(found == none, -1, found)


def build_index(groups: Sequence[tuple[Sequence[str], int]], ngram_size: int) -> OverlapIndex:
    """The index over groups of (texts, smallest number of words that counts); items are numbered through all groups in order."""
    found: dict[int, list[tuple[U64, I64]]] = {}
    first_item = 0
    for texts, min_words in groups:
        for start, stop in chunk_bounds(texts):
            words = split_words(texts[start:stop], with_operators=True)
            for length in range(min(min_words, ngram_size), ngram_size + 1):
                hashes, owners = _protected(words, length, whole_only=length < ngram_size)
                if len(hashes):
                    found.setdefault(length, []).append((hashes, owners + first_item + start))
        first_item += len(texts)
    return OverlapIndex({length: _smallest_items(parts) for length, parts in sorted(found.items(), reverse=True)})


def _protected(words: Words, length: int, whole_only: bool) -> tuple[U64, I64]:
    hashes, owners = ngram_hashes(words, length)
    kept = words.counts[owners] == length if whole_only else _num_new_words(words, length) * 2 >= length
    return hashes[kept], owners[kept]


def _num_new_words(words: Words, length: int) -> I64:
    """For each n-gram the number of its words that differ from the two words before them."""
    is_new = np.ones(len(words.hashes), dtype=np.int64)
    for back in (1, 2):
        is_new[back:] &= words.hashes[back:] != words.hashes[:-back]
    sums = np.concatenate(([0], np.cumsum(is_new)))
    owner_of_word = np.repeat(np.arange(len(words.counts)), words.counts)
    starts = np.arange(max(len(words.hashes) - length + 1, 0))
    starts = starts[owner_of_word[starts] == owner_of_word[starts + length - 1]] if len(starts) else starts
    return sums[starts + length] - sums[starts]


def _smallest_items(parts: list[tuple[U64, I64]]) -> tuple[U64, I64]:
    hashes = np.concatenate([part[0] for part in parts])
    items = np.concatenate([part[1] for part in parts])
    order = np.lexsort((items, hashes))
    hashes, items = hashes[order], items[order]
    is_first = np.ones(len(hashes), dtype=bool)
    is_first[1:] = hashes[1:] != hashes[:-1]
    return hashes[is_first], items[is_first]


def chunk_bounds(texts: Sequence[str]) -> list[tuple[int, int]]:
    """(start, stop) of runs of texts of about CHUNK_CHARS characters."""
    if not texts:
        return []
    ends = np.cumsum([len(text) for text in texts]) // CHUNK_CHARS
    starts = np.flatnonzero(np.diff(ends, prepend=-1)).tolist()
    return list(zip(starts, [*starts[1:], len(texts)], strict=True))


def find_overlaps(batches: Iterator[pa.RecordBatch], index: Any) -> Iterator[pa.RecordBatch]:
    """HIT_COLUMNS for documents (id, text); `index` is a Spark broadcast of an OverlapIndex."""
    import pyarrow as pa

    for batch in batches:
        texts = batch.column("text").to_pylist()
        hits = [index.value.first_hits(texts[start:stop]) for start, stop in chunk_bounds(texts)]
        items = pa.array(np.concatenate(hits) if hits else np.empty(0, dtype=np.int64))
        yield pa.RecordBatch.from_arrays([batch.column("id"), items], names=["id", "item"])
