"""Step: documents -> one of each group of nearly alike ones (SemDedup, Abbas et al. 2023, arXiv 2303.09540).

It makes vectors of documents and clusters them with k-means. Inside a cluster it keeps one of the documents whose
cosine exceeds the threshold: the best in quality, then length, then id. similar.parquet names the neighbours. Weights
and centroids come from a sample of bounded size on the driver. The rest is one shuffle of a vector, two ranks and an
id per document.

The built-in vector is a projection of word weights (tasks/data/embedding/semantic_vectors.py). It detects texts that
share most of their rare words where many small changes break the shingles. It cannot detect a paraphrase in other
words. A model that the recipe names (tasks/data/embedding/embedding_model.py) gives vectors that know what the model
has learned.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.deduplication.similar_pairs import decide, similar_pairs
from tasks.data.embedding.embedding_model import PROBE_COLUMNS, EmbeddingModel, encode, named_model, probe_batches
from tasks.data.embedding.semantic_vectors import (
    ASSIGNED_COLUMNS,
    BUCKET_BITS,
    BUCKET_COLUMNS,
    PAIR_COLUMNS,
    VECTOR_COLUMNS,
    VERDICT_COLUMNS,
    assign_batches,
    embed_batches,
    feature_buckets,
    fit_centroids,
    project,
    vectors_of,
)
from tasks.data.records.document_files import is_sampled, read_documents, write_kept, write_table
from tasks.data.records.documents import CODE, COMMIT, NUM_EXAMPLES
from tasks.data.records.removed_share import COLLECTION, Ceiling, check_removed_share

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

    from configs.schema import SemanticRecipe, SparkResources
    from tasks.data.deduplication.deduplicate_documents import DeduplicatedDocuments
    from tasks.data.embedding.semantic_vectors import Embed

SIMILAR = "semantic_duplicate"
MIN_SAMPLE_PER_CENTROID = 10
"""Least number of sampled documents per centroid: with fewer, a centroid would be close to a single document."""


class DistinctDocuments(Record):
    num_documents: int
    num_bytes: int
    dropped: dict[str, int]
    num_clusters: int
    num_pairs: int
    """Compared pairs whose cosine is above the threshold."""
    num_sampled: int
    """Documents on which word weights and centroids were fitted."""


@step(
    content=("documents/*.parquet", "dropped.parquet", "similar.parquet"),
    distributions=("pyspark", "pyarrow", "numpy", "torch", "transformers", "tokenizers"),
)
def remove_semantic_duplicates(
    *, documents: Artifact[DeduplicatedDocuments], recipe: SemanticRecipe, resources: SparkResources, output: Output
) -> DistinctDocuments:
    """Keep one document of those that are nearly alike. Raises ValueError where one source loses more than
    max_removed_share, or the recipe names a model that cannot be used."""
    from pyspark.sql import functions as F

    model = named_model(recipe)
    num_in = documents.record.num_documents
    output.report(Progress(0, num_in, "documents", "vectors and centroids"))
    session = spark_session(resources)
    files = documents.files("documents/*.parquet")
    read = partial(read_documents, session, files, resources)
    prose = read("id", "domain", "text", "quality", "num_chars").where(~F.col("domain").isin(CODE, COMMIT))
    embed, num_dimensions = _projection(prose, num_in, recipe) if model is None else _encoder(session, model)
    quality = F.coalesce(-F.col("quality"), F.lit(math.inf)).alias("rank_quality")
    ranked = prose.select("id", "text", quality, (-F.col("num_chars")).alias("rank_length"))
    vectors = ranked.mapInArrow(partial(embed_batches, embed=embed), VECTOR_COLUMNS).persist()
    centroids, num_sampled = _centroids(vectors, num_in, num_dimensions, recipe)
    clustered = vectors.mapInArrow(partial(assign_batches, centroids=centroids), ASSIGNED_COLUMNS).where("cluster >= 0")
    in_order = clustered.repartition("cluster").sortWithinPartitions("cluster", "position", "id")
    pairs = in_order.mapInArrow(
        partial(similar_pairs, max_cosine=recipe.max_cosine, window=recipe.window), PAIR_COLUMNS
    ).persist()
    num_pairs = pairs.count()
    output.report(Progress(num_in, num_in, "documents", f"{num_pairs} similar pairs"))
    order = ("cluster", "worse_quality", "worse_length", "worse", "better_quality", "better_length", "better")
    decided = pairs.repartition("cluster").sortWithinPartitions(*order).mapInArrow(decide, VERDICT_COLUMNS).persist()
    _check_removed_share(read("id", "collection", "source"), decided, recipe)
    write_table(decided, output, "similar.parquet")
    reason = F.when(F.col("kept_id").isNull(), F.lit("")).otherwise(F.lit(SIMILAR)).alias("reason")
    verdicts = (
        read("id").join(decided, "id", "left").select("id", reason, F.coalesce("kept_id", F.lit("")).alias("kept_id"))
    )
    counts, reasons = write_kept(verdicts, files, num_in, documents.record.num_bytes, output, "domain")
    for cached in (vectors, pairs, decided):
        cached.unpersist()
    return DistinctDocuments(
        num_documents=sum(count for count, _ in counts.values()),
        num_bytes=sum(size for _, size in counts.values()),
        dropped=reasons,
        num_clusters=len(centroids),
        num_pairs=num_pairs,
        num_sampled=num_sampled,
    )


def _projection(prose: DataFrame, num_documents: int, recipe: SemanticRecipe) -> tuple[Embed, int]:
    """The built-in vectors, from word weights by inverse document frequency in the sample; and their dimensions."""
    import numpy as np
    from pyspark.sql import functions as F

    sample = prose.where(is_sampled(num_documents, recipe.sample_documents)).select("text")
    counted = (
        sample.mapInArrow(feature_buckets, BUCKET_COLUMNS)
        .groupBy("bucket")
        .agg(F.sum("num_documents").alias("num_documents"))
        .toArrow()
    )
    frequencies = np.zeros(1 << BUCKET_BITS, dtype=np.int64)
    frequencies[counted.column("bucket").to_numpy()] = counted.column("num_documents").to_numpy()
    idf = np.log((sample.count() + 1) / (frequencies + 1)).astype(np.float32)
    return partial(
        project, idf=idf, dimensions=recipe.dimensions, seed=recipe.seed, min_words=recipe.min_words
    ), recipe.dimensions


def _encoder(session: SparkSession, model: EmbeddingModel) -> tuple[Embed, int]:
    """The vectors of a model, and its hidden size. The model is tested in an executor: raises ValueError if it does not
    run there."""
    (probe,) = (
        session.range(1, numPartitions=1).mapInArrow(partial(probe_batches, model=model), PROBE_COLUMNS).collect()
    )
    if probe.problem:
        raise ValueError(
            f"data.recipe.semantic.embedding_model {model.directory} gives no vectors: {probe.problem}. Name a text "
            f"encoder that "
            "AutoModel.from_pretrained loads and that gives last_hidden_state for input_ids"
        )
    return partial(encode, model=model), probe.num_dimensions


def _centroids(
    vectors: DataFrame, num_documents: int, num_dimensions: int, recipe: SemanticRecipe
) -> tuple[NDArray[np.int8], int]:
    """(centroids, sampled documents)"""
    import numpy as np

    sample = (
        vectors.where(is_sampled(num_documents, recipe.sample_documents)).select("id", "vector").toArrow().sort_by("id")
    )
    num_sampled = sample.num_rows
    count = min(-(-num_documents // recipe.cluster_documents), max(num_sampled // MIN_SAMPLE_PER_CENTROID, 1))
    sampled = vectors_of(sample.column("vector")) if num_sampled else np.zeros((0, num_dimensions), dtype=np.int8)
    centroids = fit_centroids(sampled, count, recipe.iterations, recipe.seed)
    return centroids if len(centroids) else np.zeros((1, num_dimensions), dtype=np.int8), num_sampled


def _check_removed_share(frame: DataFrame, decided: DataFrame, recipe: SemanticRecipe) -> None:
    from pyspark.sql import functions as F

    judged = frame.join(decided, "id", "left")

    def shown(_: str, collection: str, __: str) -> list[str]:
        lost = (
            judged.where((F.col("collection") == collection) & F.col("kept_id").isNotNull())
            .orderBy("id")
            .take(NUM_EXAMPLES)
        )
        return [f"{one.source} ({one.id} -> {one.kept_id}, cosine {one.cosine:.3f})" for one in lost]

    ceiling = Ceiling(
        "semantic.max_removed_share",
        recipe.max_removed_share,
        lambda _: "documents are nearly alike",
        "Look whether a template makes different texts look alike; then raise semantic.max_cosine or max_removed_share",
    )
    gone = F.when(F.col("kept_id").isNotNull(), 1).otherwise(0).alias("removed")
    rows = judged.select("collection", F.lit("").alias("reason"), F.lit(1).alias("amount"), gone)
    check_removed_share(rows, (COLLECTION,), ceiling, shown)
