"""Step: documents -> one survivor per page, per content and per cluster of near-duplicates, with the cluster's id.

It compares, in this order: records with the same page URL; equal content digests; MinHash-LSH candidates whose true
Jaccard similarity over word n-grams reaches the threshold, closed transitively. The survivor is what an earlier run
kept, then the best quality (none last), the longest, the smallest id. So the result depends only on the documents.

dropped.parquet names the survivor, neighbours.parquet a verified neighbour of every near-duplicate. signatures/ has
the signatures of the survivors: a later crawl is deduplicated against them (`previous`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.deduplication.connected_components import connected_components
from tasks.data.deduplication.duplicate_clusters import DuplicateCluster, check_cluster_share, largest_clusters
from tasks.data.deduplication.duplicate_summary import LARGEST, sum_up
from tasks.data.deduplication.duplicate_verdicts import COUNTED, DROPPED, NEIGHBOURS, give_verdicts, send_links
from tasks.data.deduplication.exact_groups import EARLIER, FOLLOWERS, SURVIVORS, exact_groups
from tasks.data.deduplication.minhash import signing_metadata
from tasks.data.deduplication.near_duplicates import delivered, near_duplicates, signing_of
from tasks.data.deduplication.page_duplicates import PIECES, page_losses
from tasks.data.deduplication.ranked_documents import META_COLUMNS, RANKED, send_ranked
from tasks.data.deduplication.removed_parts import EXAMPLE_COLUMNS, removed_examples, removed_schemas, write_removed
from tasks.data.deduplication.settled_clusters import CLUSTERS, MOVED, send_members, send_roots, settle_clusters
from tasks.data.deduplication.survivor_parts import signature_schema, write_survivors
from tasks.data.records.document_files import (
    check_counts,
    columns_of,
    count_reasons,
    empty_table,
    num_files,
    send_documents,
    write_empty,
)
from tasks.data.records.documents import NUM_EXAMPLES
from tasks.data.records.documents_by_id import MARKS, with_marks
from tasks.data.records.parcels import PARCEL_COLUMNS, unpacked
from tasks.data.records.parquet_parts import PART_COLUMNS, Counts, part_name, read_part_rows
from tasks.data.records.removed_share import COLLECTION, MIN_JUDGED_DOCUMENTS, Ceiling, refuse_above

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from configs.files.stored_files import StoredFile
    from configs.schema import DeduplicationRecipe, SparkResources
    from tasks.data.deduplication.duplicate_candidates import Signing
    from tasks.data.deduplication.earlier_documents import EarlierDocuments
    from tasks.data.scoring.score_documents import ScoredDocuments


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
    num_in, num_files_out = documents.record.num_documents, num_files(documents.record.num_bytes)
    signing = signing_of(recipe, resources.shuffle_partitions, num_files_out)
    previous.check_ids(spark, files, resources)
    output.report(Progress(0, num_in, "documents", "URLs, digests and signatures"))
    ranked = _ranked(spark, files, previous.document_files, resources).persist()
    grouped = _grouped(ranked, resources.shuffle_partitions).persist()
    near = near_duplicates(
        grouped.where(f"kind = '{SURVIVORS}'"),
        files,
        previous.signature_rows(spark),
        previous.document_files,
        signing,
        recipe.threshold,
    )
    ranked.unpersist()
    output.report(Progress(num_in, num_in, "documents", f"{near.num_edges} verified pairs"))
    components = connected_components(near.edges, near.num_edges, output, "rounds", resources)
    settled = _settled(grouped, components, resources.shuffle_partitions).persist()
    verdicts = _verdicts(grouped, settled, near.edges, signing).persist()
    counted, clusters = _summary(settled, verdicts, [*files, *previous.document_files])
    check_cluster_share(clusters, recipe)
    _check_removed_share(counted, verdicts, files, recipe)
    reasons = _write_removed(verdicts, output)
    counts = _write_survivors(near.signatures, verdicts, files, num_files_out, recipe, output)
    check_counts(counts, reasons, num_in)
    for cached in (grouped, settled, verdicts):
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


def _ranked(
    spark: SparkSession, files: list[StoredFile], earlier: list[StoredFile], resources: SparkResources
) -> DataFrame:
    """Parcels of send_ranked, for the documents and those that earlier runs kept."""
    count = resources.shuffle_partitions

    def read(files: list[StoredFile], is_new: bool) -> DataFrame:
        sender = partial(send_ranked, is_new=is_new, num_partitions=count)
        return send_documents(spark, files, resources, sender, META_COLUMNS)

    ranked = read(files, True)
    return ranked.unionByName(read(earlier, False)) if earlier else ranked


def _grouped(ranked: DataFrame, count: int) -> DataFrame:
    """Parcels of exact_groups."""
    pieces = delivered(ranked.where(f"kind = '{PIECES}'"), count)
    lost = pieces.mapInArrow(partial(page_losses, num_partitions=count), PARCEL_COLUMNS)
    compared = delivered(ranked.where(f"kind = '{RANKED}'").unionByName(lost), count)
    return compared.mapInArrow(partial(exact_groups, num_partitions=count), PARCEL_COLUMNS)


def _settled(grouped: DataFrame, components: DataFrame, count: int) -> DataFrame:
    """Parcels of settle_clusters, for components (id, root)."""
    roots = components.mapInArrow(partial(send_roots, num_partitions=count), PARCEL_COLUMNS)
    compared = grouped.where(f"kind <> '{FOLLOWERS}'").unionByName(roots)
    members = delivered(compared, count).mapInArrow(partial(send_members, num_partitions=count), PARCEL_COLUMNS)
    settler = partial(settle_clusters, num_partitions=count, min_removed=MIN_JUDGED_DOCUMENTS)
    return delivered(members, count).mapInArrow(settler, PARCEL_COLUMNS)


def _verdicts(grouped: DataFrame, settled: DataFrame, edges: DataFrame, signing: Signing) -> DataFrame:
    """Parcels of give_verdicts."""
    count = signing.num_partitions
    links = edges.mapInArrow(partial(send_links, num_partitions=count), PARCEL_COLUMNS)
    decided = grouped.where(f"kind <> '{EARLIER}'").unionByName(settled.where(f"kind = '{MOVED}'")).unionByName(links)
    giver = partial(give_verdicts, num_partitions=count, num_files=signing.num_files)
    return delivered(decided, count).mapInArrow(giver, PARCEL_COLUMNS)


def _summary(
    settled: DataFrame, verdicts: DataFrame, files: list[StoredFile]
) -> tuple[list[dict[str, Any]], tuple[DuplicateCluster, ...]]:
    """Rows of COUNTED, one per collection, and the largest clusters."""
    counts = verdicts.where(f"kind = '{COUNTED}'").unionByName(settled.where(f"kind = '{CLUSTERS}'"))
    summed = counts.repartition(1).mapInArrow(partial(sum_up, files=files), PARCEL_COLUMNS)
    tables = unpacked(iter(summed.toArrow().to_batches()))
    counted = tables[COUNTED].to_pylist() if COUNTED in tables else []
    num_documents = {row["collection"]: row["num_documents"] for row in counted}
    return counted, largest_clusters(tables[LARGEST], num_documents) if LARGEST in tables else ()


def _write_removed(verdicts: DataFrame, output: Output) -> dict[str, int]:
    """dropped.parquet, and neighbours.parquet: of every near-duplicate the verified neighbour that it is most similar
    to. Gives the dropped documents by reason."""
    removed = verdicts.where(f"kind in ('{DROPPED}', '{NEIGHBOURS}')").repartition(1)
    parts = removed.sortWithinPartitions("kind", "target").mapInArrow(
        partial(write_removed, directory=output.uri), PART_COLUMNS
    )
    made, counts = read_part_rows(parts.collect())
    output.add(made)
    written = {file.uri for file in made}
    for name, schema in removed_schemas().items():
        if f"{output.uri}/{name}" not in written:
            write_empty(schema.empty_table(), output, name)
    return count_reasons(counts)


def _write_survivors(
    signatures: DataFrame,
    verdicts: DataFrame,
    files: list[StoredFile],
    count: int,
    recipe: DeduplicationRecipe,
    output: Output,
) -> Counts:
    """documents/ and signatures/; counts the documents by domain."""
    import pyarrow as pa

    metadata = signing_metadata(recipe)
    writer = partial(write_survivors, files=files, directory=output.uri, num_files=count, signature_metadata=metadata)
    sent = delivered(signatures.unionByName(verdicts.where(f"kind = '{MARKS}'")), count)
    made, counts = read_part_rows(sent.mapInArrow(writer, PART_COLUMNS).collect())
    output.add(made)
    if not made:  # nothing survived: readers find the columns
        columns = empty_table(columns_of(verdicts.sparkSession, files[0]))
        documents = with_marks(columns, pa.table({"cluster": pa.array([], pa.string())}))
        write_empty(documents, output, f"documents/{part_name(0)}")
        write_empty(signature_schema(metadata).empty_table(), output, f"signatures/{part_name(0)}")
    return counts


def _check_removed_share(
    counted: list[dict[str, Any]], verdicts: DataFrame, files: list[StoredFile], recipe: DeduplicationRecipe
) -> None:
    above = sorted(
        (row["collection"], "", row["num_removed"], row["num_documents"])
        for row in counted
        if row["num_documents"] >= MIN_JUDGED_DOCUMENTS
        and row["num_removed"] > recipe.max_removed_share * row["num_documents"]
    )
    if not above:
        return

    def shown(_: str, collection: str, __: str) -> list[str]:
        example = partial(removed_examples, collection=collection, files=files, count=NUM_EXAMPLES)
        lost = verdicts.where(f"kind = '{DROPPED}'").mapInArrow(example, EXAMPLE_COLUMNS).orderBy("id")
        return [f"{row.source} ({row.reason}, {row.id} -> {row.kept_id})" for row in lost.take(NUM_EXAMPLES)]

    ceiling = Ceiling(
        "deduplicate.max_removed_share",
        recipe.max_removed_share,
        lambda _: "documents are duplicates",
        "Look whether a template makes different pages look alike; then raise deduplicate.threshold or "
        "max_removed_share",
    )
    refuse_above(COLLECTION, above, ceiling, shown)
