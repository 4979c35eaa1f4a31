"""Decides which documents are kept and which are dropped, on Spark frames of ids and scores.

It judges records of one page, equal contents, and clusters of near-duplicates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.data.deduplication.page_urls import PAGE_RECORD_COLUMNS, page_records
from tasks.data.records.documents import CODE, COMMIT

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

URL, EXACT, NEAR = "duplicate_url", "exact_duplicate", "near_duplicate"
UNPAGED_DOMAINS = (CODE, COMMIT)
"""Domains whose URLs name repositories and commits, which many documents share."""
MAX_RECORDS_PER_FILE = 3
"""Records of one source file that may share a URL; a URL of more records names a site, a book or a package, not a page,
and is not compared."""


def survivor_order(quality: str = "quality", num_chars: str = "num_chars", identity: str = "id") -> Column:
    """The order whose smallest document is kept: those that earlier runs kept, then quality (none last), length, id."""
    from pyspark.sql import functions as F

    return F.struct(
        (~F.col("is_earlier")).alias("is_new"),
        F.col(quality).isNull().alias("is_unscored"),
        (-F.col(quality)).alias("flaws"),
        (-F.col(num_chars)).alias("shortness"),
        F.col(identity).alias("id"),
    )


def page_duplicates(frame: DataFrame) -> DataFrame | None:
    """(id, collection, source, kept_id) of the new documents whose record has the page URL of a better one; None where
    no two records share a page. All pieces of a record are dropped or kept together; the kept record is named by its
    first piece."""
    from pyspark.sql import functions as F

    paged = frame.where((F.col("url") != "") & ~F.col("domain").isin(*UNPAGED_DOMAINS))
    paged = paged.select("id", "source", "offset", "piece", "is_earlier", "quality", "num_chars", "url")
    pieces = paged.mapInArrow(page_records, PAGE_RECORD_COLUMNS)
    records = pieces.groupBy("page", "file", "source", "offset", "is_earlier").agg(
        F.max("quality").alias("quality"),
        F.sum("num_chars").alias("num_chars"),
        F.min(F.struct("piece", "id")).alias("head"),
    )
    best = F.min(survivor_order(identity="head.id")).alias("best")
    in_file = records.groupBy("page", "file").agg(best, F.count("offset").alias("num_records"))
    pages = in_file.groupBy("page").agg(
        F.min("best").alias("best"),
        F.sum("num_records").alias("num_records"),
        F.max("num_records").alias("most_in_file"),
    )
    shared = pages.where(f"num_records > 1 and most_in_file <= {MAX_RECORDS_PER_FILE}").select(
        "page", F.col("best.id").alias("kept_id")
    )
    if shared.isEmpty():
        return None
    lost = (
        records.join(shared, "page")
        .where("head.id <> kept_id and not is_earlier")
        .select("source", "offset", "kept_id")
    )
    return (
        frame.where("not is_earlier").join(lost, ["source", "offset"]).select("id", "collection", "source", "kept_id")
    )


def with_exact_groups(frame: DataFrame) -> DataFrame:
    """(id, collection, source, is_earlier, best, smallest) of every document: the kept document of its content, and
    the smallest id of them."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    equal = Window.partitionBy("content_digest")
    best, smallest = F.min("rank").over(equal).alias("best"), F.min("id").over(equal).alias("smallest")
    ranked = frame.select("id", "collection", "source", "is_earlier", "content_digest", survivor_order().alias("rank"))
    return ranked.select("id", "collection", "source", "is_earlier", best, smallest)


def exact_survivors(grouped: DataFrame) -> DataFrame:
    """The rows of with_exact_groups whose document is kept for its content: those that are compared with each other."""
    return grouped.where("id = best.id and is_earlier <> best.is_new")


def verdicts_of(grouped: DataFrame, components: DataFrame, pages: DataFrame | None) -> DataFrame:
    """(id, collection, source, reason, kept_id, cluster) of every new document; a survivor has no reason and is its own
    kept_id.

    grouped: with_exact_groups; pages: page duplicates, which are not in it; None for none. The document kept instead of
    one may itself be a duplicate of another."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    members = exact_survivors(grouped).select("id", "best", "smallest").join(components, "id")
    cluster = Window.partitionBy("root")
    kept, smallest = F.min("best").over(cluster).alias("kept"), F.min("smallest").over(cluster).alias("cluster")
    moved = members.select(F.col("id").alias("same"), kept, smallest)
    new = grouped.where("not is_earlier").withColumn("same", F.col("best.id"))
    resolved = new.join(moved, "same", "left").select(
        "id",
        "collection",
        "source",
        ((F.col("id") == F.col("same")) & F.col("best.is_new")).alias("is_near"),
        F.coalesce("kept", "best").alias("kept"),
        F.coalesce("cluster", "smallest").alias("cluster"),
    )
    stays = (F.col("id") == F.col("kept.id")) & F.col("kept.is_new")
    reason = F.when(stays, F.lit("")).when(F.col("is_near"), F.lit(NEAR)).otherwise(F.lit(EXACT)).alias("reason")
    compared = resolved.select("id", "collection", "source", reason, F.col("kept.id").alias("kept_id"), "cluster")
    if pages is None:
        return compared
    final = compared.select(F.col("id").alias("page_id"), F.col("kept_id").alias("final_id"), "cluster")
    joined = pages.join(final, F.col("kept_id") == F.col("page_id"), "left")
    kept = F.coalesce("final_id", "kept_id").alias("kept_id")
    gone = joined.select(
        "id",
        "collection",
        "source",
        F.lit(URL).alias("reason"),
        kept,
        F.coalesce("cluster", "kept_id").alias("cluster"),
    )
    return compared.unionByName(gone)
