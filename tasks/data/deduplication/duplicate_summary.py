"""Adds up what all partitions removed, in one task: only this reaches the driver.

Runs in executors: imports no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.deduplication.duplicate_verdicts import COUNTED, summed_counts
from tasks.data.deduplication.settled_clusters import CLUSTERS, largest
from tasks.data.records.documents_by_id import read_by_id
from tasks.data.records.parcels import id_numbers, id_strings, parcels, unpacked

if TYPE_CHECKING:
    import pyarrow as pa

    from configs.files.stored_files import StoredFile

LARGEST = "largest"
SHOWN_CHARS = 120


def sum_up(batches: Iterator[pa.RecordBatch], files: list[StoredFile]) -> Iterator[pa.RecordBatch]:
    """From COUNTED and CLUSTERS parcels the counts of every collection, and LARGEST (collection, num_removed, kept_id,
    kept, removed_id, removed) with the beginnings of two texts of the largest clusters. files: documents, those of
    earlier runs among them."""
    import pyarrow as pa

    received = unpacked(batches)
    if COUNTED in received:
        yield from parcels(COUNTED, 0, summed_counts(received[COUNTED]))
    if CLUSTERS in received:
        clusters = largest(received[CLUSTERS])
        shown = clusters.select(["collection", "num_removed"])
        sides = {side: clusters.column(side).to_numpy() for side in ("kept", "removed")}
        ids, texts = _beginnings(np.unique(np.concatenate(list(sides.values()))), files)
        for side, numbers in sides.items():
            shown = shown.append_column(f"{side}_id", id_strings(numbers))
            shown = shown.append_column(side, texts.take(pa.array(np.searchsorted(ids, numbers))))
        yield from parcels(LARGEST, 0, shown)


def _beginnings(ids: np.ndarray, files: list[StoredFile]) -> tuple[np.ndarray, pa.Array]:
    """The ids, ascending, and the beginnings of their texts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = pa.Table.from_batches(list(read_by_id(files, ids, ["id", "text"])))
    numbers, firsts = np.unique(id_numbers(rows.column("id")), return_index=True)
    texts = pc.utf8_slice_codeunits(rows.column("text"), 0, SHOWN_CHARS)  # pyright: ignore[reportAttributeAccessIssue]
    return numbers, texts.take(pa.array(firsts)).combine_chunks()
