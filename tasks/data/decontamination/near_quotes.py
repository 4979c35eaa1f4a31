"""Detects passages of evaluation items that documents quote with small changes.

A long item is protected in passages. Runs of a few words (shingles) that a document shares with a passage, close
together, make it a candidate. Then the words of both are aligned in order. Each word has a weight by how few items
hold it. A passage is quoted if the document has MIN_SHARE of its weight: with typing errors, filler words, words
replaced, lines broken elsewhere. Its numbers must be there as well: the same problem with other numbers is another
problem.

Runs in executors: imports no Spark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tasks.data.decontamination.quoted_words import choice_hash
from tasks.data.text.word_runs import NO_STARTS, Runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tasks.data.text.words import Words

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]

MIN_WORDS = 16
"""Words of the shortest text that can be recognised by some of its words."""
PASSAGE_WORDS = 96
"""Largest number of words of a passage: a longer text is cut, and any part of it counts. A shorter text counts as a
whole, since parts such as `Find m + n` are common."""
SHINGLE_WORDS = 3
MIN_SHINGLES = 2
"""Least number of shingles that a candidate shares with a passage."""
MIN_SHINGLE_SHARE = 0.12
"""Least share of a passage's rare shingles that a candidate shares. Replacing one word in five leaves half of them."""
MIN_SHARE = 0.6
MIN_FORMULA_SHARE = 0.9
"""Least share of a passage's numbers and single letters that a quotation has, in order."""
MATHS_SHARE = 0.2
"""Least share of numbers and single letters among the words of mathematics. In other text, `a` is an article and `A.` a
choice."""
STRETCH = 1.5
"""Largest number of a document's words per word of a quoted passage."""
BATCH = 1024
FILTER_SLOTS = 8
"""Slots of the first filter per shingle."""
_LOW_BITS = np.uint64(32)


class NearQuotes(NamedTuple):
    """Quotations in a batch of texts: text, item, hash of the passage, first word, word after the last."""

    texts: I64
    items: I64
    keys: U64
    firsts: I64
    stops: I64


NO_QUOTES = NearQuotes(NO_STARTS, NO_STARTS, np.empty(0, dtype=np.uint64), NO_STARTS, NO_STARTS)


