"""Step: `preference` sources -> pairs/ in one shape, cleaned and split by prompt.

Without such a source the pairs are made of verified problems: the right answer, and one that the verifier refuses.
Those to train on ask what conversations ask, those to judge by ask the prompts of reinforcement learning, which no
conversation has. dropped.parquet names the pair that is kept instead, or the evaluation item that overlaps.
rejected.parquet names records that are no pair, and why.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.chats.chat_clusters import write_split
from tasks.data.chats.chat_records import KEPT, Judging
from tasks.data.chats.collected_rows import choose_unique, hash_of, refuse_malformed, stream_totals, write_left_out
from tasks.data.decontamination.protected_items import protected_items
from tasks.data.preferences.pair_records import PAIR_ROW_COLUMNS, make_pairs, read_pairs
from tasks.data.problems.synthesize_problems import PROMPT_SOURCE
from tasks.data.records.document_files import counts_by, read_documents
from tasks.data.records.documents import NUM_HASHES, PAIR_COLUMNS, TEST, TRAIN, VALIDATION, names_of
from tasks.data.sources.source_frame import source_frame

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from configs.schema import PreferenceCollectionRecipe, PreferenceRecipe, SparkResources
    from tasks.data.problems.synthesize_problems import SynthesizedProblems
    from tasks.data.sources.ingest_documents import IngestedDocuments
    from tasks.data.sources.list_sources import SourceListing

ROLE = "preference"


class CollectedPreferences(Record):
    num_sources: int
    """0 where the pairs were made of verified problems."""
    num_pairs: int
    num_bytes: int
    pairs_by_collection: dict[str, int]
    pairs_by_split: dict[str, int]
    dropped: dict[str, int]
    """Dropped well-formed pairs by reason."""
    rejected: dict[str, int]
    """Records that are no pair, by reason."""


@step(
    content=("pairs/*.parquet", "dropped.parquet", "rejected.parquet"),
    distributions=(
        "pyspark",
        "pyarrow",
        "numpy",
        "scipy",
        "datasketch",
        "phonenumbers",
        "python-stdnum",
        "detect-secrets",
        "tld",
    ),
)
def collect_preferences(
    *,
    sources: SourceListing,
    synthetic: Artifact[SynthesizedProblems],
    ingested: Artifact[IngestedDocuments],
    recipe: PreferenceCollectionRecipe,
    resources: SparkResources,
    output: Output,
) -> CollectedPreferences:
    """Collect all pairs. Raises ValueError if a file changed since the listing, too many records are malformed, or a
    part of the split is empty."""
    spark = spark_session(resources)
    files = [file for file in sources.files if file.role == ROLE]
    output.report(Progress(0, len(files), "sources", "reading"))
    protected, index = protected_items(ingested, synthetic, recipe.decontaminate, resources)
    items = spark.sparkContext.broadcast((index, protected))
    judging = Judging(recipe.preferences.max_pair_chars, recipe.personal_data.kinds, items)
    if files:
        frame, read = source_frame(spark, files, resources.shuffle_partitions), read_pairs
    else:
        frame, read = _problems(synthetic, resources), make_pairs
    rows = frame.mapInArrow(partial(read, judging=judging), PAIR_ROW_COLUMNS).persist()
    try:
        record = _write_streams(rows, len(files), recipe, resources, output)
        _check(record, recipe.preferences, rows)
    finally:
        rows.unpersist()
        items.destroy()
    return record


def _problems(synthetic: Artifact[SynthesizedProblems], resources: SparkResources) -> DataFrame:
    """(source, offset, id, question, answer) of the problems in conversations and of the prompts."""
    from pyspark.sql import functions as F

    spark = spark_session(resources)
    chats = read_documents(spark, synthetic.files("chats.parquet"), resources)
    said = F.from_json("messages", "array<struct<content: string>>")["content"]
    asked = chats.select("source", "offset", "id", said[0].alias("question"), said[1].alias("answer"))
    prompts = read_documents(spark, synthetic.files("prompts.parquet"), resources)
    numbered = prompts.select(
        F.lit(PROMPT_SOURCE).alias("source"),
        F.conv(F.substring("id", 1, 12), 16, 10).cast("long").alias("offset"),
        "id",
        F.col("prompt").alias("question"),
        "answer",
    )
    return asked.unionByName(numbered)


def _write_streams(
    rows: DataFrame, num_sources: int, recipe: PreferenceCollectionRecipe, resources: SparkResources, output: Output
) -> CollectedPreferences:

    totals = stream_totals(rows)
    chosen = choose_unique(rows, recipe.preferences.max_per_collection)
    unique = chosen.rows
    num_bytes = totals.get(KEPT, (0, 0))[1]
    columns, side = names_of(PAIR_COLUMNS), _side(recipe.preferences, num_sources)
    counts = write_split(unique, columns, side, num_bytes, recipe.deduplicate, resources, output, "pairs")
    output.report(Progress(num_sources, num_sources, "sources", "pairs written"))
    dropped, rejected = write_left_out(rows, chosen.left_out, output)
    unique.unpersist()
    by_collection, by_split = counts_by(counts, 0), counts_by(counts, 1)
    record = CollectedPreferences(
        num_sources=num_sources,
        num_pairs=sum(count for count, _ in by_split.values()),
        num_bytes=sum(size for _, size in by_split.values()),
        pairs_by_collection={collection: count for (collection,), (count, _) in by_collection.items()},
        pairs_by_split={part: by_split.get((part,), (0, 0))[0] for part in (TRAIN, VALIDATION, TEST)},
        dropped=dropped,
        rejected=rejected,
    )
    num_in = sum(count for count, _ in totals.values())
    assert num_in == record.num_pairs + sum(record.dropped.values()) + sum(record.rejected.values()), (num_in, record)
    return record


def _side(recipe: PreferenceRecipe, num_sources: int) -> Column:
    """The part of the split of a cluster, by the prompt of its first pair; of made pairs those of unseen prompts are
    judged by."""
    from pyspark.sql import functions as F

    share = hash_of("origin", 1) / NUM_HASHES
    test, validation = recipe.test_share, recipe.validation_share
    is_test = share < test if num_sources else F.col("source") == f"{PROMPT_SOURCE}-pairs"
    split = F.when(is_test, F.lit(TEST)).when((share >= test) & (share < test + validation), F.lit(VALIDATION))
    return split.otherwise(F.lit(TRAIN))


def _check(record: CollectedPreferences, recipe: PreferenceRecipe, rows: DataFrame) -> None:
    """Raises ValueError with examples where too much is malformed or a part of the split is empty."""
    num_read = record.num_pairs + sum(record.dropped.values()) + sum(record.rejected.values())
    share = recipe.max_rejected_share
    refuse_malformed(rows, record.rejected, num_read, share, "preference pairs", "preferences.max_rejected_share")
    if empty := [part for part, count in record.pairs_by_split.items() if not count]:
        raise ValueError(
            f"of {num_read} preference pairs none is left for {', '.join(empty)} (dropped: {record.dropped}): bring "
            f"more files of role preference, or raise preferences.test_share and preferences.validation_share"
        )
