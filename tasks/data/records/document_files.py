"""Documents as Parquet: read for a Spark job, written under canonical names and with canonical bytes.

No partition or core count changes the bytes. Files hold disjoint, ascending ranges of ids, each sorted by id. An id
is uniform, so its leading digits give the range. Executors read from the store and write to it: the driver gets what
each task wrote (digests and counts), and opens no file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from configs.files.stored_files import StoredFile, writing
from tasks.data.records.documents import NUM_HASHES, arrow_schema, names_of
from tasks.data.records.documents_by_id import send_marks, with_marks, write_marked
from tasks.data.records.parcels import PARCEL_COLUMNS
from tasks.data.records.parquet_parts import (
    PART_COLUMNS,
    Counts,
    part_name,
    read_part_rows,
    write_part,
    write_partition,
)
from tasks.data.records.stored_tables import describe_columns, map_slices, read_slices, slice_schema, slices

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from configs.schema import SparkResources
    from infra.step import Output

FILE_BYTES = 256 * 2**20
"""Bytes of text per Parquet file, before compression."""
_columns: dict[str, StructType] = {}
"""Columns of files by digest, as this process was given them."""


def num_files(num_bytes: int) -> int:
    """Number of files to which text of this size is written; it does not depend on the machine."""
    return max(1, -(-num_bytes // FILE_BYTES))


def read_documents(spark: SparkSession, files: list[StoredFile], resources: SparkResources, *columns: str) -> DataFrame:
    """The documents of Parquet files with equal columns, all of them or `columns`, spread over all partitions."""
    reader, schema = _reader(spark, files, columns)
    return slice_frame(spark, files, _num_partitions(files, resources)).mapInArrow(reader, schema)


def map_documents(
    spark: SparkSession,
    files: list[StoredFile],
    resources: SparkResources,
    function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: str,
    *columns: str,
) -> DataFrame:
    """The rows (`schema`) that `function` gives for read_documents. The Python process that reads documents also maps
    them: their texts do not go to Java and back before."""
    num_partitions = _num_partitions(files, resources)
    mapper = partial(map_slices, function=function, reader=_reader(spark, files, columns)[0])
    return slice_frame(spark, files, num_partitions).mapInArrow(mapper, schema)


def send_documents(
    spark: SparkSession,
    files: list[StoredFile],
    resources: SparkResources,
    function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    columns: str,
) -> DataFrame:
    """The parcels that `function` gives for these columns of the documents: a schema string, so that no task has to
    look for their types."""
    reader = partial(read_slices, columns=tuple(names_of(columns)), schema=arrow_schema(columns))
    mapper = partial(map_slices, function=function, reader=reader)
    return slice_frame(spark, files, _num_partitions(files, resources)).mapInArrow(mapper, PARCEL_COLUMNS)


def _num_partitions(files: list[StoredFile], resources: SparkResources) -> int:
    return max(resources.shuffle_partitions, min(len(files), resources.shuffle_partitions * 4))


def _reader(
    spark: SparkSession, files: list[StoredFile], columns: tuple[str, ...]
) -> tuple[partial[Iterator[pa.RecordBatch]], StructType]:
    """Reads slices in executors, as rows of these columns."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    schema = columns_of(spark, files[0])
    if columns:
        schema = StructType([schema[name] for name in columns])
    return partial(read_slices, columns=tuple(schema.names), schema=to_arrow_schema(schema)), schema


def slice_frame(spark: SparkSession, files: list[StoredFile], num_partitions: int) -> DataFrame:
    """The slices of files that each task reads (slice_schema)."""
    import pyarrow as pa

    rows = pa.Table.from_pylist(slices(files, num_partitions), schema=slice_schema())
    return spark.createDataFrame(rows).repartitionById(num_partitions, "partition")


