"""Chooses the survivor of every cluster of near-duplicates. Runs in executors: imports no Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.deduplication.document_ranks import group_sizes, group_starts, matching_rows, rank_order
from tasks.data.deduplication.exact_groups import EARLIER, SURVIVORS
from tasks.data.records.parcels import addressed, id_numbers, id_range, parcels, unpacked
from tasks.data.text.words import mix

if TYPE_CHECKING:
    import pyarrow as pa

ROOTS, MEMBERS, MOVED, CLUSTERS = "roots", "members", "moved", "clusters"
NUM_SHOWN = 10


def send_roots(batches: Iterator[pa.RecordBatch], num_partitions: int) -> Iterator[pa.RecordBatch]:
    """ROOTS parcels of rows (id, root), addressed by id."""
    import pyarrow as pa

    for batch in batches:
        if batch.num_rows:
            roots = pa.table({name: id_numbers(batch.column(name)) for name in ("id", "root")})
            yield from addressed(ROOTS, roots, id_range(roots.column("id").to_numpy(), num_partitions))


def send_members(batches: Iterator[pa.RecordBatch], num_partitions: int) -> Iterator[pa.RecordBatch]:
    """MEMBERS parcels: the SURVIVORS and EARLIER documents that have ROOTS, addressed by their root."""
    import pyarrow as pa

    received = unpacked(batches)
    survivors = [received[kind] for kind in (SURVIVORS, EARLIER) if kind in received]
    if ROOTS not in received or not survivors:
        return
    roots = received[ROOTS].sort_by("id")
    documents = pa.concat_tables(survivors)
    rows, is_member = matching_rows(roots.column("id").to_numpy(), documents.column("id").to_numpy())
    root = roots.column("root").to_numpy()[rows]
    members = documents.filter(pa.array(is_member)).append_column("root", pa.array(root)).combine_chunks()
    yield from addressed(MEMBERS, members, (mix(root) % np.uint64(num_partitions)).astype(np.int64))


def settle_clusters(
    batches: Iterator[pa.RecordBatch], num_partitions: int, min_removed: int
) -> Iterator[pa.RecordBatch]:
    """From MEMBERS parcels the MOVED (id, kept, is_kept_new, cluster) for each of them, addressed by id, and the
    largest CLUSTERS (collection, num_removed, cluster, kept, removed) of those that remove `min_removed` documents of a
    collection or more. A cluster is called by the smallest id of its contents."""
    import pyarrow as pa
    import pyarrow.compute as pc

    members = unpacked(batches).get(MEMBERS)
    if members is None:
        return
    members = members.take(pa.array(rank_order(members, members.column("root").to_numpy()))).combine_chunks()
    starts = group_starts(members.column("root").to_numpy())
    sizes = group_sizes(starts, members.num_rows)
    ids, is_new, smallest = (members.column(name).to_numpy() for name in ("id", "is_new", "smallest"))
    columns = {"kept": ids[starts], "is_kept_new": is_new[starts], "cluster": np.minimum.reduceat(smallest, starts)}
    moved = pa.table({"id": ids} | {name: np.repeat(values, sizes) for name, values in columns.items()})
    yield from addressed(MOVED, moved, id_range(ids, num_partitions))
    is_removed = is_new.copy()
    is_removed[starts] = False
    removed = moved.append_column("collection", members.column("collection")).filter(pa.array(is_removed))
    counted = removed.group_by(["cluster", "collection", "kept"]).aggregate([([], "count_all"), ("id", "min")])
    clusters = counted.rename_columns({"count_all": "num_removed", "id_min": "removed"})
    yield from parcels(CLUSTERS, 0, largest(clusters.filter(pc.field("num_removed") >= min_removed)))


def largest(clusters: pa.Table) -> pa.Table:
    """The NUM_SHOWN largest, the largest first."""
    import pyarrow.compute as pc

    at = clusters.schema.get_field_index("collection")
    clusters = clusters.set_column(at, "collection", pc.cast(clusters.column("collection"), "string"))
    order = [("num_removed", "descending"), ("cluster", "ascending"), ("collection", "ascending")]
    return clusters.sort_by(order).slice(0, NUM_SHOWN)
