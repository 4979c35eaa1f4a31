"""Connected components of an edge list on Spark, by alternating large and small stars (Kiveris et al. 2014, "Connected Components in
MapReduce and Beyond"): the edges shrink to one star per component, around its smallest id, in O(log^2 n) rounds.

The result is proven, not assumed: rounds go on until every node has exactly one centre and no centre has one itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MAX_ROUNDS = 40
"""2^40 nodes need fewer; a run that gets here is wrong and stops."""


def connected_components(edges: DataFrame) -> DataFrame:
    """(id, root) of every node of `edges` (left, right), roots included; a root is its component's smallest id.

    Raises RuntimeError if the stars have not settled after MAX_ROUNDS, never a half-merged result."""
    from pyspark.sql import functions as F

    larger, smaller = F.greatest("left", "right"), F.least("left", "right")
    stars = edges.where("left <> right").select(larger.alias("node"), smaller.alias("centre")).distinct().localCheckpoint()
    for _ in range(MAX_ROUNDS):
        if _is_settled(stars):
            roots = stars.select(F.col("centre").alias("id"), F.col("centre").alias("root")).distinct()
            return stars.select(F.col("node").alias("id"), F.col("centre").alias("root")).unionByName(roots)
        stars = _small_star(_large_star(stars)).localCheckpoint()
    raise RuntimeError(f"connected components have not settled after {MAX_ROUNDS} rounds: the duplicate clusters would be wrong")


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

    both = stars.select("node", "centre").unionByName(stars.select(F.col("centre").alias("node"), F.col("node").alias("centre")))
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
