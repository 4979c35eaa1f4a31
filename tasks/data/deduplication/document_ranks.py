"""The order of duplicates, and groups of equal rows, on Arrow tables and NumPy arrays.

The better of two documents is the one that an earlier run kept, then the one with the better quality (none last), the
longer one, the one with the smaller id: the smaller row of RANK. Runs in executors: imports no Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]
    U64 = NDArray[np.uint64]

RANK = ("is_new", "flaws", "shortness", "id")
"""flaws: the negative quality, NaN for none; shortness: the negative number of characters."""


def rank_order(table: pa.Table, *groups: NDArray[Any]) -> I64:
    """The order of rows by the arrays `groups`, then from the best to the worst: `table` has RANK."""
    ranks = [table.column(name).to_numpy() for name in RANK]
    return np.lexsort([*reversed(ranks), *reversed(groups)])


def group_starts(*ordered: NDArray[Any]) -> I64:
    """The first row of every group of equal, consecutive rows."""
    is_first = np.ones(len(ordered[0]), dtype=bool)
    if len(is_first):
        is_first[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in ordered])
    return np.flatnonzero(is_first)


def group_sizes(starts: I64, num_rows: int) -> I64:
    """The number of rows of every group."""
    return np.diff(np.append(starts, num_rows))


def matching_rows(ids: U64, wanted: U64) -> tuple[I64, NDArray[np.bool_]]:
    """(the rows of `ids`, ascending, that hold wanted ids; which of the wanted ones these are)."""
    if not len(ids):
        return np.empty(0, np.int64), np.zeros(len(wanted), dtype=bool)
    rows = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    is_present = ids[rows] == wanted
    return rows[is_present], is_present


def digest_partition(documents: pa.Table, num_partitions: int) -> I64:
    """The partition in which documents (digest_low) meet those of equal content."""
    return (documents.column("digest_low").to_numpy() % np.uint64(num_partitions)).astype(np.int64)
