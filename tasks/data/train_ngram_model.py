"""Step: documents -> two n-gram language models per language with enough text, each of one half of it, for the perplexity of documents.

ngram_model.json says per language how much text there was, and what a model finds of documents that it has not seen, of the same words
in disorder and of unknown words: between the first and the second lies a bound that means something.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from infra.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, canonical_json, step
from tasks.data.document_files import read_documents
from tasks.data.language_id import check_model
from tasks.data.ngram_counts import COUNT_COLUMNS, SAMPLE_COLUMNS, count_batches, sample_texts
from tasks.data.ngram_model import NUM_FOLDS, NgramCounts, NgramModel, build_model, fold_of, other_fold

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from configs.schema import NgramModelRecipe, NgramTrainingRecipe, SparkResources
    from tasks.data.remove_boilerplate import BoilerplateFreeDocuments

HASH_VALUES = 1 << 32
CALIBRATION_DOCUMENTS = 200
"""Documents per language, on average, that a model is tried on."""
QUANTILES = (0.1, 0.5, 0.9, 0.99)


class LanguageSize(NamedTuple):
    """Of what was sampled."""

    num_bytes: int
    num_documents: int


class LanguageModel(Record):
    num_bytes: int
    """Text in this language, of what was sampled."""
    trained_share: float
    """Of that text."""
    num_ngrams: tuple[int, ...]
    """Per half."""
    log_unknown: tuple[float, ...]
    """Log probability of a word that a half does not hold."""
    num_calibrated: int
    perplexity: dict[str, float]
    """Quantiles over documents that the model has not seen."""
    shuffled_perplexity: dict[str, float]
    """The same documents with their words in disorder."""
    unknown_perplexity: float
    """Of nothing but unknown words."""


class TrainedNgramModel(Record):
    languages: tuple[str, ...]
    too_small: dict[str, int]
    """Bytes of the languages that have too little text for a model: their documents get no perplexity."""


@step(content=("ngram_model.json", "models/*.npy"), distributions=("pyspark", "pyarrow", "numpy", "pycld2", "fasttext-numpy2-wheel"))
def train_ngram_model(
    *, documents: Artifact[BoilerplateFreeDocuments], recipe: NgramTrainingRecipe, resources: SparkResources, output: Output
) -> TrainedNgramModel:
    """Raises ValueError if the language recipe names a model file that is not the given one."""
    from pyspark.sql import functions as F

    check_model(recipe.language)
    spark = spark_session(resources)
    num_in = documents.record.num_documents
    output.report(Progress(0, num_in, "documents", "reading"))
    share = min(1.0, recipe.ngram_model.max_bytes / documents.record.num_bytes)
    sampler = partial(
        sample_texts, keep_below=int(share * HASH_VALUES), max_chars=recipe.language.max_chars, model_path=recipe.language.model_path
    )
    frame = read_documents(spark, documents.paths("documents/*.parquet"), resources).select("id", "domain", "source", "text")
    sample = frame.mapInArrow(sampler, SAMPLE_COLUMNS).persist()
    sizes = _sizes_by_language(sample)
    large = {language: size for language, size in sizes.items() if size.num_bytes >= recipe.ngram_model.min_language_bytes}
    trained = {language: min(1.0, recipe.ngram_model.max_language_bytes / size.num_bytes) for language, size in large.items()}
    keep_below = {language: int(trained[language] * share * HASH_VALUES) for language in large}
    counter = partial(count_batches, order=recipe.ngram_model.order, keep_below=keep_below)
    keys = ("language", "fold", "size", "hash", "context", "suffix")
    counts = sample.mapInArrow(counter, COUNT_COLUMNS).groupBy(*keys).agg(F.sum("num_occurrences").alias("num_occurrences")).persist()
    found = {}
    for number, (language, size) in enumerate(large.items()):
        output.report(Progress(number, len(large), "languages", language))
        is_language = F.col("language") == language
        models = _models(counts.where(is_language), recipe.ngram_model, output, language)
        if models is not None:
            texts = _calibration_texts(sample.where(is_language), keep_below[language], size.num_documents)
            found[language] = _measured(models, texts, size.num_bytes, trained[language])
    counts.unpersist()
    sample.unpersist()
    described = {language: model.model_dump(mode="json") for language, model in found.items()}
    content = canonical_json({"order": recipe.ngram_model.order, "languages": described})
    output.path("ngram_model.json").write_text(content, encoding="utf-8")
    too_small = {language: size.num_bytes for language, size in sizes.items() if language not in found}
    return TrainedNgramModel(languages=tuple(found), too_small=too_small)


def _sizes_by_language(sample: DataFrame) -> dict[str, LanguageSize]:
    from pyspark.sql import functions as F

    rows = sample.groupBy("language").agg(F.sum("num_bytes").alias("num_bytes"), F.count("id").alias("num_documents")).collect()
    return {row["language"]: LanguageSize(row["num_bytes"], row["num_documents"]) for row in sorted(rows)}


def _models(counts: DataFrame, recipe: NgramModelRecipe, output: Output, language: str) -> list[NgramModel] | None:
    """The model of each half, written; None where a half holds no word twice. The driver holds what was not pruned, of one language."""
    from pyspark.sql import functions as F

    is_kept = (F.col("size") == 1) | (F.col("num_occurrences") >= recipe.min_count)
    kept = counts.where(is_kept).toArrow()
    contexts = (
        counts.where("size > 1")
        .groupBy("fold", "context")
        .agg(F.sum("num_occurrences").alias("total"), F.count("hash").alias("types"), F.max("num_occurrences").alias("most"))
        .where(F.col("most") >= recipe.min_count)
        .toArrow()
    )
    columns = {name: kept.column(name).to_numpy() for name in kept.column_names if name != "language"}
    behind = {name: contexts.column(name).to_numpy() for name in contexts.column_names}
    models = []
    for fold in range(NUM_FOLDS):
        inside, of_fold = columns["fold"] == fold, np.flatnonzero(behind["fold"] == fold)
        if not (columns["num_occurrences"][inside] >= recipe.min_count).any():
            return None
        of_fold = of_fold[np.argsort(behind["context"][of_fold].view(np.uint64))]
        hashes = {name: columns[name][inside].view(np.uint64) for name in ("hash", "context", "suffix")}
        model = build_model(
            NgramCounts(
                columns["size"][inside], hashes["hash"], hashes["context"], hashes["suffix"], columns["num_occurrences"][inside],
                behind["context"][of_fold].view(np.uint64), behind["total"][of_fold], behind["types"][of_fold],
            ),
            recipe.order,
            recipe.min_count,
        )  # fmt: skip
        models.append(model)
    for fold, model in enumerate(models):
        np.save(output.path(f"models/{language}-{fold}.npy"), model.rows)
    return models


def _calibration_texts(sample: DataFrame, keep_below: int, num_documents: int) -> list[tuple[str, str]]:
    """(id, text) of the documents whose sampling hash lies lowest, about CALIBRATION_DOCUMENTS."""
    from pyspark.sql import functions as F

    sampling_hash = F.conv(F.substring("id", 9, 8), 16, 10).cast("long")
    highest = int(keep_below * min(1.0, CALIBRATION_DOCUMENTS / num_documents))
    rows = sample.where(sampling_hash < highest).select("id", "text").toArrow().to_pylist()
    return sorted((row["id"], row["text"]) for row in rows)


def _measured(models: list[NgramModel], texts: list[tuple[str, str]], num_bytes: int, trained_share: float) -> LanguageModel:
    generator = np.random.Generator(np.random.Philox(num_bytes))
    unseen: list[float] = []
    disordered: list[float] = []
    for fold in range(NUM_FOLDS):
        mine = [text for identity, text in texts if fold_of(identity) == fold]
        model = models[other_fold(fold)]
        unseen += model.perplexities(mine).tolist()
        disordered += model.perplexities([" ".join(generator.permutation(text.split())) for text in mine]).tolist()
    return LanguageModel(
        num_bytes=num_bytes,
        trained_share=trained_share,
        num_ngrams=tuple(len(model.rows) for model in models),
        log_unknown=tuple(model.log_unknown for model in models),
        num_calibrated=len(texts),
        perplexity=_quantiles(unseen),
        shuffled_perplexity=_quantiles(disordered),
        unknown_perplexity=float(np.exp(-sum(model.log_unknown for model in models) / NUM_FOLDS)),
    )


def _quantiles(values: list[float]) -> dict[str, Any]:
    known = np.array([value for value in values if not np.isnan(value)])
    return {str(share): float(np.quantile(known, share)) for share in QUANTILES} if len(known) else {}
