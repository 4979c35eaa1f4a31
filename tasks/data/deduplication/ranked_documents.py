"""What decides between duplicates, as parcels: RANKED for every document, PIECES for those that have a page URL.

The better of two documents is the one that an earlier run kept, then the one with the better quality (none last), the
longer one, the one with the smaller id: the smaller row of RANK. Runs in executors: imports no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from tasks.data.deduplication.page_urls import normalised_urls
from tasks.data.records.documents import CODE, COMMIT
from tasks.data.records.parcels import PARCEL_ROWS, addressed, digest_numbers, id_numbers

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]

META_COLUMNS = (
    "id string, source string, offset long, piece long, collection string, url string, domain string, "
    "content_digest string, num_chars long, quality double"
)
RANKED, PIECES = "ranked", "pieces"
RANK = ("is_new", "flaws", "shortness", "id")
"""flaws: the negative quality, NaN for none; shortness: the negative number of characters."""
UNPAGED_DOMAINS = (CODE, COMMIT)
"""Domains whose URLs name repositories and commits, which many documents share."""


def send_ranked(batches: Iterator[pa.RecordBatch], is_new: bool, num_partitions: int) -> Iterator[pa.RecordBatch]:
    """RANKED parcels of META_COLUMNS, addressed by content, and PIECES parcels, addressed by page."""
    for table in _gathered(batches):
        ranked = _ranked(table, is_new)
        yield from addressed(RANKED, ranked, digest_partition(ranked, num_partitions))
        yield from _send_pieces(table, ranked, num_partitions)


def digest_partition(ranked: pa.Table, num_partitions: int) -> NDArray[np.int64]:
    """The partition in which a document meets those of equal content."""
    return (ranked.column("digest_low").to_numpy() % np.uint64(num_partitions)).astype(np.int64)


def rank_order(table: pa.Table, *groups: Any) -> NDArray[np.int64]:
    """The order of rows by the arrays `groups`, then from the best to the worst: `table` has RANK."""
    return np.lexsort([table.column(name).to_numpy() for name in reversed(RANK)] + list(reversed(groups)))


def group_starts(*ordered: NDArray[Any]) -> NDArray[np.int64]:
    """The first row of every group of equal, consecutive rows."""
    is_first = np.ones(len(ordered[0]), dtype=bool)
    if len(is_first):
        is_first[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in ordered])
    return np.flatnonzero(is_first)


def group_sizes(starts: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    """The number of rows of every group."""
    return np.diff(np.append(starts, num_rows))


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    import pyarrow as pa

    waiting: list[pa.RecordBatch] = []
    num_waiting = 0
    for batch in batches:
        waiting.append(batch)
        num_waiting += batch.num_rows
        if num_waiting >= PARCEL_ROWS:
            yield pa.Table.from_batches(waiting).combine_chunks()
            waiting, num_waiting = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting).combine_chunks()


def _ranked(table: pa.Table, is_new: bool) -> pa.Table:
    """RANK, the first 128 bits of the digest, and the collection."""
    import pyarrow as pa

    high, low = digest_numbers(table.column("content_digest"))
    columns = {
        "id": id_numbers(table.column("id")),
        "is_new": np.full(table.num_rows, is_new),
        "flaws": -table.column("quality").to_numpy(),
        "shortness": -table.column("num_chars").to_numpy(),
        "digest_high": high,
        "digest_low": low,
    }
    return pa.table(columns).append_column("collection", table.column("collection").dictionary_encode())


def _send_pieces(table: pa.Table, ranked: pa.Table, num_partitions: int) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    import pyarrow.compute as pc

    domain, url = table.column("domain"), table.column("url")
    is_paged = pc.and_(pc.not_equal(url, ""), pc.invert(pc.is_in(domain, pa.array(UNPAGED_DOMAINS))))  # pyright: ignore[reportAttributeAccessIssue]
    paged = pc.fill_null(is_paged, False)
    table, ranked = table.filter(paged), ranked.filter(paged)
    if not table.num_rows:
        return
    page = normalised_urls(table.column("url").combine_chunks())
    file = pc.replace_substring_regex(table.column("source"), pattern="!.*$", replacement="")  # pyright: ignore[reportAttributeAccessIssue]
    pieces = ranked.append_column("page", page).append_column("file", file)
    for name in ("source", "offset", "piece"):
        pieces = pieces.append_column(name, table.column(name))
    pieces = pieces.filter(pc.not_equal(pieces.column("page"), ""))  # pyright: ignore[reportAttributeAccessIssue]
    targets = [crc32(page.encode()) % num_partitions for page in pieces.column("page").to_pylist()]
    yield from addressed(PIECES, pieces, np.array(targets, dtype=np.int64))
