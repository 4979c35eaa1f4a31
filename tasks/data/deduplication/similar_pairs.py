"""Pairs of nearly equal vectors in one cluster, and the documents of them that are kept.

Runs in executors: imports no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from tasks.data.embedding.semantic_vectors import PAIR_NAMES, squared_norms, vectors_of, widened

BLOCK_ROWS = 512


def similar_pairs(batches: Iterator[pa.RecordBatch], max_cosine: float, window: int) -> Iterator[pa.RecordBatch]:
    """PAIR_COLUMNS for rows ASSIGNED_COLUMNS sorted by cluster, position and id, each compared with the `window` rows
    before it.

    Clusters of up to `window` + 1 documents are compared completely; in larger ones only neighbours in position.
    """
    before: list[pa.RecordBatch] = []
    for batch in batches:
        for start in range(0, batch.num_rows, BLOCK_ROWS):
            block = batch.slice(start, BLOCK_ROWS)
            rows = pa.Table.from_batches([*before, block]).combine_chunks()
            pairs = _pairs(rows, rows.num_rows - block.num_rows, max_cosine, window)
            if pairs is not None:
                yield pairs
            rows = rows.filter(pa.array(rows.column("cluster").to_numpy() == block.column("cluster")[-1].as_py()))
            before = rows.slice(max(rows.num_rows - window, 0)).combine_chunks().to_batches()


def _pairs(rows: pa.Table, first_new: int, max_cosine: float, window: int) -> pa.RecordBatch | None:
    vectors, clusters = vectors_of(rows.column("vector")), rows.column("cluster").to_numpy()
    norms = squared_norms(vectors)
    wide = widened(vectors)
    dots = (wide[first_new:] @ wide.T).astype(np.float64)
    cosines = dots / np.sqrt(np.maximum(norms[first_new:, None] * norms, 1.0))
    positions = np.arange(len(vectors))
    distance = positions[first_new:, None] - positions
    is_pair = (distance > 0) & (distance <= window) & (clusters[first_new:, None] == clusters) & (cosines > max_cosine)
    new, old = np.nonzero(is_pair)
    if not len(new):
        return None
    cosine = cosines[new, old]
    new = new + first_new
    quality, length = (rows.column(name).to_numpy() for name in ("rank_quality", "rank_length"))
    ids = rows.column("id").to_numpy()
    rank = np.empty(len(ids), dtype=np.int64)
    rank[np.lexsort((ids.astype(str), length, quality))] = positions
    better, worse = np.where(rank[new] < rank[old], new, old), np.where(rank[new] < rank[old], old, new)
    sides = [
        [rows.column("id").take(pa.array(side)).combine_chunks(), pa.array(quality[side]), pa.array(length[side])]
        for side in (worse, better)
    ]
    return pa.RecordBatch.from_arrays(
        [pa.array(clusters[worse]), *sides[0], *sides[1], pa.array(cosine)], names=PAIR_NAMES
    )


def decide(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """VERDICT_COLUMNS of the dropped documents, for PAIR_COLUMNS sorted by cluster, rank of the worse and rank of the
    better.

    A document is dropped if it is nearly equal to a better document that is kept. So kept_id is always a kept document
    that was compared with it, not one reached through a chain.
    """
    cluster: int | None = None
    gone: dict[str, tuple[str, float]] = {}
    current = ""
    for batch in batches:
        decided: list[tuple[str, str, float]] = []
        names = ("cluster", "worse", "better", "cosine")
        for number, worse, better, cosine in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
            if number != cluster:
                cluster, gone, current = number, {}, ""
            if worse == current or better in gone:
                continue
            gone[worse] = (better, cosine)
            current = worse
            decided.append((worse, better, cosine))
        columns = list(zip(*decided, strict=True)) or [(), (), ()]
        kinds = (pa.string(), pa.string(), pa.float64())
        yield pa.RecordBatch.from_arrays(
            [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)],
            names=["id", "kept_id", "cosine"],
        )
