"""Finds records of one page: all pieces of a record are dropped or kept together.

Runs in executors: imports no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from tasks.data.deduplication.document_ranks import digest_partition, group_sizes, group_starts, rank_order
from tasks.data.deduplication.page_urls import normalised_urls
from tasks.data.records.documents import CODE, COMMIT
from tasks.data.records.parcels import addressed, unpacked

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]

PIECES, LOST, PAGED = "pieces", "lost", "paged"
UNPAGED_DOMAINS = (CODE, COMMIT)
"""Domains whose URLs name repositories and commits, which many documents share."""
MAX_RECORDS_PER_FILE = 3
"""Records of one source file that may share a URL; a URL of more records names a site, a book or a package, not a page,
and is not compared."""


def send_pieces(documents: pa.Table, ranked: pa.Table, num_partitions: int) -> Iterator[pa.RecordBatch]:
    """PIECES parcels of the documents that have a page URL, addressed by page; `ranked`: the RANK, digest and
    collection of the same rows.

    Of a URL that a file gives to many records, as many are sent as show that it is no page."""
    import pyarrow as pa
    import pyarrow.compute as pc

    has_url = pc.not_equal(documents.column("url"), "")  # pyright: ignore[reportAttributeAccessIssue]
    is_unpaged = pc.is_in(documents.column("domain"), pa.array(UNPAGED_DOMAINS))  # pyright: ignore[reportAttributeAccessIssue]
    is_paged = pc.and_not(has_url, is_unpaged)  # pyright: ignore[reportAttributeAccessIssue]
    documents, pieces = documents.filter(is_paged), ranked.filter(is_paged)
    if not pieces.num_rows:
        return
    file = pc.replace_substring_regex(documents.column("source"), pattern="!.*$", replacement="")  # pyright: ignore[reportAttributeAccessIssue]
    page = normalised_urls(documents.column("url").combine_chunks())
    pieces = pieces.append_column("page", page).append_column("file", file)
    for name in ("source", "offset", "piece"):
        pieces = pieces.append_column(name, documents.column(name))
    pieces = _first_records(pieces.filter(pc.not_equal(pieces.column("page"), "")))  # pyright: ignore[reportAttributeAccessIssue]
    targets = [crc32(page.encode()) % num_partitions for page in pieces.column("page").to_pylist()]
    yield from addressed(PIECES, pieces, np.array(targets, dtype=np.int64))


def page_losses(batches: Iterator[pa.RecordBatch], num_partitions: int) -> Iterator[pa.RecordBatch]:
    """From PIECES parcels the new documents whose record has the page URL of a better one.

    LOST parcels (id) go to the partition of the document's own content, PAGED parcels (id, kept, collection) to that of
    the content of the kept record's first piece, by which it is named."""
    import pyarrow as pa

    received = unpacked(batches).get(PIECES)
    if received is None:
        return
    pieces, starts = _by_record(received)
    record_of_piece = np.repeat(np.arange(len(starts)), group_sizes(starts, pieces.num_rows))
    records = _records(pieces, starts)
    best, ids = _best_records(records), records.column("id").to_numpy()
    is_lost = (best >= 0) & records.column("is_new").to_numpy() & (ids[best] != ids)
    lost = np.flatnonzero(is_lost[record_of_piece])
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


def _by_record(pieces: pa.Table) -> tuple[pa.Table, I64]:
    """The pieces by page, file and record, the first piece of each first; and the first rows of records."""
    import pyarrow as pa

    keys = [_codes(pieces, name) for name in ("page", "file", "source", "offset", "is_new")]
    firsts = [_codes(pieces, name) for name in ("piece", "id")]
    order = np.lexsort([*reversed(firsts), *reversed(keys)])
    return pieces.take(pa.array(order)).combine_chunks(), group_starts(*(key[order] for key in keys))


def _first_records(pieces: pa.Table) -> pa.Table:
    """The pieces of no more than MAX_RECORDS_PER_FILE + 1 records per page and file."""
    import pyarrow as pa

    pieces, starts = _by_record(pieces)
    files = group_starts(*(_codes(pieces, name)[starts] for name in ("page", "file")))
    number = np.arange(len(starts)) - np.repeat(files, group_sizes(files, len(starts)))
    is_sent = np.repeat(number <= MAX_RECORDS_PER_FILE, group_sizes(starts, pieces.num_rows))
    return pieces.filter(pa.array(is_sent))


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
    """For every record, in the order of _by_record, the best one of its page; -1 where the URL names no page, or the
    page has one record."""
    pages, files = _codes(records, "page"), _codes(records, "file")
    page_starts, file_starts = group_starts(pages), group_starts(pages, files)
    num_records = group_sizes(page_starts, len(pages))
    most_in_file = np.maximum.reduceat(group_sizes(file_starts, len(pages)), np.searchsorted(file_starts, page_starts))
    order = rank_order(records, np.repeat(np.arange(len(page_starts)), num_records))
    is_shared = (num_records > 1) & (most_in_file <= MAX_RECORDS_PER_FILE)
    return np.repeat(np.where(is_shared, order[page_starts], -1), num_records)
