"""Step: source files -> documents/ to train on, evaluation/ (protected items), rejected.parquet, sources.parquet.

documents/ holds whole records. rejected.parquet says what could not be read, and why. sources.parquet has every
listed file.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.machine.spark import spark_session
from infra.step import Output, Progress, Record, step
from tasks.data.readers.source_records import (
    CHANGED,
    DOCUMENT,
    EVALUATION,
    LOST,
    REJECTED,
    ROW_COLUMNS,
    UNREADABLE,
    UNSAMPLED,
    read_sources,
)
from tasks.data.records.document_files import count_reasons, write_documents, write_table
from tasks.data.records.documents import NUM_EXAMPLES, NUM_HASHES, RECORD_COLUMNS, names_of
from tasks.data.sources.source_frame import source_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

    from configs.schema import IngestRecipe, SparkResources
    from tasks.data.sources.list_sources import SourceFile, SourceListing

HARMLESS_REASONS = (
    "empty_file",
    "http_status",
    "not_text",
    "redirect",
    "other_namespace",
    "not_wikitext",
    "bot_turn",
    "hidden_turn",
    "no_turns",
)
"""Reasons of records that are no text, from a package's empty __init__.py to a crawl's pictures: counted, but no sign
of damage."""
STOPPING_REASONS = ("missing_column", "broken_header")
"""Reasons by which a mistake in the manifest or in a first row loses a whole file: one such record stops the run."""


class IngestedDocuments(Record):
    num_sources: int
    num_documents: int
    num_bytes: int
    """UTF-8 bytes of the documents' text."""
    num_evaluation_documents: int
    num_unsampled_documents: int
    """Documents left out because their domain holds more than its part of max_source_bytes."""
    rejected: dict[str, int]
    """Records by reason."""
    num_lost_bytes: int
    """Stored bytes of compressed files after a damage: how many records they hold is unknown."""
    documents_by_domain: dict[str, int]
    bytes_by_domain: dict[str, int]


@step(
    content=("documents/*.parquet", "evaluation/*.parquet", "rejected.parquet", "sources.parquet"),
    distributions=("pyspark", "pyarrow"),
)
def ingest_documents(
    *, sources: SourceListing, recipe: IngestRecipe, resources: SparkResources, output: Output
) -> IngestedDocuments:
    """Read the listed files. Raises ValueError if a file changed since the listing, too many records are unreadable or
    none is left."""
    spark = spark_session(resources)
    _write_sources(sources.files, output.path("sources.parquet"))
    files = [file for file in sources.files if file.role in ("pretrain", "evaluation")]
    output.report(Progress(0, len(files), "sources", "reading"))
    bounds = sampling_bounds(files, recipe.max_source_bytes)
    rows = source_frame(spark, files, resources.shuffle_partitions).mapInArrow(
        partial(read_sources, keep_below=bounds, max_record_bytes=recipe.max_record_bytes), ROW_COLUMNS
    )
    rows = rows.persist()
    try:
        record = _write_streams(rows, files, output)
        _check_lost(record, recipe, files, rows)
        _check_rejected(record, recipe, rows, may_be_empty=all(file.role == "evaluation" for file in files))
    finally:
        rows.unpersist()
    return record


