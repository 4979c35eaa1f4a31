"""A domain of a phase: how much it holds, and its pieces in the order in which they are read, a bounded number at once.

A course has one order of a domain's documents per epoch (course_position.py). It is computed, not stored: the domain's
shards are shuffled, and the documents inside each. A shard holds the documents of a range of ids, which are hashes: it
is a random sample of the domain. So pieces that are read together come from few shards. Rows are shuffled again
(packed_rows.py).

A quality bucket of weight 3.2 advances along these orders 3.2 times as fast as one of weight 1. So its documents are
read 3.2 times as often, and none of a bucket is read again before all of it were read. Without weights, or without a
bucket, a document has weight 1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tasks.data.packing.course_position import DomainPosition
from tasks.data.packing.domain_pieces import BEGUN, BUCKET, LENGTH, UNIT_COLUMNS, VISIT, ShardPieces
from tasks.data.packing.row_order import shuffled_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]

T = TypeVar("T")
R = TypeVar("R")
CHUNK_UNITS = 1 << 17
"""About as many pieces are put in order at once, and no more than an epoch of documents of weight 1."""
CHUNKS_AHEAD = 2
"""Chunks of a domain that are made before they are asked for."""
NO_UNITS = np.zeros((0, len(UNIT_COLUMNS)), dtype=np.int64)


@dataclass(frozen=True)
class Totals:
    """What a shard has, or all shards of a domain."""

    num_documents: int
    num_units: int
    num_too_long: int
    tokens: NDArray[np.float64]
    """Tokens by bucket."""

    @staticmethod
    def of(pieces: ShardPieces, num_buckets: int) -> Totals:
        lengths, buckets = pieces.units[:, LENGTH], pieces.units[:, BUCKET]
        tokens = np.bincount(buckets, weights=lengths, minlength=num_buckets)
        return Totals(len(pieces.buckets), len(pieces.units), pieces.num_too_long, tokens.astype(np.float64))


@dataclass(frozen=True)
class DomainPieces:
    """A domain's shards, as a phase reads them."""

    name: str
    seed: int
    shards: tuple[int, ...]
    """Their numbers."""
    totals: tuple[Totals, ...]
    """Of each shard."""
    weights: tuple[float, ...]
    """Of the quality buckets."""
    pieces: Callable[[int], ShardPieces]
    """Reads the pieces of a shard's number; called from several threads."""

    @cached_property
    def num_documents(self) -> int:
        return sum(total.num_documents for total in self.totals)

    @cached_property
    def num_units(self) -> int:
        return sum(total.num_units for total in self.totals)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of one epoch: each piece counts as often as its bucket weighs."""
        return int(np.array(self.weights) @ self._tokens)

    @cached_property
    def _tokens(self) -> NDArray[np.float64]:
        """Tokens by bucket."""
        return sum((total.tokens for total in self.totals), np.zeros(len(self.weights)))

    @property
    def tokens_per_unit(self) -> float:
        """On average, at least 1."""
        return max(1.0, float(self._tokens.sum()) / max(1, self.num_units))

    @cached_property
    def _epoch(self) -> Callable[[int], tuple[I64, I64]]:
        """Indexes of the shards in an epoch's order, and the index in it of each one's first document and of its
        end."""
        counts = np.array([total.num_documents for total in self.totals])

        @lru_cache(maxsize=16)
        def epoch(number: int) -> tuple[I64, I64]:
            order = shuffled_rows(np.arange(len(counts)), len(counts), f"{self.seed} {self.name} {number}")
            return order, np.append(0, np.cumsum(counts[order]))

        return epoch

    def documents(self, first: int, stop: int) -> Iterator[tuple[int, I64, I64]]:
        """Shard, sequences and visits of the visits first..stop-1, by shard. A visit is an index into the orders of all
        epochs, laid end to end."""
        size = self.num_documents
        for epoch in range(first // size, -(-stop // size)):
            order, firsts = self._epoch(epoch)
            low, high = max(first - epoch * size, 0), min(stop - epoch * size, size)
            begin, end = np.searchsorted(firsts, low, side="right") - 1, np.searchsorted(firsts, high)
            for index in range(int(begin), int(end)):
                shard, start = self.shards[order[index]], int(firsts[index])
                within = np.arange(max(low, start), min(high, int(firsts[index + 1]))) - start
                key = f"{self.seed} {self.name} {epoch} {shard}"
                sequences = shuffled_rows(within, int(firsts[index + 1]) - start, key)
                yield shard, sequences, epoch * size + start + within

    def chunks(self, position: DomainPosition, threads: Executor) -> Iterator[I64]:
        """Units (UNIT_COLUMNS) from a position on, without an end: first the waiting documents, then the buckets in
        parallel, each at its pace. The threads make some ahead."""
        waiting = [
            self._units(shard, sequences, visits)
            for visit in position.waiting
            for shard, sequences, visits in self.documents(visit, visit + 1)
        ]
        units = np.concatenate([NO_UNITS, *waiting])
        yield units[np.array(self.weights)[units[:, BUCKET]] > 0]
        documents = int(CHUNK_UNITS * self.num_documents / (self.num_units * max(1.0, sum(self.weights))))
        pace = min(self.num_documents, max(1, documents))
        yield from ahead(threads, lambda number: self._chunk(position, number, pace), count())

    def _chunk(self, position: DomainPosition, number: int, pace: int) -> I64:
        """The units that buckets of weight 1 reach between `pace` x `number` visits and as many more."""
        parts, times = [NO_UNITS], [np.zeros(0)]
        for bucket, (weight, first) in enumerate(zip(self.weights, position.next_visits, strict=True)):
            start, stop = (first + math.ceil(turn * pace * weight) for turn in (number, number + 1))
            for shard, sequences, visits in self.documents(start, stop):
                units = self._units(shard, sequences, visits, bucket)
                parts.append(units)
                times.append((units[:, VISIT] - first) / weight)
        units = np.concatenate(parts)
        return units[np.lexsort((units[:, VISIT], np.concatenate(times)))]

    def _units(self, shard: int, sequences: I64, visits: I64, bucket: int | None = None) -> I64:
        """The units of these documents, of one bucket only where it is given."""
        pieces = self.pieces(shard)
        if bucket is not None and len(self.weights) > 1:
            own = pieces.buckets[sequences] == bucket
            sequences, visits = sequences[own], visits[own]
        return pieces.of(sequences, visits)


class Queue:
    """The units of a domain that come next, from a position on."""

    def __init__(self, domain: DomainPieces, position: DomainPosition, threads: Executor) -> None:
        self._chunks, self._position = domain.chunks(position, threads), position
        self.held = next(self._chunks)
        """Units that were made and not read, in their order."""
        self._waited = self.held[:, VISIT]
        self._next_visits = np.array(position.next_visits)

    def hold(self, num_tokens: int) -> I64:
        """Tokens up to the end of each held unit, after more were added so that they have `num_tokens`."""
        parts, num_held = [self.held], int(self.held[:, LENGTH].sum())
        while num_held < num_tokens:
            parts.append(next(self._chunks))
            num_held += int(parts[-1][:, LENGTH].sum())
        self.held = np.concatenate(parts)
        return np.cumsum(self.held[:, LENGTH])

    def take(self, is_read: NDArray[np.bool_]) -> I64:
        """Read units: those that `is_read` says of the first held ones."""
        visits, first = self.held[:, VISIT], self.held[: len(is_read)]
        document = np.append(0, np.cumsum(np.diff(visits) != 0))[: len(visits)]
        is_begun = np.bincount(document[: len(is_read)], weights=is_read, minlength=len(visits)) > 0
        self.held[:, BEGUN] |= is_begun[document]
        taken = first[is_read]
        np.maximum.at(self._next_visits, taken[:, BUCKET], taken[:, VISIT] + 1)
        self.held = np.concatenate([first[~is_read], self.held[len(is_read) :]])
        return taken

    def reached(self, epochs: float) -> DomainPosition:
        """The position after what was read, which is so many passes over the domain. A document of which any piece was
        read does not wait."""
        is_passed = (self.held[:, VISIT] < self._next_visits[self.held[:, BUCKET]]) & (self.held[:, BEGUN] == 0)
        waiting = np.setdiff1d(np.array(self._position.waiting, dtype=np.int64), self._waited)
        return DomainPosition(
            num_documents=self._position.num_documents,
            next_visits=tuple(self._next_visits.tolist()),
            waiting=tuple(np.union1d(waiting, self.held[is_passed, VISIT]).tolist()),
            epochs=self._position.epochs + epochs,
        )


def ahead(threads: Executor, function: Callable[[T], R], values: Iterable[T], depth: int = CHUNKS_AHEAD) -> Iterator[R]:
    """Results in the order of the values, of which at most `depth` are computed and not yet taken."""
    waiting: deque[Future[R]] = deque()
    for value in values:
        waiting.append(threads.submit(function, value))
        if len(waiting) >= depth:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
