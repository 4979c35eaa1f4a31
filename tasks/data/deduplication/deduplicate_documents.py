"""Step: documents -> one survivor per page, per content and per cluster of near-duplicates, with the cluster's id.

It compares, in this order: records with the same page URL; equal content digests; MinHash-LSH candidates whose true
Jaccard similarity over word n-grams reaches the threshold, closed transitively. The survivor is what an earlier run
kept, then the best quality (none last), the longest, the smallest id. So the result depends only on the documents.

dropped.parquet names the survivor, neighbours.parquet a verified neighbour of every near-duplicate. signatures/ has
the signatures of the survivors: a later crawl is deduplicated against them (`previous`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.deduplication.connected_components import connected_components
from tasks.data.deduplication.duplicate_candidates import NEIGHBOUR_COLUMNS, list_neighbours
from tasks.data.deduplication.duplicate_clusters import DuplicateCluster, check_cluster_share, largest_clusters
from tasks.data.deduplication.duplicate_verdicts import (
    NEAR,
    exact_survivors,
    page_duplicates,
    verdicts_of,
    with_exact_groups,
)
from tasks.data.deduplication.minhash import signing_metadata
from tasks.data.deduplication.near_duplicates import near_duplicates, signing_of
from tasks.data.deduplication.survivor_parts import signature_schema, write_survivors
from tasks.data.records.document_files import (
    check_counts,
    columns_of,
    count_reasons,
    empty_table,
    num_files,
    read_documents,
    write_empty,
    write_table,
)
from tasks.data.records.documents import DROPPED_COLUMNS, NUM_EXAMPLES, names_of
from tasks.data.records.documents_by_id import send_marks, with_marks
from tasks.data.records.parcels import PARCEL_COLUMNS
from tasks.data.records.parquet_parts import PART_COLUMNS, Counts, part_name, read_part_rows
from tasks.data.records.removed_share import COLLECTION, Ceiling, check_removed_share

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from configs.files.stored_files import StoredFile
    from configs.schema import DeduplicationRecipe, SparkResources
    from tasks.data.deduplication.earlier_documents import EarlierDocuments
    from tasks.data.scoring.score_documents import ScoredDocuments

META_COLUMNS = (
    "id",
    "source",
    "offset",
    "piece",
    "collection",
    "domain",
    "url",
    "content_digest",
    "quality",
    "num_chars",
)


class DeduplicatedDocuments(Record):
    num_documents: int
    num_bytes: int
    num_verified_pairs: int
    """Pairs of distinct texts whose similarity reaches the threshold."""
    num_bands: int
    num_rows: int
    dropped: dict[str, int]
    largest_clusters: tuple[DuplicateCluster, ...]
    """Clusters of near-duplicates that remove at least MIN_JUDGED_DOCUMENTS documents of a source, the largest
    first."""


@step(
    content=("documents/*.parquet", "dropped.parquet", "neighbours.parquet", "signatures/*.parquet"),
    distributions=("pyspark", "pyarrow", "numpy", "scipy", "datasketch"),
)
def deduplicate_documents(
    *,
    documents: Artifact[ScoredDocuments],
    previous: EarlierDocuments,
    recipe: DeduplicationRecipe,
    resources: SparkResources,
    output: Output,
) -> DeduplicatedDocuments:
    """Keep one document per cluster. Raises ValueError where one source loses more than max_removed_share of its
    documents, or more than max_cluster_share to one cluster of near-duplicates."""
    spark = spark_session(resources)
    previous.check_signatures(recipe)
    files = documents.files("documents/*.parquet")
    num_in, num_parts = documents.record.num_documents, num_files(documents.record.num_bytes)
    signing = signing_of(recipe, resources.shuffle_partitions, num_parts)
    frame = _meta(spark, files, previous.document_files, resources)
    previous.check_ids(frame)
    output.report(Progress(0, num_in, "documents", "URLs and digests"))
    pages = page_duplicates(frame)
    others = frame if pages is None else frame.join(pages.select("id"), "id", "left_anti")
    grouped = with_exact_groups(others).persist()
    output.report(Progress(0, num_in, "documents", "signatures"))
    ids = exact_survivors(grouped).where("not is_earlier").select("id")
    near = near_duplicates(
        ids, files, previous.signature_rows(spark), previous.document_files, signing, recipe.threshold
    )
    output.report(Progress(num_in, num_in, "documents", f"{near.num_edges} verified pairs"))
    components = connected_components(near.edges, near.num_edges, output, "rounds", resources)
    verdicts = verdicts_of(grouped, components, pages).persist()
    clusters = largest_clusters(verdicts, [*files, *previous.document_files])
    check_cluster_share(clusters, recipe)
    _check_removed_share(verdicts, recipe)
    reasons = _write_removed(verdicts, near.edges, output)
    survivors = (
        verdicts.where("reason = ''")
        .select("id", "cluster")
        .mapInArrow(partial(send_marks, num_files=num_parts), PARCEL_COLUMNS)
    )
    to_write = near.signatures.unionByName(survivors).repartitionById(num_parts, "target")
    counts = _write_survivors(to_write, files, num_parts, recipe, output)
    check_counts(counts, reasons, num_in)
    for cached in (grouped, verdicts):
        cached.unpersist()
    near.release()
    output.remove("rounds")
    return DeduplicatedDocuments(
        num_documents=sum(count for count, _ in counts.values()),
        num_bytes=sum(size for _, size in counts.values()),
        dropped=reasons,
        num_verified_pairs=near.num_edges,
        num_bands=signing.num_bands,
        num_rows=signing.num_rows,
        largest_clusters=clusters,
    )


def _meta(
    spark: SparkSession, files: list[StoredFile], earlier: list[StoredFile], resources: SparkResources
) -> DataFrame:
    """META_COLUMNS and is_earlier of the documents and of those that earlier runs kept."""
    from pyspark.sql import functions as F

    def read(files: list[StoredFile], is_earlier: bool) -> DataFrame:
        return read_documents(spark, files, resources, *META_COLUMNS).withColumn("is_earlier", F.lit(is_earlier))

    frame = read(files, False)
    return frame.unionByName(read(earlier, True)) if earlier else frame


def _write_removed(verdicts: DataFrame, edges: DataFrame, output: Output) -> dict[str, int]:
    """dropped.parquet, and neighbours.parquet: of every near-duplicate the verified neighbour that it is most similar
    to. Gives the dropped documents by reason."""
    from pyspark.sql import functions as F

    dropped = names_of(DROPPED_COLUMNS)
    counts = write_table(verdicts.where("reason <> ''").select(*dropped), output, "dropped.parquet", "reason")
    unlike = (-F.col("num_shared") / F.col("num_union")).alias("unlike")
    best = F.min(F.struct(unlike, "neighbour_id", "num_shared", "num_union")).alias("best")
    nearest = edges.mapInArrow(list_neighbours, NEIGHBOUR_COLUMNS).groupBy("id").agg(best)
    removed = verdicts.where(f"reason = '{NEAR}'").select("id", "kept_id").join(nearest, "id")
    columns = ("id", "kept_id", "best.neighbour_id", "best.num_shared", "best.num_union")
    write_table(removed.select(*columns, (-F.col("best.unlike")).alias("similarity")), output, "neighbours.parquet")
    return count_reasons(counts)


def _write_survivors(
    parcels: DataFrame, files: list[StoredFile], num_parts: int, recipe: DeduplicationRecipe, output: Output
) -> Counts:
    """documents/ and signatures/; counts the documents by domain."""
    import pyarrow as pa

    metadata = signing_metadata(recipe)
    writer = partial(
        write_survivors, files=files, directory=output.uri, num_files=num_parts, signature_metadata=metadata
    )
    made, counts = read_part_rows(parcels.mapInArrow(writer, PART_COLUMNS).collect())
    output.add(made)
    if not made:  # nothing survived: readers find the columns
        columns = empty_table(columns_of(parcels.sparkSession, files[0]))
        documents = with_marks(columns, pa.table({"cluster": pa.array([], pa.string())}))
        write_empty(documents, output, f"documents/{part_name(0)}")
        write_empty(signature_schema(metadata).empty_table(), output, f"signatures/{part_name(0)}")
    return counts


def _check_removed_share(verdicts: DataFrame, recipe: DeduplicationRecipe) -> None:
    from pyspark.sql import functions as F

    def shown(_: str, collection: str, __: str) -> list[str]:
        lost = (
            verdicts.where((F.col("collection") == collection) & (F.col("reason") != ""))
            .orderBy("id")
            .take(NUM_EXAMPLES)
        )
        return [f"{row.source} ({row.reason}, {row.id} -> {row.kept_id})" for row in lost]

    ceiling = Ceiling(
        "deduplicate.max_removed_share",
        recipe.max_removed_share,
        lambda _: "documents are duplicates",
        "Look whether a template makes different pages look alike; then raise deduplicate.threshold or "
        "max_removed_share",
    )
    gone = F.when(F.col("reason") != "", 1).otherwise(0).alias("removed")
    judged = verdicts.select("collection", F.lit("").alias("reason"), F.lit(1).alias("amount"), gone)
    check_removed_share(judged, (COLLECTION,), ceiling, shown)
