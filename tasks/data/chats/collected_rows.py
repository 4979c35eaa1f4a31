"""What collecting conversations and collecting preference pairs share: rows in streams, equal ones once, capped.

A row belongs to a stream: kept, dropped, rejected, or one that says that its source changed while it was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra.step import Output
from tasks.data.chats.chat_records import CHANGED, DROPPED, KEPT, REJECTED
from tasks.data.records.document_files import count_reasons, write_table
from tasks.data.records.documents import NUM_EXAMPLES, NUM_HASHES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

DUPLICATE = "exact_duplicate"
FULL = "collection_full"


@dataclass(frozen=True)
class UniqueRows:
    """The kept rows without repetitions, persisted, and the others of them with their reason."""

    rows: DataFrame
    left_out: DataFrame
    """id, reason, kept_id."""


def stream_totals(rows: DataFrame) -> dict[str, tuple[int, int]]:
    """Rows and bytes by stream. Raises ValueError where a source changed."""
    from pyspark.sql import functions as F

    sums = rows.groupBy("stream").agg(F.count("id").alias("num_rows"), F.sum("num_bytes").alias("num_bytes")).collect()
    totals = {row["stream"]: (row["num_rows"], row["num_bytes"]) for row in sums}
    if CHANGED in totals:
        changed = sorted(row["source"] for row in rows.where(F.col("stream") == CHANGED).select("source").collect())
        raise ValueError(
            f"source {changed[0]} changed while it was read ({len(changed)} in all): "
            "run again when nothing writes to it"
        )
    return totals


def choose_unique(rows: DataFrame, max_per_collection: int, origin: Column | None = None) -> UniqueRows:
    """Of equal rows that of smallest id, and of each collection about `max_per_collection`, chosen by the hash of
    `origin`, by default the column of that name: rows of one origin together."""
    from pyspark.sql import functions as F

    kept = rows.where(F.col("stream") == KEPT)
    marked = kept.join(kept.groupBy("digest").agg(F.min("id").alias("original")), "digest")
    fits = hash_of("origin", 9) * F.col("collection_size") < max_per_collection * NUM_HASHES
    originals = marked.where("id = original")
    originals = originals if origin is None else originals.withColumn("origin", origin)
    sized = originals.join(originals.groupBy("collection").agg(F.count("id").alias("collection_size")), "collection")
    duplicates = marked.where("id <> original").select(
        "id", F.lit(DUPLICATE).alias("reason"), F.col("original").alias("kept_id")
    )
    beyond = sized.where(~fits).select("id", F.lit(FULL).alias("reason"), F.lit("").alias("kept_id"))
    return UniqueRows(sized.where(fits).persist(), duplicates.unionByName(beyond))


def write_left_out(rows: DataFrame, left_out: DataFrame, output: Output) -> tuple[dict[str, int], dict[str, int]]:
    """dropped.parquet and rejected.parquet; their rows by reason."""
    from pyspark.sql import functions as F

    dropped = rows.where(F.col("stream") == DROPPED).select("id", "reason", "kept_id").unionByName(left_out)
    rejected = rows.where(F.col("stream") == REJECTED).select("id", "source", "offset", "reason", "detail")
    return (
        count_reasons(write_table(dropped, output, "dropped.parquet", "reason")),
        count_reasons(write_table(rejected, output, "rejected.parquet", "reason")),
    )


def hash_of(column: str, start: int) -> Column:
    """32 bits of a text's hash."""
    from pyspark.sql import functions as F

    return F.conv(F.substring(F.sha2(column, 256), start, 8), 16, 10).cast("long")


def refuse_malformed(
    rows: DataFrame, rejected: Mapping[str, int], num_read: int, max_share: float, noun: str, setting: str
) -> None:
    """Raises ValueError with examples where too much is malformed. `setting` is the key of `max_share`."""
    from pyspark.sql import functions as F

    num_rejected = sum(rejected.values())
    if num_rejected <= max_share * num_read:
        return
    shown = rows.where(F.col("stream") == REJECTED).orderBy("source", "offset").take(NUM_EXAMPLES)
    examples = "; ".join(f"{row.source} at byte {row['offset']}: {row.reason} ({row.detail})" for row in shown)
    counts = ", ".join(f"{reason} {count}" for reason, count in rejected.items())
    raise ValueError(
        f"{num_rejected} of {num_read} {noun} are malformed ({counts}), more than {setting} ({max_share}) allows: "
        f"{examples}. Repair these records, or give their files the role ignore"
    )