@dataclass(frozen=True)
class PassageIndex:
    """Protected passages, and their shingles sorted by hash."""

    size: int
    """Words per shingle."""
    shingles: U64
    owners: NDArray[np.int32]
    """Passage of each shingle."""
    positions: NDArray[np.int32]
    """Position of each shingle in its passage."""
    may_hold: NDArray[np.bool_]
    """Whether any shingle has these leading bits."""
    needed: I64
    """Number of shingles that make a passage a candidate."""
    reaches: I64
    """Number of a document's words in which a passage may be quoted."""
    offsets: I64
    """Words of passage i are words[offsets[i]:offsets[i + 1]]."""
    words: U64
    weights: NDArray[np.float32]
    is_formula: NDArray[np.float32]
    """1 for numbers and single letters."""
    needed_weights: NDArray[np.float32]
    """Least weight of a quotation of each passage."""
    needed_formulas: NDArray[np.float32]
    """Least number of its numbers and single letters in a quotation."""
    items: I64
    keys: U64

    def find(self, runs: Runs) -> NearQuotes:
        """The passages that a batch of texts quotes, each once per text, at its best quotation."""
        starts = runs.starts(self.size)
        if not len(self.shingles) or not len(starts):
            return NO_QUOTES
        hashes = runs.hashes(starts, self.size)
        likely = np.flatnonzero(self.may_hold[hashes >> np.uint64(65 - len(self.may_hold).bit_length())])
        starts, hashes = starts[likely], hashes[likely]
        lows, highs = np.searchsorted(self.shingles, hashes), np.searchsorted(self.shingles, hashes, side="right")
        counts = highs - lows
        entries = np.repeat(lows - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        passages, firsts = self._candidates(
            self.owners[entries].astype(np.int64), np.repeat(starts, counts), self.positions[entries], runs
        )
        parts = [
            self._quoted(passages[at : at + BATCH], firsts[at : at + BATCH], runs)
            for at in range(0, len(passages), BATCH)
        ]
        return NearQuotes(*(np.concatenate(columns) for columns in zip(*parts, strict=True))) if parts else NO_QUOTES

    def _candidates(self, passages: I64, at: I64, positions: NDArray[np.int32], runs: Runs) -> tuple[I64, I64]:
        """(passage, first word of its earliest possible quotation), one per passage and text, where most of the
        passage's shingles are close together."""
        rows = (passages.astype(np.uint64) << _LOW_BITS) | at.astype(np.uint64)
        order = np.argsort(rows, kind="stable")
        rows, passages, at, positions = rows[order], passages[order], at[order], positions[order]
        texts = runs.owners[at]
        ends = np.minimum(at + self.reaches[passages], runs.words.offsets[texts + 1])
        counts = np.searchsorted(rows, (passages.astype(np.uint64) << _LOW_BITS) | ends.astype(np.uint64)) - np.arange(
            len(rows)
        )
        enough = np.flatnonzero(counts >= self.needed[passages])
        enough = enough[np.lexsort((at[enough], -counts[enough], texts[enough], passages[enough]))]
        passages, at, positions, texts = passages[enough], at[enough], positions[enough], texts[enough]
        is_best = np.ones(len(enough), dtype=bool)
        is_best[1:] = (passages[1:] != passages[:-1]) | (texts[1:] != texts[:-1])
        earliest = at - np.ceil(positions * STRETCH).astype(np.int64)
        return passages[is_best], np.maximum(earliest, runs.words.offsets[texts])[is_best]

    def _quoted(self, passages: I64, firsts: I64, runs: Runs) -> NearQuotes:
        """The candidates that have enough of the passage's words, in order."""
        words = runs.words
        texts = runs.owners[firsts]
        lengths, reaches = np.diff(self.offsets)[passages], self.reaches[passages]
        columns = np.arange(reaches.max())
        inside = (columns < reaches[:, None]) & (firsts[:, None] + columns < words.offsets[texts + 1][:, None])
        given = np.where(
            inside, words.hashes[np.minimum(firsts[:, None] + columns, len(words.hashes) - 1)], np.uint64(0)
        )
        best, formulas = (np.zeros((len(passages), len(columns) + 1), dtype=np.float32) for _ in range(2))
        touched = np.zeros(given.shape, dtype=bool)
        for position in range(lengths.max()):
            at = self.offsets[passages] + np.minimum(position, lengths - 1)
            equal = (given == self.words[at][:, None]) & (position < lengths)[:, None]
            _align(best, equal, self.weights[at])
            _align(formulas, equal, self.is_formula[at])
            touched |= equal
        is_quoted = (best[:, -1] >= self.needed_weights[passages]) & (formulas[:, -1] >= self.needed_formulas[passages])
        kept = np.flatnonzero(is_quoted)
        begins, ends = touched[kept].argmax(axis=1), len(columns) - touched[kept][:, ::-1].argmax(axis=1)
        return NearQuotes(
            texts[kept],
            self.items[passages[kept]],
            self.keys[passages[kept]],
            firsts[kept] + begins,
            firsts[kept] + ends,
        )


def _align(best: NDArray[np.float32], equal: NDArray[np.bool_], weights: NDArray[np.float32]) -> None:
    """Add one row of the longest common subsequence for all candidates: best[:, j] is its weight in the words before
    j."""
    np.maximum.accumulate(np.maximum(best[:, 1:], best[:, :-1] + equal * weights[:, None]), axis=1, out=best[:, 1:])


def build_passages(words: Words, items: I64, chars_per_word: int, max_items: int) -> PassageIndex:
    """The index over the words of protected texts; each text belongs to an item. Shingles and passages that more than
    max_items items share protect nothing."""
    runs = Runs(words)
    firsts, lengths, owners = _cut(words, items, chars_per_word)
    keys = runs.hashes(firsts, lengths)
    order = np.lexsort((owners, keys))
    firsts, lengths, owners, keys = firsts[order], lengths[order], owners[order], keys[order]
    is_first = np.ones(len(keys), dtype=bool)
    is_first[1:] = keys[1:] != keys[:-1]
    held_by = _distinct(np.cumsum(is_first) - 1, owners)
    kept = np.flatnonzero(is_first)[held_by <= max_items]
    firsts, lengths, owners, keys = firsts[kept], lengths[kept], owners[kept], keys[kept]
    size = SHINGLE_WORDS if chars_per_word == 1 else SHINGLE_WORDS * 2
    shingles, holders, positions = _shingles(runs, firsts, lengths, owners, size, max_items)
    num_shingles = np.bincount(holders, minlength=len(firsts))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    own = np.repeat(firsts - offsets[:-1], lengths) + np.arange(offsets[-1])
    num_bits = max(10, (len(shingles) * FILTER_SLOTS).bit_length())
    may_hold = np.zeros(1 << num_bits, dtype=bool)
    may_hold[shingles >> np.uint64(64 - num_bits)] = True
    weights = _weights(words, items)[own]
    is_formula = _formulas(words, own, offsets)
    return PassageIndex(
        size=size,
        shingles=shingles,
        owners=holders.astype(np.int32),
        positions=positions.astype(np.int32),
        may_hold=may_hold,
        needed=np.maximum(np.ceil(num_shingles * MIN_SHINGLE_SHARE).astype(np.int64), MIN_SHINGLES),
        offsets=offsets,
        reaches=np.ceil(lengths * STRETCH).astype(np.int64),
        words=words.hashes[own],
        weights=weights,
        is_formula=is_formula,
        needed_weights=_least(MIN_SHARE, weights, offsets),
        needed_formulas=_least(MIN_FORMULA_SHARE, is_formula, offsets),
        items=owners,
        keys=keys,
    )


def _formulas(words: Words, own: I64, offsets: I64) -> NDArray[np.float32]:
    """1 for the words of passages that are numbers or single letters; letters of choices (quoted_words.py) count in
    mathematics only."""
    is_formula = (~words.has_letter | ((words.lengths == 1) & ~words.is_single))[own]
    lengths = np.diff(offsets)
    is_maths = np.diff(np.concatenate(([0], np.cumsum(is_formula)))[offsets]) >= MATHS_SHARE * lengths
    return (is_formula & (np.repeat(is_maths, lengths) | (words.hashes[own] != choice_hash()))).astype(np.float32)


def _least(share: float, values: NDArray[np.float32], offsets: I64) -> NDArray[np.float32]:
    """`share` of each passage's sum of `values`."""
    sums = np.add.reduceat(values, offsets[:-1]) if len(values) else values
    return (share * sums).astype(np.float32)


def _cut(words: Words, items: I64, chars_per_word: int) -> tuple[I64, I64, I64]:
    """(first word, number of words, item) of the passages: texts in parts of equal length. Tables of numbers have
    no passages."""
    long = np.flatnonzero(words.counts >= MIN_WORDS * chars_per_word)
    num_parts = -(-words.counts[long] // (PASSAGE_WORDS * chars_per_word))
    texts = np.repeat(long, num_parts)
    part = np.arange(len(texts)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    counts, parts = words.counts[texts], np.repeat(num_parts, num_parts)
    begins, ends = part * counts // parts, (part + 1) * counts // parts
    firsts, lengths = words.offsets[texts] + begins, ends - begins
    letters = np.concatenate(([0], np.cumsum(words.has_letter)))
    lettered = np.flatnonzero((letters[firsts + lengths] - letters[firsts]) * 2 >= lengths)
    return firsts[lettered], lengths[lettered], items[texts][lettered]


def _shingles(runs: Runs, firsts: I64, lengths: I64, owners: I64, size: int, max_items: int) -> tuple[U64, I64, I64]:
    """(hash, passage, position in it) of the passages' shingles that few items hold, sorted by hash."""
    counts = lengths - size + 1
    passages = np.repeat(np.arange(len(firsts)), counts)
    positions = np.arange(len(passages)) - np.repeat(np.cumsum(counts) - counts, counts)
    hashes = runs.hashes(firsts[passages] + positions, size)
    order = np.lexsort((owners[passages], hashes))
    hashes, passages, positions = hashes[order], passages[order], positions[order]
    is_first = np.ones(len(hashes), dtype=bool)
    is_first[1:] = hashes[1:] != hashes[:-1]
    number = np.cumsum(is_first) - 1
    rare = (_distinct(number, owners[passages]) <= max_items)[number] if len(number) else np.zeros(0, dtype=bool)
    return hashes[rare], passages[rare], positions[rare]


def _distinct(groups: I64, members: I64) -> I64:
    """Number of different members of each group; rows are sorted by group, then member."""
    if not len(groups):
        return NO_STARTS
    is_new = np.ones(len(groups), dtype=np.int64)
    is_new[1:] = (groups[1:] != groups[:-1]) | (members[1:] != members[:-1])
    return np.bincount(groups, weights=is_new).astype(np.int64)


def _weights(words: Words, items: I64) -> NDArray[np.float32]:
    """Weight of every word: the logarithm of the number of items per item that holds it."""
    owners = np.repeat(items, words.counts)
    order = np.lexsort((owners, words.hashes))
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = words.hashes[order][1:] != words.hashes[order][:-1]
    number = np.cumsum(is_first) - 1
    held_by = _distinct(number, owners[order])
    weights = np.zeros(len(order), dtype=np.float32)
    weights[order] = np.log((len(np.unique(items)) + 1) / held_by)[number]
    return weights
