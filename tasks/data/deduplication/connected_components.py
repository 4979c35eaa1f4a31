"""Connected components of an edge list on Spark: the smallest id of its component for every node.

Up to MAX_SINGLE_TASK_EDGES, one task joins them in memory. Beyond that, alternating large and small stars (Kiveris et
al. 2014, "Connected Components in MapReduce and Beyond") shrink the edges to one star per component in O(log^2 n)
rounds on all executors. The result is proven, not assumed: rounds go on until every node has exactly one centre and
no centre has one itself, or the run stops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.data.deduplication.edge_components import ROOT_COLUMNS, STAR_COLUMNS, component_roots, star_rows
from tasks.data.records.document_files import read_documents, write_partitions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from configs.schema import SparkResources
    from infra.step import Output

MAX_SINGLE_TASK_EDGES = 8_000_000
"""Largest number of edges joined in one task: two numbers per edge and a few temporaries need half a gigabyte."""
MAX_ROUNDS = 40
"""Limit of rounds: 2^40 nodes need fewer, so a run that reaches it is wrong and stops."""


def connected_components(
    edges: DataFrame,
    num_edges: int,
    output: Output,
    name: str,
    resources: SparkResources,
    max_single_task_edges: int = MAX_SINGLE_TASK_EDGES,
) -> DataFrame:
    """(id, root) of every node of EDGES parcels, roots included; a root is its component's smallest id. The driver
    holds no edge. Rounds write their edges to `name` of the output: a lost executor takes no round with it. Remove it
    when the roots were read.

    Raises RuntimeError if the components have not settled after the rounds that any graph needs, never a half-merged
    result."""
    if num_edges <= max_single_task_edges:
        return edges.repartition(1).mapInArrow(component_roots, ROOT_COLUMNS)
    return _alternate_stars(edges.mapInArrow(star_rows, STAR_COLUMNS).distinct(), output, name, resources)


def _alternate_stars(edges: DataFrame, output: Output, name: str, resources: SparkResources) -> DataFrame:
    from pyspark.sql import functions as F

    before, now = "", f"{name}/edges"
    stars = _written(edges, output, now, resources)
    for number in range(MAX_ROUNDS):
        if _is_settled(stars):
            roots = stars.select(F.col("centre").alias("id"), F.col("centre").alias("root")).distinct()
            return stars.select(F.col("node").alias("id"), F.col("centre").alias("root")).unionByName(roots)
        before, now = now, f"{name}/round-{number:02d}"
        stars = _written(_small_star(_large_star(stars)), output, now, resources)
        output.remove(before)
    raise RuntimeError(
        f"connected components have not settled after {MAX_ROUNDS} rounds: the duplicate clusters would be wrong"
    )


def _written(stars: DataFrame, output: Output, name: str, resources: SparkResources) -> DataFrame:
    return read_documents(stars.sparkSession, write_partitions(stars, output, name), resources)


def _is_settled(stars: DataFrame) -> bool:
    """Whether each node has one centre and no centre is a node: then the stars are the components."""
    from pyspark.sql import functions as F

    roles = stars.select(F.col("node").alias("id"), F.lit(1).alias("as_node"), F.lit(0).alias("as_centre")).unionByName(
        stars.select(F.col("centre").alias("id"), F.lit(0).alias("as_node"), F.lit(1).alias("as_centre"))
    )
    counts = roles.groupBy("id").agg(F.sum("as_node").alias("as_node"), F.max("as_centre").alias("as_centre"))
    return counts.where("as_node > 1 or (as_node > 0 and as_centre > 0)").isEmpty()


def _large_star(stars: DataFrame) -> DataFrame:
    """Every larger neighbour of a node is tied to the node's smallest neighbour (itself included)."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    both = stars.select("node", "centre").unionByName(
        stars.select(F.col("centre").alias("node"), F.col("node").alias("centre"))
    )
    smallest = F.least("node", F.min("centre").over(Window.partitionBy("node")))
    tied = both.select("node", "centre", smallest.alias("smallest")).where("centre > node")
    return tied.select(F.col("centre").alias("node"), F.col("smallest").alias("centre")).distinct()


def _small_star(stars: DataFrame) -> DataFrame:
    """Every smaller neighbour of a node, and the node itself, is tied to the smallest of them."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    tied = stars.select("node", "centre", F.min("centre").over(Window.partitionBy("node")).alias("smallest"))
    others = tied.where("centre <> smallest").select(F.col("centre").alias("node"), F.col("smallest").alias("centre"))
    return others.unionByName(tied.select("node", F.col("smallest").alias("centre"))).distinct()
