"""Selects the documents that break a bound on their scores, and the quality buckets of the rest, on Spark.

Code and commits are exempt: the classifiers and language models are of prose. Threads of issues, half of them logs,
are judged only by toxicity. Mathematics is judged by neither toxicity nor perplexity: neither the labels nor the
reference text hold formulas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.data.records.documents import CODE, COMMIT, ISSUE, MATH, UNBUCKETED

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from configs.schema import ScoreRecipe

SCORES = ("language", "language_score", "quality", "toxicity", "perplexity", "factuality")
ANY_LANGUAGE = "*"
LOW_QUALITY = "low_quality_bucket"
WRONG_LANGUAGE, LANGUAGE_UNCERTAIN = "wrong_language", "language_uncertain"
BOUND_OF = {
    WRONG_LANGUAGE: "allowed_languages",
    LANGUAGE_UNCERTAIN: "min_language_score",
    "toxic": "max_toxicity",
    "perplexing": "max_perplexity_percentile",
    "not_factual": "min_factuality",
}
"""Name of the bound in ScoreRecipe, by reason."""
QUALITY_STEPS = 1_000_000
"""Quality is compared in whole millionths: their histogram does not depend on partitions, and has at most a million
rows."""


def is_prose() -> Column:
    from pyspark.sql import functions as F

    return ~F.col("domain").isin(CODE, COMMIT, ISSUE)


def score_reason(recipe: ScoreRecipe) -> Column:
    """The first broken bound, empty where there is none; a NULL breaks none."""
    from pyspark.sql import functions as F

    allowed = F.lit(ANY_LANGUAGE in recipe.allowed_languages) | F.col("language").isin(*recipe.allowed_languages)
    broken = {
        WRONG_LANGUAGE: ~allowed,
        LANGUAGE_UNCERTAIN: F.col("language_score") < recipe.min_language_score,
        "toxic": F.col("toxicity") > recipe.max_toxicity,
        "perplexing": F.col("perplexity_percentile") > recipe.max_perplexity_percentile,
        "not_factual": F.col("factuality") < recipe.min_factuality,
    }
    is_words = is_prose() & (F.col("domain") != MATH)
    is_judged = {"toxic": is_words | (F.col("domain") == ISSUE), "perplexing": is_words}
    named = [F.when(is_judged.get(reason, is_prose()) & is_broken, reason) for reason, is_broken in broken.items()]
    return F.coalesce(*named, F.lit(""))


def quality_millionths() -> Column:
    """Quality of prose in whole millionths, NULL for the rest."""
    from pyspark.sql import functions as F

    return F.when(is_prose(), F.floor(F.col("quality") * QUALITY_STEPS).cast("int"))


def bucket_floors(histogram: list[tuple[int, int]], num_buckets: int) -> list[int]:
    """The lowest quality of every bucket but the first, from (quality, documents) in any order.

    Documents of one quality are in one bucket, that of their middle document: document r of n (from 0) belongs into
    bucket floor((2 r + 1) num_buckets / 2 n)."""
    total = sum(count for _, count in histogram)
    floors: list[int] = []
    below = 0
    for quality, count in sorted(histogram):
        bucket = (2 * below + count) * num_buckets // (2 * total)
        floors += [quality] * (bucket - len(floors))
        below += count
    return floors + [QUALITY_STEPS + 1] * (num_buckets - 1 - len(floors))


def quality_bucket(floors: list[int]) -> Column:
    """0 for the lowest bucket; UNBUCKETED where `millionths` is NULL."""
    from pyspark.sql import functions as F

    above = [F.when(F.col("millionths") >= floor, 1).otherwise(0) for floor in floors]
    number = sum(above, F.lit(0))
    return F.when(F.col("millionths").isNull(), UNBUCKETED).otherwise(number).cast("int")


def count_unscored(frame: DataFrame) -> dict[str, int]:
    """Documents of prose without each score."""
    from pyspark.sql import functions as F

    row = (
        frame.where(is_prose()).select(*(F.count_if(F.col(name).isNull()).alias(name) for name in SCORES)).collect()[0]
    )
    return {name: row[name] for name in SCORES}
