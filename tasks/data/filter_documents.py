"""Step: documents -> those that pass the heuristic quality rules; dropped.parquet names the first rule that each other one breaks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from infra.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.document_files import read_documents, write_kept
from tasks.data.documents import UNBUCKETED
from tasks.data.heuristics import filter_batches

if TYPE_CHECKING:
    from configs.schema import FilterRecipe, SparkResources
    from tasks.data.split_documents import SplitDocuments


class FilteredDocuments(Record):
    num_documents: int
    num_bytes: int
    dropped: dict[str, int]
    """Documents by reason (tasks/data/heuristics.py)."""


@step(content=("documents/*.parquet", "dropped.parquet"), distributions=("pyspark", "pyarrow", "numpy"))
def filter_documents(
    *, documents: Artifact[SplitDocuments], recipe: FilterRecipe, resources: SparkResources, output: Output
) -> FilteredDocuments:
    """Drop what breaks a rule. Raises ValueError if nothing is left."""
    from pyspark.sql import functions as F

    spark = spark_session(resources)
    num_in = documents.record.num_documents
    output.report(Progress(0, num_in, "documents"))
    frame = read_documents(spark, documents.paths("documents/*.parquet"), resources)
    verdicts = frame.select("id", "domain", "text").mapInArrow(
        partial(filter_batches, bounds=recipe.model_dump()), "id string, reason string"
    )
    frame = frame.withColumn("quality_bucket", F.lit(UNBUCKETED))
    verdicts = verdicts.withColumn("kept_id", F.lit("")).persist()
    counts, reasons = write_kept(frame, verdicts, num_in, documents.record.num_bytes, output, "domain")
    verdicts.unpersist()
    num_kept = sum(count for count, _ in counts.values())
    if not num_kept:
        raise ValueError(f"the filter drops all {num_in} documents ({reasons}): widen the bounds of data.recipe.filter")
    return FilteredDocuments(num_documents=num_kept, num_bytes=sum(size for _, size in counts.values()), dropped=reasons)
