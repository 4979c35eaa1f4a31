"""Step: documents -> the same without paragraphs that many documents of one collection share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.document_files import read_documents, write_kept

if TYPE_CHECKING:
    from configs.schema import BoilerplateRecipe, SparkResources
    from tasks.data.extract_documents import ExtractedDocuments


class BoilerplateFreeDocuments(Record):
    num_documents: int
    num_bytes: int
    dropped: dict[str, int]


@step(content=("documents/*.parquet", "dropped.parquet"), distributions=("pyspark", "pyarrow", "numpy"))
def remove_boilerplate(
    *, documents: Artifact[ExtractedDocuments], recipe: BoilerplateRecipe, resources: SparkResources, output: Output
) -> BoilerplateFreeDocuments:
    """SEAM."""
    from pyspark.sql import functions as F

    num_in = documents.record.num_documents
    output.report(Progress(0, num_in, "documents"))
    frame = read_documents(spark_session(resources), documents.paths("documents/*.parquet"), resources)
    verdicts = frame.select("id", F.lit("").alias("reason"), F.lit("").alias("kept_id"))
    counts, reasons = write_kept(frame, verdicts, num_in, documents.record.num_bytes, output, "domain")
    num_kept = sum(count for count, _ in counts.values())
    return BoilerplateFreeDocuments(num_documents=num_kept, num_bytes=sum(size for _, size in counts.values()), dropped=reasons)
