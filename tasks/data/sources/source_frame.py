"""Source files as a Spark frame that executors read them from."""

from __future__ import annotations

from heapq import heapreplace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tasks.data.sources.list_sources import SourceFile

SOURCE_COLUMNS = (
    "name",
    "path",
    "sha256",
    "role",
    "format",
    "domain",
    "lang",
    "licence",
    "collection",
    "kind",
    "repository",
    "repository_path",
)


def source_frame(spark: SparkSession, files: list[SourceFile], num_partitions: int) -> DataFrame:
    """One row per file; files go to partitions largest first, each to the one with the fewest bytes."""
    import pyarrow as pa

    loads = [(0, number) for number in range(num_partitions)]
    rows = []
    for file in sorted(files, key=lambda file: (-file.num_text_bytes, file.name)):
        load, target = loads[0]
        heapreplace(loads, (load + file.num_text_bytes + 1, target))
        rows.append(
            {
                **{name: getattr(file, name) for name in SOURCE_COLUMNS},
                "text": list(file.text),
                "max_commits": file.max_commits,
                "partition": target,
            }
        )
    fields = [(name, pa.string()) for name in SOURCE_COLUMNS]
    schema = pa.schema(
        [*fields, ("text", pa.list_(pa.string())), ("max_commits", pa.int64()), ("partition", pa.int32())]
    )
    frame = spark.createDataFrame(pa.Table.from_pylist(rows, schema=schema))
    return frame.repartitionById(num_partitions, "partition")
