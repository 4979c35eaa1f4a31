"""Writes surviving documents and their signatures, one range of ids per task: rows are copied from the input files, only ids arrived by
shuffle. Runs in executors: imports no Spark.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.documents_by_id import read_by_id
from tasks.data.parcels import PARCEL_ROWS, id_numbers, id_range, id_strings, parcels, unpacked
from tasks.data.parquet_parts import write_rows

if TYPE_CHECKING:
    import pyarrow as pa

SURVIVORS, SIGNATURES = "survivors", "signatures"
SIGNATURE_METADATA = b"glm46.minhash"
"""Key of a signature file's schema metadata: how its signatures were made."""
PART_COUNT_COLUMNS = "domain string, num_documents long, num_bytes long"


def send_survivors(batches: Iterator[pa.RecordBatch], num_files: int) -> Iterator[pa.RecordBatch]:
    """SURVIVORS parcels (id, cluster) to the file that each one is written to."""
    import pyarrow as pa

    tables = [pa.Table.from_batches([batch]) for batch in batches if batch.num_rows]
    if not tables:
        return
    rows = pa.concat_tables(tables)
    targets = id_range(id_numbers(rows.column("id")), num_files)
    for target in np.unique(targets).tolist():
        yield from parcels(SURVIVORS, target, rows.filter(pa.array(targets == target)))


def write_survivors(
    batches: Iterator[pa.RecordBatch], paths: list[str], directory: str, num_files: int, signature_metadata: dict[str, object]
) -> Iterator[pa.RecordBatch]:
    """Write documents/part-N.parquet and signatures/part-N.parquet under `directory`; PART_COUNT_COLUMNS per domain."""
    import pyarrow as pa

    received = unpacked(batches)
    if SURVIVORS not in received:
        return
    ids = id_numbers(received[SURVIVORS].column("id"))
    order = np.argsort(ids)
    ids, clusters = ids[order], received[SURVIVORS].column("cluster").take(pa.array(order))
    name = f"part-{id_range(ids[:1], num_files)[0]:05d}.parquet"
    totals: dict[str, list[int]] = {}
    rows = _with_clusters(read_by_id(paths, ids), ids, clusters.combine_chunks(), totals)
    num_written = write_rows(next(rows), rows, os.path.join(directory, "documents", name))
    assert num_written == len(ids), (name, num_written, len(ids))
    _write_signatures(received.get(SIGNATURES), ids, os.path.join(directory, "signatures", name), signature_metadata)
    yield pa.RecordBatch.from_arrays(
        [pa.array(list(totals)), *(pa.array([total[place] for total in totals.values()], pa.int64()) for place in (0, 1))],
        names=["domain", "num_documents", "num_bytes"],
    )


def signature_schema(metadata: dict[str, object]) -> pa.Schema:
    """(id, signature: 32-bit values, little end first), and how they were made."""
    import pyarrow as pa

    num_permutations = metadata["num_permutations"]
    assert isinstance(num_permutations, int), metadata
    fields = [("id", pa.string()), ("signature", pa.binary(4 * num_permutations))]
    return pa.schema(fields, metadata={SIGNATURE_METADATA: json.dumps(metadata, sort_keys=True)})


def _with_clusters(
    batches: Iterator[pa.RecordBatch], ids: np.ndarray, clusters: pa.Array, totals: dict[str, list[int]]
) -> Iterator[pa.RecordBatch]:
    """The rows with their cluster as last column; counts documents and bytes per domain in passing."""
    import pyarrow as pa

    for batch in batches:
        places = np.searchsorted(ids, id_numbers(batch.column("id")))
        grouped = pa.Table.from_batches([batch]).select(["domain", "num_bytes"]).group_by("domain")
        for row in grouped.aggregate([("num_bytes", "count"), ("num_bytes", "sum")]).to_pylist():
            total = totals.setdefault(row["domain"], [0, 0])
            total[0] += row["num_bytes_count"]
            total[1] += row["num_bytes_sum"]
        others = [name for name in batch.schema.names if name != "cluster"]
        yield batch.select(others).append_column("cluster", clusters.take(pa.array(places)))


def _write_signatures(signed: pa.Table | None, survivors: np.ndarray, path: str, metadata: dict[str, object]) -> None:
    """One file beside every one of documents, so that a lost one is noticed: empty where no document has words."""
    import pyarrow as pa

    schema = signature_schema(metadata)
    batches: list[pa.RecordBatch] = []
    if signed is not None:
        ids = signed.column("id").to_numpy()
        kept = np.flatnonzero(np.isin(ids, survivors, assume_unique=True))
        kept = kept[np.argsort(ids[kept])]
        values = signed.column("signature").combine_chunks().take(pa.array(kept))
        batches = pa.Table.from_arrays([id_strings(ids[kept]), values], schema=schema).to_batches(max_chunksize=PARCEL_ROWS)
    rows = iter(batches or [pa.RecordBatch.from_pylist([], schema=schema)])
    write_rows(next(rows), rows, path)
