"""Reads rows of document files by their ids, in the task that needs them.

Ids and the columns that a step adds (marks) are shuffled; texts are not. The files are those of
document_files.write_documents: in order of their ids, with the range of ids in every row group. Runs in executors:
imports no Spark.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.records.parcels import addressed, id_numbers, id_range, unpacked
from tasks.data.records.parquet_parts import part_name, write_rows

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

BATCH_ROWS = 1024
MARKS = "marks"


def read_by_id(paths: list[str], ids: NDArray[np.uint64], columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows with these ids (sorted), in the order of the files; `columns` must name the id. None reads all
    columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in _files_around(paths, ids) if len(ids) else ():
        with pq.ParquetFile(path) as file:
            groups = _row_groups(file, ids)
            if groups:
                for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns, use_threads=False):
                    numbers = id_numbers(batch.column("id"))
                    indices = np.minimum(np.searchsorted(ids, numbers), len(ids) - 1)
                    is_wanted = ids[indices] == numbers
                    if is_wanted.all():
                        yield batch
                    elif is_wanted.any():
                        yield batch.filter(pa.array(is_wanted))


def send_marks(batches: Iterator[pa.RecordBatch], num_files: int) -> Iterator[pa.RecordBatch]:
    """MARKS parcels (id as a number, and the other columns), addressed to the file that each document is written to."""
    import pyarrow as pa

    rows = [batch for batch in batches if batch.num_rows]
    if not rows:
        return
    table = pa.Table.from_batches(rows)
    numbers = id_numbers(table.column("id"))
    table = table.set_column(table.schema.get_field_index("id"), "id", pa.array(numbers))
    yield from addressed(MARKS, table, id_range(numbers, num_files))


def write_marked(
    batches: Iterator[pa.RecordBatch], paths: list[str], directory: str, num_files: int
) -> Iterator[pa.RecordBatch]:
    """Write the rows that MARKS parcels name as directory/part-N.parquet, copied from the files `paths` of one
    directory, with the marks as their last columns. Yields the file's PART_COLUMNS."""
    import pyarrow as pa

    received = unpacked(batches)
    if MARKS in received:
        name, num_rows = write_marked_part(received[MARKS], paths, directory, num_files)
        yield pa.RecordBatch.from_arrays([pa.array([name]), pa.array([num_rows])], names=["name", "num_rows"])


def write_marked_part(marks: pa.Table, paths: list[str], directory: str, num_files: int) -> tuple[str, int]:
    """(name, rows) of the file of these marks, all of one range."""
    marks = marks.sort_by("id").combine_chunks()
    ids = marks.column("id").to_numpy()
    name = part_name(int(id_range(ids[:1], num_files)[0]))
    rows = _marked(read_by_id(paths, ids), ids, marks.drop_columns("id"))
    num_rows = write_rows(next(rows), rows, os.path.join(directory, name))
    assert num_rows == len(ids), (name, num_rows, len(ids))
    return name, num_rows


def with_marks(rows: pa.Table, marks: pa.Table) -> pa.Table:
    """Rows joined with the same rows of `marks`, whose columns come last and replace columns of the same name."""
    kept = rows.select([name for name in rows.column_names if name not in marks.column_names])
    for name in marks.column_names:
        kept = kept.append_column(name, marks.column(name))
    return kept


def _marked(batches: Iterator[pa.RecordBatch], ids: NDArray[np.uint64], marks: pa.Table) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for batch in batches:
        rows = np.searchsorted(ids, id_numbers(batch.column("id")))
        table = with_marks(pa.Table.from_batches([batch]), marks.take(pa.array(rows)))
        yield from table.combine_chunks().to_batches()


def _files_around(paths: list[str], ids: NDArray[np.uint64]) -> Iterator[str]:
    """The files that can hold one of the ids. A directory's files are in order of their ids, so few footers are
    read."""
    low, high = int(ids[0]), int(ids[-1])
    for _, group in groupby(paths, key=os.path.dirname):
        files = list(group)
        start = max(bisect_right(files, low, key=_first_id) - 1, 0)
        yield from files[start : bisect_right(files, high, lo=start, key=_first_id)]


def _first_id(path: str) -> int:
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(path)
    if not metadata.num_row_groups:
        return 0
    return int(metadata.row_group(0).column(metadata.schema.to_arrow_schema().get_field_index("id")).statistics.min, 16)


def _row_groups(file: object, ids: NDArray[np.uint64]) -> list[int]:
    """The row groups whose range of ids holds one of `ids`."""
    metadata = file.metadata  # pyright: ignore[reportAttributeAccessIssue]
    column = metadata.schema.to_arrow_schema().get_field_index("id")
    groups = []
    for group in range(metadata.num_row_groups):
        statistics = metadata.row_group(group).column(column).statistics
        low, high = (int(value, 16) for value in (statistics.min, statistics.max))
        start, stop = (
            np.searchsorted(ids, np.array([low], np.uint64))[0],
            np.searchsorted(ids, np.array([high], np.uint64), "right")[0],
        )
        if stop > start:
            groups.append(group)
    return groups
