"""Writes surviving documents and their signatures, one range of ids per task.

Only signatures, and ids with their clusters, arrive by shuffle. Runs in executors: imports no Spark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.records.documents_by_id import MARKS, write_marked_part
from tasks.data.records.parcels import PARCEL_ROWS, id_strings, unpacked
from tasks.data.records.parquet_parts import WrittenPart, part_row, write_rows

if TYPE_CHECKING:
    import pyarrow as pa

    from configs.files.stored_files import StoredFile

SIGNATURES = "signatures"
SIGNATURE_METADATA = b"glm46.minhash"
"""Key of a signature file's schema metadata: how its signatures were made."""


def write_survivors(
    batches: Iterator[pa.RecordBatch],
    files: list[StoredFile],
    directory: str,
    num_files: int,
    signature_metadata: dict[str, object],
) -> Iterator[pa.RecordBatch]:
    """Write documents/part-N.parquet and signatures/part-N.parquet under `directory`, for SIGNATURES parcels and MARKS
    (id, cluster) as numbers; PART_COLUMNS of both, where only documents are counted."""
    import pyarrow as pa

    received = unpacked(batches)
    if MARKS not in received:
        return
    marks = received[MARKS]
    survivors = marks.column("id").to_numpy()
    named = pa.table({"id": survivors, "cluster": id_strings(marks.column("cluster").to_numpy())})
    documents = write_marked_part(named, files, f"{directory}/documents", num_files, ("domain",))
    uri = f"{directory}/signatures/{documents.file.name}"
    signed = _write_signatures(received.get(SIGNATURES), survivors, uri, signature_metadata)
    yield part_row(documents)
    yield part_row(WrittenPart(signed.file))


def signature_schema(metadata: dict[str, object]) -> pa.Schema:
    """(id, signature: 32-bit values, little end first), and how they were made."""
    import pyarrow as pa

    num_permutations = metadata["num_permutations"]
    assert isinstance(num_permutations, int), metadata
    fields = [("id", pa.string()), ("signature", pa.binary(4 * num_permutations))]
    return pa.schema(fields, metadata={SIGNATURE_METADATA: json.dumps(metadata, sort_keys=True)})


def _write_signatures(
    signed: pa.Table | None, survivors: np.ndarray, uri: str, metadata: dict[str, object]
) -> WrittenPart:
    """One file beside every one of documents, so that a lost one is noticed: empty where no document has words."""
    import pyarrow as pa

    schema = signature_schema(metadata)
    batches: list[pa.RecordBatch] = []
    if signed is not None:
        ids = signed.column("id").to_numpy()
        kept = np.flatnonzero(np.isin(ids, survivors, assume_unique=True))
        kept = kept[np.argsort(ids[kept])]
        values = signed.column("signature").combine_chunks().take(pa.array(kept))
        batches = pa.Table.from_arrays([id_strings(ids[kept]), values], schema=schema).to_batches(
            max_chunksize=PARCEL_ROWS
        )
    rows = iter(batches or [pa.RecordBatch.from_pylist([], schema=schema)])
    return write_rows(next(rows), rows, uri, ())
