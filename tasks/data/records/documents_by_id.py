"""Reads rows of document files by their ids, in the task that needs them.

Ids and the columns that a step adds (marks) are shuffled; texts are not. The files are those of
document_files.write_documents: in order of their ids, with the range of ids in every row group. Runs in executors:
imports no Spark.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.records.parcels import addressed, id_numbers, id_range, unpacked
from tasks.data.records.parquet_parts import WrittenPart, part_name, part_row, write_rows
from tasks.data.records.stored_tables import open_parquet

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from configs.files.stored_files import StoredFile

BATCH_ROWS = 1024
MARKS = "marks"


def read_by_id(
    files: list[StoredFile], ids: NDArray[np.uint64], columns: list[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows with these ids (sorted), in the order of the files; `columns` must name the id. None reads all
    columns."""
    import pyarrow as pa

    for stored in _files_around(files, ids) if len(ids) else ():
        with open_parquet(stored) as file:
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


def named_rows(
    batches: Iterator[pa.RecordBatch], files: list[StoredFile], columns: list[str]
) -> Iterator[pa.RecordBatch]:
    """These columns (id among them) of the documents whose ids are in the batches: for few of many documents."""
    ids = [np.empty(0, np.uint64), *(id_numbers(batch.column("id")) for batch in batches)]
    return read_by_id(files, np.sort(np.concatenate(ids)), columns)


def read_marked(
    batches: Iterator[pa.RecordBatch], files: list[StoredFile], columns: list[str]
) -> Iterator[pa.RecordBatch]:
    """These columns (id among them) of the documents that the rows (id and marks) name, and then their marks."""
    import pyarrow as pa

    rows = [batch for batch in batches if batch.num_rows]
    if not rows:
        return
    table = pa.Table.from_batches(rows)
    numbers = id_numbers(table.column("id"))
    order = np.argsort(numbers)
    marks = table.drop_columns("id").take(pa.array(order)).combine_chunks()
    for batch in _marked(read_by_id(files, numbers[order], columns), numbers[order], marks):
        yield batch.select([*columns, *marks.column_names])


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
    batches: Iterator[pa.RecordBatch], files: list[StoredFile], directory: str, num_files: int, keys: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    """Write the rows that MARKS parcels name as directory/part-N.parquet, copied from the files of one directory, with
    the marks as their last columns. PART_COLUMNS for the file."""
    received = unpacked(batches)
    if MARKS in received:
        yield part_row(write_marked_part(received[MARKS], files, directory, num_files, keys))


def write_marked_part(
    marks: pa.Table, files: list[StoredFile], directory: str, num_files: int, keys: tuple[str, ...]
) -> WrittenPart:
    """The file of these marks, all of one range."""
    marks = marks.sort_by("id").combine_chunks()
    ids = marks.column("id").to_numpy()
    name = part_name(int(id_range(ids[:1], num_files)[0]))
    rows = _marked(read_by_id(files, ids), ids, marks.drop_columns("id"))
    part = write_rows(next(rows), rows, f"{directory}/{name}", keys)
    assert part.num_rows == len(ids), (name, part.num_rows, len(ids))
    return part


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


def _files_around(files: list[StoredFile], ids: NDArray[np.uint64]) -> Iterator[StoredFile]:
    """Those that can hold one of the ids. The files of a directory are in order of theirs once a longer number comes
    after a shorter one (part-100000 after part-99999): few footers of many files are read."""
    low, high = int(ids[0]), int(ids[-1])
    for _, group in groupby(files, key=lambda file: file.directory):
        ordered = sorted(group, key=lambda file: (len(file.uri), file.uri))
        start = max(bisect_right(ordered, low, key=_first_id) - 1, 0)
        yield from ordered[start : bisect_right(ordered, high, lo=start, key=_first_id)]


@lru_cache(4096)
def _first_id(file: StoredFile) -> int:
    with open_parquet(file) as opened:
        metadata = opened.metadata
        if not metadata.num_row_groups:
            return 0
        column = metadata.schema.to_arrow_schema().get_field_index("id")
        return int(metadata.row_group(0).column(column).statistics.min, 16)


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
