"""Turns documents into small integer vectors, and clusters them. Runs in executors: imports no Spark.

The built-in vector is a projection of TF-IDF weights: each word and each pair of neighbouring words adds its weight,
with a sign, to a few of the dimensions that its hash names. It has no notion of meaning: texts are alike where they
share rare words. tasks/data/embedding/embedding_model.py has vectors of a model. Both are 8-bit integers, so every dot
product is a whole number that floats hold exactly: no batch, block or thread count changes a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.records.documents import names_of
from tasks.data.text.text_chunks import chunk_bounds
from tasks.data.text.words import BASE, mix, ngram_hashes, split_words

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    I8 = NDArray[np.int8]
    F32 = NDArray[np.float32]
    Embed = Callable[[list[str]], I8]

BUCKET_COLUMNS = "bucket int, num_documents long"
VECTOR_COLUMNS = "id string, vector binary, rank_quality double, rank_length long"
ASSIGNED_COLUMNS = f"{VECTOR_COLUMNS}, cluster int, position long"
PAIR_COLUMNS = (
    "cluster int, worse string, worse_quality double, worse_length long, better string, better_quality double, "
    "better_length long, "
    "cosine double"
)
VERDICT_COLUMNS = "id string, kept_id string, cosine double"
VECTOR_NAMES = names_of(VECTOR_COLUMNS)
ASSIGNED_NAMES = names_of(ASSIGNED_COLUMNS)
PAIR_NAMES = names_of(PAIR_COLUMNS)
BUCKET_BITS = 18
"""Bits of a feature's bucket. Features share 262,144 document frequencies: two in one bucket only have a wrong
weight."""
NUM_SIGNS = 4
"""Number of dimensions to which one feature adds."""
MAX_DIMENSIONS = 1024
"""Largest number of dimensions whose sums 32-bit floats hold exactly: 1,024 x 127 x 127 is below 2^24."""
CHUNK_CHARS = 2_000_000
BLOCK_ROWS = 1024
NO_CLUSTER = -1
"""Cluster of documents with too few words to be judged."""


def weighted_features(
    texts: list[str],
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """(hashes, texts they belong to, 1 + log of their counts) of the distinct features, sorted by text and hash; words
    per text."""
    words = split_words(texts)
    runs = [ngram_hashes(words, size) for size in (1, 2)]
    hashes, owners = (np.concatenate(parts) for parts in zip(*runs, strict=True))
    order = np.lexsort((hashes, owners))
    hashes, owners = hashes[order], owners[order]
    starts = (
        np.flatnonzero(np.concatenate(([True], (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1]))))
        if len(hashes)
        else []
    )
    counts = np.diff(starts, append=len(hashes))
    return hashes[starts], owners[starts], 1 + np.log(np.maximum(counts, 1)), words.counts


def buckets_of(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The bucket of each feature's hash, whose document frequency it shares."""
    return (hashes >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)


def project(texts: list[str], idf: F32, dimensions: int, seed: int, min_words: int) -> I8:
    """(texts, dimensions): a text's vector depends only on that text; texts with fewer than `min_words` words have all
    zeros."""
    hashes, owners, weights, num_words = weighted_features(texts)
    weights = weights * idf[buckets_of(hashes)]
    sums = np.zeros(len(texts) * dimensions)
    for turn in range(NUM_SIGNS):
        drawn = mix(hashes + np.uint64(((seed + 1) * int(BASE) + turn) % 2**64))
        signs = np.where(drawn >> np.uint64(63), 1.0, -1.0)
        cells = owners * dimensions + (drawn % np.uint64(dimensions)).astype(np.int64)
        sums += np.bincount(cells, weights=weights * signs, minlength=len(sums))
    return quantised(np.where((num_words >= min_words)[:, None], sums.reshape(len(texts), dimensions), 0.0))


def quantised(vectors: NDArray[np.floating]) -> I8:
    """Each vector scaled so that its largest entry is 127."""
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    return np.rint(vectors * (127.0 / np.where(largest > 0, largest, 1.0))).astype(np.int8)


def widened(vectors: I8) -> NDArray[np.floating]:
    """The vectors as the smallest floats whose dot products are exact."""
    return vectors.astype(np.float32 if vectors.shape[1] <= MAX_DIMENSIONS else np.float64)


def squared_norms(vectors: I8) -> NDArray[np.float64]:
    """Squared lengths, as whole numbers in floats."""
    wide = widened(vectors)
    return np.einsum("nd,nd->n", wide, wide).astype(np.float64)


