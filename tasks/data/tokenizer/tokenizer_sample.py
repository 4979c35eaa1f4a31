"""Chooses the documents that a tokenizer learns from: the lowest hashes of each domain and language, up to its
share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tasks.data.records.documents import NUM_HASHES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from configs.schema import TokenizerRecipe

UNKNOWN_LANGUAGE = "und"
NUM_FITTING_ROUNDS = 50
SLICE_BITS = 10
"""Leading bits of a hash that name its slice: a slice holds at most a five-hundredth of the hashes up to it, so every
rate can be approximated."""
SHORT_SHARE = 0.02
"""Share of the wanted characters that may be missing without a report: a sample ends with a whole document."""
Cell = tuple[str, str]
"""Domain and language."""


class Slices(NamedTuple):
    """The documents of a cell by their hashes."""

    starts: np.ndarray
    """int64, ascending."""
    num_chars: np.ndarray
    """int64: of the documents from each start to the next."""

    @property
    def total(self) -> int:
        return int(self.num_chars.sum())


def count_chars(frame: DataFrame) -> dict[Cell, Slices]:
    """Characters of documents per domain and language, by hash."""
    from pyspark.sql import functions as F

    placed = frame.select("domain", language_of().alias("language"), "num_chars", _id_hash().alias("id_hash"))
    zeros = F.expr(f"greatest(length(bin(id_hash)) - {SLICE_BITS}, 0)")
    start = F.expr("shiftleft(shiftright(id_hash, zeros), zeros)").alias("start")
    sliced = (
        placed.withColumn("zeros", zeros)
        .groupBy("domain", "language", start)
        .agg(F.sum("num_chars").alias("num_chars"))
    )
    counted = sliced.toArrow().sort_by([(name, "ascending") for name in ("domain", "language", "start")])
    starts, num_chars = (counted[name].to_numpy() for name in ("start", "num_chars"))
    domains, languages = (counted[name].combine_chunks() for name in ("domain", "language"))
    changes = [np.diff(names.dictionary_encode().indices.to_numpy(), prepend=-1) != 0 for names in (domains, languages)]
    firsts = np.flatnonzero(changes[0] | changes[1])
    return {
        (domains[int(first)].as_py(), languages[int(first)].as_py()): Slices(starts[first:end], num_chars[first:end])
        for first, end in zip(firsts, [*firsts[1:], len(starts)], strict=True)
    }


def wanted_chars(sizes: Mapping[Cell, int], recipe: TokenizerRecipe) -> dict[Cell, float]:
    """Characters that the sample should have of each cell, possibly more than there are. Raises ValueError where the
    shares name no domain or language of the corpus."""
    amounts = _fit_shares(sizes, recipe)
    total = sum(amounts.values())
    if not sum(sizes.values()):
        raise ValueError(
            "there is no text to learn a tokenizer from: bring documents, or look at what the filter dropped"
        )
    if not total:
        have = sorted({domain for domain, _ in sizes}), sorted({language for _, language in sizes})
        raise ValueError(
            f"tokenizer.domain_shares {recipe.domain_shares} and language_shares {recipe.language_shares} name none "
            f"of the corpus's "
            f"documents (domains {have[0]}, languages {have[1]}): name some of these, or {{}} for shares as in the "
            f"corpus"
        )
    return {cell: recipe.sample_chars * amount / total for cell, amount in amounts.items()}


def hash_bounds(slices: Mapping[Cell, Slices], wanted: Mapping[Cell, float]) -> dict[Cell, int]:
    """Per cell the hash below which a document is in the sample: as near to the wanted characters as slices allow. A
    cell of which anything is wanted gives its first slice, however long that is: else a language of long books would
    have no token."""
    bounds = {}
    for cell, (starts, num_chars) in slices.items():
        below = np.concatenate([[0], np.cumsum(num_chars)])
        number = max(int(np.abs(below - wanted[cell]).argmin()), int(wanted[cell] > 0))
        bounds[cell] = int(starts[number]) if number < len(starts) else NUM_HASHES
    return bounds


def missing_chars(sizes: Mapping[Cell, int], wanted: Mapping[Cell, float], recipe: TokenizerRecipe) -> dict[str, int]:
    """Characters that are missing in the corpus, by domain and language with a share."""
    missing = {}
    for axis, (name, shares) in enumerate((("domain", recipe.domain_shares), ("language", recipe.language_shares))):
        for value, share in shares.items():
            asked = recipe.sample_chars * share / sum(shares.values())
            present = sum(min(sizes[cell], amount) for cell, amount in wanted.items() if cell[axis] == str(value))
            if asked - present > SHORT_SHARE * asked:
                missing[f"{name} {value}"] = round(asked - present)
    return missing


def _fit_shares(sizes: Mapping[Cell, int], recipe: TokenizerRecipe) -> dict[Cell, float]:
    """The corpus's amounts, scaled by domains and by languages in turn until both have their weights (iterative
    proportional fitting)."""
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
    """Documents whose hash is below their cell's bound; with `from_the_end` those with as high a hash instead."""
    from pyspark.sql import functions as F

    hashed = F.lit(NUM_HASHES - 1) - _id_hash() if from_the_end else _id_hash()
    entries = [F.lit(part) for (domain, language), bound in bounds.items() for part in (f"{domain}|{language}", bound)]
    cell = F.concat_ws("|", F.col("domain"), language_of())
    return frame.where(hashed < F.coalesce(F.create_map(*entries)[cell].cast("long"), F.lit(0)))


def _id_hash() -> Column:
    """A document's hash, below NUM_HASHES."""
    from pyspark.sql import functions as F

    return F.conv(F.substring(F.sha2("id", 256), 1, 8), 16, 10).cast("long")


def language_of() -> Column:
    """The language of a document, as in the cells of count_chars."""
    from pyspark.sql import functions as F

    named = [F.when(F.col(name) != "", F.col(name)) for name in ("language", "lang")]
    return F.coalesce(*named, F.lit(UNKNOWN_LANGUAGE))
