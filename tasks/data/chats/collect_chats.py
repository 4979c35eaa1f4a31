"""Step: `sft` sources, synthetic chats and verified solutions -> chats/ in one shape, split and cleaned.

The conversations have no personal data, no duplicates and no evaluation items. dropped.parquet names the conversation
that is kept instead, or the evaluation item that overlaps. rejected.parquet names records that are no conversation
with an answer, and why. masked.parquet counts the replaced personal data, as mask_personal_data does.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.chats.chat_clusters import write_split
from tasks.data.chats.chat_records import KEPT, ROW_COLUMNS, Judging, judge_chats, read_chats
from tasks.data.chats.collected_rows import choose_unique, hash_of, refuse_malformed, stream_totals, write_left_out
from tasks.data.decontamination.protected_items import protected_items
from tasks.data.privacy.mask_personal_data import count_masked
from tasks.data.privacy.personal_data import KINDS
from tasks.data.records.document_files import counts_by, read_documents, write_table
from tasks.data.records.documents import CHAT_COLUMNS, NUM_HASHES, TRAIN, VALIDATION, names_of
from tasks.data.sources.source_frame import source_frame

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from configs.schema import ChatCollectionRecipe, ChatRecipe, SparkResources
    from tasks.data.problems.synthesize_problems import SynthesizedProblems
    from tasks.data.seeds.request_traces import RequestedTraces
    from tasks.data.seeds.vary_problems import VariedProblems
    from tasks.data.seeds.verify_solutions import VerifiedSolutions
    from tasks.data.sources.ingest_documents import IngestedDocuments
    from tasks.data.sources.list_sources import SourceListing


class CollectedChats(Record):
    num_sources: int
    num_chats: int
    num_bytes: int
    chats_by_collection: dict[str, int]
    training_chats: int
    validation_chats: int
    dropped: dict[str, int]
    """Dropped well-formed conversations by reason."""
    num_masked_chats: int
    masked: dict[str, int]
    """Replaced personal data by kind, in the conversations that are kept."""
    rejected: dict[str, int]
    """Records that are no conversation with an answer, by reason."""


@step(
    content=("chats/*.parquet", "dropped.parquet", "masked.parquet", "rejected.parquet"),
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
def collect_chats(
    *,
    sources: SourceListing,
    synthetic: Artifact[SynthesizedProblems],
    ingested: Artifact[IngestedDocuments],
    recipe: ChatCollectionRecipe,
    resources: SparkResources,
    output: Output,
    solutions: Artifact[VerifiedSolutions] | None = None,
    variations: Artifact[VariedProblems] | None = None,
    traces: Artifact[RequestedTraces] | None = None,
) -> CollectedChats:
    """Collect all conversations; `traces` is None where no teacher is configured.

    Raises ValueError if a file changed since the listing, too many records are malformed, or none is left to train on.
    """
    spark = spark_session(resources)
    files = [file for file in sources.files if file.role == "sft"]
    output.report(Progress(0, len(files), "sources", "reading"))
    protected, index = protected_items(ingested, synthetic, recipe.decontaminate, resources)
    items = spark.sparkContext.broadcast((index, protected))
    judging = Judging(recipe.chats.max_chat_chars, recipe.personal_data.kinds, items)
    made = [
        file
        for artifact in (synthetic, solutions, variations, traces)
        if artifact is not None
        for file in artifact.files("chats.parquet")
    ]
    generated = read_documents(spark, made, resources)
    frames = [generated.mapInArrow(partial(judge_chats, judging=judging), ROW_COLUMNS)]
    if files:
        frames.append(
            source_frame(spark, files, resources.shuffle_partitions).mapInArrow(
                partial(read_chats, judging=judging), ROW_COLUMNS
            )
        )
    rows = reduce(lambda left, right: left.unionByName(right), frames).persist()
    try:
        record = _write_streams(rows, len(files), recipe, resources, output)
        _check_rejected(record, recipe.chats, rows)
    finally:
        rows.unpersist()
        items.destroy()
    return record


def _write_streams(
    rows: DataFrame, num_sources: int, recipe: ChatCollectionRecipe, resources: SparkResources, output: Output
) -> CollectedChats:
    from pyspark.sql import functions as F

    totals = stream_totals(rows)
    # A seed's solution, its variations and a teacher's trace come from one record: all are held out, or none.
    origin = F.concat_ws(" ", F.substring_index("source", "#", 1), F.col("offset").cast("string"))
    chosen = choose_unique(rows, recipe.chats.max_per_collection, origin)
    unique = chosen.rows
    num_bytes = totals.get(KEPT, (0, 0))[1]
    columns, side = names_of(CHAT_COLUMNS), _side(recipe.chats)
    counts = write_split(unique, columns, side, num_bytes, recipe.deduplicate, resources, output, "chats")
    masked = unique.where(F.greatest(*KINDS) > 0).select("id", *KINDS)
    write_table(masked, output, "masked.parquet")
    num_masked, by_kind = count_masked(masked)
    output.report(Progress(num_sources, num_sources, "sources", "conversations written"))
    dropped, rejected = write_left_out(rows, chosen.left_out, output)
    unique.unpersist()
    collections, sizes = counts_by(counts, 0), counts_by(counts, 1)
    record = CollectedChats(
        num_sources=num_sources,
        num_chats=sum(count for count, _ in sizes.values()),
        num_bytes=sum(size for _, size in sizes.values()),
        chats_by_collection={collection: count for (collection,), (count, _) in collections.items()},
        training_chats=sizes.get((TRAIN,), (0, 0))[0],
        validation_chats=sizes.get((VALIDATION,), (0, 0))[0],
        dropped=dropped,
        num_masked_chats=num_masked,
        masked={kind: by_kind[kind] for kind in recipe.personal_data.kinds},
        rejected=rejected,
    )
    num_in = sum(count for count, _ in totals.values())
    assert num_in == record.num_chats + sum(record.dropped.values()) + sum(record.rejected.values()), (num_in, record)
    return record


def _side(recipe: ChatRecipe) -> Column:
    """The split of a cluster, by the record of its first conversation."""
    from pyspark.sql import functions as F

    is_held_out = hash_of("origin", 1) < int(recipe.validation_share * NUM_HASHES)
    return F.when(is_held_out, F.lit(VALIDATION)).otherwise(F.lit(TRAIN))


def _check_rejected(record: CollectedChats, recipe: ChatRecipe, rows: DataFrame) -> None:
    """Raises ValueError with examples where too much is malformed or nothing is left to train on."""
    num_read = record.num_chats + sum(record.dropped.values()) + sum(record.rejected.values())
    share = recipe.max_rejected_share
    refuse_malformed(rows, record.rejected, num_read, share, "conversations", "chats.max_rejected_share")
    if not record.training_chats:
        raise ValueError(
            f"none of {num_read} conversations is left to train on (dropped: {record.dropped}, held out: "
            f"{record.validation_chats}): "
            "raise chats.max_chat_chars, lower chats.validation_share or raise synthesize.num_chats"
        )
