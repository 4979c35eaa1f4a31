"""Groups consecutive texts into chunks of bounded size, which bounds the memory of arrays over characters.

Runs in executors: imports no Spark.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np


def chunk_bounds(sizes: Iterable[int], chunk_size: int) -> list[tuple[int, int]]:
    """(start, stop) of runs of texts whose sizes add up to about `chunk_size`."""
    chunks = np.cumsum(np.fromiter(sizes, dtype=np.int64)) // chunk_size
    return list(pairwise([*np.flatnonzero(np.diff(chunks, prepend=-1)).tolist(), len(chunks)]))
