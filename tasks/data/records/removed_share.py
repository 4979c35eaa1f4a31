"""Limits what a step may remove of one source, language or domain: above the bound, the run stops and names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MIN_JUDGED_DOCUMENTS = 20
"""Groups with fewer documents have no ceiling: two copies among three files are no template."""
MIN_JUDGED_SHARE = 0.001
"""Languages with a smaller share of the documents have none either: in a crawl the rarest are detection errors."""
COLLECTION, DOMAIN, LANGUAGE = "collection", "domain", "language"
WORDS = {COLLECTION: "source", DOMAIN: "domain", LANGUAGE: "language"}
"""The name of a group's column in messages."""


class Ceiling(NamedTuple):
    key: str
    """Key in the data recipe, for example deduplicate.max_removed_share."""
    limit: float
    what: Callable[[str], str]
    """Gives the words for a reason after the counts: `documents are duplicates`."""
    advice: str


def check_removed_share(
    judged: DataFrame, groups: tuple[str, ...], ceiling: Ceiling, examples: Callable[[str, str, str], list[str]]
) -> None:
    """Raises ValueError where one reason removes a larger share of a group than the ceiling allows.

    judged: one row (groups, reason, amount, removed) per document: its size, and how much of it is removed for that
    reason. examples: gives up to NUM_EXAMPLES examples for a group's column, its value and a reason."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    for group in groups:
        of_group = Window.partitionBy(group)
        sums = judged.groupBy(group, "reason").agg(
            F.count("amount").alias("num_documents"), F.sum("amount").alias("amount"), F.sum("removed").alias("removed")
        )
        totals = (F.sum(name).over(of_group).alias(name) for name in ("num_documents", "amount"))
        least = max(MIN_JUDGED_DOCUMENTS, MIN_JUDGED_SHARE * judged.count() if group == LANGUAGE else 0)
        is_above = (F.col("num_documents") >= least) & (F.col("removed") > ceiling.limit * F.col("amount"))
        above = sorted(
            tuple(row)
            for row in sums.select(group, "reason", "removed", *totals)
            .where(is_above)
            .select(group, "reason", "removed", "amount")
            .collect()
        )
        if above:
            refuse_above(group, above, ceiling, examples)


def refuse_above(
    group: str, above: list[tuple[str, str, int, int]], ceiling: Ceiling, examples: Callable[[str, str, str], list[str]]
) -> NoReturn:
    """Raises the ValueError of groups that lose too much: (group, reason, removed, amount), of which the first is
    shown."""
    name, reason, num_removed, amount = above[0]
    more = f" (and {len(above) - 1} more)" if len(above) > 1 else ""
    raise ValueError(
        f"{WORDS[group]} {name or 'unknown'}: {num_removed} of {amount} {ceiling.what(reason)}, more than "
        f"{ceiling.key} "
        f"({ceiling.limit}) allows{more}, for example {'; '.join(examples(group, name, reason))}. "
        f"{ceiling.advice}"
    )
