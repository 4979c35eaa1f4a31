"""The pieces of documents that a domain can give to a phase, and the order in which it gives them.

Documents are shuffled again in every epoch, in an order that all phases of a course share
(tasks/data/packing/course_position.py). A quality bucket of weight 3.2 advances along these orders 3.2 times as fast
as one of weight 1. So its documents are read 3.2 times as often, and none of a bucket is read again before all of it
were read. Without weights, or without a bucket, a document has weight 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.packing.course_position import DomainPosition
from tasks.data.packing.fill_in_middle import MIN_TOKENS, NUM_EXTRA, Rearrangement
from tasks.data.records.stored_tables import open_parquet

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from configs.files.stored_files import StoredFile

    I64 = NDArray[np.int64]

UNIT_COLUMNS = ("shard", "sequence", "offset", "length", "is_rearranged", "document", "visit")
DOCUMENT, VISIT = UNIT_COLUMNS.index("document"), UNIT_COLUMNS.index("visit")
ALIKE = (1.0,)
"""Weights of a domain whose buckets no phase distinguishes."""


@dataclass(frozen=True)
class QualityBuckets:
    """Weights of the buckets, the last one for documents without a bucket, and the bucket of every sequence (-1 for
    none) by number of the shard; no shard is listed where the weights are ALIKE."""

    weights: tuple[float, ...]
    by_shard: dict[int, I64]

    def of_shard(self, shard: int, num_sequences: int) -> I64:
        """The index in `weights` of every sequence's bucket. Raises ValueError for a bucket without a weight."""
        if self.weights == ALIKE:
            return np.zeros(num_sequences, dtype=np.int64)
        buckets, num_weights = self.by_shard[shard], len(self.weights) - 1
        if buckets.size and buckets.max() >= num_weights:
            raise ValueError(
                f"bucket_weights has {num_weights} weights, but documents are in bucket {buckets.max()}: give one for "
                f"each bucket"
            )
        return np.where(buckets < 0, num_weights, buckets)


@dataclass(frozen=True)
class Pieces:
    """The pieces of a domain: one unit (shard, sequence, offset, length, whether it is rearranged) per piece of a
    document. The length of a rearranged unit includes its special tokens."""

    units: I64
    """Units; those of one document together, documents in the order of the shards."""
    firsts: I64
    """Index of every document's first unit, and the number of units at the end; a document that no row can hold has no
    unit."""
    buckets: I64
    """Index in `weights` of every document's bucket."""
    weights: tuple[float, ...]
    num_tokens: int
    """Tokens of one epoch: each piece counts as often as its bucket weighs."""
    num_too_long: int

    @property
    def num_documents(self) -> int:
        return len(self.buckets)