def columns_of(spark: SparkSession, file: StoredFile) -> StructType:
    """The columns of a file: an executor looks."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import from_arrow_schema

    known = _columns.get(file.sha256)
    if known is None:
        (row,) = slice_frame(spark, [file], 1).mapInArrow(describe_columns, "schema binary").collect()
        known = from_arrow_schema(pa.ipc.read_schema(pa.py_buffer(bytes(row["schema"]))))
        if file.sha256:
            _columns[file.sha256] = known
    return known


def write_documents(
    frame: DataFrame, output: Output, name: str, num_bytes: int, *keys: str
) -> tuple[list[StoredFile], Counts]:
    """Write documents with at most `num_bytes` of text as name/part-00000.parquet and on; counts them by `keys`."""
    count = num_files(num_bytes)
    ordered = frame.repartition(1) if count == 1 else frame.repartitionById(count, id_range_column(count))
    writer = partial(write_part, directory=f"{output.uri}/{name}", count=count, keys=keys)
    files, counts = _written(ordered.sortWithinPartitions("id").mapInArrow(writer, PART_COLUMNS), output)
    return files or [write_empty(empty_table(frame.schema), output, f"{name}/{part_name(0)}")], counts


def write_table(frame: DataFrame, output: Output, name: str, *keys: str) -> Counts:
    """Write a table of ids as one file, sorted by id; counts its rows by `keys`."""
    writer = partial(write_part, directory=output.uri, count=1, keys=keys, name=name)
    ordered = frame.repartition(1).sortWithinPartitions("id")
    files, counts = _written(ordered.mapInArrow(writer, PART_COLUMNS), output)
    if not files:
        write_empty(empty_table(frame.schema), output, name)
    return counts


def write_partitions(frame: DataFrame, output: Output, name: str) -> list[StoredFile]:
    """Write a table that the same step reads again and then removes: a file per partition, in no order."""
    writer = partial(write_partition, directory=f"{output.uri}/{name}")
    files, _ = _written(frame.mapInArrow(writer, PART_COLUMNS), output)
    return files or [write_empty(empty_table(frame.schema), output, f"{name}/{part_name(0)}")]


def count_reasons(counts: Counts) -> dict[str, int]:
    """Rows per reason of a table that was counted by it."""
    return {reason: num_rows for (reason,), (num_rows, _) in counts.items()}


def write_marked_documents(
    marks: DataFrame, files: list[StoredFile], output: Output, name: str, num_bytes: int, *keys: str
) -> tuple[list[StoredFile], Counts]:
    """Write the documents that `marks` (id and other columns) names, with the other columns as their last ones. They
    are copied from the files of one step's documents/: texts go through no shuffle."""
    count = num_files(num_bytes)
    sent = marks.mapInArrow(partial(send_marks, num_files=count), PARCEL_COLUMNS).repartitionById(count, "target")
    writer = partial(write_marked, files=files, directory=f"{output.uri}/{name}", num_files=count, keys=keys)
    made, counts = _written(sent.mapInArrow(writer, PART_COLUMNS), output)
    if not made:
        like = empty_table(columns_of(marks.sparkSession, files[0]))
        empty = with_marks(like, empty_table(marks.drop("id").schema))
        made = [write_empty(empty, output, f"{name}/{part_name(0)}")]
    return made, counts


def write_kept(
    verdicts: DataFrame, documents: list[StoredFile], num_in: int, num_bytes: int, output: Output, *keys: str
) -> tuple[Counts, dict[str, int]]:
    """Write documents/ and dropped.parquet by `verdicts` (id, reason, kept_id; reason empty for what stays; other
    columns become those of the documents): every document of the files `documents` has one. Gives the documents by
    `keys`, and the dropped ones by reason: they add up to `num_in`, else AssertionError.
    """
    dropped = verdicts.where("reason <> ''").select("id", "reason", "kept_id")
    reasons = count_reasons(write_table(dropped, output, "dropped.parquet", "reason"))
    marks = verdicts.where("reason = ''").drop("reason", "kept_id")
    _, counts = write_marked_documents(marks, documents, output, "documents", num_bytes, *keys)
    check_counts(counts, reasons, num_in)
    return counts, reasons


def check_counts(counts: Counts, reasons: dict[str, int], num_in: int) -> None:
    """Raises AssertionError unless every document was kept or dropped."""
    num_kept = sum(count for count, _ in counts.values())
    assert num_in == num_kept + sum(reasons.values()), (num_in, num_kept, reasons)


def id_range_column(count: int) -> Column:
    """The index, among `count` equal ranges, of the one that holds the id: as parquet_parts.bucket_of."""
    from pyspark.sql import functions as F

    leading = F.conv(F.substring("id", 1, 8), 16, 10).cast("long")
    return F.shiftright(leading * F.lit(count), 32).cast("int")


def is_sampled(num_documents: int, max_documents: int) -> Column:
    """Whether a document's sampling hash is among the lowest, which about `max_documents` of all have."""
    from pyspark.sql import functions as F

    bound = min(NUM_HASHES, NUM_HASHES * max_documents // max(num_documents, 1))
    return F.conv(F.substring("id", 9, 8), 16, 10).cast("long") < bound


def counts_by(counts: Counts, *indices: int) -> Counts:
    """Counts summed over all keys but those at `indices`."""
    rows, totals = Counter(), Counter()
    for key, (num_rows, total) in counts.items():
        rows[tuple(key[index] for index in indices)] += num_rows
        totals[tuple(key[index] for index in indices)] += total
    return {key: (rows[key], totals[key]) for key in sorted(rows)}


def count_by(frame: DataFrame, *keys: str) -> Counts:
    """(documents, sum of num_bytes) per value of `keys`."""
    from pyspark.sql import functions as F

    counted = frame.groupBy(*keys).agg(F.count("*").alias("num_rows"), F.sum("num_bytes").alias("num_bytes"))
    rows = sorted(counted.collect(), key=lambda row: tuple(row[name] for name in keys))
    return {tuple(row[name] for name in keys): (row["num_rows"], row["num_bytes"]) for row in rows}


def write_empty(table: pa.Table, output: Output, name: str) -> StoredFile:
    """A file without rows, for readers to see its columns: no task writes one."""
    import pyarrow.parquet as pq

    with writing(f"{output.uri}/{name}") as (file, written):
        pq.write_table(table, file, compression="zstd")
    return output.add(written)[0]


def empty_table(columns: StructType) -> pa.Table:
    """A table with these columns."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(columns).empty_table()


def _written(parts: DataFrame, output: Output) -> tuple[list[StoredFile], Counts]:
    """Runs the tasks that write PART_COLUMNS."""
    files, counts = read_part_rows(parts.collect())
    return output.add(files), counts