def fit_centroids(vectors: I8, count: int, iterations: int, seed: int) -> I8:
    """Spherical k-means on a sample, with sums in whole numbers: (at most `count`, dimensions). The result depends only
    on the sample's order."""
    filled = vectors[vectors.any(axis=1)]
    start = np.random.Generator(np.random.Philox(seed)).permutation(len(filled))[:count]
    centroids = filled[np.sort(start)]
    for _ in range(iterations if len(centroids) else 0):
        nearest = assign(filled, centroids)
        sums = np.zeros(centroids.shape, dtype=np.int64)
        for first in range(0, len(filled), BLOCK_ROWS):
            np.add.at(sums, nearest[first : first + BLOCK_ROWS], filled[first : first + BLOCK_ROWS])
        empty = np.bincount(nearest, minlength=len(centroids)) == 0
        centroids = np.where(empty[:, None], centroids, quantised(sums.astype(np.float64)))
    return centroids


def assign(vectors: I8, centroids: I8) -> NDArray[np.int64]:
    """The index of the centroid with the largest cosine, the first of equal ones."""
    norms = np.sqrt(np.maximum(squared_norms(centroids), 1.0))
    nearest = np.empty(len(vectors), dtype=np.int64)
    wide = widened(centroids).T
    for start in range(0, len(vectors), BLOCK_ROWS):
        block = widened(vectors[start : start + BLOCK_ROWS]) @ wide
        nearest[start : start + BLOCK_ROWS] = np.argmax(block.astype(np.float64) / norms, axis=1)
    return nearest


def _chunks(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    import pyarrow.compute as pc

    sizes = pc.utf8_length(batch.column("text")).to_numpy(zero_copy_only=False)  # pyright: ignore[reportAttributeAccessIssue]
    for start, stop in chunk_bounds(sizes, CHUNK_CHARS):
        yield batch.slice(start, stop - start)


def feature_buckets(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """BUCKET_COLUMNS: one row per bucket that holds a feature of these documents (text), with the number of them."""
    import pyarrow as pa

    counts = np.zeros(1 << BUCKET_BITS, dtype=np.int64)
    for batch in batches:
        for chunk in _chunks(batch):
            hashes, owners, _, _ = weighted_features(chunk.column("text").to_pylist())
            pairs = np.unique((owners << BUCKET_BITS) | buckets_of(hashes))
            counts += np.bincount(pairs & ((1 << BUCKET_BITS) - 1), minlength=len(counts))
    buckets = np.flatnonzero(counts)
    columns = [pa.array(buckets.astype(np.int32)), pa.array(counts[buckets])]
    yield pa.RecordBatch.from_arrays(columns, names=["bucket", "num_documents"])


def embed_batches(batches: Iterator[pa.RecordBatch], embed: Embed) -> Iterator[pa.RecordBatch]:
    """VECTOR_COLUMNS for rows (id, text, rank_quality, rank_length)."""
    import pyarrow as pa

    for batch in batches:
        for chunk in _chunks(batch):
            vectors = _binary(embed(chunk.column("text").to_pylist()))
            columns = [chunk.column("id"), vectors, chunk.column("rank_quality"), chunk.column("rank_length")]
            yield pa.RecordBatch.from_arrays(columns, names=VECTOR_NAMES)


def assign_batches(batches: Iterator[pa.RecordBatch], centroids: I8) -> Iterator[pa.RecordBatch]:
    """ASSIGNED_COLUMNS for rows VECTOR_COLUMNS; position: projection on a fixed direction, so that similar vectors are
    close."""
    import pyarrow as pa

    direction = np.where(mix(np.arange(centroids.shape[1], dtype=np.uint64) * BASE) >> np.uint64(63), 1, -1)
    for batch in batches:
        if not batch.num_rows:
            continue
        vectors = vectors_of(batch.column("vector"))
        clusters = np.where(vectors.any(axis=1), assign(vectors, centroids), NO_CLUSTER).astype(np.int32)
        given = [batch.column(name) for name in VECTOR_NAMES]
        yield pa.RecordBatch.from_arrays(
            [*given, pa.array(clusters), pa.array(vectors.astype(np.int64) @ direction)], names=ASSIGNED_NAMES
        )


def _binary(vectors: I8) -> pa.Array:
    import pyarrow as pa

    offsets = np.arange(len(vectors) + 1, dtype=np.int32) * vectors.shape[1]
    return pa.Array.from_buffers(
        pa.binary(), len(vectors), [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(vectors))]
    )


def vectors_of(column: pa.Array | pa.ChunkedArray) -> I8:
    """(rows, dimensions) of a binary column of equally long vectors."""
    parts = column.to_pylist()
    return np.frombuffer(b"".join(parts), dtype=np.int8).reshape(len(parts), -1)
