"""Writes one Parquet file per partition into the store, inside Spark executors.

The bytes depend only on the rows: Spark's own writer lists a column's encodings in the order of a Java hash set, which
differs from process to process. A task gives back what it wrote: name, rows, digests and counts. So nobody reads the
file again to commit it.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from configs.files.stored_files import StoredFile, writing

if TYPE_CHECKING:
    import pyarrow as pa

ROW_GROUP_ROWS = 1024
"""Row groups are what tasks divide a file by, and what is skipped when a few documents are wanted."""
PART_COLUMNS = (
    "uri string, size long, sha256 string, blocks array<string>, keys array<array<string>>, rows array<long>, "
    "totals array<long>"
)
"""A file that a task wrote; per value of the counted columns the rows and the sum of num_bytes."""
SUMMED = "num_bytes"
NULL = "\0"
"""A counted value that is null."""

Counts = dict[tuple[str, ...], tuple[int, int]]
"""(rows, sum of num_bytes) per value of the counted columns; the sum is 0 where there is no such column."""


def bucket_of(identity: str, count: int) -> int:
    """The index, among `count` ascending ranges, of the one that holds an id, by its first 32 bits."""
    return (int(identity[:8], 16) * count) >> 32


def part_name(bucket: int) -> str:
    """The file of the documents of a range."""
    return f"part-{bucket:05d}.parquet"


@dataclass
class WrittenPart:
    """What a task wrote as one file."""

    file: StoredFile
    rows: Counter[tuple[str, ...]] = field(default_factory=Counter)
    totals: Counter[tuple[str, ...]] = field(default_factory=Counter)

    @property
    def num_rows(self) -> int:
        return sum(self.rows.values())


def write_part(
    batches: Iterator[pa.RecordBatch], directory: str, count: int, keys: tuple[str, ...], name: str = ""
) -> Iterator[pa.RecordBatch]:
    """Write the rows of one partition, sorted by id, as directory/part-<bucket>.parquet, or `name`; no rows, no file.
    PART_COLUMNS for each file."""
    rows = (batch for batch in batches if batch.num_rows)
    first = next(rows, None)
    if first is None:
        return
    name = name or part_name(bucket_of(first.column("id")[0].as_py(), count))
    yield part_row(write_rows(first, rows, f"{directory}/{name}", keys))


def write_partition(batches: Iterator[pa.RecordBatch], directory: str) -> Iterator[pa.RecordBatch]:
    """Write the rows of one partition as a file of a name that no other task has. PART_COLUMNS for the file."""
    rows = (batch for batch in batches if batch.num_rows)
    first = next(rows, None)
    if first is not None:
        yield part_row(write_rows(first, rows, f"{directory}/{uuid.uuid4().hex}.parquet", ()))


def write_rows(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch], uri: str, keys: tuple[str, ...]) -> WrittenPart:
    """Write batches as one file of equal row groups, whatever their sizes, and count its rows by `keys`; a task that
    runs twice replaces the file as a whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    part = WrittenPart(StoredFile(uri, 0, ""))
    waiting, num_waiting = [first], first.num_rows
    with writing(uri) as (file, written), pq.ParquetWriter(file, first.schema, compression="zstd") as writer:

        def write(table: pa.Table) -> None:
            writer.write_table(table.combine_chunks(), row_group_size=ROW_GROUP_ROWS)
            _count(table, keys, part)

        for batch in rest:
            waiting.append(batch)
            num_waiting += batch.num_rows
            if num_waiting >= ROW_GROUP_ROWS:
                table = pa.Table.from_batches(waiting)
                num_whole = num_waiting // ROW_GROUP_ROWS * ROW_GROUP_ROWS
                write(table.slice(0, num_whole))
                waiting, num_waiting = table.slice(num_whole).combine_chunks().to_batches(), num_waiting - num_whole
        if waiting:
            write(pa.Table.from_batches(waiting))
    (part.file,) = written
    return part


def part_row(part: WrittenPart) -> pa.RecordBatch:
    """PART_COLUMNS of a file."""
    import pyarrow as pa

    keys = sorted(part.rows)
    row: dict[str, Any] = {
        "uri": part.file.uri,
        "size": part.file.size,
        "sha256": part.file.sha256,
        "blocks": list(part.file.blocks),
        "keys": [list(key) for key in keys],
        "rows": [part.rows[key] for key in keys],
        "totals": [part.totals[key] for key in keys],
    }
    texts = pa.list_(pa.string())
    types = (pa.string(), pa.int64(), pa.string(), texts, pa.list_(texts), pa.list_(pa.int64()), pa.list_(pa.int64()))
    return pa.RecordBatch.from_pylist([row], schema=pa.schema(list(zip(row, types, strict=True))))


def read_part_rows(rows: list[Any]) -> tuple[list[StoredFile], Counts]:
    """The files of PART_COLUMNS rows that a driver collected, and the sums of their counts."""
    num_rows, totals = Counter(), Counter()
    for row in rows:
        for key, count, total in zip(row["keys"], row["rows"], row["totals"], strict=True):
            num_rows[tuple(key)] += count
            totals[tuple(key)] += total
    files = [StoredFile(row["uri"], row["size"], row["sha256"], tuple(row["blocks"])) for row in rows]
    return files, {key: (num_rows[key], totals[key]) for key in sorted(num_rows)}


def _count(table: pa.Table, keys: tuple[str, ...], part: WrittenPart) -> None:
    has_sum = SUMMED in table.column_names
    if not keys:
        part.rows[()] += table.num_rows
        part.totals[()] += int(table.column(SUMMED).to_numpy().sum()) if has_sum else 0
        return
    aggregates: list[Any] = [([], "count_all"), *([(SUMMED, "sum")] if has_sum else [])]
    for row in table.group_by(list(keys)).aggregate(aggregates).to_pylist():
        key = tuple(NULL if row[name] is None else str(row[name]) for name in keys)
        part.rows[key] += row["count_all"]
        part.totals[key] += (row[f"{SUMMED}_sum"] or 0) if has_sum else 0