def sampling_bounds(files: list[SourceFile], max_bytes: int) -> dict[str, int]:
    """Per domain the sampling hash below which documents are kept: `max_bytes` shared out evenly, small domains
    first."""
    sizes: dict[str, int] = {}
    for file in files:
        sizes[file.domain] = sizes.get(file.domain, 0) + (file.num_text_bytes if file.role == "pretrain" else 0)
    bounds = {}
    rest, waiting = max_bytes, len(sizes)
    for domain, size in sorted(sizes.items(), key=lambda item: (item[1], item[0])):
        part = min(size, rest // waiting)
        bounds[domain] = NUM_HASHES if part == size else part * NUM_HASHES // size
        rest, waiting = rest - part, waiting - 1
    return bounds


def _write_sources(files: tuple[SourceFile, ...], path: Path) -> None:
    """Every listed file, whatever its role: what the chain began with, for lineage and the data card."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ("name", "sha256", "size", "role", "format", "domain", "lang", "licence", "collection")
    table = pa.Table.from_pylist([{name: getattr(file, name) for name in names} for file in files])
    pq.write_table(table.sort_by("name"), path, compression="zstd")


def _write_streams(rows: DataFrame, files: list[SourceFile], output: Output) -> IngestedDocuments:
    from pyspark.sql import functions as F

    sizes = {
        role: sum(file.num_text_bytes for file in files if file.role == role) for role in ("pretrain", "evaluation")
    }
    columns = names_of(RECORD_COLUMNS)
    stream = F.col("stream")
    _, domains = write_documents(
        rows.where(stream == DOCUMENT).select(*columns), output, "documents", sizes["pretrain"], "domain"
    )
    output.report(Progress(len(files), len(files), "sources", "documents written"))
    _, evaluation = write_documents(
        rows.where(stream == EVALUATION).select(*columns), output, "evaluation", sizes["evaluation"]
    )
    identity = F.substring(F.sha2(F.concat_ws("\n", "source", "offset"), 256), 1, 16).alias("id")
    rejected = rows.where(stream == REJECTED).select(identity, "source", "offset", "reason", "detail")
    reasons = count_reasons(write_table(rejected, output, "rejected.parquet", "reason"))
    named = stream.isin(UNSAMPLED, CHANGED, UNREADABLE, LOST)
    others = rows.where(named).select("stream", "source", "offset", "detail").toArrow().to_pylist()
    _refuse_unread(others)
    return IngestedDocuments(
        num_sources=len(files),
        num_documents=sum(count for count, _ in domains.values()),
        num_bytes=sum(size for _, size in domains.values()),
        num_evaluation_documents=sum(count for count, _ in evaluation.values()),
        num_unsampled_documents=sum(row["offset"] for row in others if row["stream"] == UNSAMPLED),
        rejected=reasons,
        num_lost_bytes=sum(row["offset"] for row in others if row["stream"] == LOST),
        documents_by_domain={domain: count for (domain,), (count, _) in domains.items()},
        bytes_by_domain={domain: size for (domain,), (_, size) in domains.items()},
    )


def _refuse_unread(others: list[dict[str, Any]]) -> None:
    """Raises ValueError for files that changed or could not be read."""
    for stream, problem, fix in (
        (CHANGED, "changed while it was read", "run again when nothing writes to the directory"),
        (
            UNREADABLE,
            "cannot be read",
            "mend the disk, the network or the permissions (of the executors too) and run again",
        ),
    ):
        affected = sorted((row["source"], row["detail"]) for row in others if row["stream"] == stream)
        if affected:
            detail = f": {affected[0][1]}" if affected[0][1] else ""
            raise ValueError(f"source {affected[0][0]} {problem} ({len(affected)} in all){detail}: {fix}")


def _check_lost(record: IngestedDocuments, recipe: IngestRecipe, files: list[SourceFile], rows: DataFrame) -> None:
    """Raises ValueError where damage made too many bytes unreadable: near the beginning of a large file it is one
    rejected record, and most of the corpus."""
    from pyspark.sql import functions as F

    total = sum(file.size for file in files)
    if record.num_lost_bytes <= recipe.max_rejected_share * total:
        return
    damages = rows.where((F.col("stream") == REJECTED) & F.col("reason").startswith("truncated"))
    shown = damages.select("source", "offset", "reason", "detail").orderBy("source", "offset").take(NUM_EXAMPLES)
    raise ValueError(
        f"{record.num_lost_bytes} of {total} bytes come after a damage in compressed files, where nothing can be read: "
        f"more than ingest.max_rejected_share ({recipe.max_rejected_share}) allows (rejected: {record.rejected}): "
        f"{_examples(shown)}. Fetch or pack these files again"
    )


def _check_rejected(record: IngestedDocuments, recipe: IngestRecipe, rows: DataFrame, *, may_be_empty: bool) -> None:
    """Raises ValueError with examples where too much was unreadable or nothing is left. `may_be_empty`: no source is
    text to train on."""
    from pyspark.sql import functions as F

    damaged = {reason: count for reason, count in record.rejected.items() if reason not in HARMLESS_REASONS}
    num_damaged = sum(damaged.values())
    num_read = record.num_documents + record.num_evaluation_documents + record.num_unsampled_documents + num_damaged
    too_many = num_damaged > recipe.max_rejected_share * num_read
    mistakes = [reason for reason in damaged if reason in STOPPING_REASONS]
    if not too_many and not mistakes and (record.num_documents or may_be_empty):
        return
    rejected = rows.where(F.col("stream") == REJECTED).select("source", "offset", "reason", "detail")
    in_order = rejected.orderBy("source", "offset")
    if mistakes:
        (row,) = in_order.where(F.col("reason").isin(*STOPPING_REASONS)).take(1)
        raise ValueError(f"source {row['source']}: {row['detail']}")
    shown = in_order.where(~F.col("reason").isin(*HARMLESS_REASONS)).take(NUM_EXAMPLES)
    examples = _examples(shown)
    if too_many:
        fix = "Repair or remove these files"
        if "no_text" in damaged:
            fix += ", or say in glm46-data.yaml which field is the `text`, or their role (sft for conversations)"
        raise ValueError(
            f"{num_damaged} of {num_read} records are unreadable "
            f"({', '.join(f'{reason} {count}' for reason, count in damaged.items())}), "
            f"more than ingest.max_rejected_share ({recipe.max_rejected_share}) allows: {examples}. {fix}"
        )
    fix = examples or "add text, or raise ingest.max_source_bytes"
    raise ValueError(
        f"the corpus is empty: no document in {record.num_sources} sources (rejected: {record.rejected or 'none'}): "
        f"{fix}"
    )


def _examples(rows: list[Row]) -> str:
    return "; ".join(f"{_place_of(row)}: {row['reason']} ({row['detail']})" for row in rows)


def _place_of(row: Row) -> str:
    return f"{row['source']} at {'row' if row['source'].lower().endswith('.parquet') else 'byte'} {row['offset']}"
