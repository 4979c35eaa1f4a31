"""Writes one Parquet file per partition, inside Spark executors, with bytes that depend only on the rows.

Spark's own writer lists a column's encodings in the order of a Java hash set, which differs from process to process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from configs.atomic_files import replacing

if TYPE_CHECKING:
    import pyarrow as pa

ROW_GROUP_ROWS = 1024
"""Rows of a row group: the unit in which tasks divide a file and in which reads by id skip documents."""
PART_COLUMNS = "name string, num_rows long"


def bucket_of(identity: str, count: int) -> int:
    """The index, among `count` ascending ranges, of the one that holds an id, by its first 32 bits."""
    return (int(identity[:8], 16) * count) >> 32


def part_name(bucket: int) -> str:
    """The file of the documents of a range."""
    return f"part-{bucket:05d}.parquet"


def write_part(batches: Iterator[pa.RecordBatch], directory: str, count: int) -> Iterator[pa.RecordBatch]:
    """Write the rows of one partition, sorted by id, as directory/part-<bucket>.parquet; without rows no file is
    written. Yields the file's PART_COLUMNS."""
    import pyarrow as pa

    rows = (batch for batch in batches if batch.num_rows)
    first = next(rows, None)
    if first is None:
        return
    name = part_name(bucket_of(first.column("id")[0].as_py(), count))
    num_rows = write_rows(first, rows, os.path.join(directory, name))
    yield pa.RecordBatch.from_arrays([pa.array([name]), pa.array([num_rows])], names=["name", "num_rows"])


def write_rows(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch], path: str) -> int:
    """Write batches as one file of equal row groups, whatever their sizes; a task that runs twice replaces the file as
    a whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    num_rows = 0
    waiting, num_waiting = [first], first.num_rows
    with replacing(Path(path)) as temporary, pq.ParquetWriter(temporary, first.schema, compression="zstd") as writer:
        for batch in rest:
            waiting.append(batch)
            num_waiting += batch.num_rows
            if num_waiting >= ROW_GROUP_ROWS:
                table = pa.Table.from_batches(waiting)
                num_whole = num_waiting // ROW_GROUP_ROWS * ROW_GROUP_ROWS
                writer.write_table(table.slice(0, num_whole).combine_chunks(), row_group_size=ROW_GROUP_ROWS)
                waiting, num_waiting = table.slice(num_whole).combine_chunks().to_batches(), num_waiting - num_whole
                num_rows += num_whole
        if waiting:
            writer.write_table(pa.Table.from_batches(waiting).combine_chunks(), row_group_size=ROW_GROUP_ROWS)
            num_rows += num_waiting
    return num_rows
