"""Detects overlap of documents with evaluation items by runs of normalised words (quoted_words.py).

A text of at least n words protects each of its n-grams. A shorter text protects the sequence of all its words, if it
has enough of them to be no everyday phrase. Some n-grams protect nothing: those that mostly repeat themselves (rows
of zeros), those with hardly a word that has letters (tables of numbers), and those that many items share (a
benchmark's instructions). Long texts are also recognised in a quotation with changes (near_quotes.py).

Every protected run is looked up by its first words, its anchor, and then compared as a whole: one pass per length of
anchor. Runs in executors: imports no Spark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tasks.data.decontamination.near_quotes import PassageIndex, build_passages
from tasks.data.decontamination.quoted_words import normalise, quoted_words, without_operators
from tasks.data.text.text_chunks import chunk_bounds
from tasks.data.text.word_runs import NO_STARTS, Runs
from tasks.data.text.words import SINGLE_RANGES, joined_words

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from tasks.data.text.words import Words

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]

HIT_COLUMNS = "id string, item long, run long, shared string"
"""item: number of the item that a document overlaps with; run: hash of the words that they share; shared: the words as
the document writes them. A document has a row for every such run, and none where there is no overlap."""
CHUNK_CHARS = 2_000_000
MIN_WORDS_OF_TEXT = 8
"""Words of the shortest protected text: a five-word sentence occurs in honest documents by chance."""
MIN_WORDS_OF_PROBLEM = 5
"""Words of the shortest protected problem: `12 + 7 = 19` has five, signs included. Equations do not occur by chance."""
MIN_LETTER_WORDS = 2
"""Least number of words with a letter in a protected run of text."""
FILTER_SLOTS = 8
"""Slots of the first filter per protected run."""
CHARS_PER_WORD = 3
"""Characters that count as one word in scripts without spaces: 13 of them are a phrase of three Thai or six Chinese
words."""
SINGLES = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in SINGLE_RANGES) + "]")
NO_MATCHES = (NO_STARTS, NO_STARTS, np.empty(0, dtype=np.uint64), NO_STARTS, NO_STARTS)


class Protection(NamedTuple):
    """The parameters by which texts are protected."""

    min_words: int
    ngram_size: int
    with_operators: bool
    is_known_from_parts: bool = False
    """Whether a quotation with changes counts as well (near_quotes.py)."""


class ProtectedTexts(NamedTuple):
    """Texts that are protected alike, and the number of the item that each belongs to."""

    texts: list[str]
    items: list[int]
    protection: Protection


@dataclass(frozen=True)
class Probe:
    """Protected runs that begin with an anchor of one length, sorted by the anchor's hash."""

    length: int
    with_operators: bool
    anchors: U64
    lengths: I64
    wholes: U64
    """Hash of the whole run."""
    items: I64
    may_hold: NDArray[np.bool_]
    """Whether any anchor has these leading bits."""


class Hits(NamedTuple):
    """Every overlap of a batch of texts, each protected run once per text, sorted by text, then item."""

    texts: I64
    items: I64
    runs: U64
    """Hash of the run, equal in all texts that share it."""
    shared: list[str]
    """The run as the text writes it."""


@dataclass(frozen=True)
class OverlapIndex:
    """Index of all protected runs and passages."""

    probes: tuple[Probe, ...]
    passages: tuple[PassageIndex, ...]

    def hits(self, texts: Sequence[str]) -> Hits:
        """The overlaps of the texts with protected runs and passages."""
        plain = normalise(texts)
        words = quoted_words(plain)
        streams = {True: Runs(words), False: Runs(without_operators(words))}
        parts = [NO_MATCHES, *(_matches(streams[probe.with_operators], probe) for probe in self.probes)]
        parts += [_near_matches(streams[False], passages) for passages in self.passages]
        owners, items, runs, starts, stops = (np.concatenate([part[column] for part in parts]) for column in range(5))
        order = np.lexsort((starts, runs, items, owners))
        owners, items, runs, starts, stops = owners[order], items[order], runs[order], starts[order], stops[order]
        is_new = np.ones(len(runs), dtype=bool)
        is_new[1:] = (runs[1:] != runs[:-1]) | (owners[1:] != owners[:-1])
        firsts = np.flatnonzero(is_new)
        text_starts = np.concatenate(([0], np.cumsum([len(text) for text in plain], dtype=np.int64)))
        begins, ends = starts[firsts] - text_starts[owners[firsts]], stops[firsts] - text_starts[owners[firsts]]
        spans = zip(owners[firsts].tolist(), begins.tolist(), ends.tolist(), strict=True)
        return Hits(
            owners[firsts], items[firsts], runs[firsts], [plain[text][start:stop] for text, start, stop in spans]
        )

    def first_hits(self, texts: Sequence[str]) -> I64:
        """The smallest item number that each text overlaps with, or -1."""
        hits = self.hits(texts)
        smallest = np.full(len(texts), -1)
        smallest[hits.texts[::-1]] = hits.items[::-1]
        return smallest