def pieces_of(
    own: list[int],
    lengths: list[I64],
    row_slots: int | None,
    may_cut: bool,
    chosen: Rearrangement,
    buckets: QualityBuckets,
) -> Pieces:
    """The documents of a domain's shards; with `row_slots` none longer than a row: longer ones are cut, or left out
    where they may not be cut."""
    documents = np.concatenate(
        [np.zeros((0, 6), dtype=np.int64), *(_documents(n, lengths[n], chosen, buckets) for n in own)]
    )
    documents = documents[documents[:, 3] > 0]
    units, bucket = documents[:, :5], documents[:, 5]
    counts = np.ones(len(units), dtype=np.int64)
    if row_slots is not None and may_cut:
        room = row_slots - NUM_EXTRA * units[:, 4]
        counts = -(-units[:, 3] // room)
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        units, room = np.repeat(units, counts, axis=0), np.repeat(room, counts)
        units[:, 2] = numbers * room
        units[:, 3] = np.minimum(units[:, 3] - units[:, 2], room)
    elif row_slots is not None:
        counts = (units[:, 3] <= row_slots).astype(np.int64)
        units = units[counts == 1]
    units[units[:, 3] < MIN_TOKENS, 4] = 0
    units[:, 3] += NUM_EXTRA * units[:, 4]
    tokens = np.bincount(np.repeat(bucket, counts), weights=units[:, 3], minlength=len(buckets.weights))
    firsts = np.append(0, np.cumsum(counts))
    return Pieces(
        units, firsts, bucket, buckets.weights, int(tokens @ buckets.weights), int(np.count_nonzero(counts == 0))
    )


def ordered_units(domain: str, pieces: Pieces, position: DomainPosition, num_tokens: int, seed: int) -> I64:
    """Units (UNIT_COLUMNS) from a position on, in the order in which they are read, for as many epochs as the tokens
    need: first the waiting documents, then the buckets in parallel, each at its pace."""
    size = pieces.num_documents
    order_of = _orders(domain, size, seed)
    visits = np.array(position.waiting, dtype=np.int64)
    documents = np.array(
        [order_of(epoch)[index] for epoch, index in (divmod(visit, size) for visit in position.waiting)], dtype=np.int64
    )
    is_wanted = np.array(pieces.weights)[pieces.buckets[documents]] > 0
    parts = [_units_of(pieces, documents[is_wanted], visits[is_wanted])]
    held = int(parts[0][:, 3].sum())
    for epoch in count():
        if held >= num_tokens:
            return np.concatenate(parts)
        parts.append(_units_of(pieces, *_one_epoch(pieces, position, epoch, order_of)))
        held += int(parts[-1][:, 3].sum())
    raise AssertionError("epochs do not end")


def _one_epoch(pieces: Pieces, position: DomainPosition, epoch: int, order_of: Callable[[int], I64]) -> tuple[I64, I64]:
    """Documents and their visits of one epoch from the position on, in which a bucket is read as often as it weighs."""
    size = pieces.num_documents
    parts: list[tuple[I64, I64, NDArray[np.float64]]] = []
    for bucket, (weight, first) in enumerate(zip(pieces.weights, position.next_visits, strict=True)):
        start, stop = (first + math.ceil(number * size * weight) for number in (epoch, epoch + 1))
        for turn in range(start // size, -(-stop // size) if weight else 0):
            visits = np.arange(max(start, turn * size), min(stop, (turn + 1) * size))
            documents = order_of(turn)[visits - turn * size]
            own = pieces.buckets[documents] == bucket
            parts.append((documents[own], visits[own], (visits[own] - first) / weight))
    documents, visits, times = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((visits, times))
    return documents[order], visits[order]


def _units_of(pieces: Pieces, documents: I64, visits: I64) -> I64:
    counts = np.diff(pieces.firsts)[documents]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    lines = pieces.units[np.repeat(pieces.firsts[:-1][documents], counts) + within]
    return np.column_stack([lines, np.repeat(documents, counts), np.repeat(visits, counts)])


def _orders(domain: str, num_documents: int, seed: int) -> Callable[[int], I64]:
    """The documents of a domain in the order of an epoch."""

    @cache
    def order_of(epoch: int) -> I64:
        digest = hashlib.sha256(f"{seed} {domain} {epoch}".encode()).digest()
        return np.random.Generator(np.random.Philox(int.from_bytes(digest[:8], "big"))).permutation(num_documents)

    return order_of


def read_buckets(sidecar: StoredFile) -> I64:
    """The quality bucket of every sequence of a shard, in their order."""
    with open_parquet(sidecar) as file:
        table = file.read(["sequence", "quality_bucket"]).sort_by("sequence")
    return table["quality_bucket"].to_numpy().astype(np.int64)


def _documents(number: int, lengths: I64, chosen: Rearrangement, buckets: QualityBuckets) -> I64:
    """Units of whole documents, without the special tokens, and their buckets."""
    sequences = np.arange(len(lengths))
    is_chosen, bucket = chosen.is_chosen(number, sequences), buckets.of_shard(number, len(lengths))
    return np.column_stack([np.full(len(lengths), number), sequences, 0 * sequences, lengths, is_chosen, bucket])
