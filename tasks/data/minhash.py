"""MinHash signatures, LSH candidate pairs and exact Jaccard similarity, as NumPy over Arrow batches. Runs in executors: imports no Spark.

A document's shingles are the 64-bit hashes of its word n-grams (of all its words, where it has fewer). Signatures follow datasketch's
scheme: the smallest value per permutation, bands of rows, banding parameters from its optimiser.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.words import BASE, mix, ngram_hashes, split_words

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]

SIGNATURE_COLUMNS = "id string, shingles binary, bands array<long>"
PAIR_COLUMNS = "left string, right string"
EDGE_COLUMNS = "left string, right string, num_shared long, num_union long"
CHUNK_CHARS = 2_000_000
"""Characters hashed at once: a chunk's arrays stay near the size of the caches."""
BUCKET_WINDOW = 32
"""Each document of a bucket is paired with this many after it. Buckets of up to 33 are paired completely; larger ones (templates) are
ordered differently in every band, so their members stay connected without a quadratic number of pairs."""
FALSE_NEGATIVE_WEIGHT = 0.95
"""A missed pair stays in the corpus, a wrong candidate costs one comparison: at 0.7 and 128 permutations 99.8 % of the pairs of
similarity 0.8 become candidates."""


def banding(threshold: float, num_permutations: int) -> tuple[int, int]:
    """(bands, rows) by datasketch's optimiser."""
    from datasketch import MinHashLSH

    weights = (1 - FALSE_NEGATIVE_WEIGHT, FALSE_NEGATIVE_WEIGHT)
    index = MinHashLSH(threshold=threshold, num_perm=num_permutations, weights=weights)
    return index.b, index.r


def permutations(count: int) -> tuple[U64, U64]:
    """Multipliers (odd) and addends of the multiply-shift hash functions: a fixed sequence, so stored signatures stay comparable."""
    numbers = mix(np.arange(1, 2 * count + 1, dtype=np.uint64) * BASE)
    return numbers[:count] | np.uint64(1), numbers[count:]


def shingle_sets(texts: list[str], ngram_size: int) -> tuple[U64, I64]:
    """Sorted distinct shingles of each text, and where each text's start (one entry more than texts)."""
    hashes, owners = ngram_hashes(split_words(texts), ngram_size, whole_if_shorter=True)
    order = np.lexsort((hashes, owners))
    hashes, owners = hashes[order], owners[order]
    is_new = np.ones(len(hashes), dtype=bool)
    is_new[1:] = (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1])
    return hashes[is_new], np.searchsorted(owners[is_new], np.arange(len(texts) + 1))


def signatures(shingles: U64, offsets: I64, num_permutations: int) -> NDArray[np.uint32]:
    """(texts, permutations): the smallest permuted shingle; texts without words have all ones."""
    found = np.full((len(offsets) - 1, num_permutations), 0xFFFFFFFF, dtype=np.uint32)
    filled = np.flatnonzero(np.diff(offsets))
    if not len(filled):
        return found
    starts = offsets[:-1][filled]
    values = np.empty_like(shingles)
    for place, (multiplier, addend) in enumerate(zip(*permutations(num_permutations), strict=True)):
        np.multiply(shingles, multiplier, out=values)
        values += addend
        values >>= np.uint64(32)
        found[filled, place] = np.minimum.reduceat(values, starts)
    return found


def band_keys(signature: NDArray[np.uint32], num_bands: int, num_rows: int) -> NDArray[np.int64]:
    """(texts, bands): one 64-bit key per band; equal keys mean equal rows of the same band."""
    rows = signature[:, : num_bands * num_rows].astype(np.uint64).reshape(len(signature), num_bands, num_rows)
    keys = np.zeros(rows.shape[:2], dtype=np.uint64) + np.arange(num_bands, dtype=np.uint64)
    for place in range(num_rows):
        keys = mix(keys * BASE + rows[:, :, place])
    return keys.view(np.int64)


