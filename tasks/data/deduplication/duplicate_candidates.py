"""The stages from texts to verified pairs of near-duplicates; each passes its rows on in batches (parcels.py).

The stages are: keys of bands -> pairs -> wanted shingles -> pairs whose true similarity reaches the threshold. Texts
are read from the document files: once to be signed, and once more to be compared if they are candidates. Runs in
executors: imports no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.deduplication.minhash import (
    CHUNK_CHARS,
    band_keys,
    jaccard_counts,
    shingle_sets,
    shingles_of,
    signatures,
    sketches,
)
from tasks.data.records.documents_by_id import read_by_id
from tasks.data.records.parcels import PARCEL_ROWS, addressed, id_numbers, id_range, id_strings, parcels, unpacked
from tasks.data.text.text_chunks import chunk_bounds
from tasks.data.text.words import mix

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from configs.files.stored_files import StoredFile

    U64 = NDArray[np.uint64]

KEYS, SIGNATURES, PAIRS, WANTED, SHINGLES, EDGES = "keys", "signatures", "pairs", "wanted", "shingles", "edges"
BUCKET_WINDOW = 32
"""Buckets of up to 33 documents are paired completely."""
LARGE_BUCKET_WINDOW = 12
"""In larger buckets (templates) each document is paired with this many documents after it, in another order for every
band: a document meets 24 random others per band, which keeps clusters connected without a quadratic number of pairs."""
LARGE_BUCKET_CENTRES = 4
"""Each document of a large bucket is also paired with this many that are most like the bucket as a whole. Of 3,000
edited copies that are each similar only to their original, the window would pair one in five with it."""
SKETCH_BITS = 64


@dataclass(frozen=True)
class Signing:
    """The parameters by which documents are signed and their parcels are addressed."""

    ngram_size: int
    permuted_by: NDArray[np.uint32]
    num_bands: int
    num_rows: int
    num_partitions: int
    num_files: int
    """Number of ranges of ids, each of which has a file of signatures."""

    def keys(self, ids: U64, signed: NDArray[np.uint32], is_new: bool) -> Iterator[pa.RecordBatch]:
        """KEYS parcels of signed documents."""
        import pyarrow as pa

        keys = band_keys(signed, self.num_bands, self.num_rows).reshape(-1)
        columns = {"id": np.repeat(ids, self.num_bands), "sketch": np.repeat(sketches(signed), self.num_bands)}
        table = pa.table({"key": keys, **columns, "is_new": np.full(len(keys), is_new)})
        return addressed(KEYS, table, (keys % np.uint64(self.num_partitions)).astype(np.int64))


def sign_documents(
    batches: Iterator[pa.RecordBatch], files: list[StoredFile], signing: Signing
) -> Iterator[pa.RecordBatch]:
    """KEYS and SIGNATURES parcels of the documents whose `id` is in these parcels; those without any word have
    neither."""
    for ids, signed in _gathered(_signed(batches, files, signing), PARCEL_ROWS // signing.num_bands):
        yield from signing.keys(ids, signed, is_new=True)
        yield from addressed(SIGNATURES, signature_table(ids, signed), id_range(ids, signing.num_files))


def send_stored_keys(batches: Iterator[pa.RecordBatch], signing: Signing) -> Iterator[pa.RecordBatch]:
    """KEYS parcels of earlier documents, from the files (`path`) of their signatures."""
    for batch in batches:
        for path in batch.column("path").to_pylist():
            for ids, signed in read_signatures(path):
                yield from signing.keys(ids, signed, is_new=False)


def signature_table(ids: U64, signed: NDArray[np.uint32]) -> pa.Table:
    """(id as a number, signature)."""
    import pyarrow as pa

    buffers = [None, pa.py_buffer(np.ascontiguousarray(signed))]
    binary = pa.Array.from_buffers(pa.binary(4 * signed.shape[1]), len(signed), buffers)
    return pa.table({"id": ids, "signature": binary})


def read_signatures(path: str) -> Iterator[tuple[U64, NDArray[np.uint32]]]:
    """(ids, signatures) of a file of stored signatures, piece by piece."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(PARCEL_ROWS // 16, use_threads=False):
            column = batch.column("signature")
            width = column.type.byte_width
            data = np.frombuffer(column.buffers()[1], dtype=np.uint32)[column.offset * width // 4 :][
                : len(column) * width // 4
            ]
            yield id_numbers(batch.column("id")), data.reshape(len(column), width // 4)


def _signed(
    batches: Iterator[pa.RecordBatch], files: list[StoredFile], signing: Signing
) -> Iterator[tuple[U64, NDArray[np.uint32]]]:
    ids = [np.empty(0, np.uint64), *(table.column("id").to_numpy() for table in unpacked(batches).values())]
    for chunk in _chunks(read_by_id(files, np.sort(np.concatenate(ids)), ["id", "text"])):
        shingles, offsets = shingles_of(chunk.column("text").to_pylist(), signing.ngram_size)
        has_words = np.diff(offsets) > 0
        yield id_numbers(chunk.column("id"))[has_words], signatures(shingles, offsets, signing.permuted_by)[has_words]


def _gathered(
    parts: Iterator[tuple[U64, NDArray[np.uint32]]], num_documents: int
) -> Iterator[tuple[U64, NDArray[np.uint32]]]:
    """The same rows in larger parts."""
    waiting: list[tuple[U64, NDArray[np.uint32]]] = []
    for part in parts:
        waiting.append(part)
        if sum(len(ids) for ids, _ in waiting) >= num_documents:
            yield np.concatenate([ids for ids, _ in waiting]), np.concatenate([signed for _, signed in waiting])
            waiting = []
    if waiting:
        yield np.concatenate([ids for ids, _ in waiting]), np.concatenate([signed for _, signed in waiting])


def _chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow.compute as pc

    for batch in batches:
        sizes = pc.binary_length(batch.column("text")).to_numpy(zero_copy_only=False)  # pyright: ignore[reportAttributeAccessIssue]
        for start, stop in chunk_bounds(sizes, CHUNK_CHARS):
            yield batch.slice(start, stop - start)


def pair_candidates(batches: Iterator[pa.RecordBatch], num_partitions: int) -> Iterator[pa.RecordBatch]:
    """PAIRS parcels (left, right; left < right) from KEYS parcels: documents that share a key, at least one of them
    new."""
    import pyarrow as pa

    received = unpacked(batches).get(KEYS)
    if received is None:
        return
    columns = (received.column(name).to_numpy() for name in ("key", "id", "sketch", "is_new"))
    left, right = bucket_pairs(*columns)
    if len(left):
        yield from addressed(PAIRS, pa.table({"left": left, "right": right}), _partition_of(left, num_partitions))


def bucket_pairs(keys: U64, ids: U64, sketched: U64, is_new: NDArray[np.bool_]) -> tuple[U64, U64]:
    """Distinct pairs of the documents with equal keys: all pairs of a bucket; in a large bucket pairs of neighbours,
    and of each document with the most central ones."""
    ordered = np.sort(keys)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(repeated):
        return np.empty(0, np.uint64), np.empty(0, np.uint64)
    indices = np.minimum(np.searchsorted(repeated, keys), len(repeated) - 1)
    kept = np.flatnonzero(repeated[indices] == keys)
    keys, ids, sketched, is_new = keys[kept], ids[kept], sketched[kept], is_new[kept]
    order = np.lexsort((ids, mix(ids ^ keys), keys))
    keys, ids, sketched, is_new = keys[order], ids[order], sketched[order], is_new[order]
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    sizes = np.diff(np.concatenate((starts, [len(keys)])))
    is_large = np.repeat(sizes > BUCKET_WINDOW + 1, sizes)
    pairs: list[NDArray[np.int64]] = []
    for distance in range(1, min(BUCKET_WINDOW, len(keys) - 1) + 1):
        is_pair = keys[distance:] == keys[:-distance]
        if distance > LARGE_BUCKET_WINDOW:
            is_pair &= ~is_large[:-distance]
        pairs.append(np.stack((first := np.flatnonzero(is_pair), first + distance)))
    members = np.flatnonzero(is_large)
    if len(members):
        pairs.append(members[_pairs_with_centres(sketched[members], sizes[sizes > BUCKET_WINDOW + 1])])
    first, second = np.concatenate(pairs, axis=1)
    is_wanted = is_new[first] | is_new[second]
    first, second = ids[first[is_wanted]], ids[second[is_wanted]]
    return distinct_pairs(np.minimum(first, second), np.maximum(first, second))


def _pairs_with_centres(sketched: U64, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of pairs of every document with the LARGE_BUCKET_CENTRES centres of its bucket; buckets are consecutive.
    An original agrees with most of its copies wherever two copies differ: the centres are the documents whose sketches
    differ least from the majority's bits."""
    starts = np.cumsum(sizes) - sizes
    usual = np.zeros(len(sizes), dtype=np.uint64)
    for position in range(SKETCH_BITS):
        bit = np.uint64(1 << position)
        usual |= np.where(
            2 * np.add.reduceat((sketched & bit != 0).astype(np.int64), starts) > sizes, bit, np.uint64(0)
        )
    away = np.bitwise_count(sketched ^ np.repeat(usual, sizes))
    nearest_first = np.lexsort((away, np.repeat(starts, sizes)))
    centres = [np.repeat(nearest_first[starts + rank], sizes) for rank in range(LARGE_BUCKET_CENTRES)]
    return np.stack((np.concatenate(centres), np.tile(np.arange(len(sketched)), LARGE_BUCKET_CENTRES)))


def distinct_pairs(left: U64, right: U64) -> tuple[U64, U64]:
    """Each pair once, sorted."""
    order = np.lexsort((right, left))
    left, right = left[order], right[order]
    is_first = np.ones(len(left), dtype=bool)
    is_first[1:] = (left[1:] != left[:-1]) | (right[1:] != right[:-1])
    is_first &= left != right
    return left[is_first], right[is_first]


def want_shingles(batches: Iterator[pa.RecordBatch], num_partitions: int) -> Iterator[pa.RecordBatch]:
    """From PAIRS parcels: the distinct pairs, which stay in their partition, and WANTED parcels (id, reader), which go
    to the partitions that read the documents."""
    import pyarrow as pa

    received = unpacked(batches).get(PAIRS)
    if received is None:
        return
    left, right = distinct_pairs(received.column("left").to_numpy(), received.column("right").to_numpy())
    (reader,) = np.unique(_partition_of(left, num_partitions)).tolist()
    yield from parcels(PAIRS, reader, pa.table({"left": left, "right": right}))
    wanted = np.unique(np.concatenate((left, right)))
    table = pa.table({"id": wanted, "reader": np.full(len(wanted), reader)})
    yield from addressed(WANTED, table, id_range(wanted, num_partitions))


def send_shingles(
    batches: Iterator[pa.RecordBatch], files: list[StoredFile], ngram_size: int
) -> Iterator[pa.RecordBatch]:
    """SHINGLES parcels (id, shingles) to every reader that wants a document, for WANTED parcels."""
    import pyarrow as pa

    received = unpacked(batches).get(WANTED)
    if received is None:
        return
    ids, readers = received.column("id").to_numpy(), received.column("reader").to_numpy()
    order = np.argsort(ids, kind="stable")
    ids, readers = ids[order], readers[order]
    for chunk in _chunks(read_by_id(files, np.unique(ids), ["id", "text"])):
        shingles, offsets = shingle_sets(chunk.column("text").to_pylist(), ngram_size)
        numbers = id_numbers(chunk.column("id"))
        starts, stops = np.searchsorted(ids, numbers), np.searchsorted(ids, numbers, "right")
        copies = np.repeat(np.arange(len(numbers)), stops - starts)
        within = np.arange(len(copies)) - np.repeat(np.cumsum(stops - starts) - (stops - starts), stops - starts)
        table = pa.table(
            {"id": numbers, "shingles": pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(shingles))}
        )
        yield from addressed(SHINGLES, table.take(pa.array(copies)), readers[starts[copies] + within])


def verify_pairs(batches: Iterator[pa.RecordBatch], threshold: float) -> Iterator[pa.RecordBatch]:
    """An EDGES parcel (left, right, num_shared, num_union) from PAIRS and SHINGLES parcels: the pairs whose true
    Jaccard similarity reaches the threshold."""
    import pyarrow as pa

    received = unpacked(batches)
    if PAIRS not in received:
        return
    pairs, sets = received[PAIRS], received[SHINGLES]
    shingles = sets.column("shingles").combine_chunks()
    values, offsets = shingles.values.to_numpy(), shingles.offsets.to_numpy()
    ids = sets.column("id").to_numpy()
    order = np.argsort(ids)
    ends = [pairs.column(side).to_numpy() for side in ("left", "right")]
    rows = [order[np.minimum(np.searchsorted(ids, side, sorter=order), len(ids) - 1)] for side in ends]
    lost = np.concatenate([side[ids[row] != side] for side, row in zip(ends, rows, strict=True)])
    if len(lost):
        raise ValueError(
            f"document {id_strings(lost[:1])[0]} has a signature but no text: documents/ and signatures/ of a "
            f"directory of "
            "deduplicate.previous do not belong together; name one that deduplicate_documents wrote"
        )
    shared, union = jaccard_counts(values, offsets, *rows)
    is_edge = pa.array(shared / np.maximum(union, 1) >= threshold)
    edges = (
        pairs.append_column("num_shared", pa.array(shared)).append_column("num_union", pa.array(union)).filter(is_edge)
    )
    if edges.num_rows:
        yield from parcels(EDGES, 0, edges)


def _partition_of(ids: U64, num_partitions: int) -> NDArray[np.int64]:
    return (mix(ids) % np.uint64(num_partitions)).astype(np.int64)
