"""Step: documents -> the same with SCORE_COLUMNS: language, quality, toxicity, perplexity, factuality. Decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.document_files import count_by, read_documents, write_documents
from tasks.data.documents import SCORE_COLUMNS

if TYPE_CHECKING:
    from configs.schema import LanguageRecipe, SparkResources
    from tasks.data.remove_boilerplate import BoilerplateFreeDocuments
    from tasks.data.train_classifiers import TrainedClassifiers
    from tasks.data.train_ngram_model import TrainedNgramModel


class ScoredDocuments(Record):
    num_documents: int
    num_bytes: int
    documents_by_language: dict[str, int]


@step(content=("documents/*.parquet",), distributions=("pyspark", "pyarrow", "numpy"))
def score_documents(
    *,
    documents: Artifact[BoilerplateFreeDocuments],
    classifiers: Artifact[TrainedClassifiers],
    ngram_model: Artifact[TrainedNgramModel],
    recipe: LanguageRecipe,
    resources: SparkResources,
    output: Output,
) -> ScoredDocuments:
    """SEAM."""
    from pyspark.sql import functions as F

    num_in = documents.record.num_documents
    output.report(Progress(0, num_in, "documents"))
    frame = read_documents(spark_session(resources), documents.paths("documents/*.parquet"), resources)
    types = {name: kind for name, _, kind in (column.partition(" ") for column in SCORE_COLUMNS.split(", "))}
    frame = frame.withColumns({name: F.lit(None).cast(kind) for name, kind in types.items()} | {"language": F.col("lang")})
    counts = count_by(write_documents(frame, output.path("documents"), documents.record.num_bytes), "language")
    return ScoredDocuments(
        num_documents=num_in,
        num_bytes=documents.record.num_bytes,
        documents_by_language={name: count for (name,), (count, _) in counts.items()},
    )
