"""Finds records of one page: all pieces of a record are dropped or kept together.

Runs in executors: imports no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.deduplication.ranked_documents import PIECES, digest_partition, group_sizes, group_starts, rank_order
from tasks.data.records.parcels import addressed, unpacked

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]

LOST, PAGED = "lost", "paged"
MAX_RECORDS_PER_FILE = 3
"""Records of one source file that may share a URL; a URL of more records names a site, a book or a package, not a page,
and is not compared."""


def page_losses(batches: Iterator[pa.RecordBatch], num_partitions: int) -> Iterator[pa.RecordBatch]:
    """From PIECES parcels the new documents whose record has the page URL of a better one.

    LOST parcels (id) go to the partition of the document's own content, PAGED parcels (id, kept, collection) to that of
    the content of the kept record's first piece, by which it is named."""
    import pyarrow as pa

    received = unpacked(batches).get(PIECES)
    if received is None:
        return
    pieces = received.take(pa.array(_record_order(received))).combine_chunks()
    starts = group_starts(*(_codes(pieces, name) for name in ("page", "source", "offset", "is_new")))
    record_of_piece = np.repeat(np.arange(len(starts)), group_sizes(starts, pieces.num_rows))
    records = _records(pieces, starts)
    best = _best_records(records)
    is_lost = (best >= 0) & records.column("is_new").to_numpy()
    ids = records.column("id").to_numpy()
    is_lost &= ids[best] != ids
    lost = np.flatnonzero(is_lost[record_of_piece])
    if not len(lost):
        return
    gone, kept = pieces.take(pa.array(lost)), records.take(pa.array(best[record_of_piece[lost]]))
    yield from addressed(LOST, gone.select(["id"]), digest_partition(gone, num_partitions))
    paged = gone.select(["id", "collection"]).append_column("kept", kept.column("id"))
    yield from addressed(PAGED, paged, digest_partition(kept, num_partitions))


def _codes(table: pa.Table, name: str) -> NDArray[np.generic]:
    """A column whose equal values are equal numbers."""
    import pyarrow as pa

    column = table.column(name)
    is_text = pa.types.is_string(column.type)
    return column.combine_chunks().dictionary_encode().indices.to_numpy() if is_text else column.to_numpy()


def _record_order(pieces: pa.Table) -> I64:
    """By page and record, its first piece first."""
    names = ("page", "source", "offset", "is_new", "piece", "id")
    return np.lexsort([_codes(pieces, name) for name in reversed(names)])


def _records(pieces: pa.Table, starts: I64) -> pa.Table:
    """A row per record: its first piece, with the best quality and the length of all of them."""
    import pyarrow as pa

    flaws = np.fmin.reduceat(pieces.column("flaws").to_numpy(), starts)
    shortness = np.add.reduceat(pieces.column("shortness").to_numpy(), starts)
    heads = pieces.take(pa.array(starts))
    for name, values in (("flaws", flaws), ("shortness", shortness)):
        heads = heads.set_column(heads.schema.get_field_index(name), name, pa.array(values))
    return heads.combine_chunks()


def _best_records(records: pa.Table) -> I64:
    """For every record the best one of its page, -1 where the URL names no page or one record."""
    pages, files = _codes(records, "page"), _codes(records, "file")
    by_file = np.lexsort((files, pages))
    starts = group_starts(pages[by_file], files[by_file])
    sizes = group_sizes(starts, len(pages))
    num_records, most_in_file = np.zeros(len(pages), np.int64), np.zeros(len(pages), np.int64)
    np.add.at(num_records, pages[by_file[starts]], sizes)
    np.maximum.at(most_in_file, pages[by_file[starts]], sizes)
    order = rank_order(records, pages)
    firsts = order[group_starts(pages[order])]
    best = np.full(len(pages), -1)
    best[pages[firsts]] = firsts
    is_shared = (num_records > 1) & (most_in_file <= MAX_RECORDS_PER_FILE)
    return np.where(is_shared, best, -1)[pages]
