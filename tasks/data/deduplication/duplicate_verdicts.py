"""Decides which new documents are kept and which are dropped. Runs in executors: imports no Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.deduplication.document_ranks import group_starts, matching_rows
from tasks.data.deduplication.duplicate_candidates import EDGES
from tasks.data.deduplication.exact_groups import FOLLOWERS, NEAR, REASONS, SURVIVORS
from tasks.data.deduplication.settled_clusters import MOVED
from tasks.data.records.documents_by_id import MARKS
from tasks.data.records.parcels import addressed, id_range, parcels, unpacked

if TYPE_CHECKING:
    import pyarrow as pa

LINKS, DROPPED, NEIGHBOURS, COUNTED = "links", "dropped", "neighbours", "counted"


def send_links(batches: Iterator[pa.RecordBatch], num_partitions: int) -> Iterator[pa.RecordBatch]:
    """LINKS parcels (id, neighbour, num_shared, num_union) from EDGES parcels: both directions of each pair, addressed
    by id."""
    edges = unpacked(batches).get(EDGES)
    if edges is None:
        return
    for own, other in (("left", "right"), ("right", "left")):
        links = edges.select([own, other, "num_shared", "num_union"])
        links = links.rename_columns(["id", "neighbour", "num_shared", "num_union"])
        yield from addressed(LINKS, links, id_range(links.column("id").to_numpy(), num_partitions))


def give_verdicts(batches: Iterator[pa.RecordBatch], num_partitions: int, num_files: int) -> Iterator[pa.RecordBatch]:
    """From SURVIVORS, FOLLOWERS, MOVED and LINKS parcels the verdicts of new documents.

    MARKS (id, cluster) of those that are kept are addressed to their file. DROPPED (id, kept, reason, collection), and
    NEIGHBOURS of those dropped as near-duplicates, are addressed by id, and COUNTED (collection, num_documents,
    num_removed) to one task."""
    import pyarrow as pa

    received = unpacked(batches)
    if SURVIVORS not in received and FOLLOWERS not in received:
        return
    moved = received[MOVED].sort_by("id") if MOVED in received else None
    dropped, collections = [], []
    if SURVIVORS in received:
        survivors = received[SURVIVORS]
        kept, cluster, stays = _settled(survivors, moved)
        marks = pa.table({"id": survivors.column("id"), "cluster": cluster}).filter(pa.array(stays))
        yield from addressed(MARKS, marks, id_range(marks.column("id").to_numpy(), num_files))
        reasons = np.full(len(kept), REASONS.index(NEAR), dtype=np.int8)
        near = _dropped(survivors, kept, reasons).filter(pa.array(~stays))
        if near.num_rows:
            neighbours = _neighbours(near, received[LINKS])
            yield from addressed(NEIGHBOURS, neighbours, id_range(neighbours.column("id").to_numpy(), num_partitions))
        dropped.append(near)
        collections.append(survivors.select(["collection"]))
    if FOLLOWERS in received:
        followers = received[FOLLOWERS]
        dropped.append(_dropped(followers, _followed(followers, moved), followers.column("reason").to_numpy()))
        collections.append(followers.select(["collection"]))
    removed = pa.concat_tables(dropped).combine_chunks()
    yield from addressed(DROPPED, removed, id_range(removed.column("id").to_numpy(), num_partitions))
    yield from parcels(COUNTED, 0, _counted(pa.concat_tables(collections), removed))


def _settled(survivors: pa.Table, moved: pa.Table | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(kept, cluster, whether it stays) of survivors, most of which are in no cluster."""
    ids = survivors.column("id").to_numpy()
    kept, cluster, stays = ids.copy(), survivors.column("smallest").to_numpy().copy(), np.ones(len(ids), dtype=bool)
    if moved is not None:
        rows, is_moved = matching_rows(moved.column("id").to_numpy(), ids)
        kept[is_moved], cluster[is_moved] = (moved.column(name).to_numpy()[rows] for name in ("kept", "cluster"))
        stays[is_moved] = (kept[is_moved] == ids[is_moved]) & moved.column("is_kept_new").to_numpy()[rows]
    return kept, cluster, stays


def _followed(followers: pa.Table, moved: pa.Table | None) -> np.ndarray:
    """What is kept for followers."""
    kept, is_final = followers.column("same").to_numpy().copy(), followers.column("is_final").to_numpy()
    if moved is not None:
        rows, is_moved = matching_rows(moved.column("id").to_numpy(), kept)
        kept[is_moved] = np.where(is_final[is_moved], kept[is_moved], moved.column("kept").to_numpy()[rows])
    return kept


def _dropped(documents: pa.Table, kept: np.ndarray, reasons: np.ndarray) -> pa.Table:
    import pyarrow as pa

    return pa.table({"id": documents.column("id"), "kept": kept, "reason": reasons}).append_column(
        "collection", documents.column("collection")
    )


def _neighbours(near: pa.Table, links: pa.Table) -> pa.Table:
    """(id, kept, neighbour, num_shared, num_union): of every near-duplicate the most similar neighbour, the smallest of
    several."""
    import pyarrow as pa

    own, other, shared, union = (
        links.column(name).to_numpy() for name in ("id", "neighbour", "num_shared", "num_union")
    )
    order = np.lexsort((other, -(shared / union), own))
    best = links.take(pa.array(order[group_starts(own[order])]))
    near = near.sort_by("id")
    rows, is_dropped = matching_rows(near.column("id").to_numpy(), best.column("id").to_numpy())
    best = best.filter(pa.array(is_dropped))
    assert best.num_rows == near.num_rows, "every near-duplicate has a verified neighbour"
    return best.add_column(1, "kept", pa.array(near.column("kept").to_numpy()[rows])).combine_chunks()


def _counted(documents: pa.Table, removed: pa.Table) -> pa.Table:
    """(collection, num_documents, num_removed) of both."""
    import pyarrow as pa

    def ones_and_zeros(table: pa.Table, is_removed: bool) -> pa.Table:
        counts = [np.full(table.num_rows, int(is_removed is counted)) for counted in (False, True)]
        return pa.table([table.column("collection"), *counts], names=["collection", "num_documents", "num_removed"])

    return summed_counts(pa.concat_tables([ones_and_zeros(documents, False), ones_and_zeros(removed, True)]))


def summed_counts(counts: pa.Table) -> pa.Table:
    """COUNTED columns, one row per collection."""
    names = ["num_documents", "num_removed"]
    summed = (
        counts.combine_chunks().group_by("collection", use_threads=False).aggregate([(name, "sum") for name in names])
    )
    return summed.rename_columns({f"{name}_sum": name for name in names})
