"""Documents as Parquet: read for a Spark job, written under canonical names and with canonical bytes.

No partition or core count changes the bytes. Files hold disjoint, ascending ranges of ids, each sorted by id. An id
is uniform, so its leading digits give the range. Executors write to the output directory themselves: on a cluster it
is on a file system that all of them mount.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.data.records.documents_by_id import send_marks, with_marks, write_marked
from tasks.data.records.parcels import PARCEL_COLUMNS
from tasks.data.records.parquet_parts import PART_COLUMNS, part_name, write_part

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from configs.schema import SparkResources
    from infra.step import Output

FILE_BYTES = 256 * 2**20
"""Bytes of text per Parquet file, before compression."""


def num_files(num_bytes: int) -> int:
    """Number of files to which text of this size is written; it does not depend on the machine."""
    return max(1, -(-num_bytes // FILE_BYTES))


def read_documents(spark: SparkSession, paths: list[Path], resources: SparkResources) -> DataFrame:
    """The documents of Parquet files; repartitioned where there are fewer row groups than partitions."""
    frame = spark.read.parquet(*(path.as_uri() for path in paths))
    count = resources.shuffle_partitions
    return frame if len(paths) >= count or _num_row_groups(paths) >= count else frame.repartition(count, "id")


def _num_row_groups(paths: list[Path]) -> int:
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(path).num_row_groups for path in paths)


def write_documents(frame: DataFrame, directory: Path, num_bytes: int) -> list[Path]:
    """Write documents with at most `num_bytes` of text as directory/part-00000.parquet and on."""
    return _write(frame, directory, num_files(num_bytes))


def write_table(frame: DataFrame, path: Path) -> None:
    """Write a table of ids as one file, sorted by id."""
    directory = path.with_suffix(".parts")
    (part,) = _write(frame, directory, 1)
    part.rename(path)
    directory.rmdir()


def write_marked_documents(marks: DataFrame, paths: list[Path], directory: Path, num_bytes: int) -> list[Path]:
    """Write the documents that `marks` (id and other columns) names, with the other columns as their last ones. They
    are copied from the files `paths` of one step's documents/, so texts are not shuffled."""
    count = num_files(num_bytes)
    directory.mkdir(parents=True)
    sent = marks.mapInArrow(partial(send_marks, num_files=count), PARCEL_COLUMNS).repartitionById(count, "target")
    writer = partial(write_marked, paths=[str(path) for path in paths], directory=str(directory), num_files=count)
    names = [row.name for row in sent.mapInArrow(writer, PART_COLUMNS).collect()]
    if not names:
        _write_empty_marked(marks, paths[0], directory / part_name(0))
    return [directory / name for name in sorted(names) or [part_name(0)]]


def _write_empty_marked(marks: DataFrame, like: Path, path: Path) -> None:
    import pyarrow.parquet as pq

    table = with_marks(pq.read_schema(like).empty_table(), marks.where("false").drop("id").toArrow())
    pq.write_table(table, path, compression="zstd")


def write_kept(
    verdicts: DataFrame, documents: list[Path], num_in: int, num_bytes: int, output: Output, *keys: str
) -> tuple[dict[tuple[str, ...], tuple[int, int]], dict[str, int]]:
    """Write documents/ and dropped.parquet by `verdicts`, which has one row for every document of the files
    `documents`.

    Columns: id, reason (empty for documents that are kept), kept_id; further columns are added to the documents.
    Returns the result of count_kept.
    """
    write_table(verdicts.where("reason <> ''").select("id", "reason", "kept_id"), output.path("dropped.parquet"))
    marks = verdicts.where("reason = ''").drop("reason", "kept_id")
    return count_kept(
        write_marked_documents(marks, documents, output.path("documents"), num_bytes), num_in, output, *keys
    )


def count_kept(
    paths: list[Path], num_in: int, output: Output, *keys: str
) -> tuple[dict[tuple[str, ...], tuple[int, int]], dict[str, int]]:
    """(documents, bytes) per value of `keys` of the written files, and the documents in dropped.parquet per reason:
    they add up to `num_in`, else AssertionError."""
    counts, reasons = count_by(paths, *keys), count_reasons(output.path("dropped.parquet"))
    num_kept = sum(count for count, _ in counts.values())
    assert num_in == num_kept + sum(reasons.values()), (num_in, num_kept, reasons)
    return counts, reasons


def id_range_column(count: int) -> Column:
    """The index, among `count` equal ranges, of the one that holds the id: as parquet_parts.bucket_of."""
    from pyspark.sql import functions as F

    leading = F.conv(F.substring("id", 1, 8), 16, 10).cast("long")
    return F.shiftright(leading * F.lit(count), 32).cast("int")


def _write(frame: DataFrame, directory: Path, count: int) -> list[Path]:
    directory.mkdir(parents=True)
    ordered = frame.repartition(1) if count == 1 else frame.repartitionById(count, id_range_column(count))
    writer = partial(write_part, directory=str(directory), count=count)
    names = [row.name for row in ordered.sortWithinPartitions("id").mapInArrow(writer, PART_COLUMNS).collect()]
    if not names:
        _write_empty(frame, directory / part_name(0))
    return [directory / name for name in sorted(names) or [part_name(0)]]


def _write_empty(frame: DataFrame, path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(frame.where("false").toArrow(), path, compression="zstd")


def count_by(paths: list[Path], *keys: str, total: str = "num_bytes") -> dict[tuple[str, ...], tuple[int, int]]:
    """(documents, sum of `total`) per value of `keys`, read without the texts."""
    import pyarrow.dataset as dataset

    table = dataset.dataset([str(path) for path in paths]).to_table(columns=[*keys, total])
    grouped = (
        table.group_by(list(keys))
        .aggregate([(total, "count"), (total, "sum")])
        .sort_by([(key, "ascending") for key in keys])
    )
    rows = grouped.to_pylist()
    return {tuple(row[key] for key in keys): (row[f"{total}_count"], row[f"{total}_sum"]) for row in rows}


def count_reasons(path: Path) -> dict[str, int]:
    """Rows of a dropped.parquet or rejected.parquet per reason."""
    import pyarrow.parquet as pq

    counts = pq.read_table(path, columns=["reason"]).group_by("reason").aggregate([("reason", "count")])
    return dict(sorted((row["reason"], row["reason_count"]) for row in counts.to_pylist()))