def _matches(runs: Runs, probe: Probe) -> tuple[I64, I64, U64, I64, I64]:
    """(text, item, hash of the run, first and last character but one) of every protected run in the words."""
    words = runs.words
    starts = runs.starts(probe.length)
    anchors = runs.hashes(starts, probe.length)
    likely = np.flatnonzero(probe.may_hold[anchors >> np.uint64(65 - len(probe.may_hold).bit_length())])
    starts, anchors = starts[likely], anchors[likely]
    lows, highs = np.searchsorted(probe.anchors, anchors), np.searchsorted(probe.anchors, anchors, side="right")
    counts = highs - lows
    entries = np.repeat(lows - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    starts = np.repeat(starts, counts)
    fits = starts + probe.lengths[entries] <= words.offsets[runs.owners[starts] + 1]
    starts, entries = starts[fits], entries[fits]
    equal = runs.hashes(starts, probe.lengths[entries]) == probe.wholes[entries]
    starts, entries = starts[equal], entries[equal]
    lasts = starts + probe.lengths[entries] - 1
    stops = words.starts[lasts] + words.lengths[lasts]
    return runs.owners[starts], probe.items[entries], probe.wholes[entries], words.starts[starts], stops


def _near_matches(runs: Runs, passages: PassageIndex) -> tuple[I64, I64, U64, I64, I64]:
    """The columns of _matches for passages that are quoted with changes."""
    words, quotes = runs.words, passages.find(runs)
    lasts = quotes.stops - 1
    return (
        quotes.texts,
        quotes.items,
        quotes.keys,
        words.starts[quotes.firsts],
        words.starts[lasts] + words.lengths[lasts],
    )


def build_index(groups: Sequence[ProtectedTexts], max_items: int) -> OverlapIndex:
    """The index over texts of items; a run that several items share names the smallest item; a run of more than
    max_items items is not protected."""
    protected: dict[tuple[bool, int], list[tuple[U64, I64, U64, I64]]] = {}
    near: dict[int, list[tuple[Words, I64]]] = {}
    for texts, items, protection, chars_per_word in [part for group in groups for part in _by_script(group)]:
        for start, stop in chunk_bounds(map(len, texts), CHUNK_CHARS):
            words = quoted_words(normalise(texts[start:stop]))
            runs = Runs(words if protection.with_operators else without_operators(words))
            if protection.is_known_from_parts:
                near.setdefault(chars_per_word, []).append((runs.words, np.array(items[start:stop], dtype=np.int64)))
            for length, (anchors, lengths, wholes, owners) in _protected(runs, protection):
                numbers = np.array(items[start:stop], dtype=np.int64)[owners]
                protected.setdefault((protection.with_operators, length), []).append(
                    (anchors, lengths, wholes, numbers)
                )
    probes = (_probe(*key, parts, max_items) for key, parts in sorted(protected.items(), reverse=True))
    passages = (
        build_passages(
            joined_words([words for words, _ in parts]), np.concatenate([items for _, items in parts]), chars, max_items
        )
        for chars, parts in near.items()
    )
    return OverlapIndex(tuple(probe for probe in probes if len(probe.anchors)), tuple(passages))


def _by_script(group: ProtectedTexts) -> Iterator[tuple[list[str], list[int], Protection, int]]:
    """(texts, items, protection, characters per word): scripts without spaces, whose words are characters, need longer
    runs."""
    single = [len(SINGLES.sub("", text)) * 2 < len(text) for text in group.texts]
    size = group.protection
    longer = size._replace(min_words=size.min_words * CHARS_PER_WORD, ngram_size=size.ngram_size * CHARS_PER_WORD)
    for is_single, protection, chars in ((False, size, 1), (True, longer, CHARS_PER_WORD)):
        indices = [index for index, value in enumerate(single) if value == is_single]
        yield [group.texts[index] for index in indices], [group.items[index] for index in indices], protection, chars


def _protected(runs: Runs, protection: Protection) -> Iterator[tuple[int, tuple[U64, I64, U64, I64]]]:
    """(length of the anchor, (anchors, lengths, hashes of the whole, texts)) of n-grams, and of texts that are shorter
    than one."""
    words, size, least = runs.words, protection.ngram_size, min(protection.min_words, protection.ngram_size)
    starts = runs.starts(size)
    starts = starts[_are_distinctive(words, starts, np.full(len(starts), size), protection)]
    if len(starts):
        grams = runs.hashes(starts, size)
        yield size, (grams, np.full(len(starts), size), grams, runs.owners[starts])
    short = np.flatnonzero((words.counts >= least) & (words.counts < size))
    short = short[_are_distinctive(words, words.offsets[short], words.counts[short], protection)]
    if len(short):
        starts, lengths = words.offsets[short], words.counts[short]
        yield least, (runs.hashes(starts, least), lengths, runs.hashes(starts, lengths), short)


def _are_distinctive(words: Words, starts: I64, lengths: I64, protection: Protection) -> NDArray[np.bool_]:
    """Whether runs of words are distinctive: half of the words are new, and MIN_LETTER_WORDS have letters. Equations
    always are."""
    if protection.with_operators:
        return np.ones(len(starts), dtype=bool)
    num_new, num_lettered = (_sums_between(values, starts, lengths) for values in (_new_words(words), words.has_letter))
    return (num_new * 2 >= lengths) & (num_lettered >= MIN_LETTER_WORDS)


def _probe(with_operators: bool, length: int, parts: list[tuple[U64, I64, U64, I64]], max_items: int) -> Probe:
    anchors, wholes = np.concatenate([part[0] for part in parts]), np.concatenate([part[2] for part in parts])
    lengths, items = np.concatenate([part[1] for part in parts]), np.concatenate([part[3] for part in parts])
    order = np.lexsort((items, wholes, anchors))
    anchors, lengths, wholes, items = anchors[order], lengths[order], wholes[order], items[order]
    is_first = np.ones(len(wholes), dtype=bool)
    is_first[1:] = wholes[1:] != wholes[:-1]
    is_new_item = is_first.copy()
    is_new_item[1:] |= items[1:] != items[:-1]
    firsts = np.flatnonzero(is_first)
    kept = firsts[np.add.reduceat(is_new_item.astype(np.int64), firsts) <= max_items]
    num_bits = max(10, (len(kept) * FILTER_SLOTS).bit_length())
    may_hold = np.zeros(1 << num_bits, dtype=bool)
    may_hold[anchors[kept] >> np.uint64(64 - num_bits)] = True
    anchors, lengths, wholes, items = anchors[kept], lengths[kept], wholes[kept], items[kept]
    if (lengths == length).all():
        wholes = anchors  # one array in the broadcast, which each worker holds
    return Probe(length, with_operators, anchors, lengths, wholes, items, may_hold)


def _new_words(words: Words) -> NDArray[np.bool_]:
    """Words that differ from the two words before them."""
    is_new = np.ones(len(words.hashes), dtype=bool)
    for back in (1, 2):
        is_new[back:] &= words.hashes[back:] != words.hashes[:-back]
    return is_new


def _sums_between(values: NDArray[np.bool_], starts: I64, lengths: I64) -> I64:
    """Number of true values in values[start:start + length]."""
    sums = np.concatenate(([0], np.cumsum(values)))
    return sums[starts + lengths] - sums[starts]


def find_overlaps(batches: Iterator[pa.RecordBatch], index: Any) -> Iterator[pa.RecordBatch]:
    """HIT_COLUMNS for documents (id, text); `index` is a Spark broadcast of an OverlapIndex."""
    import pyarrow as pa

    for batch in batches:
        texts = batch.column("text").to_pylist()
        for start, stop in chunk_bounds(map(len, texts), CHUNK_CHARS):
            hits = index.value.hits(texts[start:stop])
            ids = batch.column("id").take(pa.array(hits.texts + start))
            columns = [
                ids,
                pa.array(hits.items),
                pa.array(hits.runs.view(np.int64)),
                pa.array(hits.shared, pa.string()),
            ]
            yield pa.RecordBatch.from_arrays(columns, names=["id", "item", "run", "shared"])
