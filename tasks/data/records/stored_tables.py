"""Reads Parquet files of the store inside executors, in verified blocks: the driver opens none of them.

A file that has fewer row groups than it has readers is divided by rows. Runs in executors: imports no Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from configs.files.stored_files import StoredFile, VerifiedReader

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

BATCH_ROWS = 256
"""Rows that a task reads at once: web pages have 100 KB and more."""


@contextmanager
def open_parquet(file: StoredFile) -> Iterator[pq.ParquetFile]:
    """A stored Parquet file; what is read of it is verified."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with VerifiedReader(file) as reader, pq.ParquetFile(pa.PythonFile(reader, mode="r")) as opened:
        yield opened


def slice_schema() -> pa.Schema:
    """Columns of `slices`: parts of files that one task reads."""
    import pyarrow as pa

    file = [("uri", pa.string()), ("size", pa.int64()), ("sha256", pa.string()), ("blocks", pa.list_(pa.string()))]
    return pa.schema([("partition", pa.int32()), *file, ("slice", pa.int32()), ("num_slices", pa.int32())])


def slices(files: list[StoredFile], num_partitions: int) -> list[dict[str, Any]]:
    """Rows of slice_schema: the files over the partitions, each in as many slices as give every partition one."""
    num_slices = -(-num_partitions // len(files))
    rows = [
        {
            "uri": file.uri,
            "size": file.size,
            "sha256": file.sha256,
            "blocks": list(file.blocks),
            "slice": number,
            "num_slices": num_slices,
        }
        for file in files
        for number in range(num_slices)
    ]
    return [{"partition": number % num_partitions, **row} for number, row in enumerate(rows)]


def stored_file(row: dict[str, Any]) -> StoredFile:
    """The file of a row of slice_schema."""
    return StoredFile(row["uri"], row["size"], row["sha256"], tuple(row["blocks"]))


def read_slices(
    batches: Iterator[pa.RecordBatch], columns: tuple[str, ...], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of the slices, as `schema`, which has `columns`."""
    for batch in batches:
        for row in batch.to_pylist():
            with open_parquet(stored_file(row)) as file:
                for rows in _rows_of_slice(file, row["slice"], row["num_slices"], columns):
                    yield rows if rows.schema.equals(schema) else rows.cast(schema)


def map_slices(
    batches: Iterator[pa.RecordBatch],
    function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    reader: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
) -> Iterator[pa.RecordBatch]:
    """What `function` gives for the rows of the slices, which `reader` reads."""
    return function(reader(batches))


def _rows_of_slice(file: pq.ParquetFile, number: int, count: int, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    num_groups, num_rows = file.metadata.num_row_groups, file.metadata.num_rows
    if num_groups >= count:
        groups = [group for group in range(num_groups) if group * count // num_groups == number]
        begin, end = 0, num_rows
    else:
        begin, end = number * num_rows // count, (number + 1) * num_rows // count
        groups, first = _groups_of_rows(file, begin, end)
        begin, end = begin - first, end - first
    if not groups or begin == end:
        return
    position = 0
    for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=list(columns), use_threads=False):
        start, stop = max(begin - position, 0), min(end - position, batch.num_rows)
        if start < stop:
            yield batch.slice(start, stop - start)
        position += batch.num_rows


def _groups_of_rows(file: pq.ParquetFile, begin: int, end: int) -> tuple[list[int], int]:
    """The row groups that hold rows [begin, end), and the first row of the first of them."""
    groups, first, position = [], 0, 0
    for group in range(file.metadata.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        if position < end and position + num_rows > begin:
            first = first if groups else position
            groups.append(group)
        position += num_rows
    return groups, first


def describe_columns(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """(schema) of the first file: its Arrow schema as a message."""
    import pyarrow as pa

    for batch in batches:
        for row in batch.to_pylist():
            with open_parquet(stored_file(row)) as file:
                schema = file.schema_arrow.remove_metadata().serialize().to_pybytes()
                yield pa.RecordBatch.from_arrays([pa.array([schema], pa.binary())], names=["schema"])
