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


def page_duplicates(frame: DataFrame) -> DataFrame:
    """(id, collection, source, kept_id) of the new documents whose record has the page URL of a better one. All pieces
    of a record are dropped or kept together; the kept record is named by its first piece."""
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
    lost = (
        records.join(shared, "page")
        .where("head.id <> kept_id and not is_earlier")
        .select("source", "offset", "kept_id")
    )
    return (
        frame.where("not is_earlier").join(lost, ["source", "offset"]).select("id", "collection", "source", "kept_id")
    )


def exact_groups(frame: DataFrame) -> DataFrame:
    """(content_digest, id, is_earlier, best, smallest): per content the kept document, and the smallest id."""
    from pyspark.sql import functions as F

    grouped = frame.groupBy("content_digest").agg(F.min(survivor_order()).alias("best"), F.min("id").alias("smallest"))
    return grouped.select("content_digest", "best.id", (~F.col("best.is_new")).alias("is_earlier"), "best", "smallest")


def verdicts_of(frame: DataFrame, groups: DataFrame, components: DataFrame, pages: DataFrame | None) -> DataFrame:
    """(id, collection, source, reason, kept_id, cluster) of every new document; a survivor has no reason and is its own
    kept_id.

    pages: page duplicates, which are not in `frame`; None for none. The document kept instead of one may itself be a
    duplicate of another."""
    from pyspark.sql import functions as F

    members = groups.join(components, "id").select("id", "root", "best", "smallest")
    clusters = members.groupBy("root").agg(F.min("best").alias("kept"), F.min("smallest").alias("cluster"))
    moved = members.join(clusters, "root").select("id", "kept", "cluster")
    resolved = groups.join(moved, "id", "left").select(
        "content_digest",
        F.col("id").alias("same"),
        "is_earlier",
        F.coalesce("kept", "best").alias("kept"),
        F.coalesce("cluster", "smallest").alias("cluster"),
    )
    new = frame.where("not is_earlier").select("id", "collection", "source", "content_digest")
    same = new.join(resolved, "content_digest")
    stays = (F.col("id") == F.col("kept.id")) & F.col("kept.is_new")
    is_near = (F.col("id") == F.col("same")) & ~F.col("is_earlier")
    reason = F.when(stays, F.lit("")).when(is_near, F.lit(NEAR)).otherwise(F.lit(EXACT)).alias("reason")
    compared = same.select("id", "collection", "source", reason, F.col("kept.id").alias("kept_id"), "cluster")
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
