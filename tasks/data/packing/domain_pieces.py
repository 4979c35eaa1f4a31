"""The pieces of documents that the shards of a domain can give to a phase, one shard at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.packing.fill_in_middle import MIN_TOKENS, NUM_EXTRA, Rearrangement
from tasks.data.records.stored_tables import open_parquet

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from configs.files.stored_files import StoredFile

    I64 = NDArray[np.int64]

UNIT_COLUMNS = ("shard", "sequence", "offset", "length", "is_rearranged", "bucket", "visit", "is_begun")
OFFSET, LENGTH, REARRANGED, BUCKET, VISIT, BEGUN = range(2, len(UNIT_COLUMNS))
ALIKE = (1.0,)
"""Weights of a domain whose buckets no phase distinguishes."""


@dataclass(frozen=True)
class QualityBuckets:
    """Weights of the buckets, the last one for documents without a bucket; `read` gives the bucket of every sequence
    (-1 for none) of a shard's number, and is not asked where the weights are ALIKE."""

    weights: tuple[float, ...]
    read: Callable[[int], I64]

    def of_shard(self, shard: int, num_sequences: int) -> I64:
        """The index in `weights` of every sequence's bucket. Raises ValueError for a bucket without a weight."""
        if self.weights == ALIKE:
            return np.zeros(num_sequences, dtype=np.int64)
        buckets, num_weights = self.read(shard), len(self.weights) - 1
        if buckets.size and buckets.max() >= num_weights:
            raise ValueError(
                f"bucket_weights has {num_weights} weights, but documents are in bucket {buckets.max()}: give one for "
                f"each bucket"
            )
        return np.where(buckets < 0, num_weights, buckets)


@dataclass(frozen=True)
class ShardPieces:
    """The pieces of a shard: one unit (UNIT_COLUMNS up to the bucket) per piece of a document. The length of a
    rearranged unit includes its special tokens."""

    units: I64
    """Units in the order of the documents."""
    firsts: I64
    """Index of every document's first unit, and the number of units at the end; a document that is empty, or that no
    row can hold, has no unit."""
    buckets: I64
    """Index of every document's bucket in the weights."""
    num_too_long: int

    def of(self, documents: I64, visits: I64) -> I64:
        """The units (UNIT_COLUMNS) of these documents, in their order."""
        counts = self.firsts[documents + 1] - self.firsts[documents]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        lines = self.units[np.repeat(self.firsts[documents], counts) + within]
        return np.column_stack([lines, np.repeat(visits, counts), np.zeros(len(lines), dtype=np.int64)])

    def num_tokens(self, documents: I64) -> I64:
        """Tokens of these documents, which have units, without special tokens."""
        last = self.units[self.firsts[documents + 1] - 1]
        return last[:, OFFSET] + last[:, LENGTH] - NUM_EXTRA * last[:, REARRANGED]


def pieces_of(
    shard: int, lengths: I64, row_slots: int | None, may_cut: bool, chosen: Rearrangement, buckets: QualityBuckets
) -> ShardPieces:
    """The documents of a shard; with `row_slots` none longer than a row: longer ones are cut, or left out where they
    may not be cut."""
    number, bucket = np.arange(len(lengths)), buckets.of_shard(shard, len(lengths))
    is_moved = chosen.is_chosen(shard, number).astype(np.int64)
    room = lengths if row_slots is None else row_slots - NUM_EXTRA * is_moved * may_cut
    counts = -(-lengths // np.maximum(room, 1))
    if not may_cut:
        counts = np.minimum(counts, 1) * (lengths <= room)
    firsts = np.append(0, np.cumsum(counts))
    owner = np.repeat(number, counts)
    room = np.broadcast_to(room, len(lengths))[owner]
    offset = (np.arange(len(owner)) - firsts[owner]) * room
    length = np.minimum(lengths[owner] - offset, room)
    moved = is_moved[owner] * (length >= MIN_TOKENS)
    units = np.column_stack(
        [np.full(len(owner), shard), owner, offset, length + NUM_EXTRA * moved, moved, bucket[owner]]
    )
    return ShardPieces(units, firsts, bucket, int(np.count_nonzero((lengths > 0) & (counts == 0))))


def read_buckets(sidecar: StoredFile) -> I64:
    """The quality bucket of every sequence of a shard, in their order."""
    with open_parquet(sidecar) as file:
        table = file.read(["sequence", "quality_bucket"]).sort_by("sequence")
    return table["quality_bucket"].to_numpy().astype(np.int64)
