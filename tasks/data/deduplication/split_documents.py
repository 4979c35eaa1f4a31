"""Step: documents -> the same documents with a column `split`, decided only by the hash of the duplicate cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.records.document_files import read_documents, write_marked_documents
from tasks.data.records.documents import NUM_HASHES, TEST, TRAIN, VALIDATION

if TYPE_CHECKING:
    from configs.schema import SparkResources, SplitRecipe
    from tasks.data.deduplication.remove_semantic_duplicates import DistinctDocuments


class SplitDocuments(Record):
    num_documents: int
    num_bytes: int
    train_by_domain: dict[str, int]
    validation_by_domain: dict[str, int]
    test_by_domain: dict[str, int]


@step(content=("documents/*.parquet",), distributions=("pyspark", "pyarrow"))
def split_documents(
    *, documents: Artifact[DistinctDocuments], recipe: SplitRecipe, resources: SparkResources, output: Output
) -> SplitDocuments:
    """Hold out clusters for validation and test. Raises ValueError if one of the splits is empty."""
    from pyspark.sql import functions as F

    spark = spark_session(resources)
    num_in = documents.record.num_documents
    output.report(Progress(0, num_in, "documents"))
    files = documents.files("documents/*.parquet")
    frame = read_documents(spark, files, resources, "id", "cluster")
    cluster_hash = F.conv(F.substring(F.sha2("cluster", 256), 1, 8), 16, 10).cast("long")
    end_of_test = int(recipe.test_share * NUM_HASHES)
    end_of_validation = end_of_test + int(recipe.validation_share * NUM_HASHES)
    side = (
        F.when(cluster_hash < end_of_test, F.lit(TEST))
        .when(cluster_hash < end_of_validation, F.lit(VALIDATION))
        .otherwise(F.lit(TRAIN))
    )
    split = frame.select("id", side.alias("split"))
    _, counts = write_marked_documents(split, files, output, "documents", documents.record.num_bytes, "split", "domain")
    sides = {
        side: {domain: count for (name, domain), (count, _) in counts.items() if name == side}
        for side in (TRAIN, VALIDATION, TEST)
    }
    for side, domains in sides.items():
        if not domains:
            raise ValueError(
                f"no document of {num_in} falls into the {side} split at split.validation_share "
                f"{recipe.validation_share} and "
                f"split.test_share {recipe.test_share}: bring more documents or move the shares towards a third"
            )
    num_out = sum(count for count, _ in counts.values())
    assert num_in == num_out, (num_in, num_out)
    return SplitDocuments(
        num_documents=num_out,
        num_bytes=sum(size for _, size in counts.values()),
        train_by_domain=sides[TRAIN],
        validation_by_domain=sides[VALIDATION],
        test_by_domain=sides[TEST],
    )