def sign_batches(
    batches: Iterator[pa.RecordBatch], ngram_size: int, num_permutations: int, num_bands: int, num_rows: int
) -> Iterator[pa.RecordBatch]:
    """SIGNATURE_COLUMNS for documents (id, text); those without any word have no bands and so no neighbours."""
    import pyarrow as pa

    for batch in batches:
        for chunk in _chunks(batch):
            shingles, offsets = shingle_sets(chunk.column("text").to_pylist(), ngram_size)
            keys = band_keys(signatures(shingles, offsets, num_permutations), num_bands, num_rows)
            has_words = np.diff(offsets) > 0
            band_offsets = np.concatenate(([0], np.cumsum(has_words * num_bands))).astype(np.int32)
            bands = pa.ListArray.from_arrays(pa.array(band_offsets), pa.array(keys[has_words].reshape(-1)))
            binary = pa.Array.from_buffers(
                pa.binary(), len(offsets) - 1, [None, pa.py_buffer((offsets * 8).astype(np.int32)), pa.py_buffer(shingles)]
            )
            yield pa.RecordBatch.from_arrays([chunk.column("id"), binary, bands], names=["id", "shingles", "bands"])


def _chunks(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    import pyarrow.compute as pc

    ends = np.cumsum(pc.utf8_length(batch.column("text")).to_numpy(zero_copy_only=False)) // CHUNK_CHARS  # pyright: ignore
    starts = np.flatnonzero(np.diff(ends, prepend=-1)).tolist()
    for start, stop in zip(starts, [*starts[1:], batch.num_rows], strict=True):
        yield batch.slice(start, stop - start)


def candidate_pairs(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """PAIR_COLUMNS for rows (key, id) sorted by key; a bucket that spans batches is carried over."""
    import pyarrow as pa

    carried_keys, carried_ids = np.empty(0, dtype=np.int64), np.empty(0, dtype=object)
    for batch in batches:
        keys = np.concatenate((carried_keys, batch.column("key").to_numpy()))
        ids = np.concatenate((carried_ids, batch.column("id").to_numpy(zero_copy_only=False)))
        first_new = len(carried_keys)
        for distance in range(1, min(BUCKET_WINDOW, len(keys) - 1) + 1):
            left = np.flatnonzero(keys[distance:] == keys[:-distance])
            if not len(left):
                break
            left = left[left + distance >= first_new]
            pairs = np.sort(np.stack((ids[left], ids[left + distance])), axis=0)
            if len(left):
                yield pa.RecordBatch.from_arrays([pa.array(pairs[0]), pa.array(pairs[1])], names=["left", "right"])
        carried_keys, carried_ids = keys[-BUCKET_WINDOW:], ids[-BUCKET_WINDOW:]


def verify_pairs(batches: Iterator[pa.RecordBatch], threshold: float) -> Iterator[pa.RecordBatch]:
    """EDGE_COLUMNS for the pairs (left, right, left_shingles, right_shingles) whose true Jaccard similarity reaches the threshold."""
    import pyarrow as pa

    for batch in batches:
        shared, union = jaccard_counts(*(_shingle_column(batch.column(name)) for name in ("left_shingles", "right_shingles")))
        kept = pa.array(np.flatnonzero(shared / np.maximum(union, 1) >= threshold))
        columns = [
            batch.column("left").take(kept),
            batch.column("right").take(kept),
            pa.array(shared).take(kept),
            pa.array(union).take(kept),
        ]
        yield pa.RecordBatch.from_arrays(columns, names=["left", "right", "num_shared", "num_union"])


def jaccard_counts(left: tuple[U64, I64], right: tuple[U64, I64]) -> tuple[I64, I64]:
    """Sizes of intersection and union of the i-th sets, each given as (values, offsets)."""
    sizes = [np.diff(offsets) for _, offsets in (left, right)]
    owners = np.concatenate([np.repeat(np.arange(len(size)), size) for size in sizes])
    values = np.concatenate((left[0], right[0]))
    order = np.lexsort((values, owners))
    values, owners = values[order], owners[order]
    is_shared = (values[1:] == values[:-1]) & (owners[1:] == owners[:-1])
    shared = np.bincount(owners[1:][is_shared], minlength=len(sizes[0]))
    return shared, sizes[0] + sizes[1] - shared


def _shingle_column(column: pa.Array) -> tuple[U64, I64]:
    """(values, offsets) of a binary column of 64-bit values."""
    _, offsets, data = column.buffers()
    offsets = np.frombuffer(offsets, dtype=np.int32)[column.offset : column.offset + len(column) + 1].astype(np.int64)
    values = np.frombuffer(data, dtype=np.uint8)[offsets[0] : offsets[-1]] if data is not None else np.empty(0, dtype=np.uint8)
    return np.frombuffer(values.tobytes(), dtype=np.uint64), (offsets - offsets[0]) // 8
