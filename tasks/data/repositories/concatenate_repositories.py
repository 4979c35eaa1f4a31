"""Step: clean documents -> documents of domain `repository`: each repository's files joined, imported files first.

Only documents that other steps kept are joined, so dropped files stay out, and held-out ones stay held out. A
repository gives one document per side of the split, and more where it is longer than max_document_chars. files.parquet
says which document went into which, for lineage. A source without repositories, or with only one file of each, gives
none.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.records.document_files import read_documents, write_documents, write_table
from tasks.data.records.documents import CODE, PREPARED_COLUMNS, TRAIN, names_of
from tasks.data.repositories.joined_files import CONCATENATED_COLUMNS, join_files

if TYPE_CHECKING:
    from configs.schema import RepositoryRecipe, SparkResources
    from tasks.data.decontamination.decontaminate_documents import DecontaminatedDocuments

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
