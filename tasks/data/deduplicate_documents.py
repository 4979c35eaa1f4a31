"""Step: documents -> one survivor per cluster of exact and near duplicates, with the cluster's id; dropped.parquet names the survivor.

Exact duplicates share the content digest. Near duplicates are MinHash-LSH candidates whose true Jaccard similarity over word n-grams
reaches the threshold, closed transitively. Survivor: the longest, then the smallest id; so the result depends on the documents alone.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from infra.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.connected_components import connected_components
from tasks.data.document_files import count_by, count_reasons, read_documents, write_documents, write_table
from tasks.data.minhash import EDGE_COLUMNS, PAIR_COLUMNS, SIGNATURE_COLUMNS, banding, candidate_pairs, sign_batches, verify_pairs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from configs.schema import DeduplicationRecipe, SparkResources
    from tasks.data.score_documents import ScoredDocuments

EXACT, NEAR = "exact_duplicate", "near_duplicate"
MIN_JUDGED_DOCUMENTS = 20
"""Sources with fewer documents are not held to max_removed_share: two copies among three files are no template."""
NUM_EXAMPLES = 3


class DeduplicatedDocuments(Record):
    num_documents: int
    num_bytes: int
    num_verified_pairs: int
    """Pairs of distinct texts whose similarity reaches the threshold."""
    num_bands: int
    num_rows: int
    dropped: dict[str, int]


@step(content=("documents/*.parquet", "dropped.parquet"), distributions=("pyspark", "pyarrow", "numpy", "datasketch"))
def deduplicate_documents(
    *, documents: Artifact[ScoredDocuments], recipe: DeduplicationRecipe, resources: SparkResources, output: Output
) -> DeduplicatedDocuments:
    """Keep one document per cluster. Raises ValueError where one source loses more than max_removed_share of its documents."""
    from pyspark.sql import functions as F

    num_bands, num_rows = banding(recipe.threshold, recipe.num_permutations)
    spark = spark_session(resources)
    frame = read_documents(spark, documents.paths("documents/*.parquet"), resources)
    num_in = documents.record.num_documents
    output.report(Progress(0, num_in, "documents", "signatures"))
    groups = _exact_groups(frame)
    unique = frame.select("id", "text").join(groups.select(F.col("kept").alias("id")), "id", "left_semi")
    signed = unique.mapInArrow(
        partial(
            sign_batches, ngram_size=recipe.ngram_size, num_permutations=recipe.num_permutations, num_bands=num_bands, num_rows=num_rows
        ),
        SIGNATURE_COLUMNS,
    ).persist()
    edges = _verified_edges(signed, recipe.threshold).persist()
    num_pairs = edges.count()
    output.report(Progress(num_in, num_in, "documents", f"{num_pairs} verified pairs"))
    fates = _fates(frame, groups, connected_components(edges)).persist()
    _check_removed_share(fates, recipe)
    dropped = fates.where("id <> kept_id").select("id", "reason", "kept_id")
    write_table(dropped, output.path("dropped.parquet"))
    survivors = frame.join(fates.where("id = kept_id").select("id", "cluster"), "id")
    columns = [*frame.columns, "cluster"]
    kept = count_by(write_documents(survivors.select(*columns), output.path("documents"), documents.record.num_bytes), "domain")
    for cached in (signed, edges, fates):
        cached.unpersist()
    num_kept = sum(count for count, _ in kept.values())
    reasons = count_reasons(output.path("dropped.parquet"))
    assert num_in == num_kept + sum(reasons.values()), (num_in, num_kept, reasons)
    return DeduplicatedDocuments(
        num_documents=num_kept, num_bytes=sum(size for _, size in kept.values()), num_verified_pairs=num_pairs,
        num_bands=num_bands, num_rows=num_rows, dropped=reasons,
    )  # fmt: skip


def _exact_groups(frame: DataFrame) -> DataFrame:
    """(content_digest, kept, num_chars, smallest): per content the kept document, its length, and the smallest id."""
    from pyspark.sql import functions as F

    best = F.min(F.struct((-F.col("num_chars")).alias("shortness"), "id")).alias("best")
    grouped = frame.groupBy("content_digest").agg(best, F.min("id").alias("smallest"))
    return grouped.select("content_digest", F.col("best.id").alias("kept"), (-F.col("best.shortness")).alias("num_chars"), "smallest")


def _verified_edges(signed: DataFrame, threshold: float) -> DataFrame:
    from pyspark.sql import functions as F

    keyed = signed.select("id", F.explode("bands").alias("key"))
    buckets = keyed.repartition("key").sortWithinPartitions("key", F.xxhash64("id", "key"), "id")
    pairs = buckets.mapInArrow(candidate_pairs, PAIR_COLUMNS).distinct()
    shingles = signed.select("id", "shingles")
    left = shingles.select(F.col("id").alias("left"), F.col("shingles").alias("left_shingles"))
    right = shingles.select(F.col("id").alias("right"), F.col("shingles").alias("right_shingles"))
    joined = pairs.join(left, "left").join(right, "right").select("left", "right", "left_shingles", "right_shingles")
    return joined.mapInArrow(partial(verify_pairs, threshold=threshold), EDGE_COLUMNS)


def _fates(frame: DataFrame, groups: DataFrame, components: DataFrame) -> DataFrame:
    """(id, collection, source, kept_id, cluster, reason) of every document; a survivor is its own kept_id."""
    from pyspark.sql import functions as F

    rooted = groups.join(components.withColumnRenamed("id", "kept"), "kept", "left")
    rooted = rooted.withColumn("root", F.coalesce("root", "kept"))
    best = F.min(F.struct((-F.col("num_chars")).alias("shortness"), "kept")).alias("best")
    clusters = rooted.groupBy("root").agg(best, F.min("smallest").alias("cluster"))
    resolved = rooted.select("content_digest", "kept", "root").join(clusters, "root")
    resolved = resolved.select("content_digest", "kept", F.col("best.kept").alias("kept_id"), "cluster")
    reason = F.when(F.col("id") == F.col("kept"), F.lit(NEAR)).otherwise(F.lit(EXACT)).alias("reason")
    return frame.select("id", "collection", "source", "content_digest").join(resolved, "content_digest").select(
        "id", "collection", "source", "kept_id", "cluster", reason
    )  # fmt: skip


def _check_removed_share(fates: DataFrame, recipe: DeduplicationRecipe) -> None:
    from pyspark.sql import functions as F

    removed = F.sum(F.when(F.col("id") != F.col("kept_id"), 1).otherwise(0)).alias("num_removed")
    counts = (
        fates.groupBy("collection").agg(F.count("id").alias("num_documents"), removed).where(f"num_documents >= {MIN_JUDGED_DOCUMENTS}")
    )
    for row in sorted(counts.collect()):
        if row.num_removed > recipe.max_removed_share * row.num_documents:
            lost = fates.where((F.col("collection") == row.collection) & (F.col("id") != F.col("kept_id"))).orderBy("id").take(NUM_EXAMPLES)
            examples = ", ".join(f"{example.source} ({example.id} -> {example.kept_id})" for example in lost)
            raise ValueError(
                f"source {row.collection}: {row.num_removed} of {row.num_documents} documents are duplicates, more than "
                f"deduplicate.max_removed_share ({recipe.max_removed_share}) allows, for example {examples}. Look whether a template makes "
                "different pages look alike; then raise deduplicate.threshold or max_removed_share"
            )
