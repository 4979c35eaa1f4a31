"""Step: clean documents -> documents of domain `repository`: each repository's files joined, imported files first.

Only documents that other steps kept are joined, so dropped files stay out, and held-out ones stay held out. A
repository gives one document per side of the split, and more where it is longer than max_document_chars. files.parquet
says which document went into which, for lineage. A source without repositories, or with only one file of each, gives
none.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.records.document_files import read_documents, write_documents, write_table
from tasks.data.records.documents import (
    CODE,
    PREPARED_COLUMNS,
    REPOSITORY,
    TRAIN,
    UNBUCKETED,
    arrow_schema,
    content_digest,
    document_id,
    names_of,
)
from tasks.data.repositories.repository_order import Piece, repository_texts

if TYPE_CHECKING:
    import pyarrow as pa

    from configs.schema import RepositoryRecipe, SparkResources
    from tasks.data.decontamination.decontaminate_documents import DecontaminatedDocuments

CONCATENATED_COLUMNS = f"{PREPARED_COLUMNS}, members array<struct<id: string, num_chars: bigint>>"
MIN_FILES = 2
READ_COLUMNS = ("id", "source", "offset", "piece", "licence", "repository", "path", "split", "text")


class ConcatenatedRepositories(Record):
    num_documents: int
    num_bytes: int
    num_repositories: int
    num_files: int
    """Documents that were joined into others, including pieces of files."""
    train_bytes: int
    held_out_bytes: int


@step(content=("documents/*.parquet", "files.parquet"), distributions=("pyspark", "pyarrow"))
def concatenate_repositories(
    *, documents: Artifact[DecontaminatedDocuments], recipe: RepositoryRecipe, resources: SparkResources, output: Output
) -> ConcatenatedRepositories:
    """Join the files of each repository. Without a repository the output is empty: a mixture gives an absent domain's
    share to the others."""
    from pyspark.sql import functions as F

    spark = spark_session(resources)
    output.report(Progress(0, documents.record.num_documents, "documents", "ordering files"))
    frame = read_documents(spark, documents.files("documents/*.parquet"), resources, *READ_COLUMNS, "domain")
    files = frame.where((F.col("repository") != "") & (F.col("domain") == CODE)).select(*READ_COLUMNS)
    grouped = files.repartition("repository", "split").sortWithinPartitions("repository", "split", "id")
    joined = grouped.mapInArrow(
        partial(join_files, max_chars=recipe.max_document_chars), CONCATENATED_COLUMNS
    ).persist()
    _, counts = write_documents(
        joined.select(*names_of(PREPARED_COLUMNS)), output, "documents", documents.record.num_bytes, "split"
    )
    members = joined.select(F.col("id").alias("repository_id"), F.posexplode("members").alias("number", "member"))
    table = members.select(
        F.col("member.id").alias("id"), "repository_id", "number", F.col("member.num_chars").alias("num_chars")
    )
    write_table(table, output, "files.parquet")
    num_files, num_repositories = members.count(), joined.select("repository").distinct().count()
    joined.unpersist()
    sizes = {split: size for (split,), (_, size) in counts.items()}
    num_documents = sum(count for count, _ in counts.values())
    return ConcatenatedRepositories(
        num_documents=num_documents,
        num_bytes=sum(sizes.values()),
        num_repositories=num_repositories,
        num_files=num_files,
        train_bytes=sizes.get(TRAIN, 0),
        held_out_bytes=sum(size for split, size in sizes.items() if split != TRAIN),
    )


def join_files(batches: Iterator[pa.RecordBatch], max_chars: int) -> Iterator[pa.RecordBatch]:
    """CONCATENATED_COLUMNS of a partition that holds whole repositories, sorted by repository and split; one at a time
    in memory."""
    rows = (row for batch in batches for row in batch.to_pylist())
    for (repository, split), group in groupby(rows, key=lambda row: (row["repository"], row["split"])):
        files = list(group)
        if len({row["path"] for row in files}) >= MIN_FILES:
            yield _batch([*_documents(repository, split, files, max_chars)])


def _documents(repository: str, split: str, files: list[dict[str, Any]], max_chars: int) -> Iterator[dict[str, Any]]:
    source = f"{REPOSITORY}/{split}/{repository}"
    licences = {row["id"]: row["licence"] for row in files}
    pieces = [Piece(row["id"], row["source"], row["offset"], row["piece"], row["path"], row["text"]) for row in files]
    for number, (text, members) in enumerate(repository_texts(pieces, max_chars)):
        identity = document_id(source, number, 0)
        named = sorted({licences[piece.id] for piece, _ in members} - {""})
        yield {
            "id": identity,
            "source": source,
            "offset": number,
            "piece": 0,
            "collection": REPOSITORY,
            "url": "",
            "licence": " AND ".join(named),
            "domain": REPOSITORY,
            "lang": "",
            "repository": repository,
            "path": "",
            "text": text,
            "content_digest": content_digest(text),
            "num_chars": len(text),
            "num_bytes": len(text.encode()),
            "cluster": identity,
            "split": split,
            "language": "",
            "quality": None,
            "quality_bucket": UNBUCKETED,
            "members": [{"id": piece.id, "num_chars": size} for piece, size in members],
        }


def _batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    import pyarrow as pa

    member = pa.struct([("id", pa.string()), ("num_chars", pa.int64())])
    return pa.RecordBatch.from_pylist(
        rows, schema=arrow_schema(PREPARED_COLUMNS).append(pa.field("members", pa.list_(member)))
    )
