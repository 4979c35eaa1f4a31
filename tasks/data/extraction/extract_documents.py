"""Step: records -> documents: plain text, cut into pieces of bounded length; dropped.parquet names the records that
gave none."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.extraction.plain_text import EXTRACTED_COLUMNS, FAILURES, extract_batches
from tasks.data.records.document_files import count_reasons, map_documents, write_documents, write_table
from tasks.data.records.documents import DOCUMENT_COLUMNS, NUM_EXAMPLES, names_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from configs.schema import ExtractionRecipe, SparkResources
    from tasks.data.sources.ingest_documents import IngestedDocuments

MIN_JUDGED_RECORDS = 20
"""Collections with fewer records in markup are not checked against max_failed_share: two empty pages among three do not
mean a broken extractor."""


class ExtractedDocuments(Record):
    num_documents: int
    num_bytes: int
    num_records: int
    """Records that gave at least one document."""
    dropped: dict[str, int]
    documents_by_domain: dict[str, int]
    bytes_by_domain: dict[str, int]


@step(
    content=("documents/*.parquet", "dropped.parquet"),
    distributions=("pyspark", "pyarrow", "trafilatura", "resiliparse", "readability-lxml", "lxml"),
)
def extract_documents(
    *, records: Artifact[IngestedDocuments], recipe: ExtractionRecipe, resources: SparkResources, output: Output
) -> ExtractedDocuments:
    """Every record gives documents or a reason. Raises ValueError where more than max_failed_share of a collection's
    pages fail."""
    from pyspark.sql import functions as F

    spark = spark_session(resources)
    num_in = records.record.num_documents
    output.report(Progress(0, num_in, "records", "extracting"))
    extract = partial(extract_batches, **recipe.model_dump(exclude={"max_failed_share"}))
    files = records.files("documents/*.parquet")
    rows = map_documents(spark, files, resources, extract, EXTRACTED_COLUMNS).persist()
    _check_failed_share(rows, recipe)
    dropped = rows.where("reason <> ''").select("id", "reason", F.lit("").alias("kept_id"))
    reasons = count_reasons(write_table(dropped, output, "dropped.parquet", "reason"))
    documents = rows.where("reason = ''").select(*names_of(DOCUMENT_COLUMNS))
    num_records = documents.select("source", "offset").distinct().count()
    _, counts = write_documents(documents, output, "documents", records.record.num_bytes, "domain")
    rows.unpersist()
    assert num_in == num_records + sum(reasons.values()), (num_in, num_records, reasons)
    return ExtractedDocuments(
        num_documents=sum(count for count, _ in counts.values()),
        num_bytes=sum(size for _, size in counts.values()),
        num_records=num_records,
        dropped=reasons,
        documents_by_domain={name: count for (name,), (count, _) in counts.items()},
        bytes_by_domain={name: size for (name,), (_, size) in counts.items()},
    )


def _check_failed_share(rows: DataFrame, recipe: ExtractionRecipe) -> None:
    """Raises ValueError where too many of a collection's records in markup failed; plain text cannot fail."""
    from pyspark.sql import functions as F

    has_failed = F.col("reason").isin(*FAILURES)
    judged = rows.where("markup <> '' and piece = 0").groupBy("collection")
    counts = judged.agg(
        F.count("id").alias("num_records"), F.sum(F.when(has_failed, 1).otherwise(0)).alias("num_failed")
    )
    for row in sorted(counts.where(f"num_records >= {MIN_JUDGED_RECORDS}").collect()):
        if row.num_failed > recipe.max_failed_share * row.num_records:
            failed = rows.where((F.col("collection") == row.collection) & has_failed).orderBy("id").take(NUM_EXAMPLES)
            examples = ", ".join(f"{lost.source} at byte {lost.offset} ({lost.reason})" for lost in failed)
            raise ValueError(
                f"source {row.collection}: {row.num_failed} of {row.num_records} pages gave no text, more than "
                f"extract.max_failed_share "
                f"({recipe.max_failed_share}) allows: {examples}. Look at these pages; then choose another "
                f"extract.html_extractor, declare "
                "the files' true format in glm46-data.yaml, or raise the share"
            )
