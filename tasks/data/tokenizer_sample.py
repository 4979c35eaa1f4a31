"""Which documents a tokenizer is learned from: drawn by document hash at a rate per domain and language."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tasks.data.document_files import count_by

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import Column, DataFrame

    from configs.schema import TokenizerRecipe

UNKNOWN_LANGUAGE = "und"
NUM_FITTING_ROUNDS = 50
HASH_RANGE = 2**32
Cell = tuple[str, str]
"""Domain and language."""


def count_chars(paths: list[Path], side: str) -> dict[Cell, int]:
    """Characters of the documents on one side of the split, per domain and language."""
    sizes: dict[Cell, int] = {}
    for (split, domain, language, lang), (_, num_chars) in count_by(
        paths, "split", "domain", "language", "lang", total="num_chars"
    ).items():
        if split == side:
            cell = (domain, language or lang or UNKNOWN_LANGUAGE)
            sizes[cell] = sizes.get(cell, 0) + num_chars
    return dict(sorted(sizes.items()))


def hash_bounds(sizes: Mapping[Cell, int], recipe: TokenizerRecipe) -> dict[Cell, int]:
    """Per cell the hash below which a document is in the sample. Raises ValueError where the shares name nothing that the corpus has."""
    wanted = _fit_shares(sizes, recipe)
    total = sum(wanted.values())
    if not total:
        have = sorted({domain for domain, _ in sizes}), sorted({language for _, language in sizes})
        raise ValueError(
            f"tokenizer.domain_shares {recipe.domain_shares} and language_shares {recipe.language_shares} name none of the corpus's "
            f"documents (domains {have[0]}, languages {have[1]}): name some of these, or {{}} for shares as in the corpus"
        )
    return {
        cell: min(int(recipe.sample_chars * amount / total * HASH_RANGE / max(sizes[cell], 1)), HASH_RANGE)
        for cell, amount in wanted.items()
    }


def _fit_shares(sizes: Mapping[Cell, int], recipe: TokenizerRecipe) -> dict[Cell, float]:
    """The corpus's amounts, scaled by domains and by languages in turn until both have their weights (iterative proportional fitting)."""
    amounts = {cell: float(size) for cell, size in sizes.items()}
    axes = [(axis, shares) for axis, shares in enumerate((recipe.domain_shares, recipe.language_shares)) if shares]
    for _ in range(NUM_FITTING_ROUNDS if len(axes) > 1 else 1):
        for axis, shares in axes:
            sums: dict[str, float] = {}
            for cell, amount in amounts.items():
                sums[cell[axis]] = sums.get(cell[axis], 0.0) + amount
            rates = {str(name): weight / sums[str(name)] for name, weight in shares.items() if sums.get(str(name))}
            amounts = {cell: amount * rates.get(cell[axis], 0.0) for cell, amount in amounts.items()}
    return amounts


def drawn(frame: DataFrame, bounds: Mapping[Cell, int], *, from_the_end: bool = False) -> DataFrame:
    """Documents whose hash lies below their cell's bound; `from_the_end`, those whose hash lies as near to its end."""
    from pyspark.sql import functions as F

    place = F.conv(F.substring(F.sha2("id", 256), 1, 8), 16, 10).cast("long")
    place = F.lit(HASH_RANGE - 1) - place if from_the_end else place
    entries = [F.lit(part) for (domain, language), bound in bounds.items() for part in (f"{domain}|{language}", bound)]
    cell = F.concat_ws("|", F.col("domain"), language_of())
    return frame.where(place < F.coalesce(F.create_map(*entries)[cell].cast("long"), F.lit(0)))


def language_of() -> Column:
    """As `count_chars` names it."""
    from pyspark.sql import functions as F

    named = [F.when(F.col(name) != "", F.col(name)) for name in ("language", "lang")]
    return F.coalesce(*named, F.lit(UNKNOWN_LANGUAGE))
