"""Groups conversations that are nearly alike or come from one record: all of a group are held out, or none.

Their texts are compared like documents (tasks/data/deduplication/near_duplicates.py). Nothing is dropped, since two
answers to one question may both be worth learning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from tasks.data.deduplication.connected_components import connected_components
from tasks.data.deduplication.duplicate_candidates import EDGES
from tasks.data.deduplication.near_duplicates import near_duplicates, signing_of
from tasks.data.records.document_files import Counts, write_documents
from tasks.data.records.documents_by_id import send_marks
from tasks.data.records.parcels import PARCEL_COLUMNS, id_numbers, parcels

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

    from configs.schema import DeduplicationRecipe, SparkResources
    from infra.step import Output

SAID = "array<struct<reasoning: string, content: string>>"


@contextmanager
def chat_clusters(
    chats: DataFrame, num_bytes: int, recipe: DeduplicationRecipe, resources: SparkResources, output: Output, name: str
) -> Iterator[DataFrame]:
    """(id, cluster) of every conversation of `chats` (id, origin, messages), inside the block; a cluster is called by
    the smallest id in it. `name` of the output holds their texts meanwhile."""
    from pyspark.sql import functions as F

    turns = F.transform(
        F.from_json("messages", SAID), lambda turn: F.concat_ws("\n", turn["reasoning"], turn["content"])
    )
    texts = chats.select("id", F.array_join(turns, "\n").alias("text"))
    try:
        files, _ = write_documents(texts, output, f"{name}/texts", num_bytes)
        signing = signing_of(recipe, resources.shuffle_partitions, 1)
        ids = chats.select("id").mapInArrow(partial(send_marks, num_files=signing.num_partitions), PARCEL_COLUMNS)
        near = near_duplicates(ids, files, None, [], signing, recipe.threshold)
        firsts = chats.groupBy("origin").agg(F.min("id").alias("first"))
        of_origin = chats.join(firsts, "origin").where("id <> first").select("id", "first").persist()
        edges = near.edges.where(f"kind = '{EDGES}'").unionByName(of_origin.mapInArrow(origin_edges, PARCEL_COLUMNS))
        num_edges = near.num_edges + of_origin.count()
        roots = connected_components(edges, num_edges, output, f"{name}/rounds", resources)
        yield chats.select("id").join(roots, "id", "left").select("id", F.coalesce("root", "id").alias("cluster"))
        of_origin.unpersist()
        near.release()
    finally:
        output.remove(name)


def write_split(
    rows: DataFrame,
    columns: Sequence[str],
    side: Column,
    num_bytes: int,
    recipe: DeduplicationRecipe,
    resources: SparkResources,
    output: Output,
    name: str,
) -> Counts:
    """Write `columns` of conversations below `name`, by collection and part of the split; a cluster is in one part.
    `side` names it from the origin and source of the cluster's first row."""
    from pyspark.sql import functions as F

    compared = rows.select("id", "origin", "messages")
    with chat_clusters(compared, num_bytes, recipe, resources, output, "compared") as clusters:
        heads = rows.select(F.col("id").alias("cluster"), "origin", "source")
        sides = clusters.join(heads, "cluster").select("id", side.alias("split"))
        split = rows.join(sides, "id").select(*columns, "split")
        _, counts = write_documents(split, output, name, num_bytes, "collection", "split")
    return counts


def origin_edges(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """EDGES parcels from each (id, first) to the first conversation of its record."""
    import numpy as np
    import pyarrow as pa

    for batch in batches:
        if batch.num_rows:
            ends = {"left": id_numbers(batch.column("first")), "right": id_numbers(batch.column("id"))}
            unmeasured = {name: np.zeros(batch.num_rows, dtype=np.int64) for name in ("num_shared", "num_union")}
            yield from parcels(EDGES, 0, pa.table({**ends, **unmeasured}))
