"""The pieces of documents that a domain can give to a phase, and the order in which it gives them: shuffled anew in every epoch.

An epoch holds a document as often as its quality bucket weighs: with weight 2.3 twice, and a third time with probability 0.3, by a hash of
document, epoch and seed. Without weights, or without a bucket, it holds a document once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.fill_in_middle import MIN_TOKENS, NUM_EXTRA, Rearrangement
from tasks.data.row_order import mix_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]


@dataclass(frozen=True)
class BucketWeights:
    """Weights of quality buckets; `ids` (64 bits) and `buckets` of every sequence, by number of the shard: empty without weights."""

    weights: tuple[float, ...]
    seed: int
    ids: dict[int, NDArray[np.uint64]]
    buckets: dict[int, I64]

    def of_units(self, units: I64) -> NDArray[np.float64]:
        """Copies per epoch, on average."""
        if not self.weights:
            return np.ones(len(units))
        buckets = _of_sequences(self.buckets, units, np.int64)
        if buckets.size and buckets.max() >= len(self.weights):
            raise ValueError(
                f"bucket_weights has {len(self.weights)} weights, but documents lie in bucket {buckets.max()}: give one for each"
            )
        return np.append(self.weights, 1.0)[buckets]  # -1, without a bucket, is the last

    def copies(self, units: I64, epoch: int) -> I64:
        """How often this epoch holds each unit; all pieces of a document equally often."""
        weights = self.of_units(units)
        key = int.from_bytes(hashlib.sha256(f"{self.seed} copies {epoch}".encode()).digest()[:8], "big")
        ids = _of_sequences(self.ids, units, np.uint64)
        drawn = mix_bits(mix_bits(ids ^ np.uint64(key)) + np.uint64(key & 0xFFFF)) / 2.0**64
        return np.floor(weights).astype(np.int64) + (drawn < weights % 1.0)


@dataclass(frozen=True)
class Pieces:
    """What a domain can give: one unit (shard, sequence, offset, length, whether it is rearranged) per piece of a document. The length of
    a rearranged one counts its special tokens."""

    units: I64
    num_tokens: int
    """Of one epoch: each piece as often as its bucket weighs."""
    num_too_long: int
    weights: BucketWeights


def pieces_of(
    own: list[int], lengths: list[I64], row_slots: int | None, may_cut: bool, chosen: Rearrangement, weights: BucketWeights
) -> Pieces:
    """The documents of a domain's shards; with `row_slots` none longer than a row: cut, or left out where they may not be."""
    units = np.concatenate([np.zeros((0, 5), dtype=np.int64), *(_documents(number, lengths[number], chosen) for number in own)])
    units = units[units[:, 3] > 0]
    num_too_long = 0
    if row_slots is not None and may_cut:
        room = row_slots - NUM_EXTRA * units[:, 4]
        counts = -(-units[:, 3] // room)
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        units, room = np.repeat(units, counts, axis=0), np.repeat(room, counts)
        units[:, 2] = numbers * room
        units[:, 3] = np.minimum(units[:, 3] - units[:, 2], room)
    elif row_slots is not None:
        fits = units[:, 3] <= row_slots
        units, num_too_long = units[fits], int(np.count_nonzero(~fits))
    units[units[:, 3] < MIN_TOKENS, 4] = 0
    units[:, 3] += NUM_EXTRA * units[:, 4]
    per_unit = weights.of_units(units)
    num_tokens = sum(float(weight) * int(units[per_unit == weight, 3].sum()) for weight in np.unique(per_unit))
    return Pieces(units, int(num_tokens), num_too_long, weights)


def shuffled(domain: str, pieces: Pieces, num_tokens: int, seed: int) -> I64:
    """A domain's pieces, shuffled anew per epoch, for as many epochs as its tokens take."""
    epochs, found = [], 0
    for epoch in count():
        units = np.repeat(pieces.units, pieces.weights.copies(pieces.units, epoch), axis=0) if pieces.weights.weights else pieces.units
        epochs.append(units[_generator(seed, domain, epoch).permutation(len(units))])
        found += int(units[:, 3].sum())
        if found >= num_tokens:
            return np.concatenate(epochs)
    raise AssertionError("epochs do not end")


def read_buckets(sidecar_path: Path) -> I64:
    """The quality bucket of every sequence of a shard, in their order."""
    import pyarrow.parquet as pq

    return (
        pq.read_table(sidecar_path, columns=["sequence", "quality_bucket"])
        .sort_by("sequence")["quality_bucket"]
        .to_numpy()
        .astype(np.int64)
    )


def _documents(number: int, lengths: I64, chosen: Rearrangement) -> I64:
    """Units of whole documents, without the special tokens."""
    sequences = np.arange(len(lengths))
    return np.column_stack([np.full(len(lengths), number), sequences, 0 * sequences, lengths, chosen.is_chosen(number, sequences)])


def _of_sequences(values: dict[int, NDArray], units: I64, dtype: type) -> NDArray:
    """The value of each unit's sequence."""
    found = np.zeros(len(units), dtype=dtype)
    for shard in np.unique(units[:, 0]).tolist():
        own = units[:, 0] == shard
        found[own] = values[shard][units[own, 1]]
    return found


def _generator(seed: int, domain: str, epoch: int) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed} {domain} {epoch}".encode()).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(digest[:8], "big")))
