"""Sends what decides between duplicates, as parcels: RANKED for every document, PIECES for those with a page URL.

Runs in executors: imports no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.deduplication.document_ranks import digest_partition
from tasks.data.deduplication.page_duplicates import send_pieces
from tasks.data.records.parcels import PARCEL_ROWS, addressed, digest_numbers, id_numbers

if TYPE_CHECKING:
    import pyarrow as pa

META_COLUMNS = (
    "id string, source string, offset long, piece long, collection string, url string, domain string, "
    "content_digest string, num_chars long, quality double"
)
RANKED = "ranked"


def send_ranked(batches: Iterator[pa.RecordBatch], is_new: bool, num_partitions: int) -> Iterator[pa.RecordBatch]:
    """RANKED parcels of META_COLUMNS, addressed by content, and PIECES parcels, addressed by page."""
    for table in _gathered(batches):
        ranked = _ranked(table, is_new)
        yield from addressed(RANKED, ranked, digest_partition(ranked, num_partitions))
        yield from send_pieces(table, ranked, num_partitions)


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
    """(RANK, the first 128 bits of the digest, collection)."""
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
