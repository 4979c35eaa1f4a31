"""The held-out documents that an evaluation may ask about: enough for its budget, whatever the size of the corpus.

Executors read the parts. Of each domain they give the documents whose hash is below a bound, as many as the budget can
need: the driver holds about CHARS_PER_TOKEN characters per token of it. Where all fit, all are given.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from tasks.data.records.document_files import read_documents
from tasks.data.records.documents import NUM_HASHES, REPOSITORY, TEST, document_id
from tasks.evaluation.choice_questions import order_hash
from tasks.evaluation.intervals import MIN_ITEMS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from configs.files.stored_files import StoredFile
    from configs.schema import EvaluationRecipe, SparkResources

COLUMNS = ("id", "source", "offset", "domain")
CHARS_PER_TOKEN = 8
"""Twice what a token of prose has."""
MIN_DOCUMENTS = 100 * MIN_ITEMS
"""Documents of a domain that are given at least, so that MIN_ITEMS different records are among them."""


def held_out_documents(
    files: list[StoredFile], recipe: EvaluationRecipe, resources: SparkResources
) -> list[dict[str, str]]:
    """id, domain, text and unit of documents of side `test`, in the order of their hash; texts end at
    max_document_chars. A unit is a record; a repository, which gives a record per data.repositories.max_document_chars,
    is one."""
    from pyspark.sql import functions as F

    documents = read_documents(spark_session(resources), files, resources, *COLUMNS, "text", "split")
    text = F.substring("text", 1, recipe.max_document_chars).alias("text")
    return chosen_rows(documents.where(F.col("split") == TEST).select(*COLUMNS, text), recipe)


def chosen_rows(held_out: DataFrame, recipe: EvaluationRecipe) -> list[dict[str, str]]:
    """The rows (COLUMNS and text) of smallest hash that the token budget can need, in the order of their hash, each
    with its unit."""
    from pyspark.sql import Column
    from pyspark.sql import functions as F

    held_out = held_out.persist()
    leading = F.conv(F.substring(F.sha2("id", 256), 1, 8), 16, 10).cast("long")
    bounds = _hash_bounds(held_out, recipe.max_document_tokens * CHARS_PER_TOKEN)
    is_chosen = [(F.col("domain") == domain) & (leading < bound) for domain, bound in bounds.items()]
    rows = held_out.where(reduce(Column.__or__, is_chosen, F.lit(False))).toArrow().to_pylist()
    held_out.unpersist()
    ordered = sorted(rows, key=lambda row: order_hash(row["id"]))
    return [
        row | {"unit": document_id(row["source"], 0 if row["domain"] == REPOSITORY else row["offset"], 0)}
        for row in ordered
    ]


def _hash_bounds(held_out: DataFrame, max_chars: int) -> dict[str, int]:
    """Per domain the first 32 bits of the hash below which documents are given."""
    from pyspark.sql import functions as F

    num_chars = F.char_length("text").cast("long")
    sizes = held_out.groupBy("domain").agg(F.count("id").alias("rows"), F.sum(num_chars).alias("num_chars")).collect()
    total = max(sum(row["num_chars"] for row in sizes), 1)
    shares = {row["domain"]: max(max_chars / total, MIN_DOCUMENTS / row["rows"]) for row in sizes}
    return {domain: int(NUM_HASHES * min(share, 1.0)) for domain, share in sorted(shares.items())}
