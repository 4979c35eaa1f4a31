"""Step: scored documents -> those inside all bounds, each in its quality bucket; dropped.parquet gives the reasons.

The block list comes first (tasks/data/filtering/blocked_documents.py): after deduplication, so that no duplicate takes
the place of a blocked document. A digest means a text as it was extracted, too, since other paragraphs are boilerplate
once other files are there. Then come scores (tasks/data/filtering/score_bounds.py), then the heuristic rules
(tasks/data/filtering/heuristics.py), then the lowest buckets. The text of a dropped document remains in the row of
its id in the step's input. examples.parquet shows some of each reason.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.filtering.blocked_documents import BLOCKED, NOTHING_BLOCKED, BlockedDocuments
from tasks.data.filtering.heuristics import REASON_COLUMNS, bounds_of, filter_batches, flat_bounds
from tasks.data.filtering.score_bounds import (
    BOUND_OF,
    LANGUAGE_UNCERTAIN,
    LOW_QUALITY,
    QUALITY_STEPS,
    SCORES,
    WRONG_LANGUAGE,
    bucket_floors,
    count_unscored,
    quality_bucket,
    quality_millionths,
    score_reason,
)
from tasks.data.records.document_files import read_documents, write_kept, write_table
from tasks.data.records.documents import NUM_EXAMPLES, names_of
from tasks.data.records.documents_by_id import named_rows
from tasks.data.records.removed_share import COLLECTION, DOMAIN, LANGUAGE, Ceiling, check_removed_share

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from configs.files.stored_files import StoredFile
    from configs.schema import FilterRecipe, SparkResources
    from tasks.data.deduplication.split_documents import SplitDocuments
    from tasks.data.extraction.extract_documents import ExtractedDocuments

JUDGED_COLUMNS = (
    "id",
    "url",
    "content_digest",
    "collection",
    "domain",
    "lang",
    "text",
    *SCORES,
    "perplexity_percentile",
)
EXAMPLE_COLUMNS = "id string, source string, offset long, domain string, text string"
EXAMPLES_PER_REASON = 5
EXAMPLE_CHARS = 400
SHOWN_CHARS = 80
"""Characters of an example in a message."""


class FilteredDocuments(Record):
    num_documents: int
    num_bytes: int
    dropped: dict[str, int]
    """Documents by reason (tasks/data/filtering/score_bounds.py, tasks/data/filtering/heuristics.py)."""
    unscored: dict[str, int]
    """Documents of prose without a score, which pass its bound, by score."""
    documents_by_bucket: dict[int, int]
    """Kept documents by bucket; -1 for documents without quality."""
    bucket_floors: tuple[float, ...]
    """The lowest quality of every bucket but the first; none where no document has a quality."""


@step(
    content=("documents/*.parquet", "dropped.parquet"),
    evidence=("examples.parquet",),
    distributions=("pyspark", "pyarrow", "numpy"),
)
def filter_documents(
    *,
    documents: Artifact[SplitDocuments],
    extracted: Artifact[ExtractedDocuments] | None,
    blocked: BlockedDocuments | None,
    recipe: FilterRecipe,
    resources: SparkResources,
    output: Output,
) -> FilteredDocuments:
    """Drop documents outside a bound. `extracted`: the documents with all paragraphs, where `blocked` has digests.
    Raises ValueError where one bound removes more than max_removed_share of a
    source, a language or a domain, or if nothing is left."""
    from pyspark.sql import functions as F

    spark = spark_session(resources)
    num_in = documents.record.num_documents
    output.report(Progress(0, num_in, "documents"))
    files = documents.files("documents/*.parquet")
    read = partial(read_documents, spark, files, resources)
    listed = blocked or NOTHING_BLOCKED
    if extracted is not None:
        whole = read_documents(spark, extracted.files("documents/*.parquet"), resources, *listed.by_column)
        listed = listed.with_ids(row.id for row in whole.where(listed.holds()).select("id").collect())
    judged = _judge(read(*JUDGED_COLUMNS), listed, recipe).persist()
    histogram = judged.where("reason = '' AND millionths IS NOT NULL").groupBy("millionths").count().collect()
    counts_by_quality = [(row["millionths"], row["count"]) for row in histogram]
    floors = bucket_floors(counts_by_quality, recipe.num_quality_buckets) if counts_by_quality else []
    placed = judged.withColumn("quality_bucket", quality_bucket(floors))
    is_poor = F.col("millionths") <= int(recipe.max_dropped_quality * QUALITY_STEPS)
    is_low = (F.col("reason") == "") & F.col("quality_bucket").between(0, recipe.num_dropped_buckets - 1) & is_poor
    placed = placed.withColumn("reason", F.when(is_low, LOW_QUALITY).otherwise(F.col("reason")))
    _check_removed_share(placed, files, recipe)
    verdicts = placed.select("id", "reason", F.lit("").alias("kept_id"), "quality_bucket")
    counts, reasons = write_kept(verdicts, files, num_in, documents.record.num_bytes, output, "quality_bucket")
    _write_examples(verdicts, files, output)
    unscored = count_unscored(read("domain", *SCORES))
    judged.unpersist()
    num_kept = sum(count for count, _ in counts.values())
    if not num_kept:
        raise ValueError(f"the filter drops all {num_in} documents ({reasons}): widen the bounds of data.recipe.filter")
    return FilteredDocuments(
        num_documents=num_kept,
        num_bytes=sum(size for _, size in counts.values()),
        dropped=reasons,
        unscored=unscored,
        documents_by_bucket=dict(sorted((int(bucket), count) for (bucket,), (count, _) in counts.items())),
        bucket_floors=tuple(floor / QUALITY_STEPS for floor in floors),
    )


def _judge(frame: DataFrame, blocked: BlockedDocuments, recipe: FilterRecipe) -> DataFrame:
    """(id, collection, domain, language, reason, millionths) of all documents."""
    from pyspark.sql import functions as F

    first_reason = F.when(blocked.holds(), BLOCKED).otherwise(score_reason(recipe.scores))
    language = F.coalesce(F.nullif("language", F.lit("")), F.col("lang"), F.lit("")).alias("language")
    columns = (
        "id",
        "collection",
        "domain",
        language,
        "text",
        first_reason.alias("score_reason"),
        quality_millionths().alias("millionths"),
    )
    rules = partial(filter_batches, bounds=flat_bounds(recipe.heuristics))
    return frame.select(*columns).mapInArrow(rules, REASON_COLUMNS)


def _check_removed_share(placed: DataFrame, files: list[StoredFile], recipe: FilterRecipe) -> None:
    """Raises ValueError where a bound removes too much. Documents of other languages than `allowed_languages` and those
    of the block list are removed on purpose, and those of an uncertain language are in no group."""
    from pyspark.sql import functions as F

    def shown(group: str, name: str, reason: str) -> list[str]:
        dropped = placed.where((F.col(group) == name) & (F.col("reason") == reason)).select("id")
        first = [row.id for row in dropped.orderBy("id").take(NUM_EXAMPLES)]
        start = F.substring("text", 1, SHOWN_CHARS).alias("text")
        texts = _named(dropped.where(F.col("id").isin(first)), files).select("source", "offset", start)
        return [f"{row.source}, offset {row.offset} ({row.text!r})" for row in sorted(texts.collect())]

    def what(reason: str) -> str:
        return f"documents are dropped as {reason} ({_bounds_of(reason, recipe)})"

    ceiling = Ceiling(
        "filter.max_removed_share",
        recipe.max_removed_share,
        what,
        "Look whether these are what the bound means; then change that bound in data.recipe.filter, or raise "
        "filter.max_removed_share",
    )
    gone = F.when(F.col("reason").isin("", WRONG_LANGUAGE, BLOCKED), 0).otherwise(1).alias("removed")
    judged = placed.select("collection", "domain", "language", "reason", F.lit(1).alias("amount"), gone)
    check_removed_share(judged, (COLLECTION, DOMAIN), ceiling, shown)
    check_removed_share(judged.where(F.col("reason") != LANGUAGE_UNCERTAIN), (LANGUAGE,), ceiling, shown)


def _bounds_of(reason: str, recipe: FilterRecipe) -> str:
    """The keys of data.recipe.filter that cause a reason, with their values."""
    if reason == LOW_QUALITY:
        return (
            f"num_dropped_buckets: {recipe.num_dropped_buckets} of num_quality_buckets: {recipe.num_quality_buckets}, "
            f"max_dropped_quality: {recipe.max_dropped_quality}"
        )
    if reason in BOUND_OF:
        return f"scores.{BOUND_OF[reason]}: {getattr(recipe.scores, BOUND_OF[reason])}"
    bounds = bounds_of(reason, flat_bounds(recipe.heuristics))
    return ", ".join(f"heuristics.{name}: {value}" for name, value in bounds.items())


def _write_examples(verdicts: DataFrame, files: list[StoredFile], output: Output) -> None:
    """Write the beginnings of some dropped documents of each reason, those with the lowest ids; none of the blocked."""
    from pyspark.sql import functions as F
    from pyspark.sql.window import Window

    ranked = verdicts.where(~F.col("reason").isin("", BLOCKED)).withColumn(
        "rank", F.row_number().over(Window.partitionBy("reason").orderBy("id"))
    )
    shown = ranked.where(F.col("rank") <= EXAMPLES_PER_REASON).select("id", "reason").persist()
    start = F.substring("text", 1, EXAMPLE_CHARS).alias("text")
    examples = _named(shown, files).join(F.broadcast(shown), "id")
    write_table(examples.select("id", "reason", "source", "offset", "domain", start), output, "examples.parquet")
    shown.unpersist()


def _named(ids: DataFrame, files: list[StoredFile]) -> DataFrame:
    """EXAMPLE_COLUMNS of these few documents (id)."""
    reader = partial(named_rows, files=files, columns=names_of(EXAMPLE_COLUMNS))
    return ids.select("id").repartition(1).mapInArrow(reader, EXAMPLE_COLUMNS)
