"""Shows the largest clusters of near-duplicates: a template with other facts looks like one page many times."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from infra.step import Record
from tasks.data.deduplication.duplicate_verdicts import NEAR
from tasks.data.records.documents_by_id import named_rows
from tasks.data.records.removed_share import MIN_JUDGED_DOCUMENTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from configs.files.stored_files import StoredFile
    from configs.schema import DeduplicationRecipe

NUM_SHOWN = 10
SHOWN_CHARS = 120


class DuplicateCluster(Record):
    """The near-duplicates that one source loses to one kept document (of this source or another)."""

    collection: str
    num_removed: int
    num_documents: int
    """Documents of the source."""
    kept_id: str
    kept: str
    """The beginning of the kept text, on one line."""
    removed_id: str
    removed: str
    """The beginning of a removed text, on one line."""

    def describe(self) -> str:
        """One line of a report."""
        return (
            f"{self.num_removed:,} of {self.num_documents:,} documents of {self.collection} went as near-duplicates "
            f"of {self.kept_id} "
            f"({self.kept!r}), for example {self.removed_id} ({self.removed!r})"
        )


def largest_clusters(verdicts: DataFrame, files: list[StoredFile]) -> tuple[DuplicateCluster, ...]:
    """Those that remove MIN_JUDGED_DOCUMENTS documents of a source or more, the largest first, NUM_SHOWN of them.

    verdicts: (id, collection, source, reason, kept_id, cluster); files: documents, those of earlier runs among
    them."""
    from pyspark.sql import functions as F

    totals = verdicts.groupBy("collection").agg(F.count("id").alias("num_documents"))
    near = verdicts.where(F.col("reason") == NEAR).groupBy("cluster", "collection")
    clusters = near.agg(
        F.count("id").alias("num_removed"), F.min("kept_id").alias("kept_id"), F.min("id").alias("removed_id")
    )
    large = clusters.where(F.col("num_removed") >= MIN_JUDGED_DOCUMENTS)
    rows = (
        large.join(F.broadcast(totals), "collection")
        .orderBy(F.desc("num_removed"), "cluster", "collection")
        .take(NUM_SHOWN)
    )
    wanted = [identity for row in rows for identity in (row.kept_id, row.removed_id)]
    texts = {}
    if wanted:
        start = F.substring("text", 1, SHOWN_CHARS).alias("text")
        ids = verdicts.sparkSession.createDataFrame([(one,) for one in wanted], "id string").repartition(1)
        shown = ids.mapInArrow(partial(named_rows, files=files, columns=["id", "text"]), "id string, text string")
        texts = {row.id: " ".join(row.text.split()) for row in shown.select("id", start).collect()}
    largest = [
        DuplicateCluster(
            collection=row.collection,
            num_removed=row.num_removed,
            num_documents=row.num_documents,
            kept_id=row.kept_id,
            kept=texts[row.kept_id],
            removed_id=row.removed_id,
            removed=texts[row.removed_id],
        )
        for row in rows
    ]
    return tuple(sorted(largest, key=lambda one: (-one.num_removed, one.collection, one.kept_id)))


def check_cluster_share(clusters: tuple[DuplicateCluster, ...], recipe: DeduplicationRecipe) -> None:
    """Raises ValueError where one cluster removes a larger share of a source than the recipe allows."""
    for cluster in clusters:
        if cluster.num_removed > recipe.max_cluster_share * cluster.num_documents:
            raise ValueError(
                f"{cluster.describe()}: more than deduplicate.max_cluster_share ({recipe.max_cluster_share}) allows "
                f"one cluster of a "
                "source. Look whether a template makes different pages look alike; then raise deduplicate.threshold "
                "or max_cluster_share"
            )
